"""Delivery, asynchronous and in order: each receiver has a lane, and threads go from lane to lane.

A *lane* holds what waits for one receiver, and gives it one item at a time, in the order they were put. Lanes know
nothing of each other: one that is held up holds up no other.

**Threads** are those of a :class:`~messaging.dispatch.pool.Pool`. Receivers that are coroutine functions run on their
event loop, one task for each lane that has something to do.

**Putting** takes no lock unless the lane was idle. Lanes are bounded: see :class:`Lane`. Locks may be taken again by
the thread that has them: signal handlers and finalizers may put and close, whatever they interrupt.

**Forks.** What waits when a process forks is the parent's to deliver: the child gives it up, in all lanes, and calls
nobody. Lanes on threads go on in the child with what is put there. Loops are the parent's: lanes on them are as if
their loop was closed.
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
from itertools import repeat
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, cast

from messaging.engine import mailbox, may_block
from messaging.safelog import SafeLog
from messaging.waiting import Waiters

if TYPE_CHECKING:
    from messaging.dispatch.pool import Pool, Server

logger = SafeLog(__name__)

#: items of one lane before its thread goes on to the next one
_BATCH: Final = 64
#: pause of a lane whose task somebody has cancelled, seconds
_AFTER_CANCELLED: Final = 0.1
#: what a lane may hold before publishers wait
LIMIT: Final = 10_000
#: how much more it may hold of publishers that must not wait, times
_HARD: Final = 10
#: how long publishers wait for room, seconds
_PATIENCE: Final = 30.0

#: what closed lanes hold, and will
_NOTHING: Final[deque[Any]] = deque(maxlen=0)

#: stands for no item: an item may be ``None``
_NO_ITEM: Final = object()

#: of threads that run receivers: ``pool``
here: Final = threading.local()


class _Marker:
    """An item that is no receiver's: tells when all that was put before it is done with. Thread safe."""

    __slots__ = ("_once",)

    def __init__(self, reached: Callable[[], object]) -> None:
        self._once = [reached]

    def reach(self) -> None:
        """Tell, unless that was done."""
        try:
            reached = self._once.pop()
        except IndexError:
            return
        try:
            reached()
        except BaseException:
            logger.exception("what was to be called after an event raised")


class Progress:
    """How far somebody who runs receivers has come, and for how long it has come no further."""

    __slots__ = ("begun", "is_known", "seen", "spent")

    def __init__(self) -> None:
        #: grows with each item
        self.begun = 0
        # --- the supervisor's: ``begun`` when it looked, the seconds that count since then, and whether that was late
        self.seen = -1
        self.spent = 0.0
        self.is_known = False

    def is_late(self, timeout: float, step: float) -> bool:
        """Whether an item is late after ``step`` more seconds; once for each."""
        if self.seen != self.begun:
            self.seen, self.spent, self.is_known = self.begun, 0.0, False
            return False
        self.spent += step
        if self.is_known or not timeout or self.spent <= timeout:
            return False
        self.is_known = True
        return True


class Lane(abc.ABC):
    """What waits for one receiver. Thread safe.

    Args:
        pool: whose threads deliver.
        name: of the receiver, for the log.
        timeout: how long one item may take, seconds; 0: for ever.
        stalled: called on a worker thread if one takes longer, or if its event loop is closed. What becomes of the
            lane is up to it: see the subclasses; or else it is closed.
        limit: what it may hold. A publisher that finds so much waits until half of it is gone; one that must not wait
            (on an event loop, in a receiver) goes on up to ten times as much. After that, or after thirty seconds,
            what is put is dropped, counted and logged.
        is_held: begin by holding what is put, until :meth:`release`.
    """

    def __init__(
        self,
        pool: Pool,
        name: str,
        *,
        timeout: float,
        stalled: Callable[[], object],
        limit: int = LIMIT,
        is_held: bool = False,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.stalled = stalled
        #: items that were not put because it was full, or that newer ones took the place of
        self.dropped = 0
        #: whether somebody comes for what is put; while it is held, that is whoever releases it
        self.is_scheduled = is_held
        #: its receiver was given up, and nobody has said what is to become of the rest
        self.is_stalled = False
        self.is_closed = False
        self._is_held = is_held
        self._pool = pool
        self._limit = limit
        #: once it is closed, the one that keeps nothing
        self._items: deque[Any] = deque()
        #: markers that outlived it: to be reached when its receiver has returned
        self._left: deque[_Marker] = deque()
        #: publishers that wait for room
        self._blocked = Waiters()
        self._room = threading.RLock()  # guards dropped and the following
        #: somebody found it full, and it is not yet half empty again
        self._is_crowded = False
        self._is_overflowing = False
        _lanes.add(self)

    def __len__(self) -> int:
        """How many items wait."""
        return len(self._items)

    def items(self) -> list[Any]:
        """Return the items that wait, and the markers among them; a snapshot."""
        return [*self._items.copy()]

    def has_room(self) -> bool:
        """Whether an item may be put; waits for room where the calling thread may wait."""
        return len(self._items) < self._limit or self._wait_for_room()

    def put(self, item: Any) -> None:
        """Have the receiver get ``item`` after all that was put before. Takes no lock unless the lane was idle."""
        try:
            self._items.append(item)
            if not self.is_scheduled:
                self._wake()
        except BaseException:  # an interrupt: what was put is delivered all the same
            self._wake_again()
            raise

    def put_all(self, items: list[Any]) -> None:
        """Put several; nothing that somebody else puts comes between them."""
        try:
            self._items.extend(items)  # in one step, with the interpreter's lock
            if not self.is_scheduled:
                self._wake()
        except BaseException:
            self._wake_again()
            raise

    def put_newest(self, item: Any) -> None:
        """Put an item without waiting; in a full lane, in the place of the oldest one. Not from several threads."""
        if len(self._items) >= self._limit:
            self._drop_oldest()
        self.put(item)

    def release(self, first: list[Any]) -> None:
        """Begin with ``first``, and go on with what was put since the lane was made. Once, if it was made held.

        Raises:
            RuntimeError: it is not held.
        """
        if not self._is_held:
            raise RuntimeError(f"{self.name} is not held")
        self._is_held = False
        self._limit += len(first)
        self._items.extendleft(reversed(first))  # in one step, too
        self._unschedule()

    def when_done(self, reached: Callable[[], object]) -> None:
        """Call ``reached`` when all that was put before is done with, or given up.

        On a delivery thread or the receiver's event loop, or on the one that closes the lane. It must not raise.
        """
        marker = _Marker(reached)
        self.put(marker)
        if self.is_closed:  # then it may be where nobody looks
            self._left.append(marker)
            self._settle()

    def close(self) -> int:
        """Give up what waits, and take no more: whatever is put from now on is not delivered.

        Returns:
            How many items were given up; the one that the receiver has got is not among them, and goes on.
        """
        self.is_closed = True
        items, self._items = self._items, _NOTHING
        lost = self._give_up(items)
        self._withdraw()
        self._settle()
        self._blocked.wake()
        return lost

    # --- for subclasses and the pool

    @abc.abstractmethod
    def _wake(self) -> None:
        """Something was put, and nobody is coming for it."""

    def _wake_again(self) -> None:
        """An interrupt ended a put, perhaps after it was noted that a thread or a task comes, and before it does."""
        if self._items and not self.is_scheduled:
            self._wake()

    @abc.abstractmethod
    def _withdraw(self) -> None:
        """It was closed: nobody need come, if nobody is here."""

    @abc.abstractmethod
    def _is_at_rest(self) -> bool:
        """Whether its receiver, since it was closed, has returned or was given up."""

    def _unschedule(self) -> None:
        """Whoever was to come does not, or no more."""
        self.is_scheduled = False
        if self._items:  # put just now, by somebody who saw that it was scheduled
            self._wake()
        if self._left:
            self._settle()

    def _tell_stalled(self) -> None:
        try:
            self.stalled()
        finally:
            self._settle()

    def _give_up(self, items: deque[Any]) -> int:
        lost = 0
        with contextlib.suppress(IndexError):
            while True:
                item = items.popleft()
                if type(item) is _Marker:
                    self._left.append(item)
                else:
                    lost += 1
        return lost

    def _settle(self) -> None:
        with contextlib.suppress(IndexError):  # of two at a time each gets some
            while self._left and self._is_at_rest():
                self._left.popleft().reach()

    def _drop_oldest(self) -> None:
        items = self._items
        markers: list[_Marker] = []
        with contextlib.suppress(IndexError):  # all was taken just now
            while type(oldest := items.popleft()) is _Marker:
                markers.append(oldest)
            with self._room:
                self.dropped += 1
        # what was put before them may be in the receiver's hands still
        items.extendleft(reversed(markers))
        if self.is_closed:
            self._give_up(items)
            self._settle()

    # --- bounds

    def _wait_for_room(self) -> bool:
        # receivers of other pools must not wait either: those of this one may be waiting for them
        may_wait = may_block() and getattr(here, "pool", None) is None
        if self._has_emptied():
            return True
        if may_wait:
            fits = self._blocked.wait_for(self._has_emptied, _PATIENCE)
        else:
            fits = len(self._items) < _HARD * self._limit
        if fits:
            return True
        with self._room:
            self.dropped += 1
            is_first, self._is_overflowing = not self._is_overflowing, True
        if is_first:
            logger.error("%s does not keep up: of %d events that wait, newer ones are dropped", self.name, len(self))
        return False

    def _has_emptied(self) -> bool:
        """Whether half is gone; if not, this is told as soon as it is."""
        self._is_crowded = True  # before it is looked: who takes something looks the other way round
        return self._is_half_empty()

    def _is_half_empty(self) -> bool:
        return len(self._items) <= self._limit // 2

    def _tell_of_room(self) -> None:
        if not self._is_half_empty():
            return
        with self._room:
            if self._is_half_empty():
                self._is_crowded = self._is_overflowing = False
                self._blocked.wake()

    # --- forks

    def _after_fork(self) -> None:
        self._items.clear()
        self._left.clear()
        self._blocked = Waiters()
        self._room = threading.RLock()
        self._is_crowded = self._is_overflowing = False
        self.is_stalled = False
        self.is_scheduled = self._is_held


class ThreadLane(Lane):
    """Gives its items to a function, on the threads of its pool.

    If it does not return in time, the lane goes on only if it is restarted.

    Args:
        receive: called with each item; must not raise.
        pool, name, timeout, stalled, limit, is_held: see :class:`Lane`.
    """

    def __init__(self, receive: Callable[[Any], object], pool: Pool, name: str, **options: Any) -> None:
        super().__init__(pool, name, **options)
        self._receive = receive

    def restart(self) -> None:
        """Go on after a receiver that did not return; the thread that it is on comes back no more."""
        if self._pool.resume(self):
            self._unschedule()

    def run(self, server: Server) -> None:
        """Give out some of what waits. On a delivery thread."""
        take, receive = self._items.popleft, self._receive
        first = server.begun + 1
        # it goes up after each item, and before it is looked whether the thread was given up: see Pool._stalled
        for server.begun in range(first, first + _BATCH):
            if server.is_abandoned:  # perhaps
                return
            try:
                item = take()
            except IndexError:
                return
            if self._is_crowded:
                self._tell_of_room()
            if type(item) is _Marker:
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
    """Gives its items to a coroutine function, in a task on an event loop.

    If it does not return in time, the lane goes on when it does, or is cancelled; if the loop is closed, it does not.
    Receivers have the context variables of whoever made the lane, not those of a publisher.

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
        self.progress = Progress()
        #: whether it has the loop; one that is waiting for it is not to blame
        self.is_busy = False
        self._receive = receive
        self._box = mailbox(loop)
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[None] | None = None
        self._work: Coroutine[Any, Any, None] | None = None
        #: taken, and not given to the receiver yet
        self._taken: Any = _NO_ITEM
        self._is_parents = False

    @property
    def is_orphaned(self) -> bool:
        """Whether its loop is closed, or another process's: nothing is delivered any more."""
        return self._is_parents or self.loop.is_closed()

    @property
    def has_the_turn(self) -> bool:
        """Whether it is what its loop runs now. From any thread."""
        task = self._task
        return self.is_busy if task is None else asyncio.current_task(self.loop) is task

    def cancel(self) -> None:
        """Cancel the item in progress. From any thread."""
        begun = self.progress.begun

        def cancel(lane: LoopLane) -> None:
            if lane._task is not None and lane.progress.begun == begun:
                lane._task.cancel()

        self._post(cancel)

    def _post(self, call: Callable[[LoopLane], object]) -> None:
        if self._is_parents:
            return
        # weakly: what a mailbox holds when its loop is closed stays there, and would hold the loop
        lane = weakref.ref(self)

        def do() -> None:
            if (found := lane()) is not None:
                call(found)

        self._box.post(do)

    def _wake(self) -> None:
        try:
            if not self.is_closed and self._pool.adopt(self):
                self._post(LoopLane._start)
        except BaseException:  # an interrupt: if the task is under way already, the next one is not started
            self._pool.disown(self)
            self.is_scheduled = False
            raise

    def _withdraw(self) -> None:
        if not self.is_busy:
            self._pool.disown(self)

    def _is_at_rest(self) -> bool:
        return not self.is_busy

    def _start(self) -> None:
        if self._task is not None:  # an interrupt had it posted twice
            return
        self.is_busy = True  # before it is looked whether it is closed: see _is_at_rest
        if not self._items and self._taken is _NO_ITEM:
            self._rest()
            return
        self.progress.begun += 1
        self._context.run(self._create_task)  # tasks have a copy of it

    def _create_task(self) -> None:
        self._work = self._run()
        self._task = self.loop.create_task(self._work, name=f"events for {self.name}")
        self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        # takes items in one step with assigning them, so that no interrupt of the loop's thread comes in between
        taking = map(methodcaller("popleft"), repeat(self._items))
        receive, progress = self._receive, self.progress
        count = 0
        while True:
            if self._taken is _NO_ITEM:
                try:
                    for self._taken in taking:
                        break
                except IndexError:
                    return
            item = self._taken
            if self._is_crowded:
                self._tell_of_room()
            if type(item) is _Marker:
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
            if self._items:
                # most likely the loop is about to end: then the supervisor finds out
                self.is_busy = False
                self.loop.call_later(_AFTER_CANCELLED, self._start)
                return
        elif (error := task.exception()) is not None:
            logger.error("the receiver of %s raised", self.name, exc_info=error)
        self._rest()

    def lose(self) -> bool:
        """It is orphaned: whether anybody has to be told. With the pool's lock."""
        task = self._task
        was_busy = self.is_busy and (task is None or not task.done())
        if task is not None and self._work is not None and getcoroutinestate(self._work) == CORO_CREATED:
            # nothing of it was done, and all is still there: no reason for Python to complain of a lost task
            self._work.close()
            cast("Any", task)._log_destroy_pending = False
        self.is_busy = False
        self.is_scheduled = False  # before it is looked what waits: who puts something looks the other way round
        self.is_scheduled = self.is_stalled = not self.is_closed and (was_busy or bool(self._items))
        return self.is_stalled

    def _rest(self) -> None:
        self._pool.disown(self)
        self.is_busy = False
        self._unschedule()

    def _after_fork(self) -> None:
        super()._after_fork()
        self._is_parents = True
        self._task = self._work = None
        self.is_busy = False


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


def after_fork() -> None:
    """In the child: what waits is the parent's. After the pools, since finalizers of items may put others."""
    for lane in [*_lanes]:
        lane._after_fork()
