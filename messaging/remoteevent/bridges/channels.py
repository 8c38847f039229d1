"""Channels of a broker and remote events, both ways.

**Threads.** A message becomes an event on a worker thread, and is acknowledged when the generator has the event: with a
persistent one, when it is on the disk. An event is acknowledged when the broker has confirmed its message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from messaging.errors import ArgumentError, MessagingError
from messaging.errors.checks import plain_function
from messaging.execution import Promise
from messaging.model import Message, check_name
from messaging.remoteevent.bridges.feed import Bridge
from messaging.remoteevent.event import RemoteEvent
from messaging.remoteevent.failures import as_failure
from messaging.remoteevent.layout import encode_event
from messaging.remoteevent.listener import BatchListener
from messaging.remoteevent.targets import settled

if TYPE_CHECKING:
    from messaging.instance import Messaging
    from messaging.receiving import HandlerRegistration
    from messaging.remoteevent.event import EventId
    from messaging.remoteevent.generator import EventGenerator
    from messaging.remoteevent.listener import Outcome


@dataclass(frozen=True, kw_only=True)
class ChannelMessage(RemoteEvent):
    """A message of a channel as a remote event. Immutable.

    Attributes:
        channel: on which it arrived.
        payload: as it was received.
        content_type, content_encoding, correlation_id, reply_to: of its context, or ``None``.
    """

    channel: str
    payload: bytes
    content_type: str | None = None
    content_encoding: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None


class ChannelGenerator(Bridge):
    """Makes the messages of a channel remote events, :class:`ChannelMessage`. Thread safe; a context manager.

    Args:
        messaging: receives the messages.
        channel: a channel or a pattern, as ``Messaging.on`` takes it.
        generator, listener: see :func:`~messaging.remoteevent.bridges.from_typed`.
        event_id: id of all events, or a function that returns the id for a channel; ``None``: the channel is the id.
        **context: of the subscription, such as ``qos=1``.

    Raises:
        ArgumentError, InvalidChannelError, InvalidEventError: an argument is not as described.
        UnsupportedFeatureError, ClosedError: as ``Messaging.on``.
    """

    def __init__(
        self,
        messaging: Messaging,
        channel: str,
        *,
        generator: EventGenerator | None = None,
        listener: Any = None,
        event_id: EventId | Callable[[str], EventId] | None = None,
        **context: Any,
    ) -> None:
        super().__init__(generator, listener, event_id)

        def subscribe() -> HandlerRegistration:
            return messaging.on(channel, self._handle, **context)

        self._registration = self.open(subscribe, lambda registration: registration.close())

    @property
    def ready(self) -> Promise[None]:
        """The promise that the broker has confirmed the subscription."""
        return self._registration.ready

    def _handle(self, message: Message) -> None:
        context = message.context
        channel = context.channel or ""
        self.generate(
            channel, ChannelMessage, channel=channel, payload=bytes(message.payload),
            content_type=context.content_type, content_encoding=context.content_encoding,
            correlation_id=context.correlation_id, reply_to=context.reply_to_channel,
        )  # fmt: skip


class ChannelListener(BatchListener):
    """Publishes the events that it is notified of to a channel, as JSON. A listener; thread safe.

    The payload is the line of :mod:`messaging.remoteevent.layout`; ``decode_event`` returns the event. The events of a
    batch are published without waiting for each: one that fails may be published again behind later ones.

    Args:
        messaging: publishes the messages.
        channel: the channel, or a function that returns the one of an event.
        **context: of the messages, such as ``qos=1``.

    Raises:
        ArgumentError, InvalidChannelError: an argument is not as described.
    """

    def __init__(self, messaging: Messaging, channel: str | Callable[[RemoteEvent], str], **context: Any) -> None:
        if not callable(getattr(messaging, "publish", None)):
            raise ArgumentError(f"a messaging instance is needed, not {type(messaging).__name__}")
        self._messaging = messaging
        self._channel: Callable[[RemoteEvent], str]
        if callable(channel):
            self._channel = plain_function(channel, "channel")
        else:
            name = check_name(channel)
            self._channel = lambda _event: name
        self._context = {"content_type": "application/json", **context}

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """See :class:`~messaging.remoteevent.listener.EventTarget`: an outcome is that of the message."""
        published: list[Promise[None]] = []
        failure: MessagingError | None = None
        for event in events:
            try:
                line = encode_event(event)
                published.append(self._messaging.publish(self._channel(event), line, **self._context))
            except Exception as error:  # noqa: BLE001  # the function of the channel is the application's
                failure = as_failure(error)
                break
        if not published:
            return settled([failure])
        promise: Promise[list[Outcome]] = Promise("publish remote events")
        _collect(published, failure, promise)
        return promise


def _collect(published: list[Promise[None]], failure: MessagingError | None, promise: Promise[list[Outcome]]) -> None:
    """Resolve ``promise`` with the outcomes up to the first failure, when all messages have theirs."""
    left = set(map(id, published))

    def note(each: Promise[None]) -> None:
        each.was_retrieved = True
        left.discard(id(each))
        if left:
            return
        outcomes: list[Outcome] = []
        for one in published:
            outcomes.append(one.exception(0))
            if outcomes[-1] is not None:
                break
        else:
            if failure is not None:
                outcomes.append(failure)
        promise.resolve(outcomes)

    for each in published:
        each.listen(lambda each=each: note(each))  # type: ignore[misc]
