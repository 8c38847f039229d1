"""The pipeline as a whole: order, tokens of the source, and time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.gateway.pipeline import PipelineError
from messaging.gateway.pipeline.draft import Part, divide
from messaging.testing.waiting import PATIENCE
from tests.gateway.pipeline.kit import Source, draft, pipeline, values

HERE = "tests.gateway.pipeline.functions"


def test_a_pipeline_without_steps_is_plain() -> None:
    assert pipeline().is_plain
    for other in (
        {"where": "(a=1)"}, {"transform": [{"drop": ["a"]}]}, {"deadband": {"field": "a", "absolute": 1}},
        {"sample": {"every": 1}}, {"sample": {"every": 1, "keep": "last"}}, {"batch": {}}, {"compress": "gzip"},
    ):  # fmt: skip
        assert not pipeline(**other).is_plain
    source = Source()
    made = draft(b"\xff", source=source)
    outcome = pipeline().process(made, 0)
    assert (outcome.ready, outcome.released) == ([made], [])


def test_a_target_that_is_no_channel_fails_before_anything_is_kept() -> None:
    source = Source()
    made = pipeline(transform=[{"call": f"{HERE}:targets"}], sample={"every": 5, "keep": "last"})
    with pytest.raises(PipelineError, match="wildcard"):
        pipeline("in/{x}", "out/{x}", transform=[{"drop": ["a"]}]).process(draft({}, x="+"), 0)
    assert made.process(draft(["a"], source=source), 0).ready == []
    (held,) = made.due().ready
    assert (held.target, held.sources) == ("target/a", (source,))


def test_a_message_that_fails_is_not_remembered_by_deadband_and_sampling() -> None:
    for thinning in ({"deadband": {"field": "v", "absolute": 1}}, {"sample": {"every": 100}}):
        made = pipeline("in/{x}", "out/{x}", key="same", **thinning)
        with pytest.raises(PipelineError):
            made.process(draft({"v": 1}, x="#"), 0)
        assert len(made.process(draft({"v": 1}), 1).ready) == 1
        with pytest.raises(PipelineError):
            made.process(draft({"v": 50}, x="#"), 200)
        # as before the message that failed
        assert len(made.process(draft({"v": 1}), 50).ready) == 0


def test_sampling_the_last_message_releases_the_ones_before() -> None:
    made = pipeline(sample={"every": 10, "keep": "last"})
    sources = [Source() for _ in range(3)]
    outcomes = [made.process(draft(number, source=source), number) for number, source in enumerate(sources)]
    assert [each.released for each in outcomes] == [[], [sources[0]], [sources[1]]]
    assert made.next_due == 10
    (found,) = made.due(10).ready
    assert (values([found]), found.sources) == ([2], (sources[2],))


def test_sampling_and_batches_work_together() -> None:
    made = pipeline(sample={"every": 10, "keep": "last"}, batch={"count": 2, "delay": 5})
    for at, x in ((0, "a"), (1, "b"), (2, "a")):
        assert made.process(draft({"at": at}, f"in/{x}", x="1"), at).ready == []
    assert made.due(10).ready == []
    assert made.next_due == 11
    (batch,) = made.due(11).ready
    assert batch.payload == b'{"at":2}\n{"at":1}\n'


# --- parts


def test_a_message_is_settled_with_the_last_of_its_parts() -> None:
    """Batches of several targets are closed at different times."""
    source = Source(b"[1,2]")
    made = pipeline(transform=[{"call": f"{HERE}:targets"}], batch={"count": 2, "delay": 10})
    outcome = made.process(draft(["a", "b"], source=source), 0)
    assert (outcome.ready, outcome.released) == ([], [])
    (first,) = made.process(draft(["a"], source=Source()), 1).ready
    for token in first.sources:
        token.context.settle(True)
    assert source.settled == []
    (second,) = made.due(99).ready
    (part,) = second.sources
    # a part is used like the message
    assert (part.payload, part.context.channel, part.context.extensions) == (b"[1,2]", "in/1", {})
    part.context.settle(True)
    assert source.settled == [True]
    part.context.settle(True)
    assert source.settled == [True]


def test_a_replaced_part_does_not_settle_the_message_of_the_others() -> None:
    made = pipeline(
        transform=[{"call": f"{HERE}:several"}], sample={"every": 10, "keep": "last"}, key="{x}",
    )  # fmt: skip
    source = Source()
    outcome = made.process(draft([1, 2], source=source), 0)
    # both parts have one key: the second has replaced the first
    (replaced,) = outcome.released
    replaced.context.settle(True)
    assert source.settled == []
    (held,) = made.due().ready
    held.sources[0].context.settle(True)
    assert source.settled == [True]


def test_a_message_is_settled_with_the_last_of_parts_that_leave_together() -> None:
    source = Source()
    found = pipeline(transform=[{"call": f"{HERE}:several"}]).process(draft([1, 2], source=source), 0)
    first, second = found.ready
    first.contexts[0].settle(True)
    first.contexts[0].settle(True)
    assert source.settled == []
    second.contexts[0].settle(True)
    assert source.settled == [True]


def test_a_message_is_rejected_if_one_of_its_parts_is() -> None:
    source = Source()
    drafts = [draft(source=source) for _ in range(3)]
    divide(drafts)
    for each, acknowledged in zip(drafts, (True, False, True), strict=True):
        each.sources[0].settle(acknowledged)
    assert source.settled == [False]


def test_only_shared_messages_are_divided() -> None:
    shared, own = Source(), Source()
    drafts = [draft(source=shared), draft().copy(sources=(shared, own))]
    divide(drafts)
    assert drafts[1].sources[1] is own
    assert all(isinstance(each.sources[0], Part) for each in drafts)
    with pytest.raises(AttributeError):
        _ = drafts[0].sources[0].missing


def test_parts_may_be_settled_by_several_threads() -> None:
    source = Source()
    drafts = [draft(source=source) for _ in range(200)]
    divide(drafts)
    parts = [each.sources[0] for each in drafts]

    def settle(some: list[Any]) -> None:
        for part in some:
            part.settle(True)

    threads = [threading.Thread(target=settle, args=(parts[number::4],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert source.settled == [True]


STEPS = [
    {}, {"sample": {"every": 3}}, {"sample": {"every": 3, "keep": "last"}}, {"batch": {"count": 3, "delay": 2}},
    {"sample": {"every": 3, "keep": "last"}, "batch": {"count": 3, "delay": 2}},
    {"deadband": {"field": "item", "absolute": 2}, "batch": {"count": 2, "delay": 2}},
]  # fmt: skip
EVENTS = st.lists(
    st.tuples(st.floats(0, 2), st.sampled_from("abc"), st.lists(st.integers(0, 5), max_size=4)), max_size=30
)


@given(st.sampled_from(STEPS), EVENTS)
def test_every_message_is_settled_once_and_not_before_its_parts_are_ready(
    other: dict[str, Any], events: list[tuple[float, str, list[int]]]
) -> None:
    made = pipeline(transform=[{"call": f"{HERE}:several"}], **other)
    sources: list[Source] = []
    now = 0.0
    outcomes = []
    for pause, x, items in events:
        now += pause
        sources.append(Source())
        outcomes += [made.due(now), made.process(draft(items, f"in/{x}", x=x, source=sources[-1]), now)]
    outcomes.append(made.due())
    for outcome in outcomes:
        tokens = {id(token): token for each in outcome.ready for token in each.sources}
        for token in [*tokens.values(), *outcome.released]:
            token.context.settle(True)
    assert [each.settled for each in sources] == [[True]] * len(sources)
