"""Bridges between remote events and other forms of events (EV.4).

================================================  ==================================================================
:class:`EventAdapter`                             a method, a function or a Subject for each kind of event
:func:`topic_of`, :func:`kind_of`                 source and id as a topic, and back
:func:`as_map`, :func:`from_map`                  a remote event as a map, and back, without loss
:class:`Bridge`                                   a source of other events that feeds a generator
:func:`to_typed`, :func:`from_typed`              typed events of a ``TypedEventBus``
:class:`ChannelListener`, :class:`ChannelGenerator`  the messages of a channel of a broker
:func:`from_distributed`                          distributed events (RFC 214) to a listener, such as a mailbox
================================================  ==================================================================

**Topics.** ``remoteevent/SOURCE/tID`` for an id that is a text, ``remoteevent/SOURCE/iID`` for a number. Letters and
digits of ASCII and ``-`` stand for themselves; each byte of any other character in UTF-8 is ``_`` and two hexadecimal
digits, so the mapping is injective::

    ("boiler 7", "overheated")   remoteevent/boiler_207/toverheated
    ("boiler", -3)               remoteevent/boiler/i-3

A subscription to ``remoteevent/boiler/*`` gets the events of one source.

**Threads.** A message or an event of another kind becomes a remote event on the worker thread that delivers it, and is
acknowledged when the generator has the event: with a persistent one, when it is on the disk. Any thread may use a
bridge. Its lock guards the known ids; no code of the application runs under it."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from reactivex.subject import Subject

from messaging.dispatch.eventdata import from_portable, read_json, to_portable, write_json
from messaging.distributedeventing import CONTINUE, DistributedEventAdmin, PushEvent
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, BoundReachedError, DecodeError, InvalidTopicError, MessagingError
from messaging.errors.checks import plain_function
from messaging.execution import Closeable, Promise
from messaging.instance import Messaging
from messaging.leases import Landlord, Lease, LeaseRenewalManager, release
from messaging.model import Message, check_name
from messaging.receiving import HandlerRegistration
from messaging.remoteevent.event import RemoteEvent, check_event_id, decode_event, encode_event
from messaging.remoteevent.generator import EventGenerator
from messaging.remoteevent.listener import BatchListener, Outcome, as_failure, settled
from messaging.remoteevent.third_parties import NotificationDemultiplexer

if TYPE_CHECKING:
    import reactivex as rx

    from messaging.remoteevent.event import EventId, EventKind, EventRegistration
    from messaging.typedevent import TypedEventBus


#: first level of the topics of remote events
PREFIX: Final = "remoteevent"
_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-")
_TOPIC: Final = re.compile(rf"{PREFIX}/((?:[A-Za-z0-9-]|_[0-9a-f]{{2}})+)/([it])((?:[A-Za-z0-9-]|_[0-9a-f]{{2}})+)")
_ESCAPED: Final = re.compile(rb"_([0-9a-f]{2})")


def topic_of(source: str, event_id: EventId) -> str:
    """Return the topic of a kind of event.

    Raises:
        InvalidTopicError: the source or the id has no form in UTF-8.
    """
    if isinstance(event_id, int):
        return f"{PREFIX}/{_escaped(source)}/i{event_id}"
    return f"{PREFIX}/{_escaped(source)}/t{_escaped(event_id)}"


def kind_of(topic: str) -> EventKind:
    """Return source and id of a topic that :func:`topic_of` returned.

    Raises:
        InvalidTopicError: it is no such topic.
    """
    found = _TOPIC.fullmatch(topic)
    try:
        if found is not None:
            source, form, text = found.groups()
            event_id = int(text) if form == "i" else _plain(text)
            if topic_of(_plain(source), check_event_id(event_id)) == topic:
                return _plain(source), event_id
    except ValueError:
        pass
    raise InvalidTopicError(topic, f"not the topic of a kind of remote event: {topic!r:.80}")


def _escaped(text: str) -> str:
    try:
        return "".join(chr(each) if each in _PLAIN else f"_{each:02x}" for each in text.encode())
    except UnicodeEncodeError:
        raise InvalidTopicError(text, f"no topic can be made of {text!r:.80}: it has no form in UTF-8") from None


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), text.encode()).decode()


def as_map(event: RemoteEvent) -> dict[str, Any]:
    """Return an event as nested maps, which share no mutable value with it.

    Raises:
        InvalidEventError: a value in it has no portable form.
    """
    found: dict[str, Any] = read_json(encode_event(event))
    for key in ("handback", "data"):
        if key in found:
            found[key] = from_portable(found[key])
    return found


def from_map(value: Mapping[str, Any]) -> RemoteEvent:
    """Return the event of a map: of its subclass if that is known here.

    Raises:
        DecodeError: it is no such map.
        InvalidEventError: a value in it has no portable form.
    """
    if not isinstance(value, Mapping):
        raise DecodeError(f"a remote event is made of a map, not of a {type(value).__name__}")
    found = dict(value)
    for key in ("handback", "data"):
        if key in found:
            found[key] = to_portable(found[key])
    return decode_event(write_json(found))


S = TypeVar("S")
#: event ids that one bridge makes of topics
MAX_IDS: Final = 10_000
#: how long the source waits until a persistent generator has stored an event, seconds
_TIMEOUT: Final = 30.0


class Bridge(Closeable):
    """A source of events that feeds a generator. Thread safe; a context manager, which closes it.

    Args:
        generator: numbers the events, and notifies its listeners; ``None``: one of its own.
        listener: gets all events of the bridge, such as the listener of a mailbox; needed without a generator.
        event_id: id of all events, or a function that returns the id for a topic; ``None``: the topic is the id.

    Attributes:
        generator: of the remote events.

    Raises:
        ArgumentError, InvalidEventError: an argument is not as described.
    """

    def __init__(
        self, generator: EventGenerator | None, listener: Any, event_id: EventId | Callable[[str], EventId] | None
    ) -> None:
        if generator is None and listener is None:
            raise ArgumentError("a generator or a listener is needed")
        if generator is not None and not isinstance(generator, EventGenerator):
            raise ArgumentError(f"an EventGenerator is needed, not {type(generator).__name__}")
        self._end: Callable[[], object] = lambda: None
        self._landlord = Landlord("feed", max_duration=math.inf) if generator is None else None
        self.generator = generator or EventGenerator(landlord=self._landlord)
        self._listener = listener
        self._renewals = LeaseRenewalManager()
        self._lock = threading.Lock()  # guards the following two
        self._ids: set[EventId] = set()
        self._leases: list[Lease] = []
        self._id_of: Callable[[str], EventId]
        with on_failure(self.close):
            if event_id is None:
                self._id_of = lambda topic: topic
            elif callable(event_id):
                self._id_of = plain_function(event_id, "event_id")
            else:
                fixed = check_event_id(event_id)
                self._id_of = lambda _topic: fixed
                self._introduce(fixed)

    def open(self, start: Callable[[], S], end: Callable[[S], object]) -> S:
        """Start the source, which :meth:`close` ends; return what ``start`` returned.

        The bridge is closed if ``start`` raises.
        """
        with on_failure(self.close):  # otherwise the leases of the listener would be renewed without end
            source = start()
        self._end = lambda: end(source)
        return source

    def generate(self, topic: str, event_type: type[RemoteEvent], /, **fields: Any) -> None:
        """Generate an event, and wait until the generator has it. For the source, on a thread of its own.

        Raises:
            MessagingError: see :meth:`EventGenerator.generate <messaging.remoteevent.EventGenerator.generate>`.
        """
        event_id = check_event_id(self._id_of(topic))
        if event_id not in self._ids:
            self._introduce(event_id)
        self.generator.generate(event_id, event_type, **fields).result(_TIMEOUT)

    def _introduce(self, event_id: EventId) -> None:
        """Declare a kind of events, and register the listener for it."""
        with self._lock:
            if event_id in self._ids:
                return
            if len(self._ids) >= MAX_IDS:
                raise BoundReachedError(f"the bridge has {MAX_IDS} kinds of events already")
            self.generator.declare(event_id)
            if self._listener is not None:
                lease = self.generator.register(event_id, None, self._listener, Lease.FOREVER).lease
                self._leases.append(lease)
                self._renewals.renew_until(lease)
            self._ids.add(event_id)

    def close(self) -> None:
        """Make no further events, and close the generator if it is the bridge's own. Idempotent."""
        self._end()
        self._renewals.close()
        with self._lock:
            leases, self._leases = self._leases, []
        for lease in leases:
            release(lease)
        if self._landlord is not None:
            self.generator.close()
            self._landlord.close()


@dataclass(frozen=True, kw_only=True)
class BusEvent(RemoteEvent):
    """A typed event as a remote event. Immutable.

    Attributes:
        topic: of the typed event.
        content: the typed event as nested maps.
    """

    event_type = "messaging.remoteevent.bridges.typed.BusEvent"  # of notifications and journals

    topic: str
    content: Any = None


class TypedListener:
    """Publishes the events that it is notified of to a bus. A listener; thread safe.

    A :class:`BusEvent` becomes the typed event that it was made of. Any other event becomes the untyped event that
    :func:`~messaging.remoteevent.bridges.as_map` returns, with a topic made of source and id.

    Args:
        bus: the bus.
        topic: returns the topic of an event; ``None``: see :mod:`messaging.remoteevent.bridges`.

    Raises:
        ArgumentError: ``topic`` cannot be called.
    """

    def __init__(self, bus: TypedEventBus, topic: Callable[[RemoteEvent], str] | None = None) -> None:
        if not callable(getattr(bus, "deliver_untyped", None)):
            raise ArgumentError(f"a TypedEventBus is needed, not {type(bus).__name__}")
        self._bus = bus
        self._topic = None if topic is None else plain_function(topic, "topic")

    def notify(self, event: RemoteEvent) -> None:
        """Publish an event.

        Raises:
            InvalidTopicError, InvalidEventError: it cannot be a typed event.
            PermissionDeniedError, ClosedError: the bus does not take it.
        """
        if isinstance(event, BusEvent) and isinstance(event.content, Mapping):
            topic = event.topic if self._topic is None else self._topic(event)
            self._bus.deliver_untyped(topic, event.content)
            return
        topic = topic_of(event.source, event.id) if self._topic is None else self._topic(event)
        self._bus.deliver_untyped(topic, as_map(event))


to_typed = TypedListener


def from_typed(
    bus: TypedEventBus,
    *topics: str,
    generator: EventGenerator | None = None,
    listener: Any = None,
    event_id: EventId | Callable[[str], EventId] | None = None,
) -> Bridge:
    """Make the typed events of a bus remote events, :class:`BusEvent`.

    Args:
        bus: the bus; also one that is connected to an event network.
        *topics: topic filters, at least one.
        generator: numbers the events and notifies its listeners; ``None``: one of the bridge itself.
        listener: gets all of these events, such as the listener of a mailbox; needed without a generator.
        event_id: id of all events, or a function that returns the id for a topic; ``None``: the topic is the id. A kind
            is declared at its first event; a generator may declare it before, so that others can register.

    Returns:
        The bridge; closing it ends it.

    Raises:
        ArgumentError, InvalidTopicError, InvalidEventError: an argument is not as described.
        ClosedError: the bus is closed.
    """
    if not topics:
        raise ArgumentError("at least one topic filter is needed")
    bridge = Bridge(generator, listener, event_id)

    def handle(topic: str, event: dict[str, Any]) -> None:
        bridge.generate(topic, BusEvent, topic=topic, content=event)

    bridge.open(lambda: bus.on(*topics, handler=handle), lambda registration: registration.unregister())
    return bridge


@dataclass(frozen=True, kw_only=True)
class DistributedEvent(RemoteEvent):
    """A distributed event as a remote event. Immutable.

    Attributes:
        topic: of the event.
        content: its payload, as nested maps.
        reply_to: topic for replies, or ``None``.
        correlation_id: relates a reply to its event, or ``None``.
        framework: id of the process that sent it, as text; ``None`` if unknown.
    """

    event_type = "messaging.remoteevent.bridges.consumers.DistributedEvent"  # of notifications and journals

    topic: str
    content: Any = None
    reply_to: str | None = None
    correlation_id: str | None = None
    framework: str | None = None


def from_distributed(
    admin: DistributedEventAdmin,
    *topics: str,
    generator: EventGenerator | None = None,
    listener: Any = None,
    event_id: EventId | Callable[[str], EventId] | None = None,
) -> Bridge:
    """Consume distributed events, and make them remote events, :class:`DistributedEvent`.

    Args:
        admin: the admin.
        *topics: topic filters, at least one.
        generator, listener, event_id: see :func:`~messaging.remoteevent.bridges.from_typed`.

    Raises:
        ArgumentError, InvalidTopicError, InvalidEventError: an argument is not as described.
        ClosedError: the admin is closed.
    """
    bridge = Bridge(generator, listener, event_id)

    def consume(push: PushEvent[Any]) -> int:
        event = push.value
        framework = event.originating_framework
        bridge.generate(
            event.topic, DistributedEvent, topic=event.topic, content=event.data, reply_to=event.reply_to,
            correlation_id=event.correlation_id, framework=None if framework is None else str(framework),
        )  # fmt: skip
        return CONTINUE

    bridge.open(
        lambda: admin.on(*topics, handler=consume, is_whole=True), lambda registration: registration.unregister()
    )
    return bridge


@dataclass(frozen=True, kw_only=True)
class ChannelMessage(RemoteEvent):
    """A message of a channel as a remote event. Immutable.

    Attributes:
        channel: on which it arrived.
        payload: as it was received.
        content_type, content_encoding, correlation_id, reply_to: of its context, or ``None``.
    """

    event_type = "messaging.remoteevent.bridges.channels.ChannelMessage"  # of notifications and journals

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

    Attributes:
        ready: resolves when the broker has confirmed the subscription.

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

        self.ready: Promise[None] = self.open(subscribe, lambda registration: registration.close()).ready

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

    The payload is the line of :mod:`messaging.remoteevent.event`; ``decode_event`` returns the event. The events of a
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


class EventAdapter(NotificationDemultiplexer):
    """Calls the target of source and id of an event. A listener; thread safe.

    An event of another kind is refused with ``UnknownEventError``, which asks the sender to send no further ones. A
    target runs on a worker thread, or on its event loop if it is a coroutine function; its failure is the one of the
    notification.

    Example::

        adapter = EventAdapter(panel)
        adapter.add(("boiler", "overheated"), "show_alarm")  # panel.show_alarm(event)
        adapter.add(registration, subject)  # subject.on_next(event)
        generator.register("overheated", None, adapter)

    Args:
        owner: the object of the methods that :meth:`add` names.
    """

    def __init__(self, owner: Any = None) -> None:
        super().__init__()
        self._owner = owner

    def add(self, kind: EventRegistration | EventKind, target: Any) -> None:
        """Call ``target`` with the events of a kind, instead of an earlier one.

        Args:
            kind: a registration, or source and id.
            target: a function or coroutine function of one parameter, the name of a method of the owner, an observer
                such as a Subject, whose ``on_next`` is called, or a listener.

        Raises:
            ArgumentError, InvalidEventError: an argument is not as described.
        """
        super().add(kind, self._callable(target))

    def subject(self, kind: EventRegistration | EventKind) -> rx.Observable[RemoteEvent]:
        """Return a Subject of the events of a kind, instead of an earlier target. Raises as :meth:`add`."""
        subject: Subject[RemoteEvent] = Subject()
        self.add(kind, subject)
        return subject

    def _callable(self, target: Any) -> Any:
        if isinstance(target, str):
            method: Callable[[RemoteEvent], Any] | None = getattr(self._owner, target, None)
            if not callable(method):
                raise ArgumentError(f"{type(self._owner).__name__} has no method {target!r:.80}")
            return method
        on_next = getattr(target, "on_next", None)
        return on_next if callable(on_next) and not isinstance(target, type) else target
