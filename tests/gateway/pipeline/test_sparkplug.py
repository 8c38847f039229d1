"""The step ``sparkplug``: readings as messages, rebirths, and what a route keeps of its births."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import Message
from messaging.errors import ConfigurationError
from messaging.gateway import Gateway
from messaging.gateway.dead_letters import Selection, letters
from messaging.gateway.pipeline import Pipeline, PipelineError
from messaging.sparkplug import DataType, Metric, Payload, decode, encode
from messaging.testing.brokers import Mosquitto
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.gateway import kit as gateway_kit
from tests.gateway.kit import Broker, settings, started, unique
from tests.gateway.pipeline.kit import Source, draft, pipeline, route, values

TS = 1486144502122
Int32, UInt64, Boolean = DataType.Int32, DataType.UInt64, DataType.Boolean
CONTROL = Metric("Node Control/Rebirth", False, Boolean, TS)


def message(*metrics: Metric, seq: int | None = 0) -> bytes:
    return encode(Payload(TS, metrics, seq))


BDSEQ = Metric("bdSeq", 7, UInt64, TS)
NBIRTH = message(BDSEQ, CONTROL, Metric("volt", 12, Int32, TS, 1))
DBIRTH = message(Metric("line/temp +", 20, Int32, TS, 2), seq=1)
NDATA = message(Metric(alias=1, value=13, type=Int32, timestamp=TS), seq=2)
STEP: list[dict[str, Any]] = [{"sparkplug": True}]


def made(target: str = "out/{group}/{edge_node}/{device}/{metric}", **other: Any) -> tuple[Pipeline, list[str]]:
    """Return a pipeline, and the channels of the requests that it makes."""
    requests: list[str] = []

    def note(channel: str, payload: bytes) -> None:
        assert decode(payload).metrics[0].value is True
        requests.append(channel)

    found = Pipeline(route("spBv1.0/#", target, transform=STEP, **other), gateway="gw", name="r", request_rebirth=note)
    return found, requests


def process(found: Pipeline, topic: str, payload: bytes, now: float = 0.0, **other: Any) -> Any:
    return found.process(draft(payload, f"spBv1.0/G/{topic}", captures={}, **other), now)


def test_each_reading_is_a_message() -> None:
    found, requests = made()
    source = Source()
    ready = process(found, "NBIRTH/E", NBIRTH, source=source, message_id="id").ready
    ready += process(found, "DBIRTH/E/D", DBIRTH).ready
    assert [each["metric"] for each in values(ready)] == ["volt", "line/temp +"]
    assert values(ready)[0] == {
        "group": "G", "edge_node": "E", "device": None, "metric": "volt", "type": "Int32", "value": 12,
        "timestamp": TS, "quality": 192, "is_historical": False, "is_null": False, "is_stale": False, "alias": 1,
    }  # fmt: skip
    assert (ready[0].content_type, ready[0].sources, ready[0].message_id) == ("application/json", (source,), "id")
    assert not requests


def test_readings_have_names_for_channels() -> None:
    found, _ = made(batch={"count": 1, "delay": 1})
    targets = [each.target for each in process(found, "NBIRTH/E", NBIRTH).ready]
    targets += [each.target for each in process(found, "DBIRTH/E/D", DBIRTH).ready]
    assert targets == ["out/G/E/-/volt", "out/G/E/D/line/temp _"]


def test_commands_and_states_are_released() -> None:
    found, requests = made()
    for topic in ("NCMD/E", "DCMD/E/D"):
        source = Source()
        outcome = process(found, topic, message(CONTROL, seq=None), source=source)
        assert (outcome.ready, outcome.released) == ([], [source])
    state = found.process(draft({"online": True}, "spBv1.0/STATE/host", captures={}), 0)
    assert (state.ready, requests) == ([], [])


def test_data_without_a_birth_fails_and_asks_for_a_rebirth() -> None:
    found, requests = made()
    with pytest.raises(PipelineError, match="alias 1 of edge node 'G/E' is not known") as raised:
        process(found, "NDATA/E", NDATA)
    assert (raised.value.step, requests) == ("transform[0]", ["spBv1.0/G/NCMD/E"])
    process(found, "NBIRTH/E", NBIRTH)
    process(found, "DBIRTH/E/D", DBIRTH)
    assert [each["value"] for each in values(process(found, "NDATA/E", NDATA).ready)] == [13]


def test_a_payload_that_is_none_of_sparkplug_fails() -> None:
    found, requests = made()
    with pytest.raises(PipelineError, match="no Sparkplug B payload"):
        process(found, "NDATA/E", b"no protobuf")
    with pytest.raises(PipelineError, match="no topic of Sparkplug B"):
        found.process(draft(NDATA, "spBv1.0/other", captures={}), 0)
    assert not requests


def test_a_payload_that_was_compressed_by_its_publisher_is_expanded() -> None:
    found, _ = made()
    ready = process(found, "NBIRTH/E", gzip.compress(NBIRTH), content_encoding="gzip").ready
    assert [each["metric"] for each in values(ready)] == ["volt"]
    with pytest.raises(PipelineError, match="gzip"):
        process(found, "NBIRTH/E", b"x", content_encoding="gzip")


def test_deadbands_and_samples_have_a_key_for_each_metric() -> None:
    found, _ = made(deadband={"field": "value", "absolute": 2})
    birth = message(BDSEQ, Metric("a", 1, Int32, TS, 1), Metric("b", 1, Int32, TS, 2))
    assert len(process(found, "NBIRTH/E", birth).ready) == 2
    data = message(Metric("a", 2, Int32, TS), Metric("b", 5, Int32, TS), seq=1)
    assert [each["metric"] for each in values(process(found, "NDATA/E", data).ready)] == ["b"]


def test_stale_readings_pass_the_deadband() -> None:
    found, _ = made(deadband={"field": "value", "absolute": 2})
    process(found, "NBIRTH/E", NBIRTH)
    (stale,) = values(process(found, "NDEATH/E", message(BDSEQ, seq=None)).ready)
    assert (stale["metric"], stale["value"], stale["is_stale"], stale["quality"]) == ("volt", None, True, 500)


def test_a_changed_configuration_keeps_the_births() -> None:
    before, _ = made()
    process(before, "NBIRTH/E", NBIRTH)
    process(before, "DBIRTH/E/D", DBIRTH)
    after, requests = made("other/{metric}")
    after.inherit(before)
    assert len(process(after, "NDATA/E", NDATA).ready) == 1
    assert not requests
    pipeline(transform=[{"drop": ["a"]}]).inherit(before)  # another one has none


def test_rereading_knows_the_births_and_changes_nothing() -> None:
    live, requests = made()
    again, others = made()
    again.reread(live)
    with pytest.raises(PipelineError):
        process(again, "NDATA/E", NDATA)
    assert requests == others == []
    process(live, "NBIRTH/E", NBIRTH)
    process(live, "DBIRTH/E/D", DBIRTH)
    for _ in range(2):
        old = message(Metric(alias=1, value=5, type=Int32, timestamp=TS), seq=99)
        assert [each["value"] for each in values(process(again, "NDATA/E", old).ready)] == [5]
    assert not values(process(live, "NDATA/E", NDATA).ready)[0].get("is_uncertain")


def test_a_missing_package_is_found_when_the_pipeline_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("messaging.sparkplug")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(ConfigurationError, match=r"transform\[0\]\.sparkplug: .*rx-messaging\[sparkplug\]"):
        made()


# --- a route of a gateway


def test_a_route_asks_for_a_rebirth_and_delivers_readings(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """The gateway starts while an edge node sends data: nothing is lost, and everything is typed in the end."""
    group, target = unique("group"), unique("memory://sparkplug")
    topic = f"spBv1.0/{group}/{{}}/E"
    instances = {"a": {"url": mosquitto.url, "client_id": group, "keep_session": True}, "b": {"url": target}}
    routes = {
        "r": gateway_kit.route(
            {"channel": f"spBv1.0/{group}/#"}, "readings/{edge_node}/{device}/{metric}", transform=STEP
        )
    }

    with (
        messaging.connect(mosquitto.url) as node,
        Broker(target, "readings/#") as host,
        Gateway(settings(tmp_path, instances=instances, routes=routes)) as gateway,
    ):
        commands: Recorder[bytes] = Recorder()

        def rebirth(received: Message) -> None:
            commands.append(received.payload)
            node.publish(topic.format("NBIRTH"), NBIRTH)

        node.on(topic.format("NCMD"), rebirth).ready.result(PATIENCE)
        started(gateway)
        journal = gateway.route("r").buffer.journal
        node.publish(topic.format("NDATA"), NDATA).result(PATIENCE)
        host.messages.wait_for(1)
        (command,) = commands
        assert decode(command).metrics[0].name == "Node Control/Rebirth"
        (first, *_) = host.received
        assert first[0] == "readings/E/-/volt"
        assert json.loads(first[1])["value"] == 12
        # data before the birth is a dead letter, which can be read now
        (found,) = letters(journal, Selection())
        assert found.payload == NDATA
        assert "is not known: no birth was received" in found.reason
        outcome = gateway.route("r").replay(Selection())
        assert (outcome.replayed, outcome.failed) == (1, 0)
        eventually(lambda: json.loads(host.payloads[-1])["value"] == 13)
        # live data is read by the alias, in sequence
        node.publish(topic.format("NDATA"), message(Metric(alias=1, value=14, type=Int32, timestamp=TS), seq=1))
        eventually(lambda: json.loads(host.received[-1][1])["value"] == 14)
        assert "is_uncertain" not in json.loads(host.received[-1][1])
        # a reload keeps the births
        routes["r"]["transform"] = [*STEP, {"set": {"v": 2}}]
        gateway.reload(settings(tmp_path, instances=instances, routes=routes))
        node.publish(topic.format("NDATA"), message(Metric(alias=1, value=15, type=Int32, timestamp=TS), seq=2))
        eventually(lambda: json.loads(host.received[-1][1])["value"] == 15)
        assert json.loads(host.received[-1][1])["v"] == 2
        assert len(commands) == 1
        node.publish(topic.format("NDEATH"), message(BDSEQ, seq=None))
        eventually(lambda: json.loads(host.received[-1][1])["is_stale"])
