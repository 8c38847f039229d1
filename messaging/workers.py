"""Worker threads: where observers and other user callbacks run.

A job occupies a thread only while it has something to do, and threads that have nothing to do are reused and then
leave. There is no upper bound of its own: every stream submits at most one job at a time, so the number of threads
is bounded by the number of streams that are busy at once, and a blocked observer can never starve another's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

#: how long a thread waits for another job before it leaves, seconds
IDLE_SECONDS: Final = 1.0


def start_thread(target: Callable[[], object], name: str) -> None:
    """Run ``target`` on a daemon thread of its own.

    Raises:
        RuntimeError: no thread can be started; at the end of the interpreter, where waiting for it would never end.
    """
    if sys.is_finalizing():
        raise RuntimeError("the interpreter is ending")
    threading.Thread(target=target, name=name, daemon=True).start()


class _Worker:
    __slots__ = ("job", "wake")

    def __init__(self, job: Callable[[], object]) -> None:
        self.wake = threading.Lock()  # held by the worker while it waits: acquiring it again is the wait
        self.wake.acquire()
        self.job: Callable[[], object] | None = job


class Workers:
    """A pool of daemon threads. Thread safe.

    Threads leave when they are idle, but the last one stays as long as somebody may have work (:meth:`hold`): when no
    other can be started, at the end of the interpreter or of the system's patience, it runs what they would have run,
    one job after the other.
    """

    def __init__(self) -> None:
        #: most recently idle last: the warmest thread gets the next job, the coldest ones leave
        self._idle: deque[_Worker] = deque()
        self._backlog: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()  # guards _holders
        self._holders = 0

    def hold(self) -> None:
        """Have a thread ready until :meth:`release`."""
        with self._lock:
            self._holders += 1
            first = self._holders == 1
        if first and not self._idle:
            self.submit(_nothing)

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        with self._lock:
            self._holders -= 1

    def submit(self, job: Callable[[], object]) -> None:
        """Run ``job`` on a thread now. It must not raise; if it does, that is logged.

        Raises:
            RuntimeError: no thread can be started and nobody holds one.
        """
        try:
            worker = self._idle.pop()
        except IndexError:
            self._start(job)
        else:
            worker.job = job
            worker.wake.release()

    def _start(self, job: Callable[[], object]) -> None:
        worker = _Worker(job)
        try:
            start_thread(lambda: self._work(worker), "messaging-worker")
        except RuntimeError:
            if not self._holders:
                raise
            self._backlog.append(job)
            # a thread may have become idle just now, and not have seen it
            with contextlib.suppress(IndexError):
                self._idle.pop().wake.release()

    def _work(self, worker: _Worker) -> None:
        while True:
            job = worker.job
            worker.job = None
            if job is not None:
                self._run(job)
                job = None
            while self._backlog:
                with contextlib.suppress(IndexError):
                    self._run(self._backlog.popleft())
            self._idle.append(worker)
            if not worker.wake.acquire(timeout=IDLE_SECONDS):
                try:
                    self._idle.remove(worker)
                except ValueError:
                    # popped by submit() just now: the job is coming
                    worker.wake.acquire()
                else:
                    if not self._holders or self._idle:
                        return

    @staticmethod
    def _run(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException:  # a job guards its user code itself: this is a defect
            logger.exception("worker job failed")


def _nothing() -> None:
    """The job of a thread that is to be ready."""


class Lanes:
    """Runs short jobs in order of submission on at most ``limit`` workers. Thread safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()  # guards _active against the emptiness of _jobs
        self._active = 0

    def submit(self, job: Callable[[], object]) -> None:
        """Run ``job``, which must not raise, as soon as a lane is free."""
        with self._lock:
            self._jobs.append(job)
            if self._active == self._limit:
                return
            self._active += 1
        _workers.submit(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._active -= 1
                    return
                job = self._jobs.popleft()
            try:
                job()
            except BaseException:  # a job guards its user code itself: this is a defect
                logger.exception("worker job failed")


#: threads that callbacks of promises may occupy at the same time
CALLBACK_THREADS: Final = 32

_workers = Workers()
_callbacks = Lanes(CALLBACK_THREADS)


def call_back(job: Callable[[], object]) -> None:
    """Run a callback of a promise; it must not raise."""
    _callbacks.submit(job)


def workers() -> Workers:
    """The process's worker threads."""
    return _workers


def _after_fork() -> None:
    global _workers, _callbacks
    _workers = Workers()
    _callbacks = Lanes(CALLBACK_THREADS)


os.register_at_fork(after_in_child=_after_fork)
