"""Delivery threads: they serve the lanes in turn, and a supervisor watches them.

**Threads.** A pool has one delivery thread while nothing blocks it: several would only compete for the interpreter.
When a lane has waited for some milliseconds because the receivers of others block, the supervisor starts another
thread, up to the limit of the pool. It also detects receivers that exceed their time limit. The supervisor is a thread
of its own and runs while there is something to supervise.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from messaging.environment.forks import LiveObjects
from messaging.environment.signals import attempt, on_failure
from messaging.errors.text import SafeLog
from messaging.execution.clock import clock
from messaging.execution.mailboxes import Mailbox, mailbox
from messaging.execution.threads import start_thread, workers

logger = SafeLog(__name__)

#: delivery threads of one pool, not counting those whose receivers exceed their time limit
THREADS: Final = 64
#: how long waiting work is left to the running threads before another one is started, seconds. Not less than the
#: interpreter's switch interval: a thread that is ready to run may wait that long for its turn
GROW_AFTER: Final = 0.005
#: interval of the supervisor while no lane waits, seconds
_LOOK: Final = 0.1
#: how long the supervisor stays when there is nothing to supervise, seconds
_STAY: Final = 1.0


#: a ``ThreadLane`` and a ``LoopLane``: their module imports this one
_ThreadLane: TypeAlias = Any
_LoopLane: TypeAlias = Any

#: of threads that run receivers: ``pool``
here: Final = threading.local()


class ReceiverProgress:
    """Progress of a thread or task that runs receivers, for the supervisor."""

    __slots__ = ("begun", "is_reported", "seen", "spent")

    def __init__(self) -> None:
        #: items begun so far
        self.begun = 0
        # --- the supervisor's: ``begun`` at its last look, the seconds that count since, whether a stall was reported
        self.seen = -1
        self.spent = 0.0
        self.is_reported = False

    def is_late(self, timeout: float, step: float) -> bool:
        """Return whether the item in progress is over its time limit after ``step`` more seconds; once per item."""
        if self.seen != self.begun:
            self.seen, self.spent, self.is_reported = self.begun, 0.0, False
            return False
        self.spent += step
        if self.is_reported or not timeout or self.spent <= timeout:
            return False
        self.is_reported = True
        return True


class DeliveryThread(ReceiverProgress):
    """State of one delivery thread of a pool, shared with the supervisor."""

    __slots__ = ("has_begun", "is_abandoned", "lane")

    def __init__(self) -> None:
        super().__init__()
        #: the thread runs
        self.has_begun = False
        #: the lane it runs
        self.lane: _ThreadLane | None = None
        #: its receiver did not return in time, so the thread no longer belongs to the pool. Final only under its lock
        self.is_abandoned = False

    def is_still_at(self, lane: object) -> bool:
        """Return whether it has not moved since the supervisor looked."""
        return self.lane is lane and self.begun == self.seen


class _Heartbeat:
    """Tells whether an event loop turns."""

    __slots__ = ("_box", "_is_heard")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._box: Mailbox = mailbox(loop)
        self._is_heard = True

    def ask(self) -> bool:
        """Return whether the loop has turned since the last call."""
        if not self._is_heard:
            return False
        self._is_heard = False
        self._box.post(self._answer)
        return True

    def _answer(self) -> None:
        self._is_heard = True


def _taken_lock() -> threading.Lock:
    """Return a locked lock: acquiring it is the wait until another thread releases it."""
    lock = clock.lock()
    lock.acquire()
    return lock


class Pool:
    """The delivery threads of one event service. Thread safe.

    Where the system starts no more threads, the one kept by ``workers().hold()`` serves every lane. Without it that is
    logged, and delivery goes on with the next item for which a thread can be started.

    Args:
        name: of the service, for the log.
        threads: maximum number of threads, not counting those whose receivers exceed their time limit.
    """

    def __init__(self, threads: int = THREADS, name: str = "event delivery") -> None:
        self.name = name
        self._limit = threads
        self._threads: dict[DeliveryThread, None] = {}
        self.after_fork()
        _pools.add(self)

    def after_fork(self) -> None:
        """See ``Forkable``: threads do not survive a fork. A receiver that forked returns to an abandoned thread."""
        for thread in self._threads:
            thread.is_abandoned = True
        self._lock = threading.RLock()  # guards the following, and which lanes are scheduled
        self._threads = {}
        #: the lanes that wait for a thread, as a queue; each once
        self._ready: OrderedDict[_ThreadLane, None] = OrderedDict()
        #: the lanes that run on their loops
        self._adopted: dict[_LoopLane, None] = {}
        #: how many lanes threads have taken so far
        self._taken = 0
        #: no thread could be started
        self._is_starved = False
        self._supervisor = _Supervisor(self)

    @property
    def threads(self) -> int:
        """Number of delivery threads now."""
        return len(self._threads)

    @property
    def has_work(self) -> bool:
        """Return whether a lane waits or runs, or a delivery thread is left."""
        return bool(self._threads or self._adopted or self._ready)

    @property
    def is_idle(self) -> bool:
        """Return whether there is no work, and the supervisor has ended."""
        return not (self.has_work or self._supervisor.is_running)

    def is_inside(self) -> bool:
        """Return whether the calling thread runs a receiver of this pool."""
        return getattr(here, "pool", None) is self

    # --- lanes

    def schedule(self, lane: _ThreadLane) -> None:
        """Have a thread run a lane, unless one does."""
        thread = None
        try:
            with self._lock:
                if lane.is_scheduled or lane.is_closed:
                    return
                self._ready[lane] = None
                lane.is_scheduled = True
                if self._threads:
                    self._supervisor.hurry()
                else:
                    thread = self._add_thread()
            if thread is not None:
                self._start(thread)
            else:
                self._supervisor.start()
        except BaseException:  # not on_failure: each event of an idle lane comes here
            self._recover()
            raise

    def _recover(self) -> None:
        """Start a thread if an interrupt came while one was being started."""
        with self._lock:
            for thread in [*self._threads]:
                if not thread.has_begun:
                    thread.is_abandoned = True
                    self._threads.pop(thread, None)
            another = self._add_thread() if self._ready and not self._threads else None
        if another is not None:
            self._start(another)
        self._supervisor.start()

    def withdraw(self, lane: _ThreadLane) -> None:
        """Take back :meth:`schedule`, unless a thread runs the lane already."""
        with self._lock:
            if lane in self._ready:
                del self._ready[lane]
                lane.is_scheduled = False

    def resume(self, lane: _ThreadLane) -> bool:
        """Clear ``lane.is_stalled``; return whether it was set."""
        with self._lock:
            was_stalled, lane.is_stalled = bool(lane.is_stalled), False
        return was_stalled

    def adopt(self, lane: _LoopLane) -> bool:
        """Supervise a lane that is about to run on its loop; return whether it was not supervised before."""
        with self._lock:
            if lane.is_scheduled:
                return False
            lane.is_scheduled = True
            self._adopted[lane] = None
        self._supervisor.start()
        return True

    def disown(self, lane: _LoopLane) -> None:
        """Supervise a lane no more."""
        with self._lock:
            self._adopted.pop(lane, None)

    # --- delivery threads

    def has_abandoned(self, thread: DeliveryThread) -> bool:
        """Return whether a thread no longer belongs to the pool; final, unlike ``thread.is_abandoned`` alone."""
        with self._lock:
            return thread.is_abandoned

    def _add_thread(self) -> DeliveryThread:
        thread = DeliveryThread()
        self._threads[thread] = None
        return thread

    def _start(self, thread: DeliveryThread) -> None:
        try:
            workers().submit(lambda: self._serve(thread))
        except RuntimeError as error:
            with self._lock:
                self._threads.pop(thread, None)
                if self._threads:
                    return
                for lane in self._ready:
                    lane.is_scheduled = False  # the next put tries again
                is_first, self._is_starved = not self._is_starved, True
            if is_first:
                logger.error("%s: cannot start a delivery thread: %s; retrying with the next event", self.name, error)
        else:
            self._is_starved = False

    def _begins(self, thread: DeliveryThread) -> bool:
        """Return whether a started thread is still needed; :meth:`_recover` may have started another instead."""
        with self._lock:
            thread.has_begun = not thread.is_abandoned
            return thread.has_begun

    def _serve(self, thread: DeliveryThread) -> None:
        """Run one lane after the other until none has items."""
        here.pool = self
        try:
            if not self._begins(thread):
                return
            self._supervisor.start()
            lane = self._take(thread)
            while lane is not None:
                try:  # not ``attempt``: it would cost each event a call
                    lane.run(thread)
                except BaseException:  # receivers guard themselves: this is a defect
                    logger.exception("the receiver of %s raised", lane.name)
                thread.lane = None  # it cannot be late from now on; set before the lock is asked whether it was
                if thread.is_abandoned and self.has_abandoned(thread):
                    return
                if len(lane):
                    lane = self._take(thread, lane)
                else:
                    lane.unschedule()
                    lane = self._take(thread)
        finally:
            here.pool = None

    def _take(self, thread: DeliveryThread, unfinished: _ThreadLane | None = None) -> _ThreadLane | None:
        with self._lock:
            if unfinished is not None:
                self._ready[unfinished] = None
            if not self._ready:
                self._threads.pop(thread, None)  # under the lock: the next ``schedule`` starts another one
                if not self._ready:  # still: a finalizer may have put an item
                    return None
                self._threads[thread] = None
            lane, _ = self._ready.popitem(last=False)
            lane.is_scheduled = True
            thread.begun += 1
            thread.lane = lane
            self._taken += 1
            if self._ready:
                self._supervisor.hurry()
            return lane


class _Supervisor:
    """Starts further delivery threads of a pool, and detects receivers that exceed their time limit. Thread safe."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        #: stands for the supervisor thread that runs, or is being started
        self._current: object | None = None
        self._is_hurried = False
        self._wake_up = _taken_lock()
        self._heartbeats: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Heartbeat] = weakref.WeakKeyDictionary()

    @property
    def is_running(self) -> bool:
        """Return whether the supervisor thread runs, or is being started."""
        return self._current is not None

    def hurry(self) -> None:
        """Look soon: lanes wait while threads are busy, so that another thread may be needed. Under the pool's lock."""
        if not self._is_hurried and len(self._pool._threads) < self._pool._limit:
            self._is_hurried = True
            with contextlib.suppress(RuntimeError):  # released already, by a signal handler that interrupted this
                self._wake_up.release()

    def start(self) -> None:
        """Start the supervisor thread, unless it runs."""
        if self.is_running:
            return
        current = object()
        # the next call tries again; a thread that was started sees that it is not the current one
        with contextlib.suppress(RuntimeError), on_failure(self._give_up, current):
            with self._pool._lock:
                if self._current is not None:  # started by another thread, just now
                    return
                self._current = current
            # no worker: the last one that can be had has to deliver
            start_thread(lambda: self._run(current), "messaging-supervisor")

    def _give_up(self, current: object) -> None:
        if self._current is current:
            self._current = None

    def _run(self, current: object) -> None:
        error = attempt(self._watch, current)
        if error is not None:
            logger.error("%s: the supervisor of the delivery threads failed", self._pool.name, exc_info=error)
            self._current = None

    def _watch(self, current: object) -> None:
        """Look until there has been nothing to do for some time, or there is another supervisor."""
        pool = self._pool
        taken = -1
        looked = needed = clock.monotonic()
        to_do: deque[Callable[[], object]] = deque()
        while True:
            self._wake_up.acquire(timeout=_LOOK)
            if self._is_hurried:
                clock.pause(GROW_AFTER)
            now = clock.monotonic()
            with pool._lock:
                if self._current is not current:
                    return
                self._wake_up.acquire(blocking=False)
                self._is_hurried = False
                more = self._missing(taken)
                taken = pool._taken
                if now - looked >= _LOOK:
                    # what kept the supervisor for longer kept receivers, too
                    to_do += self._stalled(min(now - looked, 2 * _LOOK))
                    looked = now
                if pool._ready:
                    self.hurry()
                if to_do or self._is_needed():
                    needed = now
                elif now - needed > _STAY:
                    self._current = None
                    if not self._is_needed():  # still: a finalizer may have put an item
                        return
                    self._current = current
            for thread in more:
                pool._start(thread)
            with contextlib.suppress(RuntimeError):  # no thread can be started: after the next look
                while to_do:
                    workers().submit(to_do[0])
                    to_do.popleft()

    def _is_needed(self) -> bool:
        return self._pool.has_work

    def _missing(self, taken: int) -> list[DeliveryThread]:
        """Return further threads, if lanes wait and no thread has taken a lane since the last look."""
        pool = self._pool
        if not pool._ready or taken != pool._taken:
            return []
        count = min(len(pool._ready), max(1, len(pool._threads)), pool._limit - len(pool._threads))
        return [pool._add_thread() for _ in range(count)]

    def _stalled(self, step: float) -> list[Callable[[], object]]:
        """Abandon the threads of receivers that exceed their time limit; return what their lanes have to do."""
        pool = self._pool
        found: list[Callable[[], object]] = []
        for thread in [*pool._threads]:
            lane = thread.lane
            if lane is None or not thread.is_late(lane.timeout, step):
                continue
            # The thread moves on first, and then reads whether it was abandoned; here it is the other way round. So
            # either it is seen that it moved on, or it reads that it may be abandoned, and waits for the lock.
            thread.is_abandoned = True
            if thread.is_still_at(lane):
                pool._threads.pop(thread, None)
                lane.is_stalled = True
                found.append(lane.report_stall)
            else:
                thread.is_abandoned = False
        heard: dict[asyncio.AbstractEventLoop, bool] = {}
        for each in [*pool._adopted]:
            if each.is_closed and not each.task.is_busy:
                pool._adopted.pop(each, None)
            elif each.task.is_orphaned:
                pool._adopted.pop(each, None)
                found.append(each.report_stall if each.task.lose() else each.settle)
            elif each.task.is_busy and each.timeout and self._is_late(each, step, heard):
                found.append(each.report_stall)
        return found

    def _is_late(self, lane: _LoopLane, step: float, heard: dict[asyncio.AbstractEventLoop, bool]) -> bool:
        loop = lane.loop
        if loop not in heard:
            heartbeat = self._heartbeats.get(loop)
            if heartbeat is None:
                heartbeat = self._heartbeats[loop] = _Heartbeat(loop)
            heard[loop] = heartbeat.ask()
        # only the time counts in which the task could run, or kept the other tasks from running
        task = lane.task
        progress: ReceiverProgress = task.progress
        return progress.is_late(lane.timeout, step if heard[loop] or task.has_the_turn else 0.0)


_pools: Final = LiveObjects[Pool]()
