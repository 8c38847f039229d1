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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from messaging.observability.monitor.rates import Path, Rates, keyed

if TYPE_CHECKING:
    from messaging.observability.monitor.snapshot import Report

View: TypeAlias = dict[str, Any]
#: dotted name of a field -> its role and unit
Roles: TypeAlias = Mapping[str, str]

#: columns of a table, and rows
_MAX_COLUMNS: Final = 16
_MAX_ROWS: Final = 200
_LEVELS: Final[Mapping[str, str]] = {
    "connected": "good",
    "running": "good",
    "open": "good",
    "degraded": "warn",
    "connecting": "warn",
    "reconnecting": "warn",
    "paused": "warn",
    "refused": "bad",
    "failed": "bad",
    "closed": "idle",
}


def view(report: Report, rates: Rates) -> View:
    """Return the view of a report: that of its kind, or the generic one if the report has another shape."""
    made = _KINDS.get(report.kind)
    if made is not None and isinstance(report.data, Mapping):
        try:
            found = made(report.data, rates, report.roles)
        except (AttributeError, KeyError, TypeError, ValueError):  # the DTO of another version
            found = generic(report.data, rates, report.roles)
    else:
        found = generic(report.data, rates, report.roles)
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

    def of(self, title: str, items: Sequence[Any], path: Path, first: Iterable[str] = ()) -> dict[str, Any]:
        """Return a table; the columns ``first`` are in front."""
        rows: list[dict[str, Any]] = []
        columns: dict[str, None] = dict.fromkeys(first)
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


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 3)


def _state(name: Any) -> list[str]:
    text = str(name)
    return [text, _LEVELS.get(text, "idle")]


def _facts(*pairs: tuple[str, Any]) -> list[list[str]]:
    return [[label, _word(value)] for label, value in pairs if value not in (None, "", [])]


# --- messaging instances

#: counters of subscriptions, and their labels
_FATES: Final = ("received", "acknowledged", "rejected", "redelivered", "dead_lettered", "dropped", "invalid")
#: of these an idle instance shows no tile
_RARE: Final = ("rejected", "redelivered", "dead_lettered", "dropped", "invalid")


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
    handlers = data.get("handlers", data.get("consumers"))
    if not isinstance(handlers, list):
        raise TypeError("no handlers")
    field = "handlers" if "handlers" in data else "consumers"
    found = generic({name: value for name, value in data.items() if name != field}, rates, roles)
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
    found["tables"].insert(0, {"title": "handlers and topics", "columns": columns, "rows": rows[:_MAX_ROWS]})
    found["tiles"] = [
        ["handlers", len(handlers), ""],
        ["waiting events", waiting, ""],
        ["failures", sum(each["failures"] for each in handlers), ""],
        ["dropped", sum(each["dropped"] for each in handlers), ""],
    ]
    found["chart"] = {"waiting": waiting}
    blocked = [each for each in handlers if each["blocked"]]
    found["state"] = [f"{len(blocked)} blocked", "warn"] if blocked else ["works", "good"]
    return found


# --- journals


def _journal(data: Mapping[str, Any], rates: Rates, roles: Roles) -> View:
    begin, end, cursors = data["begin"], data["end"], data["cursors"]
    if isinstance(cursors, Mapping):  # name -> position
        cursors = [{"name": name, "position": at, "behind": end - at} for name, at in cursors.items()]
    depth = data.get("backlog", max((each["behind"] for each in cursors), default=end - begin))
    oldest = data.get("oldest", data.get("age"))
    found = {
        "facts": _facts(("path", data.get("path"))),
        "tiles": [
            ["depth", depth, ""],
            ["bytes", data["bytes"], "bytes"],
            *([["oldest", oldest, "seconds"]] if isinstance(oldest, (int, float)) else []),
            ["appended", _rounded(rates.of(("end",))), "/s"],
            ["dropped", data.get("dropped", 0), ""],
            ["dead letters", data.get("dead_letters", 0), ""],
        ],
        "chart": {"depth": depth},
        "tables": [],
    }
    rest = generic({name: value for name, value in data.items() if name not in ("cursors", "path")}, rates, roles)
    if cursors:
        columns = ("name", "position", "behind")
        tables: list[Any] = [_Table(rates, roles).of("cursors", cursors, ("cursors",), columns)]
        found["tables"] = [*found["tables"], *tables]
    found["tables"] += rest["tables"]
    return found


# --- gateways

#: counters of routes that make up the chart, by the names they may have
_ROUTE_IN: Final = ("received", "accepted", "stored")
_ROUTE_OUT: Final = ("forwarded", "sent", "published", "delivered", "confirmed")


def _gateway(data: Mapping[str, Any], rates: Rates, roles: Roles) -> View:
    routes = data["routes"]
    if not isinstance(routes, list):
        raise TypeError("no routes")
    found = generic({name: value for name, value in data.items() if name != "routes"}, rates, roles)
    if routes:
        order = ("name", "state", "source", "target", *_ROUTE_IN, *_ROUTE_OUT)
        found["tables"].insert(0, _Table(rates, roles).of("routes", routes, ("routes",), order))
    if isinstance(data.get("state"), str):
        found["state"] = _state(data["state"])
    for label, names in (("in /s", _ROUTE_IN), ("out /s", _ROUTE_OUT)):
        name = next((each for each in names if any(each in route for route in routes)), None)
        if name is not None:
            total = _rounded(rates.total([("routes", key, name) for key, _ in keyed(routes)]))
            found["chart"][label] = total
            found["tiles"].append([label.removesuffix(" /s"), total, "/s"])
    return found


_KINDS: Final[Mapping[str, Callable[[Mapping[str, Any], Rates, Roles], View]]] = {
    "instance": _instance,
    "typed_event_bus": _event_service,
    "event_admin": _event_service,
    "distributed_event_admin": _event_service,
    "journal": _journal,
    "gateway": _gateway,
}
