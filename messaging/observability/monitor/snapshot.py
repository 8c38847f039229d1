"""Snapshots: the reports of one process at one time, and their form in JSON.

**Layout 1.** A JSON object in UTF-8:

=============  =====================================================================================================
field          meaning
=============  =====================================================================================================
``v``          1. A reader refuses other versions; fields that it does not know are ignored
``process``    name of the process
``host``       name of its machine
``pid``        its process id
``started``    when its snapshots began, seconds since the epoch; counters of another start are not compared
``uptime``     seconds since then, by a monotonic clock
``time``       when the snapshot was taken, seconds since the epoch
``interval``   seconds between two snapshots
``reports``    list of objects: ``kind``, ``name``, ``data`` (the report), ``problems`` (texts), ``error`` (a text,
               instead of a report), ``roles`` (dotted name of a field -> its role and unit, such as ``gauge bytes``)
``omitted``    number of values that the bounds left out
=============  =====================================================================================================
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from messaging.errors import DecodeError
from messaging.errors.text import SafeLog
from messaging.execution import clock
from messaging.observability.monitor.plain import Bounds, Budget, Masking, Plain, clean
from messaging.services import ServiceRegistry
from messaging.services.reporting import Reporter, reporters

logger = SafeLog(__name__)

VERSION: Final = 1
#: bytes of a snapshot that is read
MAX_BYTES: Final = 256 * 1024
#: a process whose snapshots stay out for this long is forgotten, seconds
FORGET: Final = 600.0
#: reports of a snapshot, problems of a report
MAX_REPORTS: Final = 200
_MAX_PROBLEMS: Final = 20
#: characters of a name, of a problem
NAME: Final = 120
_PROBLEM: Final = 300
#: the bounds of reports, the widest first: the first that make a snapshot fit are used
_NARROWING: Final = (
    Bounds(),
    Bounds(items=50, values=1_000, text=150),
    Bounds(items=10, values=150, text=80, label=60),
    Bounds(items=0, values=1),
)


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one part of a process."""

    kind: str
    name: str
    #: plain values; ``None`` with an error
    data: Any
    problems: tuple[str, ...] = ()
    #: why there is no report
    error: str | None = None
    #: see :class:`~messaging.observability.monitor.plain.Plain`
    roles: Mapping[str, str] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Return the report as an object of JSON."""
        found = {"kind": self.kind, "name": self.name, "data": self.data, "problems": self.problems}
        more = {"error": self.error, "roles": self.roles or None}
        return found | {name: value for name, value in more.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The reports of one process at one time; see the module for its fields."""

    process: str
    host: str
    pid: int
    started: float
    uptime: float
    time: float
    interval: float
    reports: tuple[Report, ...]
    omitted: int = 0

    @property
    def start(self) -> tuple[int, float, str]:
        """Identify the start of the process: counters of another one are not compared."""
        return self.pid, self.started, self.host

    def fields(self) -> dict[str, Any]:
        """Return the snapshot as an object of JSON."""
        return {
            "v": VERSION,
            "process": self.process,
            "host": self.host,
            "pid": self.pid,
            "started": round(self.started, 3),
            "uptime": round(self.uptime, 6),
            "time": round(self.time, 3),
            "interval": self.interval,
            "reports": [each.fields() for each in self.reports],
            "omitted": self.omitted,
        }


class SnapshotSampler:
    """Takes snapshots of the process. For one thread at a time.

    Args:
        services: where the reporters are.
        process: name of the process.
        interval: seconds between two snapshots, as told to those who read them.
        masking: masks secrets.
    """

    def __init__(self, services: ServiceRegistry, process: str, interval: float, masking: Masking) -> None:
        self._services = services
        self._process = process
        self._interval = interval
        self._masking = masking
        self._started = clock.wall()
        self._began = clock.monotonic()

    def take(self, bounds: Bounds = _NARROWING[0]) -> Snapshot:
        """Return a snapshot. The error of a reporter becomes its report."""
        omitted = 0
        reports: list[Report] = []
        found = reporters(self._services)
        budget = Budget()
        for each in found[:MAX_REPORTS]:
            report, left_out = self._report(each, bounds, budget)
            reports.append(report)
            omitted += left_out
        return Snapshot(
            self._process,
            clean(socket.gethostname(), NAME, self._masking),
            os.getpid(),
            self._started,
            clock.monotonic() - self._began,
            clock.wall(),
            self._interval,
            tuple(reports),
            omitted + max(0, len(found) - MAX_REPORTS),
        )

    def _report(self, reporter: Reporter, bounds: Bounds, budget: Budget) -> tuple[Report, int]:
        kind = name = "unknown"
        try:
            kind, name = self._name(reporter.kind), self._name(reporter.name)
            plain = Plain(self._masking, bounds, budget)
            data = plain.convert(reporter.report())
            problems = [clean(str(each), _PROBLEM, self._masking) for each in reporter.problems()[:_MAX_PROBLEMS]]
        except Exception as error:  # reporters may be code of the application
            logger.debug("monitor: the reporter %r of kind %r failed", name, kind, exc_info=True)
            text = f"{type(error).__name__}: {_text_of(error)}"
            return Report(kind, name, None, error=clean(text, _PROBLEM, self._masking)), 0
        return Report(kind, name, data, tuple(problems), roles=plain.roles), plain.omitted

    def _name(self, name: str) -> str:
        return clean(str(name), NAME, self._masking)

    def encode(self, most: int = MAX_BYTES) -> bytes:
        """Take a snapshot and return it as JSON of at most ``most`` bytes, with narrower bounds if it has to be."""
        payload = b""
        for bounds in _NARROWING:
            payload = encoded(self.take(bounds))
            if len(payload) <= most:
                return payload
        snapshot = self.take(_NARROWING[-1])
        return encoded(replace(snapshot, reports=(), omitted=snapshot.omitted + len(snapshot.reports)))


def _text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # of a class of the application
        return "an error without text"


def encoded(snapshot: Snapshot) -> bytes:
    """Return a snapshot as JSON."""
    return json.dumps(snapshot.fields(), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(
        errors="replace"
    )


def decoded(payload: bytes, masking: Masking) -> Snapshot:
    """Read a snapshot of another process. Bounds and masks apply again: the other process is not trusted.

    Raises:
        DecodeError: it is too large, is no JSON object, has another version, or a field has a wrong type.
    """
    if len(payload) > MAX_BYTES:
        raise DecodeError(f"a snapshot has {len(payload)} bytes; at most {MAX_BYTES} are read")
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"a snapshot is no JSON: {type(error).__name__}") from error
    if not isinstance(fields, Mapping):
        raise DecodeError("a snapshot must be a JSON object")
    version = fields.get("v")
    if version != VERSION or isinstance(version, bool):
        raise DecodeError(f"a snapshot has layout {version!r:.20}; this monitor reads layout {VERSION}")
    reports = fields.get("reports")
    if not isinstance(reports, list):
        raise DecodeError("a snapshot has no list 'reports'")
    plain = Plain(masking, Bounds(values=20_000), Budget(characters=MAX_BYTES))
    return Snapshot(
        process=_text(fields, "process", masking),
        host=_text(fields, "host", masking),
        pid=int(_finite(fields, "pid", 0.0, 2.0**53)),
        started=_finite(fields, "started", 0.0, 1e11),
        uptime=_finite(fields, "uptime", 0.0, 1e11),
        time=_finite(fields, "time", 0.0, 1e11),
        interval=_finite(fields, "interval", 0.01, 86_400.0),
        reports=tuple(_reports(reports[:MAX_REPORTS], plain, masking)),
        omitted=int(_finite(fields, "omitted", 0.0, 2.0**53)) + plain.omitted + max(0, len(reports) - MAX_REPORTS),
    )


def _reports(found: Iterable[Any], plain: Plain, masking: Masking) -> Iterable[Report]:
    for each in found:
        if not isinstance(each, Mapping):
            raise DecodeError("a report of a snapshot must be a JSON object")
        problems, error, roles = each.get("problems", []), each.get("error"), each.get("roles", {})
        if not isinstance(problems, list) or not all(isinstance(text, str) for text in problems):
            raise DecodeError("'problems' of a report must be a list of texts")
        if error is not None and not isinstance(error, str):
            raise DecodeError("'error' of a report must be a text")
        if not isinstance(roles, dict) or not all(isinstance(role, str) for role in roles.values()):
            raise DecodeError("'roles' of a report must be an object of texts")
        yield Report(
            _text(each, "kind", masking),
            _text(each, "name", masking),
            plain.convert(each.get("data")),
            tuple(clean(text, _PROBLEM, masking) for text in problems[:_MAX_PROBLEMS]),
            None if error is None else clean(error, _PROBLEM, masking),
            roles,
        )


def _text(fields: Mapping[str, Any], name: str, masking: Masking) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise DecodeError(f"a snapshot has no text {name!r}")
    return clean(value, NAME, masking)


def _finite(fields: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DecodeError(f"a snapshot has no number {name!r}")
    if not (math.isfinite(value) and least <= value <= most):
        raise DecodeError(f"the number {name!r} of a snapshot is out of range")
    return float(value)
