"""The threads of the process, and the workers, which run observers and other user callbacks.

=============================  ============================================  ===========================================
thread                         runs                                          how many
=============================  ============================================  ===========================================
``messaging-engine``           the loop of all instances; no user code       one, from the first instance on
``messaging-handlers``         coroutines that were registered without a     one, from the first of them on
                               running event loop
``messaging-worker``           observers, handlers, callbacks, events;       the jobs that run, and idle ones for
                               blocking calls (``on_worker``)                ``IDLE_SECONDS``; see below
``messaging-journal``          records are written and synced, positions of  one for each open journal that is written
                               cursors stored; no user code                  to
``messaging-history``          events are encoded for a durable history; no  one for each event bus that has one
                               user code, except reading values of events
``messaging-relay``            the relay of a transactional outbox           one for each ``Relay`` on a thread
``messaging-supervisor``       delivery threads are added, receivers over    one for each event service and monitor that
                               their time limit detected; no user code       has something to deliver
``messaging-gateway-control``  connections to the control socket of a        one for each gateway, and one for each
                               gateway are accepted, their requests          request
                               executed
``messaging-http``             the HTTP server of a monitoring endpoint, or  one for each of them, and one for each
                               of a monitor; reporters                       connection
``messaging-monitor``          snapshots of a monitor are taken; reporters   one for each monitor
``messaging-snapshots``        snapshots are taken and published; reporters  one for each publisher of snapshots
=============================  ============================================  ===========================================

All are daemon threads. Each source of jobs is bounded, so a blocked job delays no job of another source: one job at a
time for each stream and each observer of connection states (``Serial``); ``concurrency`` jobs for each handler;
``CALLBACK_THREADS`` for the callbacks of all promises; ``Pool(threads)`` for each event service, not counting receivers
over their time limit; one look-up for each name of a host, one attempt to connect and one question for credentials for
each instance.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final
from weakref import WeakSet

from messaging.environment.forks import per_process
from messaging.environment.signals import attempt, on_failure
from messaging.errors.text import SafeLog
from messaging.execution.clock import clock

logger = SafeLog(__name__)

#: time after which an idle thread ends, seconds
IDLE_SECONDS: Final = 1.0

#: a job contains the exceptions of its user code, so one that raises has a defect
_DEFECT: Final = "worker job failed"


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Run ``target`` on a daemon thread of its own.

    ``Thread.start`` waits for the new thread with a ``threading.Event``. On the main thread an interrupt of that wait
    can leave the new thread blocked for ever, see :mod:`messaging.execution.waiting`. The main thread therefore
    starts a raw thread, which calls ``Thread.start``.

    Raises:
        RuntimeError: no thread can be started, or the interpreter is ending, where the wait would never end.
    """
    if sys.is_finalizing():
        raise RuntimeError("the interpreter is ending")
    target = clock.thread(target)
    thread = threading.Thread(target=target, name=name, daemon=True)
    if threading.get_ident() != threading.main_thread().ident:
        thread.start()
    else:
        _thread.start_new_thread(_start, (thread, target))
    return thread


def _start(thread: threading.Thread, target: Callable[[], object]) -> None:
    try:
        thread.start()
    except RuntimeError:  # no further thread can be started: this one runs the target
        target()


class _Worker:
    __slots__ = ("wake",)

    def __init__(self) -> None:
        self.wake = clock.lock()  # held by an idle worker, which waits by acquiring it again
        self.wake.acquire()


class Workers:
    """A pool of daemon threads. Thread safe.

    Idle threads end, but the last one stays as long as there is a holder (:meth:`hold`). If no further thread can be
    started, at the end of the interpreter or at a limit of the system, that thread runs all jobs one after the other.
    """

    def __init__(self) -> None:
        #: most recently idle last: the warmest thread gets the next job, and the coldest ones end
        self._idle: deque[_Worker] = deque()
        #: every job wakes or starts a thread, which runs it unless another thread has just become free
        self._jobs: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()  # guards _holders
        #: weak, because an interrupt may keep a holder from its call of :meth:`release`
        self._holders: WeakSet[object] = WeakSet()

    def hold(self, holder: object) -> None:
        """Keep one thread ready until :meth:`release` with the same object, or until that is garbage-collected."""
        with self._lock:
            first = not self._holders
            self._holders.add(holder)
        if first and not self._idle:
            self.submit(_nothing)

    def release(self, holder: object) -> None:
        """Undo :meth:`hold`; idempotent."""
        with self._lock:
            self._holders.discard(holder)

    def submit(self, job: Callable[[], object]) -> None:
        """Run ``job`` on a thread at once. It must not raise; an exception is logged.

        If an interrupt ends this call, the job may have been submitted.

        Raises:
            RuntimeError: no thread can be started, and there is no holder.
        """
        self._jobs.append(job)
        try:
            worker = self._idle.pop()
        except IndexError:
            self._start(job)
        else:
            try:
                worker.wake.release()
            except RuntimeError:  # awake already: another thread was interrupted after it popped the worker
                return

    def _start(self, job: Callable[[], object]) -> None:
        try:
            start_thread(self._work, "messaging-worker")
        except RuntimeError:
            if not self._holders:
                with contextlib.suppress(ValueError):  # a thread that has just become free runs it
                    self._jobs.remove(job)
                    raise
                return
            # a thread may have become idle just now without seeing the job
            with contextlib.suppress(IndexError):
                self._idle.pop().wake.release()

    def _work(self) -> None:
        worker = _Worker()
        while True:
            while self._jobs:
                try:
                    job = self._jobs.popleft()
                except IndexError:  # another thread took the job
                    break
                error = attempt(job)
                if error is not None:
                    logger.error(_DEFECT, exc_info=error)
                del job, error  # an idle thread must not keep them alive
            self._idle.append(worker)
            if self._jobs:  # submitted just now, by a thread that found no idle worker, or was interrupted
                with contextlib.suppress(IndexError):
                    self._idle.pop().wake.release()
            if not worker.wake.acquire(timeout=IDLE_SECONDS):
                try:
                    self._idle.remove(worker)
                except ValueError:
                    # popped by submit() just now: the job is queued, and the wake-up follows unless interrupted
                    worker.wake.acquire(timeout=IDLE_SECONDS)
                else:
                    if not self._jobs and (not self._holders or self._idle):
                        return


def _nothing() -> None:
    """Do nothing: the job that starts a thread in advance."""


class Lanes:
    """Runs short jobs in order of submission on at most ``limit`` workers. Thread safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()  # guards _active against the emptiness of _jobs
        #: an object for each lane that is running or about to run
        self._active: set[object] = set()

    def submit(self, job: Callable[[], object]) -> None:
        """Run ``job``, which must not raise, as soon as a lane is free.

        If an interrupt ends this call, the job runs at the latest with the next one.
        """
        lane = object()
        with on_failure(self._end, lane):  # it may be running, or never start
            with self._lock:
                self._jobs.append(job)
                if len(self._active) >= self._limit:
                    return
                self._active.add(lane)
            workers().submit(partial(self._drain, lane))

    def _end(self, lane: object) -> None:
        with self._lock:
            self._active.discard(lane)

    def _drain(self, lane: object) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._active.discard(lane)
                    return
                self._active.add(lane)
                job = self._jobs.popleft()
            error = attempt(job)
            if error is not None:
                logger.error(_DEFECT, exc_info=error)
            del job, error


#: maximum number of threads for callbacks of promises
CALLBACK_THREADS: Final = 32


#: returns the worker threads of the process
workers: Final = per_process(Workers)


@per_process
def callback_lanes() -> Lanes:
    """Return the lanes of the callbacks of promises."""
    return Lanes(CALLBACK_THREADS)


def call_back(job: Callable[[], object]) -> None:
    """Run a callback of a promise. It must not raise."""
    callback_lanes().submit(job)


class Serial:
    """Runs a function on a worker thread while there is work, never on two threads at once. Thread safe.

    A thread is occupied only while there is work. Two objects never wait for each other.

    Args:
        drain: does all pending work. It must not raise.
        has_work: returns whether work is pending; called after ``drain``, so that work added meanwhile is not missed.
    """

    __slots__ = ("_busy", "_drain", "_has_work")

    def __init__(self, drain: Callable[[], object], has_work: Callable[[], object]) -> None:
        self._drain = drain
        self._has_work = has_work
        #: the right to run: :meth:`wake` acquires it, and the worker releases it when no work is left
        self._busy = threading.Lock()

    def wake(self) -> bool:
        """Start a worker unless one is running; return whether one was started. To be called after work was added.

        Raises:
            RuntimeError: no thread can be started. The next call tries again.
        """
        if not self._busy.acquire(blocking=False):
            return False
        try:
            workers().submit(self._run)
        except RuntimeError:  # the job is not queued: an interrupt, which is no RuntimeError, may leave it queued
            self._busy.release()
            raise
        return True

    def _run(self) -> None:
        while True:
            try:
                self._drain()
            finally:
                self._busy.release()
            if not self._has_work() or not self._busy.acquire(blocking=False):
                return
