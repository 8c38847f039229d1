"""Waiting: a signal ends it, whichever thread the system hands the signal to."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from messaging.execution import Flag, Promise, Waiters
from tests.doubles.fake import PATIENCE, FakeBroker, until
from tests.doubles.fixtures import Connect
from tests.interrupts import again, interrupt_everywhere


class NoticedError(Exception):
    """What the handler of the signal raises."""


@pytest.fixture
def elsewhere() -> Iterator[Callable[[], Future[bool]]]:
    """Has another thread take a signal as soon as this one waits; whether this one noticed by itself."""
    noticed = threading.Event()
    main = threading.get_ident()

    def handle(*_: object) -> None:
        noticed.set()
        raise NoticedError

    def take() -> bool:
        noticed.clear()
        until(lambda: sys._current_frames()[main].f_code is Flag.wait.__code__)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        if noticed.wait(PATIENCE):
            return True
        signal.pthread_kill(main, signal.SIGUSR1)  # for the test to end
        return False

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(threading.get_ident).result(PATIENCE)  # starting a thread waits, too
            yield lambda: pool.submit(take)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("timeout", [None, 1e6])
def test_a_signal_that_another_thread_takes_ends_the_wait(
    elsewhere: Callable[[], Future[bool]], timeout: float | None
) -> None:
    taken = elsewhere()
    with pytest.raises(NoticedError):
        Flag().wait(timeout)
    assert taken.result(PATIENCE)


def test_it_ends_waiting_for_an_outcome(elsewhere: Callable[[], Future[bool]]) -> None:
    promise: Promise[None] = Promise("a test")
    taken = elsewhere()
    with pytest.raises(NoticedError):
        promise.result()
    assert taken.result(PATIENCE)


def test_it_ends_waiting_for_a_message_and_loses_none(
    elsewhere: Callable[[], Future[bool]], broker: FakeBroker, connect: Connect
) -> None:
    with connect(broker).subscribe("a") as stream:
        for wait in (stream.receive, lambda: next(iter(stream))):
            taken = elsewhere()
            with pytest.raises(NoticedError):
                wait()
            assert taken.result(PATIENCE)
            broker.deliver(b"1")
            assert stream.receive(PATIENCE).payload == b"1"


def test_a_wait_ends_with_the_flag_or_after_its_time() -> None:
    flag = Flag()
    for timeout in (-1, 0, 0.05, 0.7):
        started = time.monotonic()
        assert not flag.wait(timeout)
        assert max(0, timeout) <= time.monotonic() - started < max(0, timeout) + PATIENCE
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(flag.wait, timeout) for timeout in (None, PATIENCE)]
        flag.set()
        assert [each.result(PATIENCE) for each in waiting] == [True, True]
    for timeout in (None, 0, -1, 1e300, float("inf")):
        assert flag.wait(timeout)


def test_an_interrupt_anywhere_in_a_wait_leaves_nothing_locked() -> None:
    flag, waiters = Flag(), Waiters()

    def run() -> None:
        flag.clear()
        again(lambda: flag.wait(0.0001))
        again(flag.set)
        assert again(lambda: flag.wait(PATIENCE))
        again(lambda: waiters.wait_for(flag.is_set, PATIENCE))
        again(lambda: waiters.wait_for(lambda: False, 0.0001))
        again(waiters.wake)

    assert interrupt_everywhere(run, lambda: None, "waiting.py") > 30
    again(waiters.wake)
    assert not waiters


def test_a_thread_that_waits_for_a_condition_is_woken() -> None:
    waiters = Waiters()
    held: list[None] = []
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(waiters.wait_for, lambda: bool(held), timeout) for timeout in (None, PATIENCE)]
        until(lambda: waiters)
        held.append(None)
        waiters.wake()
        assert [each.result(PATIENCE) for each in waiting] == [True, True]
    assert not waiters.wait_for(lambda: False, 0.01)
    assert not waiters
