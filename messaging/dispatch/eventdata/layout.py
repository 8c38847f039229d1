"""The layout of one event on the wire and in an archive: version 1.

An event is a JSON object in UTF-8, or the same map in CBOR (RFC 8949), told from JSON by its first byte. In CBOR, byte
strings, NaN, bignums and the standard tags of dates, decimals, UUIDs and sets may be in place of ``$`` tags. A program
without this library sends as little as::

    {"event": 1, "data": {"id": 3, "total": 99.5, "placed": {"$datetime": "2025-10-09T08:53:20+00:00"}}}

All keys but ``event`` and ``data`` may be missing, or ``null``. A reader ignores keys that it does not know.

===============  =======================================================================================================
``event``        1, the version of the layout
``topic``        text of 1 to 65,535 characters. It may be missing if the channel tells the topic
``data``         any value in the portable form of :mod:`messaging.dispatch.eventdata.values`. It is
                 required if ``kind`` is ``"data"``, and ignored otherwise
``time``         integer: the publication time, in microseconds since 1970, UTC
``kind``         ``"data"`` (the default), ``"close"`` (the sender publishes nothing more), ``"error"`` (it failed)
``id``           text: identifies the event
``origin``       text of a UUID: the framework in which the event was published first
``bundle``       integer of at least 0: the bundle that published it, in that framework
``recorder``     text: the recorder of an archive, unique for each run of it; see ``sequence``
``sender``       text of a UUID: the process that sent the event; see ``sequence``
``sequence``     integer of at least 0: a recorder or sender counts its events, so that a missing number is a lost event
``path``         list of at most 32 texts of UUIDs: the senders that the event passed
``session``      text: the session in which the event was published
``reply``        text: the topic that takes replies
``correlation``  text: relates a reply to its request
``principal``    text: who published the event, as the sender says
``notify``       ``true``: the sender wants an acknowledgement
``enums``        list of at most 32 texts ``module:class``: the enums of the members in the data. Where the class is
                 imported, a reader has the member itself. A reader ignores entries that are wrong, and those beyond 32
``error``        ``{"type": text, "message": text}``: what failed, if ``kind`` is ``"error"``
===============  =======================================================================================================

Texts without a stated length have at most 200 characters; the message of an error has any length. Integers have 64
bits. UUIDs are written as RFC 9562 does, in either case, and read in lower case.

``recorder``, ``sequence``, ``topic``, ``time`` and ``data`` are the fields of a recorded event. The archive of Spark
has them.

A publisher makes events with :meth:`WireEvent.of`, which writes the data in portable form. A receiver gets them from
:func:`decode`, which checks every field but the data: :meth:`WireEvent.value` does, so that a broker client can route
and count an event whose data it cannot read.

Every function is thread safe. An event must not be mutated after it was made.
"""

from __future__ import annotations

import contextlib
import datetime
import operator
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn

from messaging.codecs import Codec, codec_for
from messaging.dispatch.eventdata.converters import with_article
from messaging.dispatch.eventdata.enums import MAX_CLASSES
from messaging.dispatch.eventdata.schema import MISSING
from messaging.dispatch.eventdata.values import from_portable, is_unicode, read_json, to_portable, with_tags, write_json
from messaging.errors import DecodeError, EncodeError, InvalidEventError, MissingExtraError
from messaging.errors.text import tolerant

#: the version of the layout
LAYOUT: Final = 1
#: kinds of events
DATA: Final = "data"
CLOSE: Final = "close"
ERROR: Final = "error"
#: characters of a text without a length of its own
MAX_TEXT: Final = 200
#: characters of a topic
MAX_TOPIC: Final = 65_535
#: senders in a path
MAX_PATH: Final = 32

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_FIRST: Final = (datetime.datetime.min.replace(tzinfo=datetime.UTC) - _EPOCH) // _MICROSECOND
_LAST: Final = (datetime.datetime.max.replace(tzinfo=datetime.UTC) - _EPOCH) // _MICROSECOND
_MAX_INT: Final = 2**63 - 1
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
#: first bytes of a map in CBOR, with which no JSON text begins; and the tag that may precede it (RFC 8949 3.4.6)
_CBOR_MAP: Final = range(0xA0, 0xC0)
_SELF_DESCRIBED: Final = b"\xd9\xd9\xf7"


def microseconds(time: datetime.datetime) -> int:
    """Return the microseconds since 1970 of a time with a zone. ``TypeError`` if it has none."""
    return (time - _EPOCH) // _MICROSECOND


def time_of(count: int) -> datetime.datetime:
    """Return the time of a number of microseconds since 1970, in UTC. ``OverflowError`` beyond the year 9999."""
    return _EPOCH + count * _MICROSECOND


class WireError(NamedTuple):
    """What failed at the sender: the name of the class of the error, and its text."""

    type: str
    message: str


@dataclass(slots=True, repr=False)
class WireEvent:
    """One event in its layout. See the module for the meaning and the bounds of the fields.

    Making one checks nothing: :func:`encode` and :func:`decode` do. It is not frozen, since a frozen dataclass takes
    four times as long to make. Equal to events with equal fields.

    Attributes:
        topic: the topic of the event.
        data: its data in portable form; a result of :func:`~messaging.dispatch.eventdata.values.to_portable`.
        time: the publication time in microseconds since 1970, UTC; or ``None``.
        kind: ``"data"``, ``"close"`` or ``"error"``.
        id, origin, bundle, recorder, sender, sequence, session, principal: the fields of these names, or ``None``.
        path: the senders that the event passed.
        reply_to, correlation_id: the fields ``reply`` and ``correlation``, or ``None``.
        notify: whether the sender wants an acknowledgement.
        error: what failed, if the kind is ``"error"``; or ``None``.
        enums: the classes of the members of enums in the data.
    """

    topic: str
    data: Any = None
    _: KW_ONLY
    time: int | None = None
    kind: str = DATA
    id: str | None = None
    origin: str | None = None
    bundle: int | None = None
    recorder: str | None = None
    sender: str | None = None
    sequence: int | None = None
    path: tuple[str, ...] = ()
    session: str | None = None
    reply_to: str | None = None
    correlation_id: str | None = None
    principal: str | None = None
    notify: bool = False
    error: WireError | None = None
    enums: tuple[str, ...] = ()

    @classmethod
    def of(cls, topic: str, value: Any, **fields: Any) -> WireEvent:
        """Return an event with any value as its data, which is copied in portable form.

        Args:
            topic: the topic.
            value: the payload: a map, an object with fields, or any other value of an event.
            fields: the other arguments of the constructor.

        Raises:
            InvalidEventError: ``value`` has no portable form.
        """
        event = cls(topic, **fields)
        event.put(value)
        return event

    def put(self, value: Any, *, is_bounded: bool = True) -> None:
        """Make a copy of ``value`` in portable form the data. Raises as :meth:`of`.

        Args:
            value: the payload.
            is_bounded: whether the bounds of the portable form apply.
        """
        enums: list[str] = []
        self.data = to_portable(value, is_bounded=is_bounded, enums=enums)
        self.enums = tuple(sorted(enums)) if enums else ()

    def value(self, *, is_bounded: bool = True) -> Any:
        """Return the data as values of Python; a new copy for each call.

        Args:
            is_bounded: whether the bounds of the portable form apply.

        Raises:
            DecodeError: the data is not in portable form, or beyond its bounds.
        """
        return from_portable(self.data, is_bounded=is_bounded, enums=self.enums)

    @tolerant
    def __repr__(self) -> str:
        # without the data, which may be secret
        shown = ("kind", "id", "recorder", "sender", "sequence")
        fields = [f", {name}={getattr(self, name)!r:.80}" for name in shown if getattr(self, name) is not None]
        return f"WireEvent({self.topic!r:.80}{''.join(fields)})"


# --- fields


class _WrongError(Exception):
    """A field has a value that the layout does not allow; the text says what it must be."""


def _text(value: Any) -> str:
    if type(value) is str and len(value) <= MAX_TEXT and (value.isascii() or is_unicode(value)):
        return value
    raise _WrongError(f"text of at most {MAX_TEXT} characters")


def _name(value: Any) -> str:
    return _text(value) or _fail(f"text of 1 to {MAX_TEXT} characters")


def _topic(value: Any) -> str:
    if type(value) is str and 0 < len(value) <= MAX_TOPIC and (value.isascii() or is_unicode(value)):
        return value
    raise _WrongError(f"text of 1 to {MAX_TOPIC} characters")


def _fail(wanted: str) -> NoReturn:
    raise _WrongError(wanted)


def _count(value: Any) -> int:
    if type(value) is int and 0 <= value <= _MAX_INT:
        return value
    raise _WrongError("an integer from 0 to 2**63 - 1")


def _time(value: Any) -> int:
    if type(value) is int and _FIRST <= value <= _LAST:
        return value
    raise _WrongError("an integer, microseconds since 1970, in the years 1 to 9999")


def _uuid(value: Any) -> str:
    # Length and class first: the cache must not keep long texts, nor texts of hostile classes.
    if type(value) is str and len(value) == _UUID_LENGTH:
        return _lower_uuid(value)
    raise _WrongError("text of a UUID")


_UUID_LENGTH: Final = 36


@lru_cache(1024)
def _lower_uuid(text: str) -> str:
    return text.lower() if _UUID.fullmatch(text) else _fail("text of a UUID")


def _path(value: Any) -> tuple[str, ...]:
    if type(value) not in (list, tuple) or len(value) > MAX_PATH:
        raise _WrongError(f"a list of at most {MAX_PATH} texts of UUIDs")
    return tuple(map(_uuid, value))


def _enums(value: Any) -> tuple[str, ...]:
    if type(value) not in (list, tuple) or len(value) > MAX_CLASSES:
        raise _WrongError(f"a list of at most {MAX_CLASSES} texts")
    return tuple(map(_text, value))


def _known_enums(value: Any) -> tuple[str, ...]:
    """Return what is right of a list of classes: they are hints, for which no event is refused."""
    found: list[str] = []
    for each in value if type(value) is list else ():
        with contextlib.suppress(_WrongError):
            found.append(_text(each))
            if len(found) == MAX_CLASSES:
                break
    return tuple(found)


def _kind(value: Any) -> str:
    if type(value) is str and value in (DATA, CLOSE, ERROR):
        return value
    raise _WrongError("'data', 'close' or 'error'")


def _flag(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise _WrongError("true or false")


def _error(value: Any) -> WireError:
    if type(value) is dict:
        type_, message = value.get("type"), value.get("message")
    elif type(value) is WireError:
        type_, message = value
    else:
        type_ = message = None
    if type(type_) is str and type(message) is str and len(type_) <= MAX_TEXT and is_unicode(type_ + message):
        return WireError(type_, message)
    raise _WrongError(f"a map with the texts 'type' (at most {MAX_TEXT} characters) and 'message'")


#: key -> attribute, and the function that checks a value. In the order in which they are written, the data last; that
#: of recorded events is the order of their first version.
_FIELDS: Final[dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "recorder": ("recorder", _name),
    "sender": ("sender", _uuid),
    "sequence": ("sequence", _count),
    "topic": ("topic", _topic),
    "time": ("time", _time),
    "kind": ("kind", _kind),
    "id": ("id", _text),
    "origin": ("origin", _uuid),
    "bundle": ("bundle", _count),
    "path": ("path", _path),
    "session": ("session", _text),
    "reply": ("reply_to", _text),
    "correlation": ("correlation_id", _text),
    "principal": ("principal", _text),
    "notify": ("notify", _flag),
    "error": ("error", _error),
    "enums": ("enums", _enums),
}
#: how they are read
_READ: Final = {**_FIELDS, "enums": ("enums", _known_enums)}
#: values that are not written; the empty tuple is one object
_DEFAULTS: Final[dict[str, Any]] = {"topic": MISSING, "kind": MISSING, "path": (), "notify": False, "enums": ()}
_WRITTEN: Final = tuple((key, _DEFAULTS.get(key), check) for key, (_, check) in _FIELDS.items())
_values_of: Final = operator.attrgetter(*(name for name, _ in _FIELDS.values()))


# --- writing


def encode(event: WireEvent, *, as_cbor: bool = False) -> bytes:
    """Return an event in its layout.

    Args:
        event: the event.
        as_cbor: whether to write CBOR, which needs the extra ``cbor``.

    Raises:
        InvalidEventError: a field has a value that the layout does not allow.
        MissingExtraError: the extra ``cbor`` is not installed.
    """
    if not as_cbor:
        text = _written_as_usual(event)
        if text is not None:
            return text
    found: dict[str, Any] = {"event": LAYOUT}
    try:
        for value, (key, default, check) in zip(_values_of(event), _WRITTEN, strict=True):
            if value is not default:
                found[key] = check(value)
    except _WrongError as error:
        problem = f"an event with a wrong {key!r}, {with_article(type(value))}: it must be {error}"
    else:
        return _written(event, found, as_cbor)
    raise InvalidEventError(problem)


#: fields that most events of a sender do not have; their values then
_rare_of: Final = operator.attrgetter(
    "recorder", "path", "session", "reply_to", "correlation_id", "principal", "notify", "error", "kind", "enums"
)
_NO_RARE: Final = (None, (), None, None, None, None, False, None, DATA, ())


def _written_as_usual(event: WireEvent) -> bytes | None:
    """Return the JSON of an event that differs from others of its sender by few fields; ``None`` for any other event.

    The text of the other fields is made, and checked, once for each topic.
    """
    sequence, time, id_ = event.sequence, event.time, event.id
    if _rare_of(event) != _NO_RARE or type(sequence) is not int or type(time) is not int:
        return None
    if not 0 <= sequence <= _MAX_INT or not _FIRST <= time <= _LAST:
        return None
    middle = ""
    if id_ is not None:
        if type(id_) is not str or not _PLAIN_ID.fullmatch(id_):
            return None
        middle = f',"id":"{id_}"'
    try:
        head, topic, tail = _constant_parts(event.sender, event.topic, event.origin, event.bundle)
    except (TypeError, AttributeError, _WrongError):  # the slow way names the field that is wrong
        return None
    return b"%b%d%b%d%b%b%b}" % (head, sequence, topic, time, middle.encode(), tail, write_json(event.data))


#: ids that are the same in JSON
_PLAIN_ID: Final = re.compile(rf"[0-9A-Za-z.:_-]{{0,{MAX_TEXT}}}")


@lru_cache(4096, typed=True)
def _constant_parts(
    sender: str | None, topic: str, origin: str | None, bundle: int | None
) -> tuple[bytes, bytes, bytes]:
    """Return the text before the sequence, between it and the time, and after the id, up to the data.

    Raises:
        _WrongError: a field is wrong, or the topic is not ASCII: then the data decides how it is written.
    """
    if not topic.isascii():
        raise _WrongError("ASCII")
    given = (("sender", sender, _uuid), ("topic", topic, _topic), ("origin", origin, _uuid), ("bundle", bundle, _count))
    parts = {key: b"," + write_json({key: check(value)})[1:-1] for key, value, check in given if value is not None}
    return (
        b'{"event":%d%b,"sequence":' % (LAYOUT, parts.get("sender", b"")),
        parts["topic"] + b',"time":',
        parts.get("origin", b"") + parts.get("bundle", b"") + b',"data":',
    )


def _written(event: WireEvent, found: dict[str, Any], as_cbor: bool) -> bytes:
    if event.error is not None:
        found["error"] = {"type": event.error.type, "message": event.error.message}
    if event.kind == DATA:
        del found["kind"]
        found["data"] = event.data
    elif event.kind == ERROR and event.error is None:
        raise InvalidEventError("an event of kind 'error' without its error")
    if not as_cbor:
        return write_json(found)
    try:
        return _cbor().encode(found, {})
    except EncodeError as error:
        raise InvalidEventError(f"an event cannot be written as CBOR: {error}") from None


# --- reading


def decode(payload: bytes, topic: str | None = None) -> WireEvent:
    """Return the event in a payload. Its data is checked by :meth:`WireEvent.value`.

    Args:
        payload: JSON or CBOR in the layout of the module.
        topic: the topic that the channel tells, or ``None``. The event may lack a topic then, and may not have another
            one, so that a sender publishes only to the channels that the broker allows it.

    Raises:
        DecodeError: the payload is no event of this layout.
        MissingExtraError: it is CBOR, and the extra ``cbor`` is not installed.
    """
    found = _parsed(payload)
    if type(found) is not dict or "event" not in found:
        raise DecodeError("not an event: no object with the version of its layout, 1, in 'event'")
    version = found["event"]
    if type(version) is not int or version != LAYOUT:
        shown = version if type(version) is int and 0 <= version <= _MAX_INT else with_article(type(version))
        raise DecodeError(f"an event of layout {shown}: this version of the library reads layout {LAYOUT}")
    event = WireEvent("" if topic is None else topic)
    fields = _READ
    try:
        for key, value in found.items():
            if key in fields and value is not None:
                name, check = fields[key]
                setattr(event, name, check(value))
    except _WrongError as error:
        problem = f"an event with a wrong {key!r}, {with_article(type(value))}: it must be {error}"
    else:
        return _read(found, event, topic)
    raise DecodeError(problem)


def _read(found: dict[str, Any], event: WireEvent, topic: str | None) -> WireEvent:
    own = event.topic
    if not own:
        raise DecodeError("an event without 'topic': it must be text, as the channel does not tell it")
    if topic is not None and own != topic:
        raise DecodeError(f"an event with the 'topic' {own!r:.80}: it must be that of its channel, {topic!r:.80}")
    kind = event.kind
    if kind == DATA:
        if "data" not in found:
            raise DecodeError("an event without 'data': it must be there, and may be null")
        event.data = found["data"]
    elif kind == ERROR and event.error is None:
        raise DecodeError("an event of kind 'error' without 'error': it must be a map with 'type' and 'message'")
    return event


#: bytes in which :func:`sender_that_waits` looks for the fields before the data, and the key of the data
_HEAD: Final = 1 << 16
_DATA_KEY: Final = b',"data":'
#: what an event has that wants an acknowledgement: the key, which JSON may also write with escapes
_MAY_NOTIFY: Final = re.compile(rb"notify|\\u00")


def sender_that_waits(payload: bytes, *, is_whole: bool = True) -> tuple[str, str] | None:
    """Return the sender of an event that wants an acknowledgement, and the id that it awaits; ``None`` if none does.

    It also reads an event that :func:`decode` refuses, as far as these fields are right: a sender whose event is
    refused must not wait in vain.

    Args:
        payload: the event.
        is_whole: whether to read all of it; otherwise only the JSON before the data, for events that are too large.
    """
    if not _MAY_NOTIFY.search(payload, 0, len(payload) if is_whole else _HEAD):
        return None
    end = payload.find(_DATA_KEY, 0, _HEAD)
    parts = [payload[:end] + b"}"] if end >= 0 else []
    if is_whole:
        parts.append(payload)
    for each in parts:
        try:
            found = _parsed(each)
        except (DecodeError, MissingExtraError):
            continue
        if type(found) is dict and found.get("notify") is True:
            return _awaited(found)
    return None


def _awaited(found: dict[str, Any]) -> tuple[str, str] | None:
    try:
        sender, event_id = _uuid(found.get("sender")), found.get("id")
        return sender, f"{sender}-{_count(found.get('sequence'))}" if event_id is None else _text(event_id)
    except _WrongError:
        return None


def _parsed(payload: bytes) -> Any:
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise DecodeError(f"not an event: a payload is bytes, not {with_article(type(payload))}")
    payload = bytes(payload).removeprefix(_SELF_DESCRIBED)
    if not payload or payload[0] not in _CBOR_MAP:
        return read_json(payload)
    try:
        return with_tags(_cbor().decode(payload, Any, {}))
    except DecodeError as error:
        problem = str(error)
    except RecursionError:
        problem = "nested too deeply"
    raise DecodeError(f"not an event: {problem}")


@lru_cache(1)
def _cbor() -> Codec:
    return codec_for("application/cbor")
