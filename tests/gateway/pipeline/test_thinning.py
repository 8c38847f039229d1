"""Deadband and sampling, with a clock of the tests."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from messaging.gateway.pipeline.thinning import LastSample, Thinning
from messaging.gateway.settings import DeadbandSettings
from messaging.testing.tables import table
from tests.gateway.pipeline.kit import Source, draft, pipeline, values


def deadband(keys: int = 100, **settings: Any) -> Thinning:
    return Thinning(DeadbandSettings.model_validate({"field": "v", **settings}), keys=keys)


def passed(band: Thinning, *numbers: Any, times: list[float] | None = None, key: str = "k") -> list[Any]:
    """Return the numbers that pass, one each second."""
    found = []
    for at, number in zip(times or range(len(numbers)), numbers, strict=True):
        made = draft({"v": number})
        if band.passes(made, key, at):
            band.note(made, key, at)
            found.append(number)
    return found


@table(
    "settings, numbers, expected",
    [
        ({"absolute": 1}, [10, 10.5, 10.9, 11, 11.5, 10, 9.5], [10, 11, 10]),
        ({"absolute": 0}, [10, 10, 10.001, 10.001, 10], [10, 10.001, 10]),
        ({"percent": 10}, [100, 109, 110, 119, 121, 108], [100, 110, 121, 108]),
        ({"percent": 10}, [0, 0, 0.1, 0.1, 0], [0, 0.1, 0]),
        ({"percent": 10}, [-100, -109, -110], [-100, -110]),
        ({"absolute": 1}, [10, "x", 10, 10], [10, "x", 10]),
        ({"absolute": 1}, [10, None, True, 10], [10, None, True, 10]),
    ],
)
def test_a_number_passes_when_it_changed(settings: dict[str, Any], numbers: list[Any], expected: list[Any]) -> None:
    assert passed(deadband(**settings), *numbers) == expected


def test_small_steps_add_up() -> None:
    assert passed(deadband(absolute=1), *[number / 4 for number in range(20)]) == [0, 1, 2, 3, 4]


def test_a_number_passes_unchanged_after_a_silence() -> None:
    band = deadband(absolute=1, max_silence=5)
    assert passed(band, 1, 1, 1, 1, 1, times=[0, 4.9, 5, 9.9, 10]) == [1, 1, 1]


def test_keys_have_states_of_their_own() -> None:
    band = deadband(absolute=1)
    assert passed(band, 1, key="a") == passed(band, 1, key="b") == [1]
    assert passed(band, 1, key="a") == []


def test_the_number_may_be_the_payload_or_an_item() -> None:
    for field, payload in (("$", b"5"), ("[0]", b"[5]")):
        band = deadband(field=field, absolute=1)
        made = draft(payload)
        assert band.passes(made, "k", 0)
        band.note(made, "k", 0)
        assert not band.passes(draft(payload), "k", 1)


@table("payload", [b"no json", b"NaN", b"1e999", b"[1]"])
def test_a_payload_without_the_number_passes(payload: bytes) -> None:
    for field in ("$", "v"):
        band = deadband(field=field, absolute=1)
        for at in range(3):
            made = draft(payload)
            assert band.passes(made, "k", at)
            band.note(made, "k", at)


def test_the_key_that_was_silent_for_longest_is_forgotten() -> None:
    band = deadband(keys=2, absolute=1)
    for key in ("a", "b", "c"):
        passed(band, 1, key=key)
    assert passed(band, 1, key="c") == passed(band, 1, key="b") == []
    assert passed(band, 1, key="a") == [1]
    band = deadband(keys=3, absolute=1)
    for number in range(10):
        passed(band, number, key=str(number % 5))
    assert [key for key in "01234" if not band.passes(draft({"v": int(key) + 5}), key, 0)] == ["2", "3", "4"]


@given(st.lists(st.floats(-100, 100), max_size=30), st.floats(0.01, 50))
def test_what_does_not_pass_is_within_the_band(numbers: list[float], band: float) -> None:
    made = deadband(absolute=band)
    last = math.nan
    for at, number in enumerate(numbers):
        if passed(made, number, times=[at]):
            assert not abs(number - last) < band
            last = number
        else:
            assert abs(number - last) < band


# --- sampling


def test_the_first_message_of_an_interval_passes() -> None:
    sample, made = Thinning(interval=10), draft()
    found = []
    for at in (0, 1, 9.9, 10, 15, 20, 100):
        if sample.passes(made, "k", at):
            sample.note(made, "k", at)
            found.append(at)
    assert found == [0, 10, 20, 100]
    assert sample.passes(made, "other", 1)


def test_the_last_message_of_an_interval_passes_at_its_end() -> None:
    sample = LastSample(10, 100)
    made = [draft(number) for number in range(4)]
    assert sample.put(made[0], "a", 0) == (None, None)
    assert sample.put(made[1], "b", 3) == (None, None)
    assert sample.put(made[2], "a", 9) == (made[0], None)
    assert (sample.next_due, sample.due(9.9)) == (10, [])
    assert sample.due(10) == [made[2]]
    assert sample.next_due == 13
    assert sample.put(made[3], "a", 11) == (None, None)
    assert sample.due(30) == [made[1], made[3]]
    assert (sample.next_due, sample.due(99)) == (None, [])


def test_the_messages_that_are_held_are_bounded() -> None:
    sample = LastSample(10, 2)
    made = [draft(number) for number in range(3)]
    sample.put(made[0], "a", 0)
    sample.put(made[1], "b", 1)
    assert sample.put(made[2], "c", 2) == (None, made[0])
    assert sample.due() == made[1:]
    assert sample.due() == []


# --- in a pipeline


def test_messages_that_do_not_pass_are_released() -> None:
    made = pipeline(deadband={"field": "v", "absolute": 1})
    sources = [Source() for _ in range(3)]
    outcomes = [made.process(draft({"v": v}, source=source), 0) for v, source in zip((1, 1, 3), sources, strict=True)]
    assert [len(each.ready) for each in outcomes] == [1, 0, 1]
    assert outcomes[1].released == [sources[1]]


def test_the_key_is_the_channel_or_a_template() -> None:
    made = pipeline(deadband={"field": "v", "absolute": 1})
    assert [len(made.process(draft({"v": 1}, channel), 0).ready) for channel in ("in/1", "in/2", "in/1")] == [1, 1, 0]
    made = pipeline(deadband={"field": "v", "absolute": 1}, key="{x}")
    found = [len(made.process(draft({"v": 1}, channel, x=x), 0).ready) for channel, x in (("in/1", "a"), ("in/2", "a"))]
    assert found == [1, 0]


def test_messages_of_one_message_are_thinned_one_after_the_other() -> None:
    here = "tests.gateway.pipeline.functions"
    made = pipeline(transform=[{"call": f"{here}:several"}], deadband={"field": "item", "absolute": 1})
    assert values(made.process(draft([1, 1, 2, 2, 5]), 0).ready) == [{"item": 1}, {"item": 2}, {"item": 5}]
    made = pipeline(transform=[{"call": f"{here}:several"}], sample={"every": 10})
    assert values(made.process(draft([1, 2]), 0).ready) == [{"item": 1}]


def test_sampling_comes_after_the_deadband() -> None:
    made = pipeline(deadband={"field": "v", "absolute": 1}, sample={"every": 10})
    found = [len(made.process(draft({"v": v}), at).ready) for at, v in ((0, 1), (1, 5), (10, 1), (11, 1), (12, 5))]
    # 5 is not remembered by the deadband: sampling has left it out
    assert found == [1, 0, 0, 0, 1]
