"""Delivery, asynchronous and in order: each receiver has a lane, and threads go from lane to lane.

A *lane* holds what waits for one receiver, and gives it one item at a time, in the order they were put. Lanes know
nothing of each other: one that is held up holds up no other.

**Threads.** There is one delivery thread as long as nothing holds it up: with the interpreter's lock, several only
take it from each other. When something waits and no thread has come to it for some milliseconds, since the receivers
of others are waiting for something, there is another one, up to ``threads``. A supervisor looks for that, and for
receivers that do not return, while there is something to do. Receivers that are coroutine functions run on their event
loop, one task for each lane that has something to do.

**Putting** takes no lock unless the lane was idle. Lanes are bounded: see :class:`Lane`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from messaging.engine import mailbox, may_block
from messaging.workers import workers

logger = logging.getLogger(__name__)

#: delivery threads that one pool may have, beside those of receivers that do not return
THREADS: Final = 64
#: items of one lane before its thread goes on to the next one
_BATCH: Final = 64
#: how long what waits is left to the threads there are, seconds
_GROW_AFTER: Final = 0.005
#: how often the supervisor looks while nothing waits, seconds
_LOOK: Final = 0.1
#: looks without anything to do before the supervisor leaves
_IDLE_LOOKS: Final = 5
#: pause of a lane whose task somebody has cancelled, seconds
_AFTER_CANCELLED: Final = 0.1
#: what a lane may hold before publishers wait
LIMIT: Final = 10_000
#: how much more it may hold of publishers that must not wait, times
_HARD: Final = 10
#: how long publishers wait for room, seconds
_PATIENCE: Final = 30.0


class _Marker:
    """An item that is no receiver's: tells when all that was put before it is done with."""

    __slots__ = ("reached",)

    def __init__(self, reached: Callable[[], object]) -> None:
        self.reached = reached


class Lane(abc.ABC):
    """What waits for one receiver.

    Args:
        pool: whose threads deliver.
        name: of the receiver, for the log.
        timeout: how long one item may take, seconds; 0: for ever.
        stalled: called on a worker thread if one takes longer; this lane goes on only if it is restarted.
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
        self.is_closed = False
        self._pool = pool
        self._limit = limit
        self._items: deque[Any] = deque()
        self._room = threading.Condition(threading.Lock())  # guards _waiting
        self._waiting = 0
        self._is_overflowing = False

    def __len__(self) -> int:
        """How many items wait."""
        return len(self._items)

    def has_room(self) -> bool:
        """Whether an item may be put; waits for room where the calling thread may wait."""
        return len(self._items) < self._limit or self._wait_for_room()

    def put(self, item: Any) -> None:
        """Have the receiver get ``item`` after all that was put before. Takes no lock unless the lane was idle."""
        self._items.append(item)
        if not self.is_scheduled:
            self._wake()

    def put_all(self, items: list[Any]) -> None:
        """Put several; nothing that somebody else puts comes between them."""
        self._items.extend(items)  # in one step, with the interpreter's lock
        if not self.is_scheduled:
            self._wake()

    def put_newest(self, item: Any) -> None:
        """Put an item without waiting; in a full lane, in the place of the oldest one. Not from several threads."""
        if len(self._items) >= self._limit:
            with contextlib.suppress(IndexError):  # all was taken just now
                self._items.popleft()
                self.dropped += 1
        self.put(item)

    def release(self, first: list[Any]) -> None:
        """Begin with ``first``, and go on with what was put since the lane was made; once, if it was made held."""
        self._limit += len(first)
        self._items.extendleft(reversed(first))  # in one step, too
        self.is_scheduled = False
        if self._items:
            self._wake()

    @abc.abstractmethod
    def _wake(self) -> None:
        """Something was put, and nobody is coming for it."""

    def when_done(self, reached: Callable[[], object]) -> None:
        """Call ``reached`` on a delivery thread when all that was put before is done with, or given up."""
        self.put(_Marker(reached))

    def close(self) -> int:
        """Give up what waits, and take no more: whatever is put from now on is not delivered.

        Returns:
            How many items were given up.
        """
        self.is_closed = True
        return self._give_up()

    def _give_up(self) -> int:
        lost = 0
        while self._items:
            try:
                item = self._items.popleft()
            except IndexError:
                break
            if item.__class__ is _Marker:
                item.reached()
            else:
                lost += 1
        self._tell_of_room()
        return lost

    def _wait_for_room(self) -> bool:
        if self._pool.is_inside() or not may_block():
            fits = len(self._items) < _HARD * self._limit
        else:
            with self._room:
                self._waiting += 1
                try:
                    fits = self._room.wait_for(lambda: len(self._items) <= self._limit // 2, _PATIENCE)
                finally:
                    self._waiting -= 1
        if fits:
            self._is_overflowing = False
            return True
        self.dropped += 1
        if not self._is_overflowing:
            self._is_overflowing = True
            logger.error("%s does not keep up: of %d events that wait, newer ones are dropped", self.name, len(self))
        return False

    def _tell_of_room(self) -> None:
        if self._waiting and len(self._items) <= self._limit // 2:
            with self._room:
                self._room.notify_all()


class ThreadLane(Lane):
    """Gives its items to a function, on the threads of its pool.

    Args:
        receive: called with each item; must not raise.
        pool, name, timeout, stalled, limit: see :class:`Lane`.
    """

    def __init__(self, receive: Callable[[Any], object], pool: Pool, name: str, **options: Any) -> None:
        super().__init__(pool, name, **options)
        self._receive = receive

    def _wake(self) -> None:
        self._pool.schedule(self)

    def restart(self) -> None:
        """Go on after a receiver that did not return; the thread that it is on comes back no more."""
        self.is_scheduled = False
        if self._items:
            self._wake()

    def run(self, server: _Server) -> None:
        """Give out some of what waits. On a delivery thread."""
        items, receive = self._items, self._receive
        for _ in range(_BATCH):
            if self.is_closed:
                self._give_up()
                return
            try:
                item = items.popleft()
            except IndexError:
                break
            if item.__class__ is _Marker:
                item.reached()
                continue
            receive(item)
            # in this order: see Pool._stalled
            server.begun += 1
            if server.is_abandoned:
                return
        if self._waiting:
            self._tell_of_room()


class LoopLane(Lane):
    """Gives its items to a coroutine function, in a task on an event loop.

    Args:
        receive: called with each item, and awaited; must not raise anything but ``CancelledError``.
        loop: where.
        pool, name, timeout, stalled, limit: see :class:`Lane`.
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
        self._receive = receive
        self._loop = loop
        self._box = mailbox(loop)
        self._task: asyncio.Task[None] | None = None
        #: see ``_Server``
        self.begun = 0
        self.seen = -1
        self.since = 0.0

    @property
    def is_orphaned(self) -> bool:
        """Whether its loop is closed: nothing is delivered any more."""
        return self._loop.is_closed()

    @property
    def is_busy(self) -> bool:
        """Whether it has the loop; one that is waiting for it is not to blame."""
        return self._task is not None

    def _wake(self) -> None:
        if self._pool.adopt(self):
            self._box.post(self._start)

    def _start(self) -> None:
        self.begun += 1
        self._task = self._loop.create_task(self._run(), name=f"events for {self.name}")
        self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        items, receive = self._items, self._receive
        count = 0
        while items and not self.is_closed:
            item = items.popleft()
            if item.__class__ is _Marker:
                item.reached()
                continue
            await receive(item)
            self.begun += 1
            count += 1
            if count % _BATCH == 0:
                self._tell_of_room()
                await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if self.is_closed:
            self._give_up()
        self._tell_of_room()
        if task.cancelled() and self._items:
            # most likely the loop is about to end: then the supervisor finds out
            self._loop.call_later(_AFTER_CANCELLED, self._start)
            return
        self._pool.disown(self)
        self.is_scheduled = False
        if self._items:  # put just now, by somebody who saw that it was running
            self._wake()

    def cancel(self) -> None:
        """Cancel the item in progress. From any thread."""

        def cancel() -> None:
            if self._task is not None:
                self._task.cancel()

        self._box.post(cancel)


class _Server:
    """What one delivery thread does; shared with the supervisor."""

    __slots__ = ("begun", "is_abandoned", "lane", "seen", "since")

    def __init__(self) -> None:
        self.lane: ThreadLane | None = None
        #: grows with each item, and each lane
        self.begun = 0
        #: the receiver did not return in time: this thread is the pool's no more
        self.is_abandoned = False
        # --- the supervisor's: ``begun`` when it looked, and since when it is that
        self.seen = -1
        self.since = 0.0


class Pool:
    """The threads that deliver. Thread safe.

    Args:
        threads: how many at most; those whose receivers do not return in time do not count.
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._limit = threads
        self._lock = threading.Lock()  # guards the following, and what becomes scheduled
        self._ready: deque[ThreadLane] = deque()
        self._servers: set[_Server] = set()
        self._adopted: set[LoopLane] = set()
        #: lanes that threads came to
        self._taken = 0
        self._is_supervised = False
        self._is_hurried = False
        self._hurry = threading.Event()
        #: of threads that run receivers
        self._here = threading.local()
        _pools.add(self)

    @property
    def threads(self) -> int:
        """How many delivery threads there are now."""
        return len(self._servers)

    def is_inside(self) -> bool:
        """Whether the calling thread runs a receiver."""
        return getattr(self._here, "is_inside", False)

    # --- lanes

    def schedule(self, lane: ThreadLane) -> None:
        """Have a thread come to a lane."""
        with self._lock:
            if lane.is_scheduled:
                return
            lane.is_scheduled = True
            self._ready.append(lane)
            if self._servers:
                self._has_backlog()
                return
            server = self._add_server()
        self._supervise()
        self._start(server)

    def adopt(self, lane: LoopLane) -> bool:
        """Watch over a lane that is about to run on its loop; ``False`` if it is already."""
        with self._lock:
            if lane.is_scheduled:
                return False
            lane.is_scheduled = True
            self._adopted.add(lane)
        self._supervise()
        return True

    def disown(self, lane: LoopLane) -> None:
        """It has ended."""
        with self._lock:
            self._adopted.discard(lane)

    # --- delivery threads

    def _add_server(self) -> _Server:
        server = _Server()
        self._servers.add(server)
        return server

    def _start(self, server: _Server) -> None:
        workers().submit(lambda: self._serve(server))

    def _serve(self, server: _Server) -> None:
        """Go from lane to lane until none has anything left."""
        self._here.is_inside = True
        try:
            lane = self._take(server)
            while lane is not None:
                lane.run(server)
                if server.is_abandoned:
                    return
                server.lane = None
                if lane._items:
                    lane = self._take(server, lane)
                else:
                    lane.is_scheduled = False
                    if lane._items:  # put just now, by somebody who saw that a thread was here
                        lane._wake()
                    lane = self._take(server)
        finally:
            self._here.is_inside = False
            with self._lock:
                self._servers.discard(server)
                left = None if server.is_abandoned else server.lane
            if left is not None:  # it returned while it was being given up
                left.restart()

    def _take(self, server: _Server, unfinished: ThreadLane | None = None) -> ThreadLane | None:
        with self._lock:
            if unfinished is not None:
                self._ready.append(unfinished)
            if not self._ready:
                self._servers.discard(server)  # with the lock: whoever schedules from now on starts another one
                return None
            server.begun += 1
            server.lane = self._ready.popleft()
            self._taken += 1
            if self._ready:
                self._has_backlog()
            return server.lane

    # --- the supervisor

    def _has_backlog(self) -> None:
        """Lanes wait while threads are busy. With the lock."""
        if not self._is_hurried:
            self._is_hurried = True
            self._hurry.set()

    def _supervise(self) -> None:
        """See to it that somebody looks."""
        if self._is_supervised:
            return
        with self._lock:
            if self._is_supervised:
                return
            self._is_supervised = True
        workers().submit(self._watch)

    def _watch(self) -> None:
        taken = -1
        idle = 0
        while idle < _IDLE_LOOKS:
            self._hurry.wait(_LOOK)
            if self._is_hurried:
                time.sleep(_GROW_AFTER)
            now = time.monotonic()
            with self._lock:
                self._hurry.clear()
                self._is_hurried = False
                more = self._missing(taken)
                taken = self._taken
                if self._ready:
                    self._has_backlog()
                stalled = self._stalled(now)
                idle = 0 if self._servers or self._adopted else idle + 1
                if idle == _IDLE_LOOKS:
                    self._is_supervised = False
            for server in more:
                self._start(server)
            for lane in stalled:
                workers().submit(lane.stalled)

    def _missing(self, taken: int) -> list[_Server]:
        """Further threads, if something waits and nobody has come to anything since the last look."""
        if not self._ready or taken != self._taken:
            return []
        count = min(len(self._ready), max(1, len(self._servers)), self._limit - len(self._servers))
        return [self._add_server() for _ in range(count)]

    def _stalled(self, now: float) -> list[Lane]:
        """Lanes whose receivers have not returned in time; their threads are given up."""
        found: list[Lane] = []
        for server in [*self._servers]:
            lane = server.lane
            if lane is not None and self._is_late(server, lane.timeout, now):
                # a receiver that returns now either counts before the next line, or sees this one
                server.is_abandoned = True
                if server.begun != server.seen:
                    server.is_abandoned = False
                    continue
                self._servers.discard(server)
                found.append(lane)
        for each in [*self._adopted]:
            if each.is_orphaned or (each.is_busy and self._is_late(each, each.timeout, now)):
                self._adopted.discard(each)
                found.append(each)
        return found

    @staticmethod
    def _is_late(watched: _Server | LoopLane, timeout: float, now: float) -> bool:
        if watched.seen != watched.begun:
            watched.seen, watched.since = watched.begun, now
            return False
        return bool(timeout) and now - watched.since > timeout


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    """Threads do not survive a fork: what waited goes on with the next item that is put."""
    for pool in [*_pools]:
        pool._lock = threading.Lock()
        pool._hurry = threading.Event()
        pool._servers.clear()
        pool._adopted.clear()
        pool._is_supervised = pool._is_hurried = False
        for lane in pool._ready:
            lane.is_scheduled = False
        pool._ready.clear()


os.register_at_fork(after_in_child=_after_fork)
