"""Views: how the page shows a report. Each kind may have one; every other report is shown by :func:`generic`.

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

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from messaging.observability.monitor.rates import Path, Rates, keyed

if TYPE_CHECKING:
    from messaging.observability.monitor.snapshot import Report

View: TypeAlias = dict[str, Any]
#: dotted name of a field -> its role and unit
Roles: TypeAlias = Mapping[str, str]
#: makes the view of a report
_Viewing: TypeAlias = Callable[[Any, Rates, Roles], View]

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


# --- any kind


def generic(data: Any, rates: Rates, roles: Roles) -> View:
    """Return a view of a report of an unknown kind: its numbers, its texts, and a table for each list of objects."""
    found: View = {"facts": [], "tiles": [], "chart": {}, "tables": []}
    numbers: list[list[Any]] = []
    _add(data, (), rates, roles, found, numbers)
    if numbers:
        found["tables"].insert(0, {"title": "numbers", "columns": ["name", "value"], "rows": numbers[:_MAX_ROWS]})
    return found


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
            found["tables"].append(_Table(rates, roles).of(label, value, path))
        else:
            found["facts"].append([label, ", ".join(map(str, value[:50]))])


class _Table:
    """Makes tables of lists of objects; the columns are the leaves of the objects."""

    def __init__(self, rates: Rates, roles: Roles) -> None:
        self._rates = rates
        self._roles = roles

    def of(self, title: str, items: Sequence[Any], path: Path) -> dict[str, Any]:
        """Return a table with a row for each item."""
        rows: list[dict[str, Any]] = []
        columns: dict[str, None] = {}
        for key, item in [*keyed(items)][:_MAX_ROWS]:
            cells: dict[str, Any] = {}
            self._add(item, (), path, (*path, key), cells)
            columns.update(dict.fromkeys(cells))
            rows.append(cells)
        used = [each for each in columns if any(row.get(each) not in (None, "") for row in rows)][:_MAX_COLUMNS]
        return {
            "title": title,
            "columns": [each.replace("_", " ") for each in used],
            "rows": [[row.get(each) for each in used] for row in rows],
        }

    def _add(self, value: Any, names: Path, above: Path, path: Path, cells: dict[str, Any]) -> None:
        name = ".".join(names) or "value"
        if isinstance(value, Mapping):
            for each, inner in value.items():
                self._add(inner, (*names, each), above, (*path, each), cells)
        elif isinstance(value, list):
            is_flat = not any(isinstance(each, (dict, list)) for each in value)
            cells[name] = ", ".join(map(str, value[:20])) if is_flat else f"{len(value)} entries"
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            role = self._roles.get(".".join((*above, *names)), "")
            if not role.startswith("identity"):
                cells[name] = _number(value, self._rates.of(path), role)
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
        return _rounded(rates.total([("subscriptions", key, "counters", name) for key in keys]))

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
    tables = []
    if subscriptions:
        rows = [
            [
                each["channel"]["name"],
                "yes" if each["channel"]["connected"] else "no",
                each["buffered"],
                _in_flight(each["counters"]),
                *(
                    _number(each["counters"][name], rates.of(("subscriptions", key, "counters", name)))
                    for name in _FATES
                ),
            ]
            for key, each in keyed(subscriptions)
        ]
        columns = ["channel", "connected", "buffered", "in flight", *(name.replace("_", " ") for name in _FATES)]
        tables.append({"title": "subscriptions and queues", "columns": columns, "rows": rows[:_MAX_ROWS]})
    if data["reply_to_subscriptions"]:
        handlers = [
            [each["request_channel"]["name"], _word(each["request_channel"]["connected"])]
            for each in data["reply_to_subscriptions"]
        ]
        tables.append({"title": "request handlers", "columns": ["channel", "connected"], "rows": handlers[:_MAX_ROWS]})
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
        "tables": tables,
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
    if handlers:
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
        found["tables"].insert(0, {"title": "handlers and topics", "columns": columns, "rows": rows[:_MAX_ROWS]})
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
    tables = []
    if cursors:
        columns = ["cursor", "position", "behind", "records/s"]
        tables.append({"title": "cursors", "columns": columns, "rows": cursors[:_MAX_ROWS]})
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
        "tables": tables,
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
        return _rounded(rates.total([("routes", key, name) for key in keys]))

    depth = sum(each["depth"] for each in buffers)
    tables = [
        {"title": title, "columns": columns, "rows": rows[:_MAX_ROWS]}
        for title, columns, rows in (
            ("routes", _ROUTE_COLUMNS, [_route(each, key, rates) for key, each in keyed(routes)]),
            (
                "routes of requests",
                ["route", "from", "to", "pending", "answered", "failed"],
                [
                    [each["name"], each["source"], each["target"], each["pending"]]
                    + [_number(each[name], rates.of(("requests", key, name))) for name in ("answered", "failed")]
                    for key, each in keyed(data["requests"])
                ],
            ),
            (
                "devices",
                ["devices", "known", "published as offline"],
                [[each["name"], each["known"], each["is_offline"]] for each in data["devices"]],
            ),
        )
        if rows
    ]
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
        "tables": tables,
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
