"""The state of edge nodes, by the statements of the Sparkplug 3.0 specification (``tck-id-...``)."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging import MessagingError
from messaging.errors import ArgumentError, DecodeError, InvalidChannelError, UnknownMetricError
from messaging.sparkplug import (
    DataSet,
    DataType,
    Metric,
    Parameter,
    Payload,
    Property,
    Reading,
    SparkplugDecoder,
    Template,
    decode,
    encode,
)
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE

TS = 1486144502122
Int32, Boolean, String, UInt64 = DataType.Int32, DataType.Boolean, DataType.String, DataType.UInt64


def bdseq(number: int) -> Metric:
    return Metric("bdSeq", number, UInt64, TS)


class Host:
    """A decoder with the requests that it has made."""

    def __init__(self, **options: Any) -> None:
        self.requests: list[str] = []
        self.decoder = SparkplugDecoder(self._ask, **options)

    def _ask(self, channel: str, payload: bytes) -> None:
        found = decode(payload)
        (metric,) = found.metrics
        assert (metric.name, metric.value, metric.type, found.seq) == ("Node Control/Rebirth", True, Boolean, None)
        assert found.timestamp == metric.timestamp
        self.requests.append(channel)

    def read(self, kind: str, *metrics: Metric, seq: int | None = None, at: str = "E", device: str = "D",
             timestamp: int | None = TS) -> list[Reading]:  # fmt: skip
        channel = f"spBv1.0/G/{kind}/{at}" + (f"/{device}" if kind.startswith("D") else "")
        return self.decoder.read(channel, encode(Payload(timestamp, metrics, seq)))

    def born(self, at: str = "E") -> None:
        self.read("NBIRTH", bdseq(7), Metric("volt", 12, Int32, TS, 1), seq=0, at=at)
        self.read("DBIRTH", Metric("temp", 20, Int32, TS, 2), Metric("on", False, Boolean, TS, 3), seq=1, at=at)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def born(host: Host) -> Host:
    """A host that has received the births of an edge node and of its device."""
    host.born()
    return host


def values(readings: list[Reading]) -> list[tuple[str | None, str, Any]]:
    return [(each.device, each.metric, each.value) for each in readings]


def test_a_birth_gives_a_reading_for_each_metric(host: Host) -> None:
    """tck-id-payloads-nbirth-*: the birth tells every metric, its type and its value."""
    found = host.read(
        "NBIRTH", bdseq(0), Metric("volt", 12, Int32, TS - 5, 1, properties={"engUnit": Property(String, "V")}), seq=0
    )
    assert found[1] == Reading(
        "G", "E", None, "volt", Int32, 12, TS - 5, 1, properties={"engUnit": Property(String, "V")}
    )
    assert found[0].metric == "bdSeq"
    assert not host.requests


def test_data_is_read_by_alias_without_name_and_type(born: Host) -> None:
    """tck-id-payloads-alias-data-cmd-requirement: data has the alias only."""
    found = born.read("DDATA", Metric(alias=2, value=-3, type=Int32, timestamp=TS), seq=2)
    assert found == [Reading("G", "E", "D", "temp", Int32, -3, TS, 2)]
    # of the type of the birth: -1, as an unsigned number without a type
    raw = bytes.fromhex("1208") + bytes.fromhex("1002") + bytes.fromhex("50ffffffff0f")
    assert values(born.decoder.read("spBv1.0/G/DDATA/E/D", raw + bytes.fromhex("1803"))) == [("D", "temp", -1)]
    assert not born.requests


def test_data_is_read_by_name(born: Host) -> None:
    assert values(born.read("NDATA", Metric("volt", 13, Int32, TS), seq=2)) == [(None, "volt", 13)]
    assert not born.requests


def test_the_timestamp_of_the_message_stands_in_for_that_of_a_metric(born: Host) -> None:
    assert born.read("NDATA", Metric("volt", 13, Int32), seq=2)[0].timestamp == TS


def test_the_members_of_a_template_are_read_by_the_types_of_the_birth(host: Host) -> None:
    members = (Metric("a", -5, Int32, alias=11), Metric("b", "x", String))
    host.read("NBIRTH", bdseq(0), Metric("udt", Template(reference="T", metrics=members), DataType.Template), seq=0)
    member_a, member_b = bytes.fromhex("0a016150ffffffff0f"), bytes.fromhex("0a01627a0179")
    template = b"".join(b"\x12" + bytes([len(each)]) + each for each in (member_a, member_b))
    metric = b"\x0a\x03udt\x20\x13" + b"\x92\x01" + bytes([len(template)]) + template
    found = host.decoder.read("spBv1.0/G/NDATA/E", b"\x12" + bytes([len(metric)]) + metric + b"\x18\x01")
    (reading,) = found
    assert isinstance(reading.value, Template)
    assert [(each.name, each.type, each.value) for each in reading.value.metrics] == [
        ("a", Int32, -1),
        ("b", String, "y"),
    ]


# --- sequence numbers and rebirths


def test_sequence_numbers_wrap_after_255(born: Host) -> None:
    """tck-id-payloads-sequence-num-incrementing."""
    for number in range(2, 600):
        (found,) = born.read("NDATA", Metric(alias=1, value=number, type=Int32), seq=number % 256)
        assert not found.is_uncertain
    assert not born.requests


@table("kind", ["NDATA", "DDATA", "DBIRTH", "DDEATH"])
def test_a_lost_message_asks_for_a_rebirth(kind: str) -> None:
    """tck-id-operational-behavior-host-reordering-rebirth, without a reorder timeout: MQTT keeps the order."""
    host = Host()
    host.born()
    host.read(kind, *([Metric("temp", 5, Int32, TS)] if kind == "DBIRTH" else []), seq=4)
    assert host.requests == ["spBv1.0/G/NCMD/E"]


def test_data_after_a_lost_message_is_uncertain_until_the_rebirth(born: Host) -> None:
    assert born.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=5)[0].is_uncertain
    assert born.read("DDATA", Metric(alias=2, value=1, type=Int32), seq=6)[0].is_uncertain
    born.born()
    assert not born.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=2)[0].is_uncertain


def test_a_message_that_is_delivered_twice_asks_for_nothing(born: Host) -> None:
    for _ in range(2):
        assert not born.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=2)[0].is_uncertain
    assert not born.requests


def test_data_without_a_birth_asks_for_a_rebirth(host: Host) -> None:
    with pytest.raises(UnknownMetricError, match="alias 1 of edge node 'G/E' is not known: no birth was received"):
        host.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=9)
    with pytest.raises(UnknownMetricError, match="alias 2 of device 'G/E/D'"):
        host.read("DDATA", Metric(alias=2, value=1, type=Int32), seq=10)
    assert host.requests == ["spBv1.0/G/NCMD/E"]


def test_data_with_name_and_type_is_read_without_a_birth(host: Host) -> None:
    (found,) = host.read("NDATA", Metric("volt", 1, Int32), seq=9)
    assert (found.metric, found.value, found.is_uncertain) == ("volt", 1, True)
    assert host.requests == ["spBv1.0/G/NCMD/E"]


def test_data_with_a_name_and_no_type_is_not_guessed(host: Host) -> None:
    with pytest.raises(UnknownMetricError, match="metric 'm'"):
        host.decoder.read("spBv1.0/G/NDATA/E", bytes.fromhex("12050a016d5005"))


def test_data_of_a_metric_that_the_birth_does_not_define_asks_for_a_rebirth(born: Host) -> None:
    """Sparkplug 3.0, 5.15: a metric in NDATA that was not in the NBIRTH."""
    assert values(born.read("NDATA", Metric("new", 1, Int32), seq=2)) == [(None, "new", 1)]
    assert born.requests == ["spBv1.0/G/NCMD/E"]


def test_data_of_an_alias_that_the_birth_does_not_define_asks_for_a_rebirth(born: Host) -> None:
    """Sparkplug 3.0, 5.15: an alias that is not known."""
    with pytest.raises(UnknownMetricError, match="alias 99 of edge node 'G/E' is not known: its birth does not define"):
        born.read("NDATA", Metric(alias=99, value=1, type=Int32), seq=2)
    assert born.requests == ["spBv1.0/G/NCMD/E"]
    # the sequence goes on
    assert not born.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=3)[0].is_uncertain


def test_a_device_without_a_birth_asks_for_a_rebirth(host: Host) -> None:
    host.read("NBIRTH", bdseq(1), seq=0)
    with pytest.raises(UnknownMetricError):
        host.read("DDATA", Metric(alias=2, value=1, type=Int32), seq=1)
    assert host.requests == ["spBv1.0/G/NCMD/E"]


def test_the_birth_of_a_device_without_that_of_its_edge_node_asks_for_a_rebirth(host: Host) -> None:
    """tck-id-message-flow-device-birth-publish-nbirth-wait."""
    assert values(host.read("DBIRTH", Metric("temp", 5, Int32, TS, 2), seq=5)) == [("D", "temp", 5)]
    assert host.requests == ["spBv1.0/G/NCMD/E"]
    assert values(host.read("DDATA", Metric(alias=2, value=6, type=Int32), seq=6)) == [("D", "temp", 6)]
    # the NBIRTH that follows does not take the device for one of an old session
    assert [each.metric for each in host.read("NBIRTH", bdseq(3), seq=0)] == ["bdSeq"]


def test_requests_are_limited_for_each_edge_node() -> None:
    host = Host(rebirth_interval=3600)
    for at in ("E1", "E2", "E1", "E2"):
        with pytest.raises(UnknownMetricError):
            host.read("NDATA", Metric(alias=99, value=1, type=Int32), seq=9, at=at)
        host.born(at)
    assert host.requests == ["spBv1.0/G/NCMD/E1", "spBv1.0/G/NCMD/E2"]


def test_requests_are_repeated_after_the_interval() -> None:
    host = Host(rebirth_interval=0)
    for _ in range(3):
        with pytest.raises(UnknownMetricError):
            host.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=9)
    assert len(host.requests) == 3


def test_an_alias_that_stands_for_two_metrics_stands_for_none(host: Host) -> None:
    """tck-id-payloads-alias-uniqueness: a violation does not mistake one metric for the other."""
    host.read("NBIRTH", bdseq(0), Metric("a", 1, Int32, TS, 5), Metric("b", 2, Int32, TS, 5), seq=0)
    with pytest.raises(UnknownMetricError, match="alias 5"):
        host.read("NDATA", Metric(alias=5, value=1, type=Int32), seq=1)
    assert values(host.read("NDATA", Metric("a", 3, Int32), seq=2)) == [(None, "a", 3)]


def test_devices_may_have_the_aliases_of_others(born: Host) -> None:
    born.read("DBIRTH", Metric("speed", 1, Int32, TS, 2), seq=2, device="D2")
    assert values(born.read("DDATA", Metric(alias=2, value=1, type=Int32), seq=3)) == [("D", "temp", 1)]
    assert values(born.read("DDATA", Metric(alias=2, value=1, type=Int32), seq=4, device="D2")) == [("D2", "speed", 1)]


# --- deaths


def test_the_death_of_an_edge_node_makes_its_metrics_stale(born: Host) -> None:
    """tck-id-operational-behavior-edge-node-termination-host-action-ndeath-*: node and devices, time of the host."""
    found = born.read("NDEATH", bdseq(7), timestamp=None)
    assert [(each.device, each.metric) for each in found] == [
        (None, "bdSeq"), (None, "volt"), ("D", "temp"), ("D", "on"),
    ]  # fmt: skip
    assert all(each.is_stale and each.is_null and each.quality == 500 for each in found)
    assert all(each.timestamp is not None and each.timestamp > TS for each in found)
    assert [each.type for each in found] == [UInt64, Int32, Int32, Boolean]
    assert born.decoder.known_nodes == born.decoder.known_metrics == 0


def test_a_death_of_another_session_is_ignored(born: Host) -> None:
    """tck-id-payloads-ndeath-bdseq: the will of the session before may come after the birth of the new one."""
    assert born.read("NDEATH", bdseq(6)) == []
    assert values(born.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=2)) == [(None, "volt", 1)]


def test_a_death_without_a_number_is_that_of_the_session(born: Host) -> None:
    assert len(born.decoder.read("spBv1.0/G/NDEATH/E", b"")) == 4


def test_the_death_of_a_device_makes_its_metrics_stale(born: Host) -> None:
    """tck-id-operational-behavior-edge-node-termination-host-action-ddeath-*: time of the payload."""
    found = born.read("DDEATH", seq=2, timestamp=TS + 9)
    assert [(each.metric, each.is_stale, each.timestamp) for each in found] == [
        ("temp", True, TS + 9), ("on", True, TS + 9),
    ]  # fmt: skip
    assert values(born.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=3)) == [(None, "volt", 1)]
    assert not born.requests
    assert born.read("DDEATH", seq=4) == []
    assert born.read("DDEATH", seq=5, device="unknown") == []


def test_a_death_of_an_edge_node_that_is_not_known_has_no_readings(host: Host) -> None:
    assert host.read("NDEATH", bdseq(1)) == host.read("DDEATH", seq=3) == []
    assert not host.requests


def test_devices_of_a_session_that_ended_unnoticed_become_stale(born: Host) -> None:
    found = born.read("NBIRTH", bdseq(8), Metric("volt", 12, Int32, TS, 1), seq=0)
    assert [(each.device, each.metric, each.is_stale) for each in found] == [
        ("D", "temp", True), ("D", "on", True), (None, "bdSeq", False), (None, "volt", False),
    ]  # fmt: skip


def test_a_rebirth_in_the_same_session_keeps_the_devices(born: Host) -> None:
    assert len(born.read("NBIRTH", bdseq(7), seq=0)) == 1
    assert values(born.read("DDATA", Metric(alias=2, value=5, type=Int32), seq=1)) == [("D", "temp", 5)]


# --- quality, flags and JSON


def test_the_quality_of_a_metric_is_its_property(host: Host) -> None:
    """tck-id-payloads-propertyset-quality-value-value: 0, 192 or 500."""
    metrics = [
        Metric(f"m{code}", 1, Int32, TS, properties={"Quality": Property(Int32, code)}) for code in (0, 192, 500)
    ]
    found = host.read("NBIRTH", bdseq(0), *metrics, seq=0)
    assert [each.quality for each in found] == [192, 0, 192, 500]
    assert [each.is_stale for each in found] == [False, False, False, True]


def test_a_reading_is_a_json_object(host: Host) -> None:
    table = DataSet(("a", "b"), (Int32, DataType.Double), ((1, float("inf")), (None, 2.5)))
    template = Template("1", "T", False, (Parameter("p", Int32, 5),), (Metric("x", b"\0", DataType.Bytes, TS),))
    made = [
        Metric("table", table, DataType.DataSet, TS),
        Metric("template", template, DataType.Template, TS),
        Metric("bytes", b"\xff", DataType.Bytes, TS, 5, is_historical=True, is_transient=True),
        Metric("nan", float("nan"), DataType.Double, TS),
        Metric("array", (1, 2), DataType.Int8Array, TS),
        Metric(
            "nested", None, String, TS,
            properties={"set": Property(DataType.PropertySet, {"x": Property(Int32, 1)}),
                        "list": Property(DataType.PropertySetList, ({"y": Property(String, "z")},))},
        ),
    ]  # fmt: skip
    found = [each.to_json() for each in host.read("NBIRTH", bdseq(0), *made, seq=0)][1:]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    common = {
        "group": "G", "edge_node": "E", "device": None, "timestamp": TS, "quality": 192, "is_historical": False,
        "is_null": False, "is_stale": False,
    }  # fmt: skip
    rows = [[1, "Infinity"], [None, 2.5]]
    assert found[0] == {
        **common, "metric": "table", "type": "DataSet",
        "value": {"columns": ["a", "b"], "types": ["Int32", "Double"], "rows": rows},
    }  # fmt: skip
    assert found[1]["value"] == {
        "version": "1", "reference": "T", "is_definition": False, "parameters": {"p": 5},
        "metrics": [{"metric": "x", "type": "Bytes", "value": "AA==", "timestamp": TS}],
    }  # fmt: skip
    assert found[2] == {
        **common, "metric": "bytes", "type": "Bytes", "value": "/w==", "alias": 5, "is_historical": True,
        "is_transient": True,
    }  # fmt: skip
    assert [each["value"] for each in found[3:]] == ["NaN", [1, 2], None]
    assert found[5]["properties"] == {"set": {"x": 1}, "list": [{"y": "z"}]}
    assert found[5]["is_null"]


# --- what has no readings, and what is refused


@table("channel", ["spBv1.0/G/NCMD/E", "spBv1.0/G/DCMD/E/D", "spBv1.0/STATE/host", "STATE/host"])
def test_commands_and_states_of_hosts_have_no_readings(host: Host, channel: str) -> None:
    assert host.decoder.read(channel, b'{"online": true}') == host.decoder.reread(channel, b"") == []
    assert not host.requests


def test_other_channels_are_refused() -> None:
    with pytest.raises(InvalidChannelError):
        SparkplugDecoder().read("plant/line", b"")


@table(
    "metrics, text",
    [
        ((Metric("m", timestamp=TS),), "a metric of a birth needs its datatype"),
        ((Metric(None, 1, Int32, TS, 5),), "a metric of a birth has no name"),
        ((Metric("m" * 1001, 1, Int32),), "more than 1000 characters"),
    ],
)
def test_a_birth_that_does_not_define_its_metrics_is_refused(metrics: tuple[Metric, ...], text: str) -> None:
    """tck-id-payloads-metric-datatype-req, tck-id-payloads-alias-birth-requirement."""
    host = Host()
    host.born()
    with pytest.raises(DecodeError, match=text):
        host.read("NBIRTH", *metrics, seq=0)
    # what was known before stays
    assert values(host.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=2)) == [(None, "volt", 1)]


def test_a_payload_that_cannot_be_read_counts_as_lost(born: Host) -> None:
    with pytest.raises(DecodeError):
        born.decoder.read("spBv1.0/G/NDATA/E", b"\xff\xff")
    assert born.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=3)[0].is_uncertain
    assert born.requests == ["spBv1.0/G/NCMD/E"]


# --- bounds


def test_the_edge_node_that_is_silent_for_longest_is_forgotten() -> None:
    host = Host(max_nodes=2)
    for at in ("E1", "E2"):
        host.born(at)
    host.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=2, at="E1")
    host.born("E3")
    assert host.decoder.known_nodes == 2
    host.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=3, at="E1")
    with pytest.raises(UnknownMetricError):
        host.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=2, at="E2")
    assert host.requests == ["spBv1.0/G/NCMD/E2"]


def test_the_metrics_of_all_edge_nodes_are_bounded() -> None:
    host = Host(max_metrics=20)
    for number in range(50):
        host.born(f"E{number}")
        assert host.decoder.known_metrics <= 20
    assert host.decoder.known_nodes == 3
    with pytest.raises(DecodeError, match="a birth of 20 metrics; at most 19"):
        host.read("NBIRTH", *[Metric(f"m{number}", 1, Int32) for number in range(20)], seq=0)


def test_the_devices_of_one_edge_node_are_bounded() -> None:
    host = Host(max_metrics=20)
    host.read("NBIRTH", bdseq(0), seq=0)
    for number in range(100):
        host.read("DBIRTH", Metric("m", 1, Int32), seq=(number + 1) % 256, device=f"D{number}")
        assert host.decoder.known_metrics <= 20


def test_requests_that_are_remembered_are_bounded() -> None:
    host = Host(max_nodes=2, rebirth_interval=3600)
    for number in (1, 2, 3, 1):
        with pytest.raises(UnknownMetricError):
            host.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=9, at=f"E{number}")
    assert len(host.requests) == 4


@table(
    "options",
    [
        {"max_nodes": 0}, {"max_metrics": True}, {"max_nodes": "x"}, {"rebirth_interval": -1},
        {"rebirth_interval": "x"}, {"request_rebirth": 5},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        SparkplugDecoder(**options)


# --- rereading, and threads


def test_rereading_changes_nothing(host: Host) -> None:
    data = encode(Payload(TS, (Metric(alias=1, value=5, type=Int32),), 77))
    with pytest.raises(UnknownMetricError):
        host.decoder.reread("spBv1.0/G/NDATA/E", data)
    assert not host.requests
    host.born()
    for _ in range(2):
        assert values(host.decoder.reread("spBv1.0/G/NDATA/E", data)) == [(None, "volt", 5)]
    birth = encode(Payload(TS, (Metric("other", 5, Int32, alias=1),), 0))
    assert values(host.decoder.reread("spBv1.0/G/NBIRTH/E", birth)) == [(None, "other", 5)]
    assert len(host.decoder.reread("spBv1.0/G/NDEATH/E", b"")) == 4
    assert values(host.read("NDATA", Metric(alias=1, value=1, type=Int32), seq=2)) == [(None, "volt", 1)]
    assert not host.requests


def test_a_decoder_may_be_used_by_the_callback_and_by_several_threads() -> None:
    found: list[str] = []

    def ask(channel: str, payload: bytes) -> None:
        decoder.read(channel, payload)  # would wait for ever, were it called with the lock
        found.append(channel)

    decoder = SparkplugDecoder(ask, rebirth_interval=0)
    data = encode(Payload(TS, (Metric("m", 1, Int32),), 0))

    def run(number: int) -> None:
        for _ in range(200):
            decoder.read(f"spBv1.0/G/NDATA/E{number}", data)
            decoder.read(f"spBv1.0/G/NBIRTH/E{number}", data)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert decoder.known_nodes == 4
    assert len(found) == 4  # data without a birth; later data has the number of the birth again


KINDS = ["NBIRTH", "DBIRTH", "NDATA", "DDATA", "NDEATH", "DDEATH"]
MESSAGES = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from(["E1", "E2", "E3"]),
    st.sampled_from(["D1", "D2"]),
    st.integers(0, 3),
    st.lists(
        st.builds(
            Metric,
            st.sampled_from([None, "a", "b", "bdSeq"]),
            st.integers(0, 3),
            st.just(Int32),
            alias=st.none() | st.integers(0, 3),
        ),
        max_size=4,
    ),
)


@given(st.lists(MESSAGES, max_size=40))
def test_any_messages_keep_the_bounds_and_the_count(messages: list[Any]) -> None:
    decoder = SparkplugDecoder(lambda *_: None, max_nodes=2, max_metrics=9)
    for kind, at, device, seq, metrics in messages:
        channel = f"spBv1.0/G/{kind}/{at}" + (f"/{device}" if kind.startswith("D") else "")
        try:
            decoder.read(channel, encode(Payload(1, metrics, seq)))
        except MessagingError:
            continue
        assert decoder.known_nodes <= 2
        assert decoder.known_metrics <= 9
    for at in ("E1", "E2", "E3"):
        decoder.read(f"spBv1.0/G/NDEATH/{at}", b"")
    assert decoder.known_nodes == decoder.known_metrics == 0


# --- the flow of the specification


def test_the_messages_that_the_specification_shows_are_followed() -> None:
    """Sparkplug 3.0, 6.4.18 to 6.4.24: NBIRTH, DBIRTH, NDATA, DDATA, NCMD, DCMD, NDEATH, DDEATH."""
    flow = Host()
    node, device = "spBv1.0/Sparkplug B Devices/{}/Raspberry Pi", "spBv1.0/Sparkplug B Devices/{}/Raspberry Pi/Pibrella"

    def send(topic: str, kind: str, seq: int | None, *metrics: Metric) -> list[Reading]:
        return flow.decoder.read(topic.format(kind), encode(Payload(TS, metrics, seq)))

    birth = send(
        node, "NBIRTH", 0, bdseq(0),
        *(Metric(f"Node Control/{name}", False, Boolean, TS) for name in ("Reboot", "Rebirth", "Next Server")),
        Metric("Node Control/Scan Rate", 3000, DataType.Int64, TS),
        Metric("Properties/Hardware Make", "Raspberry Pi", String, TS),
        Metric("Supply Voltage", 12.1, DataType.Float, TS),
    )  # fmt: skip
    assert birth[-1] == Reading("Sparkplug B Devices", "Raspberry Pi", None, "Supply Voltage", DataType.Float, 12.1, TS)
    inputs = [Metric(f"Inputs/{name}", False, Boolean, TS) for name in "ABCD"]
    assert len(send(device, "DBIRTH", 1, *inputs)) == 4
    assert send(node, "NDATA", 2, Metric("Supply Voltage", 12.3, DataType.Float, TS))[0].value == 12.3
    found = send(device, "DDATA", 3, Metric("Inputs/A", True, Boolean, TS), Metric("Inputs/C", True, Boolean, TS))
    assert values(found) == [("Pibrella", "Inputs/A", True), ("Pibrella", "Inputs/C", True)]
    assert send(node, "NCMD", None, Metric("Node Control/Rebirth", True, Boolean, TS)) == []
    assert send(device, "DCMD", None, Metric("Outputs/LEDs/Green", True, Boolean, TS)) == []
    assert len(send(device, "DDEATH", 4)) == 4
    assert len(send(node, "NDEATH", None, bdseq(0))) == 7
    assert not flow.requests
