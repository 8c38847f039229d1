"""Waiting: a signal ends it, whichever thread the system hands the signal to."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from messaging import Message
from messaging.execution import Flag, Promise, Waiters
from messaging.testing.waiting import PATIENCE, eventually
from tests.doubles.fake import FakeBroker
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
        eventually(lambda: sys._current_frames()[main].f_code is Flag.wait.__code__)
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
        eventually(lambda: waiters)
        held.append(None)
        waiters.wake()
        assert [each.result(PATIENCE) for each in waiting] == [True, True]
    assert not waiters.wait_for(lambda: False, 0.01)
    assert not waiters


def test_a_storm_of_signals_raises_only_the_error_of_the_handler(broker: FakeBroker, connect: Connect) -> None:
    """Not as ``RuntimeError: release unlocked lock``; and every message arrives."""
    #: not empty while the main thread is ready for a signal
    ready: list[None] = []

    def handle(*_: object) -> None:
        if ready:
            raise NoticedError

    def receive() -> tuple[Message | None, int]:
        message, count = None, 0
        try:
            ready.append(None)
            message = stream.receive(PATIENCE)
            ready.clear()
        except NoticedError:
            count = 1
        ready.clear()
        return message, count

    def storm() -> None:
        while not is_over.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(0.0003)  # sleeps: a storm of signals

    stream = connect(broker).subscribe("a", prefetch=4)
    broker.wait_subscribed()
    main, is_over = threading.get_ident(), threading.Event()
    noticed = received = 0
    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=storm)
    thread.start()
    try:
        ends = time.monotonic() + 1.5
        while time.monotonic() < ends:
            sender = threading.Timer(0.001, broker.deliver, (b"1", b"2", b"3"))
            sender.start()
            got: list[bytes] = []
            while len(got) < 3:
                message, count = receive()
                noticed += count
                if message is not None:
                    got.append(message.payload)
            assert got == [b"1", b"2", b"3"]
            received += 3
            sender.join()
    finally:
        is_over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert noticed > 10
    assert received > 10
