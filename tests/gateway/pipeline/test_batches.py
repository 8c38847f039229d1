"""Batches and compression."""

from __future__ import annotations

import base64
import gzip
import json
from datetime import UTC, datetime
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from messaging.gateway.pipeline import Draft, Pipeline, PipelineError
from messaging.gateway.pipeline import batches as batches_module
from messaging.testing.tables import table
from tests.gateway.pipeline.kit import Source, draft, pipeline

AT = datetime(2026, 1, 2, 3, 4, 5, 678000, UTC).timestamp()


def batching(**settings: Any) -> Pipeline:
    return pipeline(batch={"count": 3, "delay": 10, **settings})


def fill(made: Pipeline, *found: Any, now: float = 0.0, **other: Any) -> list[Draft]:
    ready: list[Draft] = []
    for each in found:
        ready += made.process(draft(each, **other), now).ready
    return ready


def test_a_batch_is_closed_by_its_count() -> None:
    made = batching()
    (batch,) = fill(made, 1, {"a": "ä"}, None, 4)
    assert batch.payload == '1\n{"a":"ä"}\nnull\n'.encode()
    assert (batch.content_type, batch.content_encoding) == ("application/x-ndjson", None)
    assert made.next_due == 10
    (rest,) = made.due().ready
    assert rest.payload == b"4\n"
    assert made.next_due is None


def test_a_batch_may_be_an_array() -> None:
    (batch,) = fill(batching(format="json_array"), 1, [2], "3")
    assert batch.payload == b'[1,[2],"3"]'
    assert batch.content_type == "application/json"


def test_a_batch_is_closed_when_its_first_message_has_waited() -> None:
    made = batching()
    fill(made, 1, now=5)
    fill(made, 2, now=14)
    assert (made.next_due, made.due(14.9).ready) == (15, [])
    (batch,) = made.due(15).ready
    assert batch.payload == b"1\n2\n"
    assert (made.next_due, made.due(99).ready) == (None, [])


def test_a_batch_is_closed_by_its_bytes() -> None:
    made = batching(count=100, max_bytes=20)
    ready = fill(made, "a" * 6, "b" * 6, "c" * 6, "d" * 50, "e")
    assert [each.payload for each in ready] == [
        b'"aaaaaa"\n"bbbbbb"\n', b'"cccccc"\n', b'"' + b"d" * 50 + b'"\n',
    ]  # fmt: skip
    assert [each.payload for each in made.due().ready] == [b'"e"\n']


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(5, 60), st.sampled_from(["json_lines", "json_array"]))
def test_batches_hold_every_message_once_in_order_within_bounds(lengths: list[int], most: int, kind: str) -> None:
    made = batching(count=5, max_bytes=most, format=kind)
    texts = [f"{number}{'x' * length}" for number, length in enumerate(lengths)]
    ready = [*fill(made, *texts), *made.due().ready]
    found: list[str] = []
    for batch in ready:
        lines = batch.payload.splitlines() if kind == "json_lines" else [batch.payload]
        items = [json.loads(each) for each in lines]
        items = items if kind == "json_lines" else items[0]
        assert len(items) <= 5
        assert len(items) == 1 or len(batch.payload) <= most
        found += items
    assert found == texts


def test_each_target_has_a_batch_of_its_own() -> None:
    made = batching(count=2)
    assert fill(made, 1, x="a") == fill(made, 2, x="b") == []
    (batch,) = fill(made, 3, x="a")
    assert (batch.payload, batch.target) == (b"1\n3\n", "out/a")


def test_open_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "OPEN_BATCHES", 2)
    made = batching(count=100)
    assert fill(made, 1, x="a") == fill(made, 2, x="b") == []
    (early,) = fill(made, 3, x="c")
    assert (early.payload, early.target) == (b"1\n", "out/a")


def test_a_batch_stands_for_its_messages() -> None:
    made = batching(count=2)
    sources = [Source(), Source()]
    ready: list[Draft] = []
    for number, source in enumerate(sources):
        ready += made.process(draft(number, source=source, message_id=f"id{number}", timestamp=AT + number), 0).ready
    (batch,) = ready
    assert batch.sources == tuple(sources)
    assert (batch.timestamp, batch.channel, batch.captures, batch.headers) == (AT, "in/1", {"x": "1"}, {})
    assert not any(each.settled for each in sources)


def test_a_batch_that_is_made_again_has_the_same_id() -> None:
    def made(*ids: str | None) -> str | None:
        batcher = batching(count=2)
        ready: list[Draft] = []
        for number, each in enumerate(ids):
            ready += batcher.process(draft(number, message_id=each), 0).ready
        return ready[0].message_id

    assert made("a", "b") == made("a", "b") != made("b", "a")
    assert made("a", None) is None
    assert len(made("a", "b") or "") == 32


def test_an_envelope_has_channel_time_and_headers() -> None:
    made = batching(count=6, envelope=True)
    headers = {"n": 1, "t": "x", "b": b"x", "f": float("nan")}
    (batch,) = [
        *fill(made, {"a": 1}, timestamp=AT, headers=headers),
        *fill(made, b"text", b"\xff", b"NaN", timestamp=AT),
        *fill(made, b"5", timestamp=AT, content_type="text/plain"),
        *fill(made, gzip.compress(b"5"), timestamp=AT, content_encoding="unknown"),
    ]
    common = {"channel": "in/1", "time": "2026-01-02T03:04:05.678+00:00"}
    found = [json.loads(each) for each in batch.payload.splitlines()]
    assert found[:5] == [
        {**common, "headers": {"n": 1, "t": "x", "b": "b'x'", "f": "nan"}, "payload": {"a": 1}},
        {**common, "payload": "text"},
        {**common, "payload_base64": base64.b64encode(b"\xff").decode()},
        {**common, "payload": "NaN"},
        {**common, "payload": "5"},
    ]
    assert found[5]["content_encoding"] == "unknown"
    assert gzip.decompress(base64.b64decode(found[5]["payload_base64"])) == b"5"


def test_what_is_no_json_fails_and_is_not_kept() -> None:
    made = batching(count=2)
    for payload in (b"no json", b"NaN", b'"\\ud800"'):
        with pytest.raises(PipelineError) as raised:
            made.process(draft(payload), 0)
        assert raised.value.step == "payload"
    assert [each.payload for each in fill(made, 1, 2)] == [b"1\n2\n"]


def test_nothing_of_a_message_is_kept_when_a_part_of_it_cannot_be_batched() -> None:
    source = Source()
    made = pipeline(transform=[{"call": "tests.gateway.pipeline.functions:bad_item"}], batch={"count": 2, "delay": 10})
    with pytest.raises(PipelineError, match="the payload is not JSON"):
        made.process(draft(1, source=source), 0)
    assert made.due().ready == []
    assert source.settled == []
    # the sampling has not seen it, either
    plain = pipeline(sample={"every": 5}, batch={"count": 1, "delay": 10})
    with pytest.raises(PipelineError):
        plain.process(draft(b"no json"), 0)
    assert len(plain.process(draft(1), 1).ready) == 1


# --- compression


@table("name", ["gzip", "zstd"])
def test_payloads_are_compressed(name: str) -> None:
    def expand(data: bytes) -> bytes:
        return gzip.decompress(data) if name == "gzip" else zstandard.ZstdDecompressor().decompress(data)

    text = b'"' + b"x" * 1000 + b'"'
    (found,) = pipeline(compress=name).process(draft(text, content_type="text/plain"), 0).ready
    assert (expand(found.payload), found.content_encoding, found.content_type) == (text, name, "text/plain")
    assert len(found.payload) < 100
    (batch,) = fill(pipeline(compress=name, batch={"count": 2, "delay": 1}), text, text)
    assert (expand(batch.payload), batch.content_encoding) == (text + b"\n" + text + b"\n", name)
    assert batch.content_type == "application/x-ndjson"


def test_what_is_compressed_already_stays_as_it_is() -> None:
    data = gzip.compress(b"{}")
    (found,) = pipeline(compress="zstd").process(draft(data, content_encoding="gzip"), 0).ready
    assert (found.payload, found.content_encoding) == (data, "gzip")


def test_a_held_sample_is_compressed_when_it_passes() -> None:
    made = pipeline(compress="gzip", sample={"every": 5, "keep": "last"})
    assert made.process(draft(1), 0).ready == []
    (found,) = made.due(5).ready
    assert gzip.decompress(found.payload) == b"1"
