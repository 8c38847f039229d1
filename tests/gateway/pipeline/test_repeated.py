"""Messages that a source delivers again while their first copies are held, or on their way to the disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from messaging.gateway.pipeline import Draft
from messaging.testing.tables import table
from tests.gateway.pipeline.kit import Source, draft, pipeline, values

HERE = "tests.gateway.pipeline.functions"


class Known:
    """What is stored of batches, and on its way to the disk: keys, and the sources that have joined them."""

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.joined: dict[str, list[Any]] = {}

    def key(self, message_id: str, channel: str, payload: bytes) -> str:
        return f"{message_id} {channel} {payload.decode()}"

    def joins(self, key: str, sources: Sequence[Any]) -> bool:
        if key not in self.joined:
            return False
        self.joined[key] += sources
        return True

    def is_stored(self, key: str) -> bool:
        return key in self.stored


def again() -> Source:
    """Return a message that the broker has sent before."""
    made = Source()
    made.context.extensions["redelivered"] = True
    return made


def settle(drafts: Sequence[Any]) -> None:
    for each in drafts:
        for source in each.sources if isinstance(each, Draft) else (each,):
            source.context.settle(True)


def test_a_message_that_comes_again_while_its_batch_is_open_is_in_it_once() -> None:
    """The copy is acknowledged with the batch, and not before: the connection of the first one is lost."""
    made = pipeline(batch={"count": 3, "format": "json_array"})
    made.recognition = Known()  # type: ignore[assignment]
    sources = [Source(), again(), Source(), again(), Source()]
    outcomes = [
        made.process(draft(number, message_id=f"m{number}", source=source), 0)
        for number, source in zip((1, 1, 2, 2, 3), sources, strict=True)
    ]
    assert [each.released for each in outcomes] == [[]] * 5
    assert [each.repeated for each in outcomes] == [0, 1, 0, 1, 0]
    assert [each.filtered for each in outcomes] == [0] * 5
    (batch,) = outcomes[-1].ready
    assert values([batch]) == [[1, 2, 3]]
    assert {*batch.sources} == {*sources}
    # once it is closed, others know it
    late = made.process(draft(1, message_id="m1", source=again()), 0)
    assert (late.ready, late.released, late.repeated) == ([], [], 0)
    assert values(made.due().ready) == [[1]]


def test_equal_messages_are_all_in_the_batch() -> None:
    made = pipeline(batch={"count": 4, "format": "json_array"})
    made.recognition = Known()  # type: ignore[assignment]
    for message_id, source in (("m1", Source()), ("m2", Source()), ("m2", Source()), ("m3", again())):
        outcome = made.process(draft("x", message_id=message_id, source=source), 0)
        assert not outcome.repeated
    assert values(outcome.ready) == [["x"] * 4]


def test_a_message_of_a_batch_on_its_way_to_the_disk_is_acknowledged_with_it() -> None:
    made = pipeline(batch={"count": 1})
    known = made.recognition = Known()  # type: ignore[assignment]
    (batch,) = made.process(draft(1, message_id="m", source=Source()), 0).ready
    known.joined = {key: [] for key in batch.members}
    source = again()
    outcome = made.process(draft(1, message_id="m", source=source), 0)
    assert (outcome.ready, outcome.released, outcome.repeated) == ([], [], 1)
    assert known.joined == {batch.members[0]: [source.context]}


def test_the_parts_of_a_message_that_comes_again_are_recognised_one_by_one() -> None:
    """One is stored, one on its way to the disk, one in an open batch: the last one of them acknowledges the copy."""
    made = pipeline(transform=[{"call": f"{HERE}:targets"}], batch={"count": 2})
    known = made.recognition = Known()  # type: ignore[assignment]
    first, copy = Source(), again()
    assert made.process(draft(["a", "b", "c"], message_id="m", source=first), 0).ready == []
    fill = [made.process(draft([name], message_id=name, source=Source()), 0) for name in ("a", "b")]
    (stored,), (coming,) = (each.ready for each in fill)
    settle([stored])
    known.stored = {*stored.members}
    known.joined = {key: [] for key in coming.members}
    outcome = made.process(draft(["a", "b", "c"], message_id="m", source=copy), 0)
    assert (outcome.ready, len(outcome.released), outcome.repeated) == ([], 1, 1)
    settle(outcome.released)
    (joined,) = (each for each in known.joined.values() if each)
    settle([coming])
    for each in joined:
        each.settle(True)
    assert (first.settled, copy.settled) == ([], [])
    settle(made.due().ready)
    assert (first.settled, copy.settled) == ([True], [True])


@table("thinning", [{"deadband": {"field": "v", "absolute": 1}}, {"sample": {"every": 100}}])
@table("batch", [{}, {"batch": {"count": 2, "format": "json_array"}}])
def test_a_message_that_comes_again_passes_as_its_first_copy_did(
    thinning: dict[str, Any], batch: dict[str, Any]
) -> None:
    """Filtered, it would be acknowledged before the first copy is stored."""
    made = pipeline(**thinning, **batch)
    made.recognition = Known()  # type: ignore[assignment]
    outcomes = [
        made.process(draft({"v": 1}, message_id=message_id, source=source), 0)
        for message_id, source in (("m1", Source()), ("m1", again()), ("m2", Source()), ("m2", again()))
    ]
    assert [len(each.released) for each in outcomes] == [0, 0, 1, 1]
    assert [each.filtered for each in outcomes] == [0, 0, 1, 1]
    if batch:
        assert values(made.due().ready) == [[{"v": 1}]]
    else:
        assert [len(each.ready) for each in outcomes] == [1, 1, 0, 0]
