"""Views of reports: each kind has what an operator looks for; other shapes are shown as they are."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import messaging
from messaging.gateway.reports import BufferDTO, DeviceStateDTO, GatewayDTO, RequestRouteDTO, RouteDTO
from messaging.journal import CursorDTO, JournalDTO
from messaging.observability.monitor.plain import Bounds, Masking, Plain
from messaging.observability.monitor.snapshot import Report
from messaging.observability.monitor.views import Rates, numbers, view
from messaging.services import ServiceRegistry
from messaging.services.reporting import Histogram, counter, gauge, label
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from messaging.typedevent import TypedEventBus

BOUNDS = (0.1, 1.0)


def shown(kind: str, dto: Any, before: Any = None, problems: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the view of a report, two seconds after ``before``."""
    plain = Plain(Masking(), Bounds())
    data = plain.convert(dto)
    earlier = None if before is None else numbers(Plain(Masking(), Bounds()).convert(before))
    found = view(Report(kind, "x", data, problems, roles=plain.roles), Rates(numbers(data), earlier, 2.0))
    json.dumps(found, allow_nan=False)
    return found


def tiles(found: dict[str, Any]) -> dict[str, Any]:
    return {label: value for label, value, _ in found["tiles"]}


def rows(found: dict[str, Any], title: str) -> list[dict[str, Any]]:
    (table,) = [each for each in found["tables"] if each["title"] == title]
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def route(name: str, received: int, *, is_target_up: bool = True, is_enabled: bool = True, depth: int = 0) -> RouteDTO:
    latency = Histogram(BOUNDS)
    latency.record(0.25)
    latency.record(0.75)
    buffer = BufferDTO(depth=depth, bytes=2048, age=3.5, storing=0, accepted=received, dropped=1, dead_letters=2)
    return RouteDTO(
        name=name, source="plant:a/+", target="cloud:b", is_enabled=is_enabled, is_source_up=True, is_subscribed=True,
        is_target_up=is_target_up, received=received, filtered=1, looped=0, repeated=0, failed=0,
        published=received - depth, retried=0, in_flight=7, latency=latency.get_dto(), buffer=buffer,
    )  # fmt: skip


def gateway(*routes: RouteDTO, state: str = "running") -> GatewayDTO:
    requests = (RequestRouteDTO("ask", "cloud:q", "plant:q", 1, 20, 3),)
    return GatewayDTO(
        "x", state, 1_795_000_000.0, 4, routes, requests, (DeviceStateDTO("lamps", 12, is_offline=False),)
    )


def test_a_gateway_shows_buffers_rates_and_dead_letters_of_each_route() -> None:
    before = gateway(route("up", 100), route("alarms", 0))
    found = shown("gateway", gateway(route("up", 300, depth=40, is_target_up=False), route("alarms", 0)), before)
    up, alarms = rows(found, "routes")
    assert (up["route"], up["from"], up["to"], up["state"]) == ("up", "plant:a/+", "cloud:b", "target down")
    assert up["received"] == [300, 100.0, ""]
    assert up["published"] == [260, 80.0, ""]
    assert (up["stored"], up["in flight"], up["dead letters"], up["dropped"]) == (40, 7, 2, 1)
    assert (up["bytes"], up["oldest"], up["latency"]) == (
        [2048, None, "bytes"],
        [3.5, None, "seconds"],
        [0.5, None, "seconds"],
    )
    assert alarms["state"] == "up"
    assert found["state"] == ["running", "good"]
    assert tiles(found) | {"in": 100.0, "out": 80.0, "stored": 40, "dead letters": 4, "in flight": 14} == tiles(found)
    assert ["running since", 1_795_000_000.0, "since"] in found["tiles"]
    assert found["chart"] == {"in /s": 100.0, "out /s": 80.0, "stored": 40}
    assert rows(found, "routes of requests")[0]["pending"] == 1
    assert rows(found, "devices") == [{"devices": "lamps", "known": 12, "published as offline": False}]


def test_a_gateway_with_problems_does_not_look_well() -> None:
    assert shown("gateway", gateway(route("up", 1)), problems=("up: no target",))["state"] == ["running", "warn"]
    assert shown("gateway", gateway(state="closed"))["state"] == ["closed", "idle"]
    (disabled,) = rows(shown("gateway", gateway(route("up", 1, is_enabled=False))), "routes")
    assert disabled["state"] == "disabled"


def journal(end: int) -> JournalDTO:
    cursors = (CursorDTO("uploader", end - 5, 5),)
    return JournalDTO("/j", 10, end, 1, 4096, 2, 5, 500, 1.5, 1_000_000, None, 3, 4, cursors)


def test_a_journal_shows_its_backlog_and_its_cursors() -> None:
    found = shown("journal", journal(120), journal(100))
    assert tiles(found) == {
        "backlog": 5, "backlog bytes": 500, "oldest": 1.5, "appended": 10.0, "unstored": 2, "dropped": 3,
        "dead letters": 4, "bytes of files": 4096, "max bytes": 1_000_000,
    }  # fmt: skip
    assert rows(found, "cursors") == [{"cursor": "uploader", "position": 115, "behind": 5, "records/s": 10.0}]
    assert ["offsets", "10 to 120"] in found["facts"]


def test_an_instance_shows_its_streams_and_its_connection() -> None:
    with messaging.connect("memory://viewed", services=ServiceRegistry(), name="x") as m:
        before = m.runtime.get_runtime_dto()
        m.on("a/+", lambda _: None)
        before = Plain(Masking(), Bounds()).convert(m.runtime.get_runtime_dto())
        for _ in range(6):
            m.publish("a/1", b"").result(PATIENCE)
        found = shown("instance", m.runtime.get_runtime_dto(), before)
    assert found["state"] == ["connected", "good"]
    assert tiles(found)["out"] == 3.0
    (stream,) = rows(found, "subscriptions and queues")
    assert (stream["channel"], stream["connected"]) == ("a/+", "yes")
    assert ["broker", "memory://viewed"] in found["facts"]


def test_an_event_bus_shows_its_handlers_and_their_topics() -> None:
    with TypedEventBus(ServiceRegistry(), name="x") as bus:
        bus.on("orders/*")(lambda topic, event: None)
        found = shown("typed_event_bus", bus.get_dto())
    (handler,) = rows(found, "handlers and topics")
    assert (handler["topics"], handler["waiting"], handler["blocked"]) == ("orders/*", 0, "")
    assert tiles(found) == {"handlers": 1, "waiting events": 0, "failures": 0, "dropped": 0}
    assert found["state"] == ["works", "good"]


@dataclass(frozen=True)
class PressDTO:
    name: str = field(metadata=label("press"))
    strokes: int = field(metadata=counter("strokes", "strokes"))
    oil: int = field(metadata=gauge("oil", "bytes"))
    started: float = field(metadata=gauge("begin", "seconds", name="start_time"))
    is_hot: bool = field(metadata=gauge("whether it is hot"))
    parts: tuple[CursorDTO, ...] = ()


def test_a_report_of_another_kind_is_shown_with_units_and_rates() -> None:
    part = CursorDTO("a", 3, 0)
    before, now = (PressDTO("x", strokes, 2048, 1_795_000_000.0, True, (part,)) for strokes in (10, 20))
    found = shown("press", now, before)
    assert dict(map(tuple, found["tables"][0]["rows"])) == {
        "strokes": [20, 5.0, ""],
        "oil": [2048, None, "bytes"],
        "started": [1_795_000_000.0, None, "since"],
    }
    assert found["facts"] == [["is hot", "yes"]], "the name is the title"
    assert rows(found, "parts") == [{"name": "a", "position": 3, "behind": 0}]


@table("kind", ["instance", "gateway", "journal", "typed_event_bus", "distributed_event_admin", "odd"])
@table(
    "data",
    [
        None, 7, "text", [], [1, 2], {}, {"name": 3}, {"routes": None}, {"routes": [1]}, {"routes": [{}], "state": {}},
        {"connection": {}, "publisher": 1, "requests": []}, {"handlers": [{"waiting": "x"}]}, {"consumers": {}},
        {"begin": "a", "end": None, "cursors": {"a": 1}}, {"handlers": [[[]]]},
    ],
)  # fmt: skip
def test_a_report_of_another_shape_is_shown_as_it_is(kind: str, data: Any) -> None:
    found = shown(kind, data)
    assert found["state"] == ["works", "good"]
    assert {"facts", "tiles", "chart", "tables"} <= found.keys()
