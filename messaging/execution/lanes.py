"""Ordered lanes: asynchronous delivery to one receiver each, in FIFO order.

A *lane* queues the items of one receiver and passes them on one at a time. Lanes are independent: a receiver that
blocks delays no other lane.

**Threads.** A :class:`ThreadLane` runs on the threads of a :class:`~messaging.execution.pool.Pool`. A
:class:`LoopLane` runs a coroutine function on its event loop, in one task while it has items.

**Putting** takes no lock unless the lane was idle. Lanes are bounded, see :class:`Lane`. Locks are reentrant: a signal
handler or a finalizer may put and close, whatever it interrupts.

**Forks.** Items that are queued when the process forks are the parent's to deliver: in the child, every lane drops
them. Lanes on threads go on in the child with the items that are put there. Event loops belong to the parent: in the
child, a lane on a loop behaves as if its loop was closed.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any, Final, cast

from messaging.environment.forks import LiveObjects
from messaging.environment.signals import attempt, taking
from messaging.errors.text import SafeLog
from messaging.execution.mailboxes import after_cancelled, mailbox
from messaging.execution.pool import DeliveryThread, Pool, ReceiverProgress, here
from messaging.execution.waiting import Waiters, may_block

logger = SafeLog(__name__)

#: items of one lane before its thread goes on to the next lane
_BATCH: Final = 64
#: default bound of a lane, items: from here on publishers wait
LIMIT: Final = 10_000
#: how many times the bound a lane may hold of publishers that must not wait
_HARD: Final = 10
#: how long publishers wait for room, seconds
_PATIENCE: Final = 30.0

#: the items of closed lanes
_NOTHING: Final[deque[Any]] = deque(maxlen=0)

#: no item: an item may be ``None``
_NO_ITEM: Final = object()


class _Barrier:
    """Item that no receiver gets: it is reached when every earlier item has been processed. Thread safe."""

    __slots__ = ("_once",)

    def __init__(self, reached: Callable[[], object]) -> None:
        self._once = [reached]

    def reach(self) -> None:
        """Call the callback, unless that was done."""
        try:
            reached = self._once.pop()
        except IndexError:
            return
        error = attempt(reached)
        if error is not None:
            logger.error("the callback after an event raised", exc_info=error)


class Room(Waiters):
    """The bound of a lane: publishers wait for room, or their items are dropped, counted and logged. Thread safe."""

    __slots__ = ("_is_overflowing", "_lane", "_lock", "dropped", "is_awaited", "limit")

    def __init__(self, lane: Lane, limit: int) -> None:
        super().__init__()
        self._lane = lane
        self.limit = limit
        self._lock = threading.RLock()  # guards the following
        #: items that were dropped because the lane was full, or replaced by newer ones
        self.dropped = 0
        #: a publisher found the lane full, and it is not half empty since
        self.is_awaited = False
        self._is_overflowing = False

    def wait(self) -> bool:
        """Wait for room where the calling thread may wait; return whether an item may be put."""
        # receivers of other pools must not wait either: those of this one may be waiting for them
        may_wait = may_block() and getattr(here, "pool", None) is None
        if self._has_emptied():
            return True
        fits = self.wait_for(self._has_emptied, _PATIENCE) if may_wait else len(self._lane) < _HARD * self.limit
        if fits:
            return True
        with self._lock:
            self.dropped += 1
            is_first, self._is_overflowing = not self._is_overflowing, True
        if is_first:
            logger.error(
                "%s is %d events behind: dropping new events until it has caught up",
                self._lane.name, len(self._lane),
            )  # fmt: skip
        return False

    def count_dropped(self, count: int = 1) -> None:
        """Count items that were dropped, such as the number that ``Lane.close`` returned."""
        with self._lock:
            self.dropped += count

    def offer(self) -> None:
        """Wake the publishers that wait, once the lane is half empty."""
        if not self._is_half_empty():
            return
        with self._lock:
            if self._is_half_empty():
                self.is_awaited = self._is_overflowing = False
                self.wake()

    def _has_emptied(self) -> bool:
        """Return whether the lane is half empty; otherwise :meth:`offer` is called when it is."""
        self.is_awaited = True  # before the length is read: a thread that takes an item looks the other way round
        return self._is_half_empty()

    def _is_half_empty(self) -> bool:
        return len(self._lane) <= self.limit // 2


class Lane(abc.ABC):
    """Bounded FIFO queue of one receiver, and the thread or task that empties it. Thread safe.

    Args:
        pool: supervises the lane; its threads run a :class:`ThreadLane`.
        name: of the receiver, for the log.
        timeout: time limit of one item, seconds; 0: none.
        stalled: called with the lane, on a worker thread, if an item exceeds the limit, or if the lane's event loop is
            closed. It decides what becomes of the lane: see the subclasses; or it closes the lane.
        limit: bound, items. A publisher that finds the lane full waits until it is half empty. A publisher that must
            not wait (on an event loop, in a receiver) may fill it up to ten times the bound. Beyond that, or after 30
            seconds, items are dropped, counted and logged.
        is_held: queue items without delivering them, until :meth:`release`.
    """

    def __init__(
        self,
        pool: Pool,
        name: str,
        *,
        timeout: float,
        stalled: Callable[[Lane], object],
        limit: int = LIMIT,
        is_held: bool = False,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.stalled = stalled
        #: a thread or task comes for the items; a held lane counts as scheduled until it is released
        self.is_scheduled = is_held
        #: its receiver exceeded the time limit, and ``stalled`` has not decided yet
        self.is_stalled = False
        self.is_closed = False
        self._is_held = is_held
        self._pool = pool
        self.room = Room(self, limit)
        #: once closed, a queue that keeps nothing
        self._items: deque[Any] = deque()
        #: barriers of a closed lane: reached when its receiver has returned
        self._left: deque[_Barrier] = deque()
        _lanes.add(self)

    def __len__(self) -> int:
        """Return the number of queued items."""
        return len(self._items)

    def items(self) -> list[Any]:
        """Return the queued items, and the barriers among them; a snapshot."""
        return [*self._items.copy()]

    def has_room(self) -> bool:
        """Return whether an item may be put; waits for room where the calling thread may wait."""
        return len(self._items) < self.room.limit or self.room.wait()

    def put(self, item: Any) -> None:
        """Enqueue ``item`` for the receiver, in FIFO order. Takes no lock unless the lane was idle.

        If an interrupt ends this call, the item is delivered at the latest with the next one.
        """
        self._items.append(item)
        if not self.is_scheduled:
            self._wake()

    def put_all(self, items: list[Any]) -> None:
        """Enqueue several items; no item of another thread comes between them."""
        self._items.extend(items)  # in one step, with the interpreter's lock
        if not self.is_scheduled:
            self._wake()

    def put_newest(self, item: Any) -> None:
        """Enqueue an item without waiting; a full lane drops its oldest item. Not from several threads at once."""
        items = self._items
        if len(items) >= self.room.limit:
            barriers: list[_Barrier] = []
            with contextlib.suppress(IndexError):  # the receiver took all of them just now
                while type(oldest := items.popleft()) is _Barrier:
                    barriers.append(oldest)
                self.room.count_dropped()
            # the receiver may still be processing the items before them
            items.extendleft(reversed(barriers))
            if self.is_closed:
                self._drop_all(items)
                self.settle()
        self.put(item)

    def release(self, first: list[Any]) -> None:
        """Deliver ``first``, then the items put since the lane was made. Once, if it was made held.

        Raises:
            RuntimeError: it is not held.
        """
        if not self._is_held:
            raise RuntimeError(f"{self.name} is not held")
        self._is_held = False
        self.room.limit += len(first)
        self._items.extendleft(reversed(first))  # in one step, too
        self.unschedule()

    def when_done(self, reached: Callable[[], object]) -> None:
        """Call ``reached`` when every earlier item has been processed or dropped.

        It runs on a delivery thread, on the receiver's event loop, or on the thread that closes the lane. It must not
        raise.
        """
        barrier = _Barrier(reached)
        self.put(barrier)
        if self.is_closed:  # then the barrier may be in the queue that keeps nothing
            self._left.append(barrier)
            self.settle()

    def close(self) -> int:
        """Drop the queued items, and every item that is put from now on.

        Returns:
            The number of items dropped now. The item that the receiver is processing is not among them.
        """
        self.is_closed = True
        items, self._items = self._items, _NOTHING
        lost = self._drop_all(items)
        self._withdraw()
        self.settle()
        self.room.wake()
        return lost

    # --- for subclasses and the pool

    @abc.abstractmethod
    def _wake(self) -> None:
        """Schedule the lane: an item was put while it was idle."""

    @abc.abstractmethod
    def _withdraw(self) -> None:
        """Unschedule a closed lane whose receiver is not running."""

    @abc.abstractmethod
    def _is_at_rest(self) -> bool:
        """Return whether the receiver of a closed lane has returned, or exceeded its time limit."""

    def unschedule(self) -> None:
        """Mark the lane as idle; schedule it again if items are queued. For the pool."""
        self.is_scheduled = False
        if self._items:  # put just now, by a thread that saw it scheduled
            self._wake()
        if self._left:
            self.settle()

    def report_stall(self) -> None:
        """Call ``stalled``. For the pool, on a worker thread."""
        try:
            self.stalled(self)
        finally:
            self.settle()

    def _drop_all(self, items: deque[Any]) -> int:
        lost = 0
        with contextlib.suppress(IndexError):
            while True:
                item = items.popleft()
                if type(item) is _Barrier:
                    self._left.append(item)
                else:
                    lost += 1
        return lost

    def settle(self) -> None:
        """Reach the barriers of a closed lane, if its receiver is at rest. For the pool."""
        with contextlib.suppress(IndexError):  # each of two threads reaches some
            while self._left and self._is_at_rest():
                self._left.popleft().reach()

    # --- forks

    def after_fork(self) -> None:
        """See ``Forkable``: drop the parent's items. Their finalizers may put others."""
        self._items.clear()
        self._left.clear()
        dropped = self.room.dropped
        self.room = Room(self, self.room.limit)
        self.room.dropped = dropped
        self.is_stalled = False
        self.is_scheduled = self._is_held


class ThreadLane(Lane):
    """Passes its items to a function, on the threads of its pool.

    If the function exceeds the time limit, the lane goes on only after :meth:`restart`.

    Args:
        receive: called with each item; must not raise.
        pool, name, timeout, stalled, limit, is_held: see :class:`Lane`.
    """

    def __init__(self, receive: Callable[[Any], object], pool: Pool, name: str, **options: Any) -> None:
        super().__init__(pool, name, **options)
        self._receive = receive

    def restart(self) -> None:
        """Go on after a stalled receiver, on another thread. Its own thread no longer serves the pool."""
        if self._pool.resume(self):
            self.unschedule()

    def run(self, thread: DeliveryThread) -> None:
        """Pass on up to a batch of items, on a delivery thread."""
        take, receive = self._items.popleft, self._receive
        first = thread.begun + 1
        room = self.room
        # it grows after each item, and before the thread reads whether it was abandoned: see ``pool._Supervisor``
        for thread.begun in range(first, first + _BATCH):
            if thread.is_abandoned:  # perhaps
                return
            try:
                item = take()
            except IndexError:
                return
            if room.is_awaited:
                room.offer()
            if type(item) is _Barrier:
                item.reach()
            else:
                receive(item)

    def _wake(self) -> None:
        self._pool.schedule(self)

    def _withdraw(self) -> None:
        self._pool.withdraw(self)

    def _is_at_rest(self) -> bool:
        return not self.is_scheduled or self.is_stalled or self._is_held


class LoopLane(Lane):
    """Passes its items to a coroutine function, in a task on an event loop.

    If the coroutine exceeds the time limit, the lane goes on when it returns or is cancelled; not after its loop was
    closed.

    Args:
        receive: called with each item, and awaited; must not raise anything but ``CancelledError``.
        loop: where.
        pool, name, timeout, stalled, limit, is_held: see :class:`Lane`.
    """

    def __init__(
        self,
        receive: Callable[[Any], Awaitable[object]],
        loop: asyncio.AbstractEventLoop,
        pool: Pool,
        name: str,
        **options: Any,
    ) -> None:
        super().__init__(pool, name, **options)
        self.loop = loop
        self.task = LaneTask(self, receive, loop)

    def _wake(self) -> None:
        try:
            if not self.is_closed and self._pool.adopt(self):
                self.task.start()
        except BaseException:  # an interrupt: if the task was started already, the next one is not
            self._pool.disown(self)
            self.is_scheduled = False
            raise

    def _withdraw(self) -> None:
        if not self.task.is_busy:
            self._pool.disown(self)

    def _is_at_rest(self) -> bool:
        return not self.task.is_busy

    def after_fork(self) -> None:
        """See ``Lane.after_fork``."""
        super().after_fork()
        self.task.leave_to_parent()


class LaneTask:
    """The task that empties a :class:`LoopLane`, one after the other while it has items.

    Receivers run with the context variables of the code that made the lane, not with those of a publisher.

    Args:
        lane: whose items it takes.
        receive, loop: see :class:`LoopLane`.

    Attributes:
        progress: of the receiver.
        is_busy: whether the task was started: a task that waits for its turn on the loop counts.
    """

    def __init__(
        self, lane: LoopLane, receive: Callable[[Any], Awaitable[object]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.progress = ReceiverProgress()
        self.is_busy = False
        self._lane = lane
        self._receive = receive
        self._loop = loop
        self._box = mailbox(loop)
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[None] | None = None
        self._work: Coroutine[Any, Any, None] | None = None
        #: the item that was taken from the queue, and not passed on yet
        self._taken: Any = _NO_ITEM
        self._is_parents = False

    @property
    def is_orphaned(self) -> bool:
        """Return whether its loop is closed, or belongs to the parent process: nothing is delivered any more."""
        return self._is_parents or self._loop.is_closed()

    @property
    def has_the_turn(self) -> bool:
        """Return whether it is the task that its loop runs now. From any thread."""
        task = self._task
        return self.is_busy if task is None else asyncio.current_task(self._loop) is task

    def start(self) -> None:
        """Start it soon. From any thread."""
        self._post(LaneTask._start)

    def cancel(self) -> None:
        """Cancel the item in progress. From any thread."""
        begun = self.progress.begun

        def cancel(found: LaneTask) -> None:
            if found._task is not None and found.progress.begun == begun:
                found._task.cancel()

        self._post(cancel)

    def _post(self, call: Callable[[LaneTask], object]) -> None:
        if self._is_parents:
            return
        # weakly: callbacks stay in the mailbox of a closed loop, and would keep the loop alive
        this = weakref.ref(self)

        def do() -> None:
            if (found := this()) is not None:
                call(found)

        self._box.post(do)

    def _start(self) -> None:
        if self._task is not None:  # an interrupt had it posted twice
            return
        self.is_busy = True  # before the queue is read: see _is_at_rest
        if not self._lane._items and self._taken is _NO_ITEM:
            self._rest()
            return
        self.progress.begun += 1
        self._context.run(self._create_task)  # tasks have a copy of it

    def _create_task(self) -> None:
        self._work = self._run()
        self._task = self._loop.create_task(self._work, name=f"events for {self._lane.name}")
        self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        items = taking(self._lane._items)
        receive, progress, room = self._receive, self.progress, self._lane.room
        count = 0
        while True:
            if self._taken is _NO_ITEM:
                try:
                    for self._taken in items:
                        break
                except IndexError:
                    return
            item = self._taken
            if room.is_awaited:
                room.offer()
            if type(item) is _Barrier:
                item.reach()
                self._taken = item = _NO_ITEM
            else:
                received = receive(item)
                self._taken = _NO_ITEM
                await received
            progress.begun += 1
            count += 1
            if count % _BATCH == 0:
                await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = self._work = None
        if task.cancelled():
            if self._lane._items:
                # most likely the loop is about to end: the supervisor detects that
                self.is_busy = False
                after_cancelled(self._loop, self._start)
                return
        elif (error := task.exception()) is not None:
            logger.error("the receiver of %s raised", self._lane.name, exc_info=error)
        self._rest()

    def lose(self) -> bool:
        """End the task of an orphaned lane; return whether ``stalled`` has to be called. Under the pool's lock."""
        lane, task = self._lane, self._task
        was_busy = self.is_busy and (task is None or not task.done())
        if task is not None and self._work is not None and getcoroutinestate(self._work) == CORO_CREATED:
            # the task has not begun and the items are still queued: asyncio need not report a lost task
            self._work.close()
            cast("Any", task)._log_destroy_pending = False
        self.is_busy = False
        lane.is_scheduled = False  # before the queue is read: a thread that puts an item looks the other way round
        lane.is_scheduled = lane.is_stalled = not lane.is_closed and (was_busy or bool(lane._items))
        return lane.is_stalled

    def _rest(self) -> None:
        self._lane._pool.disown(self._lane)
        self.is_busy = False
        self._lane.unschedule()

    def leave_to_parent(self) -> None:
        """Forget the task in a forked child: it is the parent's."""
        self._is_parents = True
        self._task = self._work = None
        self.is_busy = False


_lanes: Final = LiveObjects[Lane](is_late=True)
