"""Samples: the numbers of all reports, with names and labels that stay the same from one collection to the next.

**Names** are made of the kind of the reporter, the fields that lead to the number, and its unit:
``messaging_instance_publisher_pending_messages``.

**Labels** are the name of the reporter and the fields of a report with the meaning ``label``. Reporters of one kind and
name get ``name="bus"``, ``name="bus#2"`` and so on. Objects that have an identity get a label ``index``, from 1, which
tells apart those with equal labels. An object keeps its index while it lives; then another object gets it.

**Bounds.** At most ``MAX_OBJECTS`` objects of each field are read, and ``MAX_TEXT`` characters of each text. What is
left out is counted in ``messaging_omitted_objects``.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from messaging.errors.checks import check_optional
from messaging.errors.text import SafeLog, visible
from messaging.services import ServiceRegistry, default_registry
from messaging.services.reporting import HistogramDTO, Meaning, meanings, reporters

if TYPE_CHECKING:
    from messaging.services.reporting import Reporter

logger = SafeLog(__name__)

#: objects of one field of a report that are read
MAX_OBJECTS: Final = 1000
#: characters of a text
MAX_TEXT: Final = 200
#: reporters that are read
MAX_REPORTERS: Final = 10_000
#: objects inside of each other
_MAX_DEPTH: Final = 8

Labels = tuple[tuple[str, str], ...]


@dataclasses.dataclass(slots=True)
class Family:
    """The samples of one name.

    Attributes:
        name: without the ``_total`` of counters and the ``_info`` of texts.
        kind: ``counter``: the values only rise; ``gauge``; ``histogram``, whose samples are in ``histograms``;
            ``info``: the labels are the content, the value is 1.
        help: what is counted, for people.
        unit: in the plural; may be empty.
        samples: labels and value.
        histograms: labels and counts.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    unit: str = ""
    samples: list[tuple[Labels, float]] = dataclasses.field(default_factory=list)
    histograms: list[tuple[Labels, HistogramDTO]] = dataclasses.field(default_factory=list)


def metric_name(kind: str, path: Sequence[str], meaning: Meaning) -> str:
    """Return the name of a number, without the suffix of its kind.

    Args:
        kind: of the reporter.
        path: the names of the fields that lead to the object with the number.
        meaning: of the field.
    """
    name = "_".join(("messaging", kind, *path, meaning.name))
    unit = meaning.unit
    return name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"


def info_name(kind: str, path: Sequence[str]) -> str:
    """Return the name of the texts that describe an object, without ``_info``."""
    return "_".join(("messaging", kind, *path))


def label_text(value: object) -> str:
    """Return a text of a report for a label: bounded, without control characters and lone surrogates."""
    if isinstance(value, (tuple, list, frozenset, set)):
        value = ",".join(str(each) for each in [*value][:20])
    text = str(value)
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT - 1]}…"
    return visible(text)


class Sampler:
    """Collects the samples of the reporters in a registry. Thread safe.

    Args:
        services: the registry; by default that of the process.

    Raises:
        ArgumentError: ``services`` is no registry.
    """

    def __init__(self, services: ServiceRegistry | None = None) -> None:
        check_optional("services", services, ServiceRegistry)
        self.services = default_registry() if services is None else services
        self._lock = threading.Lock()  # guards the following, and is not held while reporters are called
        self._indexes = _Indexes()
        self._failures = 0
        #: what was logged
        self._failed: set[tuple[str, str]] = set()

    def collect(self) -> list[Family]:
        """Return the samples as they are now, in the order of the names. A reporter that fails is left out."""
        reports: list[tuple[Reporter, Any, int]] = []
        failures = 0
        found = reporters(self.services)
        for each in found[:MAX_REPORTERS]:
            try:
                reports.append((each, each.report(), len(each.problems())))
            except Exception as error:  # noqa: BLE001  # of the reporter, which may be of any program
                failures += 1
                self._log(each, error)
        with self._lock:
            self._failures += failures
            collection = _Collection(self._indexes, max(0, len(found) - MAX_REPORTERS))
            for each, report, problems in reports:
                try:
                    collection.add(each, report, problems)
                except Exception as error:  # noqa: BLE001  # a report of another shape than it should have
                    self._failures += 1
                    self._log(each, error)
            self._indexes.end()
            return collection.finish(self._failures)

    def _log(self, reporter: Reporter, error: Exception) -> None:
        """Log the failure of a reporter, once."""
        key = (str(reporter.kind), f"{type(error).__name__}: {error}"[:MAX_TEXT])
        if key not in self._failed and len(self._failed) < MAX_OBJECTS:
            self._failed.add(key)
            logger.error(
                "reporter %s %r: cannot be read: %s: %s; it is left out", key[0], reporter.name, *_parts(error)
            )


def _parts(error: Exception) -> tuple[str, Exception]:
    return type(error).__name__, error


class _Indexes:
    """The indexes of objects that have equal labels. An index is free again when a collection lacks its object."""

    def __init__(self) -> None:
        self._given: dict[object, dict[object, int]] = {}
        self._seen: dict[object, dict[object, int]] = {}

    def index(self, group: object, identity: object) -> int:
        """Return the index of an object, from 1; the smallest free one for a new object."""
        seen = self._seen.setdefault(group, {})
        given = self._given.setdefault(group, {})
        found = given.get(identity)
        if found is None:
            taken = {*given.values(), *seen.values()}
            found = next(number for number in range(1, len(taken) + 2) if number not in taken)
            given[identity] = found
        seen[identity] = found
        return found

    def end(self) -> None:
        """Forget the objects that were not seen since the last call."""
        self._given, self._seen = self._seen, {}


class _Collection:
    """The families of one collection.

    Args:
        indexes: of the objects.
        omitted: number of objects that are left out already.
    """

    def __init__(self, indexes: _Indexes, omitted: int) -> None:
        self._indexes = indexes
        self._omitted = omitted
        self._families: dict[str, Family] = {}
        self._problems = Family("messaging_problems", "gauge", "problems that keep a part from working now", "problems")

    def add(self, reporter: Reporter, report: Any, problems: int) -> None:
        """Add the numbers of one report."""
        kind, name = str(reporter.kind), label_text(reporter.name)
        number = self._indexes.index((kind, name), id(reporter))
        labels = (("name", name if number == 1 else f"{name}#{number}"),)
        self._problems.samples.append(((("kind", kind), *labels), problems))
        if report is not None:
            self._read(kind, (), labels, report, 0)

    def finish(self, failures: int) -> list[Family]:
        """Return the families, with those of the collection itself."""
        omitted = Family("messaging_omitted_objects", "gauge", "objects of reports beyond the bounds", "objects")
        omitted.samples.append(((), self._omitted))
        failed = Family("messaging_reporter_failures", "counter", "reports that could not be read")
        failed.samples.append(((), failures))
        every = [*self._families.values(), self._problems, omitted, failed]
        return sorted((each for each in every if each.samples or each.histograms), key=lambda each: each.name)

    def _read(self, kind: str, path: tuple[str, ...], labels: Labels, report: Any, depth: int) -> None:
        """Add the numbers of an object and of those in it."""
        texts: list[tuple[str, str]] = []
        for meaning in meanings(type(report)):
            value = getattr(report, meaning.field)
            role = meaning.role
            if role == "counter" or role == "gauge":
                if value is not None:
                    name = metric_name(kind, path, meaning)
                    self._put(name, role, meaning, labels, float(value))
            elif role == "histogram":
                if isinstance(value, HistogramDTO):
                    family = self._family(metric_name(kind, path, meaning), role, meaning)
                    if family.kind == role:
                        family.histograms.append((labels, value))
            elif role == "part":
                self._read_part(kind, path, labels, meaning, value, depth)
            elif role == "info":
                texts.append((meaning.name, "" if value is None else label_text(_at(value, meaning.path))))
            elif role == "state":
                name = metric_name(kind, path, meaning)
                for each in meaning.values:
                    self._put(name, "gauge", meaning, (*labels, ("state", each)), float(each == value))
        if texts:
            about = Meaning("", "info", f"about the {' '.join((kind.replace('_', ' '), *path))}")
            self._put(info_name(kind, path), "info", about, (*labels, *_apart(texts, labels)), 1.0)

    def _read_part(
        self, kind: str, path: tuple[str, ...], labels: Labels, meaning: Meaning, value: Any, depth: int
    ) -> None:
        if depth >= _MAX_DEPTH:
            return
        inner = (*path, meaning.name) if meaning.name else path
        if isinstance(value, (tuple, list)):
            found = [each for each in value[:MAX_OBJECTS] if dataclasses.is_dataclass(each)]
            if found:
                self._omitted += max(0, len(value) - MAX_OBJECTS)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            found = [value]
        else:
            return
        taken: set[Labels] = set()
        for each in found:
            own = self._labels(kind, inner, labels, each)
            if own in taken:  # without an identity they cannot be told apart
                self._omitted += 1
                continue
            taken.add(own)
            self._read(kind, inner, own, each, depth + 1)

    def _labels(self, kind: str, path: tuple[str, ...], around: Labels, report: Any) -> Labels:
        """Return the labels of an object: those of the objects around it, and its own."""
        own: list[tuple[str, str]] = []
        identity: list[object] = []
        for meaning in meanings(type(report)):
            if meaning.role == "label":
                own.append((meaning.name, label_text(_at(getattr(report, meaning.field), meaning.path))))
            elif meaning.role == "identity":
                identity.append(getattr(report, meaning.field))
        labels = (*around, *_apart(own, around))
        if identity:
            labels = (*labels, ("index", str(self._indexes.index((kind, path, labels), tuple(identity)))))
        return labels

    def _family(self, name: str, kind: Literal["counter", "gauge", "histogram", "info"], meaning: Meaning) -> Family:
        """Return the family of a name, which may be of another kind than this number."""
        found = self._families.get(name)
        if found is None:
            found = self._families[name] = Family(name, kind, meaning.help, meaning.unit)
        return found

    def _put(
        self, name: str, kind: Literal["counter", "gauge", "info"], meaning: Meaning, labels: Labels, value: float
    ) -> None:
        family = self._family(name, kind, meaning)
        if family.kind == kind and not math.isnan(value):
            family.samples.append((labels, value))


def _at(value: Any, path: str) -> Any:
    return getattr(value, path) if path else value


def _apart(own: Sequence[tuple[str, str]], around: Labels) -> Iterator[tuple[str, str]]:
    """Return labels with names that those around them do not have."""
    taken = {name for name, _ in around}
    for name, text in own:
        yield (f"own_{name}" if name in taken else name), text
