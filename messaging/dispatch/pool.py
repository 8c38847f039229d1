"""The threads that deliver: they go from lane to lane, and somebody looks after them.

**Threads.** There is one delivery thread as long as nothing holds it up: with the interpreter's lock, several only
take it from each other. When something waits and no thread has come to it for some milliseconds, since the receivers
of others are waiting for something, there is another one, up to ``threads``. A supervisor looks for that, and for
receivers that do not return, while there is something to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from messaging.dispatch.lanes import Progress, after_fork, here
from messaging.execution import Mailbox, mailbox, start_thread, workers
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.dispatch.lanes import LoopLane, ThreadLane

logger = SafeLog(__name__)

#: delivery threads that one pool may have, beside those of receivers that do not return
THREADS: Final = 64
#: how long what waits is left to the threads there are, seconds
_GROW_AFTER: Final = 0.005
#: how often the supervisor looks while nothing waits, seconds
_LOOK: Final = 0.1
#: how long the supervisor stays when there is nothing to do, seconds
_STAY: Final = 1.0


class Server(Progress):
    """What one delivery thread does; shared with the supervisor."""

    __slots__ = ("has_begun", "is_abandoned", "lane")

    def __init__(self) -> None:
        super().__init__()
        #: a thread has come to it
        self.has_begun = False
        #: the one it runs
        self.lane: ThreadLane | None = None
        #: the receiver did not return in time: this thread is the pool's no more. Sure only with the pool's lock
        self.is_abandoned = False

    def is_still_at(self, lane: ThreadLane) -> bool:
        """Whether it has not moved since the supervisor looked."""
        return self.lane is lane and self.begun == self.seen


class _Beat:
    """Whether an event loop turns."""

    __slots__ = ("_box", "_is_heard")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._box: Mailbox = mailbox(loop)
        self._is_heard = True

    def ask(self) -> bool:
        """Whether it has turned since it was asked last."""
        if not self._is_heard:
            return False
        self._is_heard = False
        self._box.post(self._answer)
        return True

    def _answer(self) -> None:
        self._is_heard = True


def _taken_lock() -> threading.Lock:
    """Acquiring it again is waiting until somebody else releases it; unlike with an event, nobody has it meanwhile."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Pool:
    """The threads that deliver. Thread safe.

    Where no thread can be started, the one that somebody has kept with ``workers().hold()`` does everything; or else
    that is logged, and what waits goes on when something is put for which one can be.

    Args:
        threads: how many at most; those whose receivers do not return in time do not count.
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._limit = threads
        self._lock = threading.RLock()  # guards the following, and what becomes scheduled
        #: as a queue; each once
        self._ready: OrderedDict[ThreadLane, None] = OrderedDict()
        self._servers: set[Server] = set()
        self._adopted: set[LoopLane] = set()
        #: lanes that threads came to
        self._taken = 0
        #: no thread could be started for it
        self._is_starved = False
        #: stands for the supervisor there is, or is about to be
        self._supervisor: object | None = None
        self._is_hurried = False
        self._hurry = _taken_lock()
        self._beats: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Beat] = weakref.WeakKeyDictionary()
        _pools.add(self)

    @property
    def threads(self) -> int:
        """How many delivery threads there are now."""
        return len(self._servers)

    def is_inside(self) -> bool:
        """Whether the calling thread runs a receiver."""
        return getattr(here, "pool", None) is self

    # --- lanes

    def schedule(self, lane: ThreadLane) -> None:
        """Have a thread come to a lane."""
        server = None
        try:
            with self._lock:
                if lane.is_scheduled or lane.is_closed:
                    return
                self._ready[lane] = None
                lane.is_scheduled = True
                if self._servers:
                    self._has_backlog()
                else:
                    server = self._add_server()
            if server is not None:
                self._start(server)
            else:
                self._supervise()
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """An interrupt came while a thread was being started: there may be none. Start another one then."""
        with self._lock:
            for server in [*self._servers]:
                if not server.has_begun:
                    server.is_abandoned = True
                    self._servers.discard(server)
            another = self._add_server() if self._ready and not self._servers else None
        if another is not None:
            self._start(another)
        self._supervise()

    def withdraw(self, lane: ThreadLane) -> None:
        """Have no thread come to it, if none is there."""
        with self._lock:
            if lane in self._ready:
                del self._ready[lane]
                lane.is_scheduled = False

    def resume(self, lane: ThreadLane) -> bool:
        """Take back that a lane is stalled; ``False`` if it is not."""
        with self._lock:
            was_stalled, lane.is_stalled = lane.is_stalled, False
        return was_stalled

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

    def has_given_up(self, server: Server) -> bool:
        """Whether a thread is the pool's no more; the last word, unlike ``server.is_abandoned`` alone."""
        with self._lock:
            return server.is_abandoned

    def _add_server(self) -> Server:
        server = Server()
        self._servers.add(server)
        return server

    def _start(self, server: Server) -> None:
        try:
            workers().submit(lambda: self._serve(server))
        except RuntimeError as error:
            with self._lock:
                self._servers.discard(server)
                if self._servers:
                    return
                for lane in self._ready:
                    lane.is_scheduled = False  # whoever puts something tries again
                is_first, self._is_starved = not self._is_starved, True
            if is_first:
                logger.error("nobody delivers events: %s", error)
        else:
            self._is_starved = False

    def _begins(self, server: Server) -> bool:
        """Whether a thread that has just started is wanted; :meth:`_recover` may have started another one for it."""
        with self._lock:
            server.has_begun = not server.is_abandoned
            return server.has_begun

    def _serve(self, server: Server) -> None:
        """Go from lane to lane until none has anything left."""
        here.pool = self
        try:
            if not self._begins(server):
                return
            self._supervise()
            lane = self._take(server)
            while lane is not None:
                try:
                    lane.run(server)
                except BaseException:  # receivers guard themselves: this is a defect
                    logger.exception("the receiver of %s raised", lane.name)
                server.lane = None  # from now on it is late no more; before it is asked whether it was
                if server.is_abandoned and self.has_given_up(server):
                    return
                if lane._items:
                    lane = self._take(server, lane)
                else:
                    lane._unschedule()
                    lane = self._take(server)
        finally:
            here.pool = None

    def _take(self, server: Server, unfinished: ThreadLane | None = None) -> ThreadLane | None:
        with self._lock:
            if unfinished is not None:
                self._ready[unfinished] = None
            if not self._ready:
                self._servers.discard(server)  # with the lock: whoever schedules from now on starts another one
                if not self._ready:  # still: a finalizer may have put something
                    return None
                self._servers.add(server)
            lane, _ = self._ready.popitem(last=False)
            lane.is_scheduled = True
            server.begun += 1
            server.lane = lane
            self._taken += 1
            if self._ready:
                self._has_backlog()
            return lane

    # --- the supervisor

    @property
    def _is_supervised(self) -> bool:
        return self._supervisor is not None

    def _has_backlog(self) -> None:
        """Lanes wait while threads are busy: there may have to be more of them. With the lock."""
        if not self._is_hurried and len(self._servers) < self._limit:
            self._is_hurried = True
            self._hurry.release()

    def _supervise(self) -> None:
        """See to it that somebody looks."""
        if self._is_supervised:
            return
        supervisor = object()
        try:
            with self._lock:
                if self._supervisor is not None:  # another thread's, just now
                    return
                self._supervisor = supervisor
            # no worker: the last one there is has to deliver
            start_thread(lambda: self._watch(supervisor), "messaging-supervisor")
        except RuntimeError:
            self._supervisor = None  # not now
        except BaseException:  # an interrupt: if that one has started, it sees that it is not meant
            if self._supervisor is supervisor:
                self._supervisor = None
            raise

    def _watch(self, supervisor: object) -> None:
        try:
            self._look_on(supervisor)
        except BaseException:
            logger.exception("nobody looks after the receivers of events now")
            self._supervisor = None

    def _look_on(self, supervisor: object) -> None:
        """Until there has been nothing to do for some time, or there is another supervisor."""
        taken = -1
        looked = needed = time.monotonic()
        to_do: deque[Callable[[], object]] = deque()
        while True:
            self._hurry.acquire(timeout=_LOOK)
            if self._is_hurried:
                time.sleep(_GROW_AFTER)
            now = time.monotonic()
            with self._lock:
                if self._supervisor is not supervisor:
                    return
                self._hurry.acquire(blocking=False)
                self._is_hurried = False
                more = self._missing(taken)
                taken = self._taken
                if now - looked >= _LOOK:
                    # if it was kept from looking for longer, so were receivers from going on
                    to_do += self._stalled(min(now - looked, 2 * _LOOK))
                    looked = now
                if self._ready:
                    self._has_backlog()
                if to_do or self._is_needed():
                    needed = now
                elif now - needed > _STAY:
                    self._supervisor = None
                    if not self._is_needed():  # still: a finalizer may have put something
                        return
                    self._supervisor = supervisor
            for server in more:
                self._start(server)
            with contextlib.suppress(RuntimeError):  # no thread can be started: after the next look
                while to_do:
                    workers().submit(to_do[0])
                    to_do.popleft()

    def _is_needed(self) -> bool:
        return bool(self._servers or self._adopted or self._ready)

    def _missing(self, taken: int) -> list[Server]:
        """Further threads, if something waits and nobody has come to anything since the last look."""
        if not self._ready or taken != self._taken:
            return []
        count = min(len(self._ready), max(1, len(self._servers)), self._limit - len(self._servers))
        return [self._add_server() for _ in range(count)]

    def _stalled(self, step: float) -> list[Callable[[], object]]:
        """Give up the threads of receivers that have not returned in time; returns what their lanes have to do."""
        found: list[Callable[[], object]] = []
        for server in [*self._servers]:
            lane = server.lane
            if lane is None or not server.is_late(lane.timeout, step):
                continue
            # It says that it has moved, and then looks whether it was given up; here it is the other way round. So
            # either it is seen that it has moved, or it sees that it may have been given up, and waits for the lock.
            server.is_abandoned = True
            if server.is_still_at(lane):
                self._servers.discard(server)
                lane.is_stalled = True
                found.append(lane._tell_stalled)
            else:
                server.is_abandoned = False
        heard: dict[asyncio.AbstractEventLoop, bool] = {}
        for each in [*self._adopted]:
            if each.is_closed and not each.is_busy:
                self._adopted.discard(each)
            elif each.is_orphaned:
                self._adopted.discard(each)
                found.append(each._tell_stalled if each.lose() else each._settle)
            elif each.is_busy and each.timeout and self._is_late(each, step, heard):
                found.append(each._tell_stalled)
        return found

    def _is_late(self, lane: LoopLane, step: float, heard: dict[asyncio.AbstractEventLoop, bool]) -> bool:
        loop = lane.loop
        if loop not in heard:
            beat = self._beats.get(loop)
            if beat is None:
                beat = self._beats[loop] = _Beat(loop)
            heard[loop] = beat.ask()
        # what counts is the time in which it could go on, or kept the others from it
        return lane.progress.is_late(lane.timeout, step if heard[loop] or lane.has_the_turn else 0.0)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    """Threads do not survive a fork. A receiver that forked returns to a thread that was given up."""
    for pool in [*_pools]:
        pool._lock = threading.RLock()
        pool._hurry = _taken_lock()
        for server in pool._servers:
            server.is_abandoned = True
        pool._servers.clear()
        pool._adopted.clear()
        pool._ready.clear()
        pool._beats = weakref.WeakKeyDictionary()
        pool._is_hurried = pool._is_starved = False
        pool._supervisor = None
    after_fork()


os.register_at_fork(after_in_child=_after_fork)
