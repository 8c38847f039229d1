"""``messaging.testing.waiting``: waits that end with their condition, and errors that say what was seen last."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import reactivex
from reactivex import operators as ops

import messaging
from messaging.testing.waiting import (
    PATIENCE,
    Recorder,
    eventually,
    eventually_async,
    in_thread,
    observed,
    results,
    subscribed,
)


def test_a_wait_returns_what_its_condition_returned() -> None:
    values = iter([0, "", "found"])
    assert eventually(lambda: next(values)) == "found"


def test_a_wait_in_vain_names_the_state_the_last_result_and_the_values_it_looks_at() -> None:
    arrived = [1, 2]
    with pytest.raises(AssertionError) as caught:
        eventually(lambda: len(arrived) > 2, "a third item", patience=0.01)
    text = str(caught.value)
    assert "waited 0.01 s in vain for: a third item" in text
    assert "the condition returned False" in text
    assert "arrived = [1, 2]" in text


def test_an_assertion_of_the_condition_is_not_yet_and_is_shown_at_the_end() -> None:
    def check() -> bool:
        raise AssertionError("3 is not 4")

    with pytest.raises(AssertionError, match="last seen: 3 is not 4"):
        eventually(check, patience=0.01)


def test_a_condition_may_look_at_what_has_not_arrived() -> None:
    arrived: list[dict[str, int]] = []
    coming: list[dict[str, int]] = [{}, {"depth": 7}, {}]

    def check() -> bool:
        try:
            return arrived[-1]["depth"] == 7
        finally:
            arrived.append(coming.pop())

    assert eventually(check)
    with pytest.raises(AssertionError, match=r"last seen: the condition raised KeyError\('age'\)"):
        eventually(lambda: arrived[-1]["age"], patience=0.01)


def test_another_error_of_the_condition_ends_the_wait() -> None:
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 // 0)


def test_a_condition_that_holds_at_the_deadline_holds() -> None:
    begin = time.monotonic()
    assert eventually(lambda: time.monotonic() >= begin + 0.02, patience=0.02)


def test_a_coroutine_waits_without_blocking_its_loop() -> None:
    async def main() -> None:
        arrived: list[int] = []
        asyncio.get_running_loop().call_later(0.01, arrived.append, 1)
        assert await eventually_async(lambda: arrived) == [1]
        with pytest.raises(AssertionError, match="in vain"):
            await eventually_async(lambda: len(arrived) == 2, patience=0.01)

    asyncio.run(main())


def test_a_recorder_is_a_handler_an_observer_and_a_list() -> None:
    recorder: Recorder[int] = Recorder()
    recorder(1)
    recorder.append(2)
    recorder.on_next(3)
    recorder += [4]
    assert recorder == [1, 2, 3, 4]
    assert recorder.wait_for(4) == [1, 2, 3, 4]


def test_a_recorder_that_is_a_handler_gets_messages_and_not_their_contents() -> None:
    with messaging.connect("memory://waiting-handler") as m:
        received: Recorder[messaging.Message] = Recorder()
        m.on("a", received).ready.result(PATIENCE)
        m.publish("a", 7).result(PATIENCE)
        assert received.wait_for(1)[0].payload == b"7"


def test_a_recorder_wakes_the_thread_that_waits_for_its_items() -> None:
    recorder: Recorder[int] = Recorder()
    thread = threading.Thread(target=lambda: [recorder.append(number) for number in range(100)])
    thread.start()
    assert recorder.wait_for(100) == list(range(100))
    thread.join(PATIENCE)


def test_a_recorder_says_what_it_has_when_a_wait_is_in_vain() -> None:
    recorder: Recorder[str] = Recorder()
    recorder("first")
    with pytest.raises(AssertionError, match=r"for: 2 items; recorded \['first'\]"):
        recorder.wait_for(2, patience=0.01)


def test_an_item_whose_act_raises_is_not_recorded() -> None:
    def refuse(item: int) -> None:
        if item == 2:
            raise ValueError("two")

    recorder: Recorder[int] = Recorder(refuse)
    recorder(1)
    with pytest.raises(ValueError, match="two"):
        recorder(2)
    assert recorder == [1]


def test_the_end_of_a_stream_is_recorded() -> None:
    completed: Recorder[int] = Recorder()
    reactivex.of(1, 2).subscribe(completed)
    completed.wait_completed()
    assert completed == [1, 2]
    failed: Recorder[int] = Recorder()
    reactivex.throw(ValueError("no")).subscribe(failed)
    assert str(failed.wait_error()) == "no"
    assert failed.wait_ended() is failed.error


def test_a_subscription_is_confirmed_when_its_recorder_is_there() -> None:
    with messaging.connect("memory://waiting") as m:
        first, second = subscribed(m, "a/+"), observed(m.subscribe("a/b"))
        results(m.publish("a/b", b"%d" % number) for number in range(3))
        for recorder in (first, second):
            recorder.wait_for(3)
            assert recorder.payloads == [b"0", b"1", b"2"]
        first.dispose()
        m.publish("a/b", b"3").result(PATIENCE)
        second.wait_for(4)
        assert len(first) == 3
        second.wait_payload(b"3")
        assert second.wait_payloads(4) == [b"0", b"1", b"2", b"3"]
        piped = observed(m.subscribe("a/b").pipe(ops.take(1)))
        m.publish("a/b", b"4").result(PATIENCE)
        piped.wait_completed()
        assert piped.payloads == [b"4"]


def test_promises_are_all_made_before_the_first_is_waited_for() -> None:
    together = threading.Barrier(3)

    def meet(number: int) -> int:
        together.wait(PATIENCE)
        return number

    assert results(in_thread(meet, number) for number in (1, 2, 3)) == [1, 2, 3]


def test_an_error_in_a_thread_is_raised_where_its_result_is_asked_for() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        in_thread(int, "x").result(PATIENCE)
