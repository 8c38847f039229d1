"""Publishing events with an instance, and receiving them from a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from messaging.cloudevents.bindings import Binding, Mode, from_message, merged_headers, parts_of
from messaging.codecs import encode
from messaging.errors import ArgumentError, CodecError
from messaging.errors.text import SafeLog
from messaging.model import Features

if TYPE_CHECKING:
    from cloudevents.core.base import BaseCloudEvent

    from messaging.cloudevents.event import CloudEvent
    from messaging.execution import Promise
    from messaging.instance import Messaging

logger = SafeLog(__name__)

OnInvalid = Literal["raise", "reject", "skip"]

#: what binary mode needs of an instance
_BINARY_NEEDS: Final = frozenset({Features.MESSAGE_PROPERTIES, Features.EXTENSION_HEADERS})


def publish(
    m: Messaging,
    channel: str,
    event: BaseCloudEvent,
    mode: Mode | None = None,
    *,
    binding: Binding | None = None,
    content_encoding: str | None = None,
    **context: Any,
) -> Promise[None]:
    """Publish ``event`` to ``channel``.

    Args:
        m: the instance.
        channel: where to.
        event: of this package, or of the ``cloudevents`` package, version 1.0.
        mode: see :func:`to_message`; ``None``: ``binary`` if the instance announces ``messageProperties`` and
            ``headers``, else ``structured``, without a content type if it cannot carry that.
        binding: see :func:`to_message`; ``None``: ``amqp`` on AMQP, else ``mqtt``.
        content_encoding: compression of the payload, such as ``gzip``.
        **context: as for :meth:`Messaging.publish`, without ``content_type``, which is the event's.

    Returns:
        The promise of :meth:`Messaging.publish`, which also lists the errors.

    Raises:
        InvalidEventError: an attribute is missing or invalid; the text names it.
        EncodeError: the data does not suit the attribute ``datacontenttype``.
        ArgumentError: another argument is not as described, or a header has the name of an attribute.
        UnsupportedFeatureError: ``mode`` is ``binary``, and the instance cannot carry headers.
    """
    if "content_type" in context:
        raise ArgumentError("content_type is the event's: set its attribute 'datacontenttype'")
    try:
        features, runtime, send = m.features, m.runtime, m.publish
    except AttributeError:
        raise ArgumentError(f"m must be a Messaging instance, not {type(m).__name__}") from None
    if mode is None:
        mode = "binary" if features >= _BINARY_NEEDS else "structured"
    if binding is None:
        binding = "amqp" if "amqp" in runtime.get_runtime_dto().protocols else "mqtt"
    payload, content_type, headers = parts_of(event, mode, binding)
    if mode == "structured" and Features.MESSAGE_PROPERTIES not in features:
        content_type = None  # implied (MQTT binding 3.2.1)
    if content_encoding:
        payload, _ = encode(payload, content_type, content_encoding)
    merged = merged_headers(headers, context.pop("headers", None))
    return send(
        channel,
        payload,
        content_type=content_type,
        content_encoding=content_encoding,
        headers=merged or None,
        **context,
    )


class EventStream:
    """The events of a stream of messages, for iteration; made by :func:`events`. As thread safe as the stream.

    A context manager, sync and async, like the stream. A message is acknowledged as the stream does it: when the next
    one is asked for.
    """

    __slots__ = ("_on_invalid", "_stream", "skipped")

    def __init__(self, stream: Any, on_invalid: OnInvalid | None) -> None:
        for needed in ("receive", "close", "__next__", "__anext__"):
            if not hasattr(stream, needed):
                raise ArgumentError(f"stream must be what subscribe() returned, not {type(stream).__name__}")
        if on_invalid is not None and (not isinstance(on_invalid, str) or on_invalid not in get_args(OnInvalid)):
            raise ArgumentError(f"on_invalid must be one of {', '.join(map(repr, get_args(OnInvalid)))}")
        self._stream = stream
        self._on_invalid = on_invalid
        #: messages that were no events, and were rejected or skipped
        self.skipped = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> CloudEvent:
        while (event := self._event(next(self._stream))) is None:
            pass
        return event

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CloudEvent:
        while (event := self._event(await anext(self._stream))) is None:
            pass
        return event

    def receive(self, timeout: float | None = None) -> CloudEvent:
        """Wait for the next event; for at most ``timeout`` seconds for each message until there is one.

        Raises:
            DeadlineError: no message came in time.
            ClosedError: the stream has ended.
            CodecError: the message is no event, and ``on_invalid`` is ``raise``.
        """
        while (event := self._event(self._stream.receive(timeout))) is None:
            pass
        return event

    def close(self) -> Promise[None]:
        """End the stream, see ``MessageStream.close``."""
        closing: Promise[None] = self._stream.close()
        return closing

    def _event(self, message: Any) -> CloudEvent | None:
        try:
            return from_message(message)
        except CodecError as error:
            if self._on_invalid == "raise":
                message.reject_invalid()
                raise
            problem = str(error)
        self.skipped += 1
        if self._on_invalid is None:
            rejected = message.reject_invalid()
        else:
            rejected = self._on_invalid == "reject" and message.reject()
        outcome = "rejected" if rejected else "skipped"
        logger.warning("events of %r: message %s: %.500s", message.context.channel, outcome, problem)
        return None

    def __enter__(self) -> Self:
        self._stream.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._stream.__exit__(*details)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._stream.__aexit__(*details)


def events(stream: Any, *, on_invalid: OnInvalid | None = None) -> EventStream:
    """Return the events of a stream of messages, in both modes, for ``for``, ``async for`` and ``receive``.

    With Rx operators use ``stream.pipe(operators.map(from_message))``.

    Args:
        stream: what ``subscribe`` returned, without a model.
        on_invalid: what becomes of a message that is no event: by default it goes to the dead-letter channel, is
            rejected if there is none, and the events go on. ``raise`` does that and raises its error; ``reject``
            rejects it and goes on, so that ``max_deliveries`` counts; ``skip`` acknowledges it and goes on. All but
            ``raise`` log and count it.

    Raises:
        ArgumentError: an argument is not as described.
    """
    return EventStream(stream, on_invalid)
