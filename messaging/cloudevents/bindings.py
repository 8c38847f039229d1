"""Events as messages, in binary and structured mode, by the MQTT and AMQP protocol bindings (CloudEvents 1.0.2).

``publish`` sends events with an instance, and ``events`` receives them from a stream.

=================  =================================  ==========================================================
binding            names of headers in binary mode    values
=================  =================================  ==========================================================
``mqtt``           the attribute's                    canonical text (MQTT binding 3.1.3)
``amqp``           ``cloudEvents_`` before it         int, bool and bytes as such, else canonical text
``amqp-colon``     ``cloudEvents:`` before it         the same: the only prefix up to 1.0.2 of the AMQP binding
``rabbitmq``       ``ce-`` before it                  canonical text: the binding of the Python SDK for RabbitMQ
=================  =================================  ==========================================================

The AMQP binding is for AMQP 1.0, whose application properties are what AMQP 0-9-1 calls headers: RabbitMQ converts the
ones to the others. A time is sent as text, because a timestamp of AMQP 0-9-1 has whole seconds only. No binding of
these percent-encodes. Reading finds the binding by the required attributes.

Every function is thread safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, get_args

from messaging.cloudevents.attributes import REQUIRED, canonical, is_name, timestamp
from messaging.cloudevents.event import CloudEvent, attributes_of, event_of
from messaging.cloudevents.json_format import JsonFormat, parse, read_event
from messaging.codecs import decode, encode
from messaging.errors import ArgumentError, CodecError, DecodeError, InvalidEventError
from messaging.errors.checks import check_instance, check_mapping
from messaging.errors.text import SafeLog
from messaging.execution import Promise
from messaging.model import Features, Message, MessageContext, MessageContextBuilder

if TYPE_CHECKING:
    from cloudevents.core.base import BaseCloudEvent

    from messaging.instance import Messaging

logger = SafeLog(__name__)

Mode = Literal["binary", "structured"]
Binding = Literal["mqtt", "amqp", "amqp-colon", "rabbitmq"]
OnInvalid = Literal["raise", "reject", "skip"]

#: begin of the content type of every event format
_STRUCTURED: Final = "application/cloudevents"
_BATCH: Final = "application/cloudevents-batch"
JSON_TYPE: Final = JsonFormat.CONTENT_TYPE
_PREFIXES: Final[Mapping[str, str]] = {
    "amqp": "cloudEvents_", "amqp-colon": "cloudEvents:", "rabbitmq": "ce-", "mqtt": "",
}  # fmt: skip
#: bindings that keep the type of a value
_TYPED: Final = frozenset({"amqp", "amqp-colon"})
#: attributes of the distributed tracing extension, which on MQTT share their headers with W3C trace context
_TRACING: Final = frozenset({"traceparent", "tracestate"})
#: what binary mode needs of an instance
_BINARY_NEEDS: Final = frozenset({Features.MESSAGE_PROPERTIES, Features.EXTENSION_HEADERS})
_NO_HEADERS: Final[Mapping[str, Any]] = MappingProxyType({})
_JSON: Final = JsonFormat()


class _Parts(NamedTuple):
    """The parts of a message that represent an event."""

    payload: bytes
    #: ``None``: the event has neither data nor a content type
    content_type: str | None
    headers: dict[str, Any]


def _check_mode(mode: Any, binding: Any) -> None:
    """Refuse a mode or binding that does not exist.

    Raises:
        ArgumentError: see above.
    """
    for name, value, known in (("mode", mode, get_args(Mode)), ("binding", binding, get_args(Binding))):
        if not isinstance(value, str) or value not in known:
            shown = repr(value[:40]) if isinstance(value, str) else type(value).__name__
            raise ArgumentError(f"{name} must be one of {', '.join(map(repr, known))}, not {shown}")


def _parts_of(event: BaseCloudEvent, mode: Mode = "binary", binding: Binding = "mqtt") -> _Parts:
    """Return payload, content type and headers that represent ``event``; see :func:`to_message`."""
    _check_mode(mode, binding)
    if mode == "structured":
        return _Parts(_JSON.write(event), JSON_TYPE, {})
    attributes = attributes_of(event)
    data = event.get_data()
    content_type = attributes.pop("datacontenttype", None)
    if content_type is None and data is not None and not isinstance(data, (bytes, bytearray, memoryview)):
        content_type = "application/json"  # explicit outside of the JSON format (JSON event format 3.1.2)
    payload = _JSON.write_data(data, content_type)
    prefix, typed = _PREFIXES[binding], binding in _TYPED
    headers = {
        prefix + name: value if typed and not isinstance(value, datetime) else canonical(value)
        for name, value in attributes.items()
    }
    return _Parts(payload, content_type, headers)


def to_message(
    event: BaseCloudEvent,
    channel: str,
    mode: Mode = "binary",
    *,
    binding: Binding = "mqtt",
    extensions: Mapping[str, Any] | None = None,
) -> Message:
    """Return ``event`` as a message for ``channel``.

    Args:
        event: of this package, or of the ``cloudevents`` package, version 1.0.
        channel: where to publish it.
        mode: ``binary``: attributes as headers, data as payload; ``structured``: all of it as a JSON payload. An
            instance that does not announce ``headers``, such as MQTT 3.1.1 without envelope, takes neither headers nor
            a content type: publish with :func:`~messaging.cloudevents.publish`.
        binding: names and types of the headers in binary mode, see the module; ``amqp`` for AMQP.
        extensions: of the message; its ``headers`` are sent besides those of the event.

    Raises:
        InvalidEventError: an attribute is missing or invalid; the text names it.
        EncodeError: the data does not suit the attribute ``datacontenttype``.
        ArgumentError: another argument is not as described, or a header has the name of an attribute.
    """
    payload, content_type, headers = _parts_of(event, mode, binding)
    more = check_mapping("extensions", {} if extensions is None else extensions)
    merged = _merged_headers(headers, more.get(Features.EXTENSION_HEADERS))
    if merged:
        more[Features.EXTENSION_HEADERS] = merged
    builder = MessageContextBuilder().channel(channel).extensions(more).content(payload)
    if content_type is not None:
        builder.content_type(content_type)
    return builder.build_message()


def _merged_headers(own: dict[str, Any], others: Any) -> dict[str, Any]:
    """Return the headers of an event together with those of the application.

    Raises:
        ArgumentError: ``others`` is no mapping, or has another value for a header of the event.
    """
    if others is None:
        return own
    merged = {**check_mapping("headers", others)}
    for name, value in own.items():
        if name in merged and merged[name] != value:
            raise ArgumentError(f"header {name!r} is an attribute of the event already; leave it out")
        merged[name] = value
    return merged


# --- reading


def is_cloud_event(message: Message, *, implied: bool = False) -> bool:
    """Return whether ``message`` says that it is an event: by its content type, or by the required attributes.

    A message may say so and be invalid: then :func:`from_message` raises.

    Args:
        message: a received message.
        implied: whether a message without content type and headers is looked into: on MQTT 3.1.1, every event is such
            a message. It costs as much as parsing its payload.

    Raises:
        ArgumentError: ``message`` is no message.
    """
    check_instance("message", message, Message)
    content_type = _content_type(message)
    if content_type.startswith(_STRUCTURED) or _binding_of(_headers(message)) is not None:
        return True
    if not implied or content_type or message.payload.lstrip()[:1] != b"{":
        return False
    try:
        found = parse(_decoded(message))
    except (InvalidEventError, DecodeError):
        return False
    return isinstance(found, dict) and all(name in found for name in REQUIRED)


def from_message(message: Message) -> CloudEvent:
    """Return the event that ``message`` represents, in whichever mode and binding.

    A message with neither content type nor the headers of an event is read as structured: on MQTT 3.1.1, that is
    implied (MQTT binding 3.2.1). The setting ``default_content_type`` of an instance replaces a missing content type.

    Raises:
        DecodeError: it represents none; the text names the attribute and a correct value.
        UnknownContentTypeError, UnknownContentEncodingError: no codec or encoding of that name is known.
        ArgumentError: ``message`` is no message.
    """
    check_instance("message", message, Message)
    content_type = _content_type(message)
    headers = _headers(message)
    if content_type.startswith(_STRUCTURED):
        return _structured(message, content_type)
    binding = _binding_of(headers)
    try:
        if binding is not None:
            return _binary(message, binding, headers)
        if not content_type:
            return event_of(parse(_decoded(message)))
        problem = _missing(headers)
    except InvalidEventError as error:
        problem = str(error)
    raise DecodeError(f"no CloudEvent: {problem}")


def _structured(message: Message, content_type: str) -> CloudEvent:
    if content_type.startswith(_BATCH):
        raise DecodeError("no CloudEvent: a batch of events, which the MQTT and AMQP bindings do not have; send each")
    media_type = content_type.partition(";")[0].strip()
    if media_type != JSON_TYPE:
        raise DecodeError(f"no CloudEvent: event format {media_type!r:.80} is not supported; use {JSON_TYPE!r}")
    return read_event(_decoded(message))


def _binary(message: Message, binding: str, headers: Mapping[str, Any]) -> CloudEvent:
    prefix = _PREFIXES[binding]
    attributes: dict[str, Any] = {}
    for header, value in headers.items():
        name = header[len(prefix) :]
        if header.startswith(prefix) and is_name(name):
            value = _single(name, value)
            if value is not None:
                attributes[name] = timestamp(name, value) if name == "time" and type(value) is str else value
    context = message.context
    content_type = context.content_type or message.default_content_type
    if content_type:
        attributes["datacontenttype"] = content_type  # wins over a header of that name
    else:
        content_type = attributes.get("datacontenttype")
    event = CloudEvent.received(attributes, None)
    data = _JSON.read_data(_decoded(message), content_type)
    return event if data is None else CloudEvent.received(event.get_attributes(), data)


def _single(name: str, value: Any) -> Any:
    """Return the value of an attribute; a header that is there several times must have one value."""
    if not isinstance(value, tuple):
        return value
    if name == "tracestate":  # may be in parts (W3C trace context 3.3.1)
        return ",".join(map(str, value))
    if name in _TRACING:  # the first one is the sender's, others are of those who forwarded it
        return value[0] if value else None
    if len({*map(repr, value)}) != 1:
        raise InvalidEventError(f"attribute {name!r}: is there {len(value)} times, with different values; send one")
    return value[0]


def _content_type(message: Message) -> str:
    found = message.context.content_type or message.default_content_type
    return found.strip().lower() if isinstance(found, str) else ""


def _headers(message: Message) -> Mapping[str, Any]:
    found = message.context.extensions.get(Features.EXTENSION_HEADERS)
    return found if isinstance(found, Mapping) else _NO_HEADERS


def _binding_of(headers: Mapping[str, Any]) -> str | None:
    """Return the binding of which all required attributes are there."""
    for binding, prefix in _PREFIXES.items():
        if all(prefix + name in headers for name in REQUIRED):
            return binding
    return None


def _missing(headers: Mapping[str, Any]) -> str:
    """Return what headers lack that come closest to those of an event."""
    closest = max(
        reversed([*_PREFIXES.values()]), key=lambda prefix: sum(prefix + name in headers for name in REQUIRED)
    )
    missing = [closest + name for name in REQUIRED if closest + name not in headers]
    return f"neither content type {JSON_TYPE!r} nor the headers {', '.join(map(repr, missing))}"


def _decoded(message: Message) -> bytes:
    """Return the payload without its content encoding."""
    if not message.context.content_encoding:
        return message.payload
    payload: bytes = decode(message.payload, MessageContext(content_encoding=message.context.content_encoding), bytes)
    return payload


# --- with an instance


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
    payload, content_type, headers = _parts_of(event, mode, binding)
    if mode == "structured" and Features.MESSAGE_PROPERTIES not in features:
        content_type = None  # implied (MQTT binding 3.2.1)
    if content_encoding:
        payload, _ = encode(payload, content_type, content_encoding)
    merged = _merged_headers(headers, context.pop("headers", None))
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
