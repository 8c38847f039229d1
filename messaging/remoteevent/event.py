"""Remote events and registrations of interest (EV.2.3.2, EV.2.3.5), and one event as one line of JSON.

Notifications and journals have events as lines:

=============  =====================================================================================================
``source``     text
``id``         integer or text
``sequence``   integer
``handback``   a portable value, see :mod:`messaging.dispatch.eventdata`; missing for ``None``
``type``       name of the subclass of ``RemoteEvent``; missing for ``RemoteEvent`` itself
``data``       the fields of the subclass, portable; missing with ``type``
``suppressed`` number of older events that a mailbox dropped in favour of this one; missing for 0
=============  =====================================================================================================

A line is encoded once: an event that was read from a line is written as the same line again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final, Self, TypeAlias

from messaging.dispatch.eventdata import convert, from_portable, read_json, to_portable, write_json
from messaging.errors import ArgumentError, ConversionError, DecodeError, InvalidEventError
from messaging.errors.text import SafeLog
from messaging.leases import Lease

logger = SafeLog(__name__)


#: identifies a kind of event within its source
EventId: TypeAlias = int | str
#: keys of the encoded event, and of the number of suppressed ones, among the attributes
_LINE: Final = "_line"
_SUPPRESSED: Final = "_suppressed"
#: source and id: together they identify a kind of event everywhere
EventKind: TypeAlias = tuple[str, EventId]


@dataclass(frozen=True)
class RemoteEvent:
    """The notification of one occurrence of an event (EV.2.3.2). Immutable.

    A subclass adds what is special to its events. It is a frozen dataclass whose fields are ``kw_only``::

        @dataclass(frozen=True, kw_only=True)
        class Overheated(RemoteEvent):
            celsius: float

    Third parties pass events of subclasses on unchanged, also in processes that do not know the subclass. There
    :attr:`event_type` and :attr:`data` have the name and the fields.

    Attributes:
        source: names the generator; the same text for all its events, of at most 500 characters.
        id: the kind of the event, relative to the source: an int of 64 bits or a text.
        sequence_number: rises from event to event of one source and id. Equal numbers mean the same event.
        handback: the value that was given when interest was registered, in the form in which it travels: of a value
            with fields its map. ``None`` without one.

    Raises:
        InvalidEventError: an attribute is not as described.
    """

    source: str
    id: EventId
    sequence_number: int
    handback: Any = None

    #: name of the class in notifications; a subclass may set it, by default it is the name of module and class
    event_type: ClassVar[str | None] = None
    _known: ClassVar[dict[str, type[RemoteEvent]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "event_type" not in vars(cls):
            cls.event_type = f"{cls.__module__}.{cls.__qualname__}"
        RemoteEvent._known[str(cls.event_type)] = cls
        # the decorator `dataclass` leaves a method that the class itself defines
        if "__hash__" not in vars(cls):
            cls.__hash__ = RemoteEvent.__hash__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_kind(self.source, self.id)
        check_sequence_number(self.sequence_number)

    def __hash__(self) -> int:
        # a handback, or a field of a subclass, may be a map, which has no hash
        return hash((self.source, self.id, self.sequence_number))

    @property
    def kind(self) -> EventKind:
        """Source and id, which together identify the kind of event."""
        return self.source, self.id

    @property
    def data(self) -> dict[str, Any]:
        """The fields that a subclass adds, by name. Of a class that is not known here as they were received."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)[4:]}

    @property
    def type_name(self) -> str | None:
        """Name of the subclass; ``None`` of ``RemoteEvent`` itself."""
        return self.event_type

    def with_handback(self, handback: Any) -> Self:
        """Return the event with another handback."""
        return self._changed(handback=handback)

    def renamed(self, event_id: EventId, sequence_number: int) -> Self:
        """Return the event with another id and number."""
        return self._changed(id=event_id, sequence_number=sequence_number)

    def _changed(self, **changes: Any) -> Self:
        """Return a copy with other attributes. The constructor, which may be the application's, does not run."""
        changed = object.__new__(type(self))
        changed.__dict__.update({key: value for key, value in vars(self).items() if key != _LINE}, **changes)
        return changed

    @property
    def suppressed(self) -> int:
        """Number of older events of the kind that a mailbox dropped in favour of this one; see its ``keep``."""
        return int(self.__dict__.get(_SUPPRESSED, 0))

    def suppressing(self, count: int) -> Self:
        """Return the event with a number of suppressed ones."""
        return self._changed(**{_SUPPRESSED: count}) if count else self

    def number(self, sequence_number: int) -> None:
        """Set the sequence number. For the generator, before any other code sees the event."""
        self.__dict__["sequence_number"] = sequence_number

    def keep_line(self, line: bytes) -> None:
        """Keep the encoded event, which never changes."""
        self.__dict__[_LINE] = line


@dataclass(frozen=True)
class ForeignEvent(RemoteEvent):
    """An event of a class that is not known here. It travels on unchanged."""

    foreign_type: str = dataclasses.field(default="", kw_only=True)
    foreign_data: Any = dataclasses.field(default=None, kw_only=True)

    @property
    def data(self) -> dict[str, Any]:
        """See :class:`RemoteEvent`."""
        return self.foreign_data if isinstance(self.foreign_data, dict) else {}

    @property
    def type_name(self) -> str | None:
        """See :class:`RemoteEvent`."""
        return self.foreign_type


@dataclass(frozen=True, slots=True)
class EventRegistration:
    """A registration of interest (EV.2.3.5), as a generator returns it. Immutable.

    Attributes:
        id: kind of the events, relative to the source; that of the events (EV.2.3.5).
        source: names the generator; that of the events.
        lease: of the interest: it ends with the lease.
        sequence_number: of the last event of the kind when the interest was registered; the first event afterwards has
            a higher one.
        is_fully_ordered: whether the generator skips no number (EV.2.3.2). If so, a gap between two received numbers
            tells how many events were lost. Otherwise a gap tells nothing.
    """

    id: EventId
    source: str
    lease: Lease
    sequence_number: int
    is_fully_ordered: bool = False

    @property
    def kind(self) -> EventKind:
        """Source and id."""
        return self.source, self.id


_LONG: Final = range(-(2**63), 2**63)
_LONGEST_SOURCE: Final = 500


def check_event_id(value: object) -> EventId:
    """Return ``value`` if it can identify a kind of event; raise ``InvalidEventError``."""
    if isinstance(value, str):
        if value and len(value) <= 200:
            return value
    elif isinstance(value, int) and not isinstance(value, bool) and value in _LONG:
        return value
    raise InvalidEventError(f"an event id must be an int of 64 bits, or a text of 1 to 200 characters: {value!r:.80}")


def check_kind(source: object, event_id: object) -> EventKind:
    """Return source and id if they can identify a kind of event everywhere; raise ``InvalidEventError``."""
    if not isinstance(source, str) or not 0 < len(source) <= _LONGEST_SOURCE:
        raise InvalidEventError(
            f"the source of a remote event must be a text of 1 to {_LONGEST_SOURCE} characters, not {source!r:.80}"
        )
    return source, check_event_id(event_id)


def as_kind(value: object) -> EventKind:
    """Return source and id of a registration, or of (source, id).

    Raises:
        ArgumentError, InvalidEventError: it is neither.
    """
    if isinstance(value, EventRegistration):
        return value.kind
    if isinstance(value, tuple) and len(value) == 2:
        return check_kind(*value)
    raise ArgumentError(f"a kind of event must be a registration, or (source, id), not {value!r:.80}")


def check_sequence_number(value: object) -> int:
    """Return ``value`` if it can be a sequence number; raise ``InvalidEventError``."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise InvalidEventError(f"a sequence number must be an int from 0 to 2**63-1, not {value!r:.80}")


#: kinds of events whose common part of the line is remembered
_HEADS: Final = 4096


def encode_event(event: RemoteEvent) -> bytes:
    """Return an event as one line, without the end of the line.

    Raises:
        InvalidEventError: a value in it has no portable form.
    """
    line: bytes | None = event.__dict__.get(_LINE)
    if line is None:
        line = _encode(event)
        event.keep_line(line)
    return line


def _encode(event: RemoteEvent) -> bytes:
    return b"%b%d%b" % (_head(event.source, event.id), event.sequence_number, _tail(event))


@lru_cache(maxsize=_HEADS)
def _head(source: str, event_id: EventId) -> bytes:
    """Return the line of an event up to its number. Events of a kind have it in common."""
    return b'{"source":%b,"id":%b,"sequence":' % (write_json(source), write_json(event_id))


def _tail(event: RemoteEvent) -> bytes:
    """Return the line of an event behind its number."""
    value: dict[str, Any] = {}
    if event.handback is not None:
        value["handback"] = to_portable(event.handback)
    if event.suppressed:
        value["suppressed"] = event.suppressed
    name = event.type_name
    if name is not None:
        value["type"] = name
        value["data"] = event.foreign_data if isinstance(event, ForeignEvent) else to_portable(event.data)
    return b"," + write_json(value)[1:] if value else b"}"


class NumberedLine:
    """The line of an event whose sequence number is not known yet: encoded once, numbered later.

    Args:
        event: its sequence number does not count.

    Raises:
        InvalidEventError: a value in it has no portable form.
    """

    __slots__ = ("_head", "_tail")

    def __init__(self, event: RemoteEvent) -> None:
        self._head = _head(event.source, event.id)
        self._tail = _tail(event)

    def numbered(self, number: int) -> bytes:
        """Return the line with a sequence number."""
        return b"%b%d%b" % (self._head, number, self._tail)


def decode_event(line: bytes) -> RemoteEvent:
    """Return the event of a line: of its subclass if that is known here, and the event fits it.

    Otherwise it has its ``type_name`` and ``data``, and travels on unchanged.

    Raises:
        DecodeError: the line holds no event.
    """
    value = read_json(line)
    try:
        handback = value.get("handback")
        if handback is not None:
            handback = from_portable(handback)
        name = value.get("type")
        if name is None:
            event = RemoteEvent(value["source"], value["id"], value["sequence"], handback)
        else:
            event = _typed(value, str(name), handback)
        suppressed = value.get("suppressed", 0)
        if suppressed:
            event = event.suppressing(check_sequence_number(suppressed))
    except (AttributeError, KeyError, TypeError) as error:
        raise DecodeError(f"not a remote event: {type(error).__name__}: {error}") from None
    except InvalidEventError as error:
        raise DecodeError(f"not a remote event: {error}") from None
    event.keep_line(line)
    return event


def _typed(value: dict[str, Any], name: str, handback: Any) -> RemoteEvent:
    kind = RemoteEvent._known.get(name)
    data = value.get("data")
    if kind is not None and isinstance(data, dict):
        fields = from_portable(data)
        base = {
            "source": value["source"],
            "id": value["id"],
            "sequence_number": value["sequence"],
            "handback": handback,
        }
        try:
            return convert({**fields, **base}, kind)  # type: ignore[no-any-return]
        except ConversionError as error:
            # of another version of the class: it must not be lost on the way
            logger.warning("event %r of %r is not a %s: %s", value["id"], value["source"], name, error)
    return ForeignEvent(value["source"], value["id"], value["sequence"], handback, foreign_type=name, foreign_data=data)
