"""Reporters: parts of a program that report their state to metrics, health checks and the monitor.

A part registers a :class:`Reporter` in the service registry for as long as it lives. What reads the reports finds them
there by :func:`reporters`; neither side knows the other.

**Reports are data transfer objects**, frozen dataclasses whose fields say what they mean to a reader of numbers, by
the metadata of :func:`dataclasses.field`::

    @dataclass(frozen=True, slots=True)
    class QueueDTO:
        name: str = field(metadata=label("queue"))
        sent: int = field(metadata=counter("messages that were sent", "messages"))
        waiting: int = field(metadata=gauge("messages that wait", "messages"))

=====================  ===============================================================================================
metadata               the field
=====================  ===============================================================================================
:func:`counter`        a number that only rises while the part lives
:func:`gauge`          a number that rises and falls, or a bool; ``None``: not known
:func:`histogram`      a :class:`HistogramDTO`: how often a number was within which bounds
:func:`state`          one of some names
:func:`label`          a text that tells this object from its siblings; part of all its numbers
:func:`identity`       tells siblings with equal labels apart; is not shown
:func:`info`           a text that describes the object
:func:`part`           a further object, or several, whose numbers have another name than the field
none                   for programs only: a number without metadata is not exported
=====================  ===============================================================================================

Further dataclasses, and tuples of dataclasses, are read without metadata. So a new object is exported without code.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

from messaging.errors import ArgumentError
from messaging.errors.checks import check_instance, check_procedure, check_result
from messaging.errors.text import tolerant
from messaging.services import ServiceRegistration, ServiceRegistry

Role = Literal["counter", "gauge", "histogram", "state", "label", "identity", "info", "part"]

_KEY: Final = "messaging.services.reporting"


class Reporter(Protocol):
    """A part of a program that reports its state. Thread safe."""

    #: what the part is, in snake case: ``instance``, ``typed_event_bus``, ``journal``, ``gateway`` ...
    kind: str
    #: distinguishes the parts of one kind; for people
    name: str

    def report(self) -> Any:
        """Return a snapshot of the state: a frozen dataclass of plain values, tuples and further dataclasses.

        Called from any thread, often, and never waits. It holds no secret.
        """

    def problems(self) -> Sequence[str]:
        """Return what keeps the part from working now, each a text for people; empty: it works.

        Called from any thread, often, and never waits.
        """


class PartReporter:
    """A reporter made of functions. Thread safe if they are.

    Args:
        kind: what the part is, in snake case.
        name: distinguishes the parts of one kind.
        report: returns the state, see :meth:`Reporter.report`.
        problems: returns the problems, see :meth:`Reporter.problems`; without it there are none.

    Raises:
        ArgumentError: an argument is not as described.
    """

    __slots__ = ("_problems", "_report", "kind", "name")

    def __init__(
        self, kind: str, name: str, report: Callable[[], Any], problems: Callable[[], Sequence[str]] | None = None
    ) -> None:
        if not isinstance(kind, str) or not kind.isascii() or not kind.isidentifier() or kind != kind.lower():
            raise ArgumentError(f"kind must be a name in snake case, such as 'typed_event_bus', not {kind!r:.80}")
        check_instance("name", name, str)
        for what, function in (("report", report), ("problems", problems or tuple)):
            check_procedure(function, what)
        self.kind = kind
        self.name = name
        self._report = report
        self._problems = problems or tuple

    def report(self) -> Any:
        """See :class:`Reporter`."""
        return check_result(self._report(), "report")

    def problems(self) -> Sequence[str]:
        """See :class:`Reporter`."""
        problems: Sequence[str] = check_result(self._problems(), "problems")
        return problems

    @tolerant
    def __repr__(self) -> str:
        return f"<PartReporter {self.kind} {self.name!r}>"


def register_reporter(services: ServiceRegistry, reporter: Reporter) -> ServiceRegistration:
    """Register a reporter: :func:`reporters` returns it until the registration is removed.

    Parts with a service registry of their own, such as instances and event buses, register themselves.

    Raises:
        ArgumentError: a method of ``reporter`` is a coroutine function: it is called, and not awaited.
    """
    for method in ("report", "problems"):
        check_procedure(getattr(reporter, method, None), f"{method} of a reporter")
    return services.register(
        Reporter, reporter, {"messaging.reporter.kind": reporter.kind, "messaging.reporter.name": reporter.name}
    )


def reporters(services: ServiceRegistry) -> list[Reporter]:
    """Return the reporters that are registered in ``services``, in the order of kind and name."""
    found: list[Reporter] = []
    for reference in services.find(Reporter):
        reporter: Reporter | None = services.get(reference)
        if reporter is not None:
            found.append(reporter)
    return sorted(found, key=lambda each: (each.kind, each.name))


# --- histograms


@dataclasses.dataclass(frozen=True, slots=True)
class HistogramDTO:
    """How often a number was within which bounds.

    Attributes:
        bounds: upper bounds of the buckets, in order; a number belongs to the first bucket that it does not exceed.
        counts: numbers in each bucket, and at last those above all bounds.
        sum: of all numbers.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Return how many numbers there were."""
        return sum(self.counts)


class Histogram:
    """Counts numbers by buckets. For one writing thread at a time; :meth:`get_dto` may be called from any thread.

    Args:
        bounds: upper bounds of the buckets, in order.

    Raises:
        ArgumentError: the bounds are not in order, or there are none.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        if not self._bounds or any(low >= high for low, high in itertools.pairwise(self._bounds)):
            raise ArgumentError("bounds must be numbers in rising order, at least one")
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def record(self, value: float) -> None:
        """Count a number."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def get_dto(self) -> HistogramDTO:
        """Return the counts as they are now."""
        return HistogramDTO(self._bounds, tuple(self._counts), self._sum)


# --- what the fields of a report mean


@dataclasses.dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of one field of a report.

    Attributes:
        field: name of the field.
        role: see the module.
        help: what the number counts, for people.
        unit: in the plural, and a base unit: ``messages``, ``bytes``, ``seconds``; empty: the name says it.
        name: of the number or label; by default that of the field.
        values: the names of a state.
        path: for a label, the attribute of the value that has its text.
    """

    field: str
    role: Role
    help: str = ""
    unit: str = ""
    name: str = ""
    values: tuple[str, ...] = ()
    path: str = ""


def counter(help: str, unit: str = "", *, name: str = "") -> Mapping[str, Any]:  # noqa: A002
    """Return the metadata of a number that only rises while the part lives."""
    return _metadata("counter", help=help, unit=unit, name=name)


def gauge(help: str, unit: str = "", *, name: str = "") -> Mapping[str, Any]:  # noqa: A002
    """Return the metadata of a number that rises and falls, of a bool, or of a number that may be ``None``."""
    return _metadata("gauge", help=help, unit=unit, name=name)


def histogram(help: str, unit: str, *, name: str = "") -> Mapping[str, Any]:  # noqa: A002
    """Return the metadata of a :class:`HistogramDTO`."""
    return _metadata("histogram", help=help, unit=unit, name=name)


def state(help: str, values: Sequence[str], *, name: str = "") -> Mapping[str, Any]:  # noqa: A002
    """Return the metadata of a text that is one of ``values``."""
    return _metadata("state", help=help, values=tuple(values), name=name)


def label(name: str = "", path: str = "") -> Mapping[str, Any]:
    """Return the metadata of a text that tells an object from its siblings.

    Args:
        name: of the label; by default that of the field.
        path: attribute of the value that has the text, if the value is an object itself.
    """
    return _metadata("label", name=name, path=path)


def identity() -> Mapping[str, Any]:
    """Return the metadata of a number or text that tells siblings with equal labels apart."""
    return _metadata("identity")


def info(name: str = "", path: str = "") -> Mapping[str, Any]:
    """Return the metadata of a text, or of a tuple of texts, that describes the object; see :func:`label`."""
    return _metadata("info", name=name, path=path)


def part(name: str) -> Mapping[str, Any]:
    """Return the metadata of an object or of several, whose numbers are named after ``name``.

    With an empty name they are named as if they were fields of the object around them.
    """
    return _metadata("part", name=name)


def _metadata(role: Role, **values: Any) -> Mapping[str, Any]:
    return MappingProxyType({_KEY: Meaning("", role, **values)})


#: the meanings of the fields of each class of reports; as many as there are classes
_meanings: Final[dict[type, tuple[Meaning, ...]]] = {}


def meanings(kind: type) -> tuple[Meaning, ...]:
    """Return the meanings of the fields of a dataclass, in their order. Fields without metadata are parts.

    Raises:
        ArgumentError: ``kind`` is no dataclass.
    """
    found = _meanings.get(kind) if isinstance(kind, type) else None
    if found is None:
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise ArgumentError(f"a report must be a dataclass, not {kind!r:.80}")
        found = _meanings[kind] = tuple(_meaning(each) for each in dataclasses.fields(kind))
    return found


def _meaning(field: dataclasses.Field[Any]) -> Meaning:
    given: Meaning | None = field.metadata.get(_KEY)
    if given is None:
        return Meaning(field.name, "part", name=field.name)
    if given.role == "part":
        return dataclasses.replace(given, field=field.name)
    return dataclasses.replace(given, field=field.name, name=given.name or field.name)
