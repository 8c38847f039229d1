"""Remote events and registrations of interest (EV.2.3.2, EV.2.3.5)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeAlias

from messaging.errors import InvalidEventError

if TYPE_CHECKING:
    from messaging.leases import Lease

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

    @property
    def line(self) -> bytes | None:
        """The event as it was read or written, see :mod:`messaging.remoteevent.layout`; ``None`` if it was not yet."""
        return self.__dict__.get(_LINE)

    def keep_line(self, line: bytes) -> None:
        """Keep the encoded event, which never changes. For :mod:`messaging.remoteevent.layout`."""
        self.__dict__[_LINE] = line

    @classmethod
    def class_named(cls, name: str) -> type[RemoteEvent] | None:
        """Return the subclass with that ``event_type``; ``None`` if it is not known here."""
        return cls._known.get(name)


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


def check_sequence_number(value: object) -> int:
    """Return ``value`` if it can be a sequence number; raise ``InvalidEventError``."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise InvalidEventError(f"a sequence number must be an int from 0 to 2**63-1, not {value!r:.80}")
