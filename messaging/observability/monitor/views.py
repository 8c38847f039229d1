"""Views: how the page shows a report, with the rates of its counters since the report before.

Each kind may have a view; every other report is shown by :func:`generic`.

A view is a plain value of JSON. The page puts its texts and numbers where they belong, and knows no kinds:

============  ======================================================================================================
field         meaning
============  ======================================================================================================
``state``     ``[text, level]``; the level is ``good``, ``warn``, ``bad`` or ``idle``
``facts``     list of ``[label, text]``
``tiles``     list of ``[label, number, unit]``; the unit is ``/s``, ``bytes``, ``seconds``, ``since`` or empty
``chart``     name of a line -> its next value; ``null``: unknown
``tables``    list of ``{"title", "columns", "rows"}``; a cell is a text, a number, ``null``, a truth value, or
              ``[number, rate, unit]``: a number with a unit, or a counter and its increase per second
============  ======================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from messaging.observability.monitor.snapshot import Report

#: names of the fields and keys of the items that lead to a value
Path: TypeAlias = tuple[str, ...]

View: TypeAlias = dict[str, Any]
#: dotted name of a field -> its role and unit
Roles: TypeAlias = Mapping[str, str]
#: makes the view of a report
_Viewing: TypeAlias = Callable[[Any, "Rates", Roles], View]

#: fields that tell the items of a list apart, the best first; a dotted name is a field of a field
_KEYS: Final = (
    "id", "service_id", "name", "channel.name", "request_channel.name", "topic", "pattern", "channel", "key",
)  # fmt: skip
#: columns of a table, and rows
_MAX_COLUMNS: Final = 16
_MAX_ROWS: Final = 200
_LEVELS: Final[Mapping[str, str]] = {
    "connected": "good",
    "running": "good",
    "degraded": "warn",
    "connecting": "warn",
    "reconnecting": "warn",
    "starting": "warn",
    "stopping": "warn",
    "refused": "bad",
    "failed": "bad",
    "closed": "idle",
}


# --- rates


def keyed(items: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each item of a list with a key that it keeps when others come and go."""
    seen: dict[str, int] = {}
    for number, item in enumerate(items):
        key = _key(item)
        if key is None:
            yield f"#{number}", item
            continue
        count = seen[key] = seen.get(key, 0) + 1
        yield (key if count == 1 else f"{key}#{count}"), item


def _key(item: Any) -> str | None:
    if not isinstance(item, Mapping):
        return None
    for name in _KEYS:
        value: Any = item
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            return f"{name}={value}"
    return None


def numbers(data: Any) -> dict[Path, float]:
    """Return all numbers of a report by their paths."""
    found: dict[Path, float] = {}
    _collect(data, (), found)
    return found


def _collect(value: Any, path: Path, found: dict[Path, float]) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        found[path] = value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            _collect(each, (*path, name), found)
    elif isinstance(value, list):
        for key, each in keyed(value):
            _collect(each, (*path, key), found)


class Rates:
    """The changes of the numbers of one report since the one before, per second.

    Args:
        now: the numbers.
        before: the earlier numbers; ``None``: there are none, and no rates.
        seconds: between the two.
    """

    __slots__ = ("_before", "_now", "_seconds")

    def __init__(
        self, now: Mapping[Path, float], before: Mapping[Path, float] | None = None, seconds: float = 0.0
    ) -> None:
        self._now = now
        self._before = before if seconds > 0 else None
        self._seconds = seconds

    def of(self, path: Path) -> float | None:
        """Return the increase of a counter per second; ``None`` if it is unknown, or the counter began anew."""
        if self._before is None:
            return None
        now, before = self._now.get(path), self._before.get(path)
        if now is None or before is None or now < before:
            return None
        return (now - before) / self._seconds

    def total(self, paths: Sequence[Path]) -> float | None:
        """Return the rounded sum of the known rates; ``None`` without an earlier report."""
        return None if self._before is None else round(sum(filter(None, map(self.of, paths))), 3)


# --- any kind


def view(report: Report, rates: Rates) -> View:
    """Return the view of a report: that of its kind, or the generic one if the report has another shape."""
    made: _Viewing = _KINDS.get(report.kind, generic)
    data = report.data
    if isinstance(data, Mapping) and data.get("name") == report.name:
        data = _without(data, "name")  # it is the title
    try:
        found = made(data, rates, report.roles)
    except (AttributeError, KeyError, TypeError, ValueError):  # the DTO of another version
        found = generic(data, rates, report.roles)
    if report.error is not None:
        found["state"] = ["no report", "bad"]
    elif "state" not in found:
        found["state"] = ["problems", "bad"] if report.problems else ["works", "good"]
    elif report.problems and found["state"][1] == "good":
        found["state"][1] = "warn"
    return found


def generic(data: Any, rates: Rates, roles: Roles) -> View:
    """Return a view of a report of an unknown kind: its numbers, its texts, and a table for each list of objects."""
    found: View = {"facts": [], "tiles": [], "chart": {}, "tables": []}
    numbers: list[list[Any]] = []
    _add(data, (), rates, roles, found, numbers)
    return found | {"tables": [*_table("numbers", ["name", "value"], numbers), *found["tables"]]}


def _table(title: str, columns: list[str], rows: list[list[Any]]) -> list[dict[str, Any]]:
    """Return a table; no table without rows."""
    return [{"title": title, "columns": columns, "rows": rows[:_MAX_ROWS]}] if rows else []


def _add(value: Any, path: Path, rates: Rates, roles: Roles, found: View, numbers: list[list[Any]]) -> None:
    name = ".".join(path)
    label = name.replace("_", " ") or "value"
    if isinstance(value, (bool, str)):
        found["facts"].append([label, _word(value)])
    elif isinstance(value, (int, float)):
        if not roles.get(name, "").startswith("identity"):
            numbers.append([label, _number(value, rates.of(path), roles.get(name, ""))])
    elif isinstance(value, Mapping):
        for each, inner in value.items():
            _add(inner, (*path, each), rates, roles, found, numbers)
    elif isinstance(value, list) and value:
        if any(isinstance(each, Mapping) for each in value):
            found["tables"].append(_items_table(label, value, path, rates, roles))
        else:
            found["facts"].append([label, ", ".join(map(str, value[:50]))])


def _items_table(title: str, items: Sequence[Any], path: Path, rates: Rates, roles: Roles) -> dict[str, Any]:
    """Return a table with a row for each object of a list; the columns are the leaves of the objects."""
    rows: list[dict[str, Any]] = []
    columns: dict[str, None] = {}
    for key, item in [*keyed(items)][:_MAX_ROWS]:
        cells: dict[str, Any] = {}
        _add_cells(item, path, (), key, rates, roles, cells)
        columns.update(dict.fromkeys(cells))
        rows.append(cells)
    used = [each for each in columns if any(row.get(each) not in (None, "") for row in rows)][:_MAX_COLUMNS]
    return {
        "title": title,
        "columns": [each.replace("_", " ") for each in used],
        "rows": [[row.get(each) for each in used] for row in rows],
    }


def _add_cells(
    value: Any, above: Path, names: Path, key: str, rates: Rates, roles: Roles, cells: dict[str, Any]
) -> None:
    name = ".".join(names) or "value"
    if isinstance(value, Mapping):
        for each, inner in value.items():
            _add_cells(inner, above, (*names, each), key, rates, roles, cells)
    elif isinstance(value, list):
        is_flat = not any(isinstance(each, (dict, list)) for each in value)
        cells[name] = ", ".join(map(str, value[:20])) if is_flat else f"{len(value)} entries"
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        role = roles.get(".".join((*above, *names)), "")
        if not role.startswith("identity"):
            cells[name] = _number(value, rates.of((*above, key, *names)), role)
    else:
        cells[name] = value


def _number(value: float, rate: float | None, role: str = "") -> Any:
    """Return a cell: with a unit, and with a rate unless the number is no counter."""
    kind, _, unit = role.partition(" ")
    is_counter = isinstance(value, int) and kind != "gauge"
    shown = round(rate, 3) if rate and is_counter else None
    return value if shown is None and not unit else [value, shown, unit]


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _without(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in names}


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 3)


def _state(name: Any) -> list[str]:
    text = str(name)
    return [text, _LEVELS.get(text, "idle")]


def _facts(*pairs: tuple[str, Any]) -> list[list[str]]:
    return [[label, _word(value)] for label, value in pairs if value not in (None, "", [])]


# --- messaging instances

#: counters of subscriptions, and their labels
_FATES: Final = (
    "received", "acknowledged", "rejected", "redelivered", "dead_lettered", "unrouted", "dropped", "invalid"
)  # fmt: skip
#: of these an idle instance shows no tile
_RARE: Final = ("rejected", "redelivered", "dead_lettered", "unrouted", "dropped", "invalid")


def _instance(data: Mapping[str, Any], rates: Rates, _: Roles) -> View:
    connection, publisher, requests = data["connection"], data["publisher"], data["requests"]
    subscriptions = data["subscriptions"]
    keys = [key for key, _ in keyed(subscriptions)]
    counters = [each["counters"] for each in subscriptions]

    def rate(name: str) -> float | None:
        return rates.total([("subscriptions", key, "counters", name) for key in keys])

    tiles: list[list[Any]] = [
        ["in", rate("received"), "/s"],
        ["out", _rounded(rates.of(("publisher", "published"))), "/s"],
        ["acknowledged", rate("acknowledged"), "/s"],
    ]
    tiles += [[name.replace("_", " "), rate(name), "/s"] for name in _RARE if sum(each[name] for each in counters)]
    buffered = sum(each["buffered"] for each in subscriptions)
    tiles += [
        ["buffered", buffered, ""],
        ["in flight", sum(map(_in_flight, counters)), ""],
        ["pending publishes", publisher["pending"], ""],
        ["failed publishes", publisher["failed"], ""],
        ["pending requests", requests["pending"], ""],
    ]
    outbox = data.get("outbox")
    if isinstance(outbox, Mapping):
        tiles += [
            ["stored", outbox["waiting"], ""],
            ["oldest stored", outbox["oldest"], "seconds"],
            ["dead letters", outbox["dead_letters"], ""],
        ]
    rows = [
        [
            each["channel"]["name"],
            "yes" if each["channel"]["connected"] else "no",
            each["buffered"],
            _in_flight(each["counters"]),
            *(_number(each["counters"][name], rates.of(("subscriptions", key, "counters", name))) for name in _FATES),
        ]
        for key, each in keyed(subscriptions)
    ]
    columns = ["channel", "connected", "buffered", "in flight", *(name.replace("_", " ") for name in _FATES)]
    channels = [each["request_channel"] for each in data["reply_to_subscriptions"]]
    handlers = [[each["name"], _word(each["connected"])] for each in channels]
    return {
        "state": _state(connection["state"]),
        "facts": _facts(
            ("broker", data["connection_uri"]),
            ("host", connection["host"]),
            ("cause", connection["cause"] if connection["state"] != "connected" else None),
            ("last problem", connection["cause"] if connection["state"] == "connected" else None),
            ("client id", connection["client_id"]),
            ("provider", data["provider_name"]),
        ),
        "tiles": [*tiles, ["in this state since", connection["since"], "since"]],
        "chart": {"in /s": rate("received"), "out /s": _rounded(rates.of(("publisher", "published")))},
        "tables": [
            *_table("subscriptions and queues", columns, rows),
            *_table("request handlers", ["channel", "connected"], handlers),
        ],
    }


def _in_flight(counters: Mapping[str, Any]) -> int:
    settled: int = counters["acknowledged"] + counters["rejected"]
    return max(0, int(counters["delivered"]) - settled)


# --- event buses and event admins


def _event_service(data: Mapping[str, Any], rates: Rates, roles: Roles) -> View:
    field = "handlers" if "handlers" in data else "consumers"
    handlers = data[field]
    found = generic(_without(data, field), rates, roles)
    waiting = sum(each["waiting"] for each in handlers)
    rows = [
        [
            each["name"],
            ", ".join(each["topics"]),
            each["waiting"],
            *(_number(each[name], rates.of((field, key, name))) for name in ("failures", "dropped")),
            each["blocked"] or "",
        ]
        for key, each in keyed(handlers)
    ]
    columns = ["handler", "topics", "waiting", "failures", "dropped", "blocked"]
    found["tables"] = [*_table("handlers and topics", columns, rows), *found["tables"]]
    found["tiles"] = [
        ["handlers", len(handlers), ""],
        ["waiting events", waiting, ""],
        ["failures", sum(each["failures"] for each in handlers), ""],
        ["dropped", sum(each["dropped"] for each in handlers), ""],
    ]
    found["chart"] = {"waiting": waiting}
    blocked = [each for each in handlers if each["blocked"]]
    if blocked:
        found["state"] = [f"{len(blocked)} blocked", "warn"]
    return found


# --- journals


def _journal(data: Mapping[str, Any], rates: Rates, _: Roles) -> View:
    cursors = [
        [each["name"], each["position"], each["behind"], _rounded(rates.of(("cursors", key, "position")))]
        for key, each in keyed(data["cursors"])
    ]
    tiles = [
        ["backlog", data["backlog"], ""],
        ["backlog bytes", data["backlog_bytes"], "bytes"],
        ["oldest", data["oldest"], "seconds"],
        ["appended", _rounded(rates.of(("end",))), "/s"],
        ["unstored", data["unstored"], ""],
        ["dropped", data["dropped"], ""],
        ["dead letters", data["dead_letters"], ""],
        ["bytes of files", data["bytes"], "bytes"],
    ]
    for label, name, unit in (("max records", "max_records", ""), ("max bytes", "max_bytes", "bytes")):
        if data[name] is not None:
            tiles.append([label, data[name], unit])
    return {
        "facts": _facts(("path", data["path"]), ("offsets", f"{data['begin']} to {data['end']}")),
        "tiles": tiles,
        "chart": {"backlog": data["backlog"], "appended /s": _rounded(rates.of(("end",)))},
        "tables": _table("cursors", ["cursor", "position", "behind", "records/s"], cursors),
    }


# --- gateways

#: counters of a route, and numbers of its buffer with their units, in the order of the columns
_ROUTE: Final = ("filtered", "looped", "repeated", "retried", "failed")
_BUFFER: Final = (("depth", ""), ("bytes", "bytes"), ("age", "seconds"), ("dead_letters", ""))
_ROUTE_COLUMNS: Final = [
    "route", "from", "to", "state", "received", "published", "in flight", "stored", "bytes", "oldest", "dead letters",
    "dropped", "latency", *_ROUTE,
]  # fmt: skip


def _gateway(data: Mapping[str, Any], rates: Rates, _: Roles) -> View:
    routes = data["routes"]
    keys = [key for key, _ in keyed(routes)]
    buffers = [each["buffer"] for each in routes]

    def rate(name: str) -> float | None:
        return rates.total([("routes", key, name) for key in keys])

    depth = sum(each["depth"] for each in buffers)
    requests = [
        [each["name"], each["source"], each["target"], each["pending"]]
        + [_number(each[name], rates.of(("requests", key, name))) for name in ("answered", "failed")]
        for key, each in keyed(data["requests"])
    ]
    devices = [[each["name"], each["known"], each["is_offline"]] for each in data["devices"]]
    return {
        "state": _state(data["state"]),
        "facts": [],
        "tiles": [
            ["in", rate("received"), "/s"],
            ["out", rate("published"), "/s"],
            ["in flight", sum(each["in_flight"] for each in routes), ""],
            ["stored", depth, ""],
            ["oldest stored", max((each["age"] for each in buffers), default=0), "seconds"],
            ["dead letters", sum(each["dead_letters"] for each in buffers), ""],
            ["dropped", sum(each["dropped"] for each in buffers), ""],
            ["reloads", data["reloads"], ""],
            ["running since", data["started"], "since"],
        ],
        "chart": {"in /s": rate("received"), "out /s": rate("published"), "stored": depth},
        "tables": [
            *_table("routes", _ROUTE_COLUMNS, [_route(each, key, rates) for key, each in keyed(routes)]),
            *_table("routes of requests", ["route", "from", "to", "pending", "answered", "failed"], requests),
            *_table("devices", ["devices", "known", "published as offline"], devices),
        ],
    }


def _route(route: Mapping[str, Any], key: str, rates: Rates) -> list[Any]:
    buffer = route["buffer"]

    def counter(*names: str) -> Any:
        found: Any = route
        for name in names:
            found = found[name]
        return _number(found, rates.of(("routes", key, *names)))

    return [
        route["name"],
        route["source"],
        route["target"],
        _route_state(route),
        counter("received"),
        counter("published"),
        route["in_flight"],
        *([buffer[name], None, unit] if unit else buffer[name] for name, unit in _BUFFER),
        counter("buffer", "dropped"),
        [route["latency"]["mean"], None, "seconds"],
        *(counter(name) for name in _ROUTE),
    ]


def _route_state(route: Mapping[str, Any]) -> str:
    if not route["is_enabled"]:
        return "disabled"
    down = [side for side in ("source", "target") if not route[f"is_{side}_up"]]
    if down:
        return f"{' and '.join(down)} down"
    return "up" if route.get("is_subscribed", True) else "not subscribed"


_KINDS: Final[Mapping[str, _Viewing]] = {
    "instance": _instance,
    "typed_event_bus": _event_service,
    "event_admin": _event_service,
    "distributed_event_admin": _event_service,
    "journal": _journal,
    "gateway": _gateway,
}
