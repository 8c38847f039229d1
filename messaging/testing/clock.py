"""A virtual clock for tests: an hour passes in a millisecond, and the order of all that falls due is always the same.

::

    from messaging.testing.clock import VirtualClock

    with VirtualClock() as time, messaging.connect("memory://test") as m:
        m.publish("a", b"1", time_to_live=60.0)
        time.advance(61.0)          # the message has expired

The fixture ``virtual_clock`` of :mod:`messaging.testing.plugin` is such a clock.

**When time passes.** Virtual time stands still while anything is left to do. It passes in two cases, both on the thread
that entered the clock, the *driver*: while :meth:`VirtualClock.advance` runs; and while the driver waits for something
(``promise.result()``, ``stream.receive(timeout=5)``, ``Event.wait(5)``, or, on an event loop, any ``await``). Then the
clock goes in steps: it waits until every thread and event loop is at rest, sets the time to the earliest moment for
which something is waiting, and wakes that one. What falls due at the same moment is woken in the order in which it
began to wait. So a time-out of a minute passes at once, if nothing comes before it. A loop of a test that polls calls
``clock.pause``, not ``time.sleep``.

**What it watches.** The engine's loop and the loop of handlers, of which there are new ones while the clock is used;
every event loop that is made meanwhile; worker threads and all other threads of the project; other threads that wait
for the project. A thread that is blocked by ``threading`` (``Event.wait``, ``Queue.get`` …) or accepts connections
counts as at rest. Sockets and other processes keep real time: the clock does not know that something may still come
from them, so tests with brokers or processes do not use it.

Instances, event services and journals of a test are opened and closed while the clock is used. At its end the threads
that still wait are ended. One clock is used at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import sys
import sysconfig
import threading
import time
from collections import deque
from datetime import UTC, datetime
from functools import cache
from math import inf, nextafter
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, TypeVarTuple, cast

from messaging.execution import callback_lanes, clock, engine, handlers_loop, workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor
    from contextvars import Context
    from types import FrameType

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: how long the process may take to come to rest, real seconds
PATIENCE: Final = 30.0
#: virtual seconds after which a wait without a time limit is an error
HORIZON: Final = 86_400.0
#: virtual seconds that pass at the end, so that idle threads end
_LEAVE: Final = 3.0
#: interval of looks at threads that do not tell when they come to rest, real seconds
_LOOK: Final = 0.002

#: code below these folders waits for nothing of this project
_FOREIGN: Final = tuple(
    {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class VirtualClockError(RuntimeError):
    """The process did not come to rest, or something waits for what can never come."""


class _EndedError(SystemExit):
    """Ends a thread of the project that waits after the end of the clock."""


class _Party:
    """A thread, or a job that a thread is about to run. Guarded by the lock of the clock."""

    __slots__ = ("is_busy", "is_guest", "name", "thread")

    def __init__(self, name: str, thread: threading.Thread | None = None, *, is_guest: bool = False) -> None:
        self.name = name
        self.thread = thread
        #: it was not started by the project: it may end, or block, without a word to the clock
        self.is_guest = is_guest
        self.is_busy = True

    def __repr__(self) -> str:
        thread, name = self.thread, self.name
        frame = None if thread is None or thread.ident is None else sys._current_frames().get(thread.ident)
        return name if frame is None else f"{name} at {_place(frame)}"


class _Wait:
    """A wait of a thread or an event loop until it is woken, or until a moment. Guarded by the lock of the clock."""

    __slots__ = ("door", "due", "is_last", "is_over", "is_woken", "order", "party", "wake")

    def __init__(self, due: float, order: int, wake: Callable[[], object], *, is_last: bool = False) -> None:
        self.due = due
        #: what falls due at the same moment comes first
        self.is_last = is_last
        self.order = order
        #: wakes the thread or loop in real time
        self.wake = wake
        self.party: _Party | None = None
        self.is_over = False
        #: it is over because of another thread, and not because its time came
        self.is_woken = False

    @property
    def place(self) -> tuple[float, bool, int]:
        """The place in the order in which waits end."""
        return self.due, self.is_last, self.order


class _Lock:
    """A ``threading.Lock`` whose waits end in virtual time; in real time once the clock has ended. Thread safe."""

    def __init__(self, owner: VirtualClock) -> None:
        self._owner = owner
        self._is_locked = False
        self._waits: deque[_Wait] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; see ``threading.Lock``. An infinite timeout is allowed."""
        owner = self._owner
        with owner.changed:
            if not self._is_locked:
                self._is_locked = True
                return True
            if not blocking or timeout == 0:
                return False
            door = threading.Lock()
            door.acquire()
            wait = owner.make_wait(inf if timeout < 0 else owner.time + timeout, door.release)
            self._waits.append(wait)
        try:
            owner.block(wait, door, timeout)
        finally:
            with owner.changed:
                if not wait.is_over or not wait.is_woken:
                    with contextlib.suppress(ValueError):
                        self._waits.remove(wait)
        return wait.is_woken

    def release(self) -> None:
        """Release the lock; the thread that waits longest acquires it."""
        with self._owner.changed:
            if not self._is_locked:
                raise RuntimeError("release unlocked lock")
            while self._waits:
                wait = self._waits.popleft()
                if not wait.is_over:
                    self._owner.end_wait(wait, is_woken=True)
                    return
            self._is_locked = False

    def locked(self) -> bool:
        """Return whether the lock is acquired."""
        return self._is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Selector(selectors.DefaultSelector):
    """Selects without a time limit: the clock wakes the loop when its next timer is due."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the files that are ready; wait for virtual time unless ``timeout`` is 0."""
        if timeout is None or timeout > 0:
            self.loop.rest(super().select)
        return super().select(0)

    @property
    def has_sockets(self) -> bool:
        """Return whether the loop waits for more than calls of other threads."""
        return len(self.get_map()) > 1


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is that of a virtual clock. Made by ``VirtualClock.new_loop``."""

    _ready: deque[Any]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, owner: VirtualClock) -> None:
        self._owner = owner
        self._selects = _Selector()
        self._selects.loop = self
        self._wait: _Wait | None = None
        super().__init__(self._selects)

    def time(self) -> float:
        """Return the virtual time."""
        return self._owner.time

    @property
    def _clock_resolution(self) -> float:  # timers that are due now run now, and none of a later moment
        now = self._owner.time
        return nextafter(now, inf) - now

    @_clock_resolution.setter
    def _clock_resolution(self, _: float) -> None:
        """Ignore what asyncio sets."""

    def rest(self, select: Callable[[float | None], object]) -> None:
        """Wait until another thread calls this loop, a timer is due, or a socket is ready. For the selector."""
        owner = self._owner
        with owner.changed:
            if self._ready or owner.has_ended():
                left = 0.0 if self._ready else self._seconds_left()
                wait = None
            else:
                due = self._scheduled[0].when() if self._scheduled else inf
                self._wait = wait = owner.make_wait(due, self._write_to_self)  # type: ignore[attr-defined]
        if wait is None:
            select(left)
            return
        try:
            if owner.is_driver():
                owner.drive(wait, (lambda: select(0)) if self._selects.has_sockets else None)
            else:
                owner.begin(wait)
                select(None)
        finally:
            with owner.changed:
                owner.end_wait(wait, is_woken=True)  # by a socket, unless it is over
                self._wait = None

    def _seconds_left(self) -> float | None:
        return max(0.0, self._scheduled[0].when() - self.time()) if self._scheduled else None

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See ``asyncio.AbstractEventLoop``. From here on the loop is not at rest."""
        with self._owner.changed:
            handle = super().call_soon_threadsafe(callback, *args, context=context)
            if self._wait is not None:
                self._owner.end_wait(self._wait, is_woken=True)
            return handle

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """See ``asyncio.AbstractEventLoop``. The clock waits for the call."""
        party = self._owner.enter(_Party(f"executor call {getattr(func, '__qualname__', func)}"))
        future: asyncio.Future[T] = super().run_in_executor(executor, self._owner.watched(party, func), *args)
        future.add_done_callback(lambda _: self._owner.leave(party))
        return future

    async def shutdown_default_executor(self, *_: Any, **__: Any) -> None:
        """End the threads of the default executor, whose calls have returned."""
        self._executor_shutdown_called = True
        executor = getattr(self, "_default_executor", None)
        if executor is not None:
            executor.shutdown(wait=True)


class _Target:
    """The function of a thread that the clock watches from before its start. If it is dropped, so is the thread."""

    def __init__(self, owner: VirtualClock, target: Callable[[], object]) -> None:
        self._owner = owner
        self._target = target
        self._party = owner.enter(_Party(f"thread for {getattr(target, '__qualname__', target)}"))
        self._is_begun = False

    def __call__(self) -> None:
        self._is_begun = True
        try:
            self._owner.watched(self._party, self._target)()
        except _EndedError:
            return
        finally:
            self._owner.leave(self._party)

    def __del__(self) -> None:
        if not self._is_begun:  # no thread could be started
            self._owner.leave(self._party)


class VirtualClock:
    """Takes the place of the clock, the engine, and the worker threads of the process in a ``with`` block.

    The thread that enters is the driver, see the module. The other methods may be called from any thread, unless they
    say otherwise.

    Args:
        wall: what the wall clock says at the beginning, seconds since the epoch; the real time unless given.
        patience: how long the process may take to come to rest after each step, real seconds.
    """

    def __init__(self, *, wall: float | None = None, patience: float = PATIENCE) -> None:
        self.patience = patience
        #: virtual monotonic time, seconds
        self.time = time.monotonic()
        self._wall = (time.time() if wall is None else wall) - self.time
        self._suspended = clock.boot() - self.time
        #: guards everything; notified when a thread comes to rest, or the wait of the driver is over
        self.changed = threading.Condition()
        self._has_ended = False
        self._driver: threading.Thread | None = None
        self._parties: set[_Party] = set()
        #: the party of each thread
        self._party_of: dict[int, _Party] = {}
        self._waits: set[_Wait] = set()
        self._count = 0
        #: threads from before, and the driver
        self._others: set[threading.Thread] = set()
        self._cleanup = contextlib.ExitStack()

    # --- entering and leaving

    def __enter__(self) -> Self:
        if clock.monotonic is not time.monotonic:
            raise VirtualClockError("another virtual clock is in use")
        self._driver = threading.current_thread()
        self._others = {*threading.enumerate()}
        clock.monotonic = lambda: self.time
        clock.wall = lambda: self.time + self._wall
        clock.wall_ns = lambda: round(clock.wall() * 1_000_000) * 1000
        clock.now = lambda: datetime.fromtimestamp(clock.wall(), UTC)
        clock.boot = lambda: self.time + self._suspended
        clock.pause = self._pause
        clock.lock = lambda: cast("threading.Lock", _Lock(self))
        clock.new_loop = self.new_loop
        clock.thread = lambda target: _Target(self, target)
        self._cleanup.callback(clock.use_real_time)
        for module in (asyncio.events, asyncio):  # asyncio.run() looks in the former
            self._cleanup.callback(setattr, module, "new_event_loop", asyncio.new_event_loop)
            setattr(module, "new_event_loop", self.new_loop)  # noqa: B010  # mypy: it is a constant
        self._cleanup.callback(setattr, threading.Condition, "wait", threading.Condition.wait)
        setattr(threading.Condition, "wait", _wait_of_driver(self, threading.Condition.wait))  # noqa: B010  # mypy
        for own in (callback_lanes, workers, engine, handlers_loop):
            self._cleanup.callback(own.swap, own.swap(None))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with contextlib.suppress(VirtualClockError) if kind is not None else contextlib.nullcontext():
                self.advance(_LEAVE)
                if (found := engine.swap(None)) is not None:
                    found.end()
                if (loop := handlers_loop.swap(None)) is not None:
                    loop.call_soon_threadsafe(loop.stop)
                self.advance(0.0)
        finally:
            with self.changed:
                self._has_ended = True
                for wait in [*self._waits]:
                    self.end_wait(wait, is_woken=False)
            self._cleanup.close()

    def new_loop(self) -> VirtualLoop:
        """Return a new event loop with the time of this clock."""
        return VirtualLoop(self)

    # --- time

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, and run everything that falls due, in order. On the driver, without a running loop.

        Returns when nothing is left to do at the end of that time. ``advance(0.0)`` finishes all work in progress.

        Raises:
            VirtualClockError: the process did not come to rest. The error names the threads that are still busy.
        """
        if asyncio._get_running_loop() is not None:
            raise VirtualClockError("advance() would block the event loop of this thread; `await elapse()` instead")
        if not self.is_driver():
            raise VirtualClockError("only the thread that entered the clock advances it")
        self._advance_to(self.time + seconds)

    def _advance_to(self, due: float) -> None:
        with self.changed:
            wait = self.make_wait(due, _nothing, is_last=True)
        self.drive(wait)

    async def elapse(self, seconds: float) -> None:
        """Let ``seconds`` pass as :meth:`advance` does. On a loop of this clock, if the driver runs it or waits."""
        loop = asyncio.get_running_loop()
        passed = loop.create_future()

        def wake() -> None:
            loop.call_soon_threadsafe(_resolve, passed)

        with self.changed:
            self._waits.add(self.make_wait(self.time + seconds, wake, is_last=True))
        await passed

    def until(self, holds: Callable[[], object], within: float = 60.0) -> None:
        """Let time pass until ``holds()`` is true, which is asked whenever the process is at rest. On the driver.

        Raises:
            VirtualClockError: it is not true after ``within`` virtual seconds, or the process did not come to rest.
        """
        end = self.time + within
        self.advance(0.0)
        while not holds():
            with self.changed:
                due = min((each.due for each in self._waits), default=inf)
            if self.time >= end:
                raise VirtualClockError(f"{holds!r} is not true after {within:g} virtual seconds")
            self._advance_to(min(due, end))

    def shift_wall(self, seconds: float) -> None:
        """Set the wall clock forward, or back if ``seconds`` is negative. Nothing else changes."""
        self._wall += seconds

    def suspend(self, seconds: float) -> None:
        """Suspend the machine: afterwards the wall clock and the lease clock are ahead, and no timer has run."""
        self._wall += seconds
        self._suspended += seconds

    def _pause(self, seconds: float) -> None:
        lock = _Lock(self)
        lock.acquire()
        lock.acquire(timeout=seconds)

    # --- waits; for locks and loops of this module

    def has_ended(self) -> bool:
        """Return whether the ``with`` block was left."""
        return self._has_ended

    def is_driver(self) -> bool:
        """Return whether the calling thread is the driver."""
        return threading.current_thread() is self._driver

    def make_wait(self, due: float, wake: Callable[[], object], *, is_last: bool = False) -> _Wait:
        """Return a wait until the moment ``due``. With the lock held."""
        self._count += 1
        return _Wait(max(due, self.time), self._count, wake, is_last=is_last)

    def begin(self, wait: _Wait) -> None:
        """Note that the calling thread waits, unless the wait is over already."""
        with self.changed:
            if wait.is_over:
                return
            wait.party = party = self._own_party()
            party.is_busy = False
            self._waits.add(wait)
            self.changed.notify_all()

    def block(self, wait: _Wait, door: threading.Lock, timeout: float) -> None:
        """Block the calling thread until ``wait`` is over; the driver lets time pass meanwhile.

        Args:
            wait: it has not begun yet.
            door: released when the wait is over.
            timeout: of the wait in real time, should the clock have ended; negative: none.

        Raises:
            _EndedError: the clock has ended, and the thread is one of the project.
        """
        if self.has_ended():
            door.acquire(timeout=-1 if timeout < 0 or timeout == inf else timeout)
            return
        if self.is_driver():
            self.drive(wait)
            return
        self.begin(wait)
        try:
            door.acquire()
        finally:
            with self.changed:
                self.end_wait(wait, is_woken=False)  # interrupted, unless it is over
        if self.has_ended() and not wait.is_woken and wait.party is not None and not wait.party.is_guest:
            raise _EndedError

    def drive(self, wait: _Wait, poll: Callable[[], object] | None = None) -> None:
        """Let time pass until ``wait``, which has not begun yet, is over. On the driver.

        Args:
            wait: of the driver.
            poll: returns whether a socket of the driver's loop is ready; that ends the wait, too.
        """
        with self.changed:
            self._waits.add(wait)
            try:
                self._drive(wait, poll)
            finally:
                self._waits.discard(wait)

    def end_wait(self, wait: _Wait, *, is_woken: bool) -> None:
        """End a wait, unless it is over. With the lock held."""
        if wait.is_over:
            return
        wait.is_over, wait.is_woken = True, is_woken
        self._waits.discard(wait)
        if wait.party is not None:
            wait.party.is_busy = True
        wait.wake()
        self.changed.notify_all()

    def _drive(self, wait: _Wait, poll: Callable[[], object] | None) -> None:
        horizon = self.time + HORIZON
        while not wait.is_over:
            self._settle(wait, poll)
            if wait.is_over or (poll is not None and poll()):
                return
            first = min(self._waits, key=lambda each: each.place)
            if first.due == inf:
                raise VirtualClockError(f"nothing is left to do, and {self._driver} waits without a time limit")
            if first.due > horizon and wait.due == inf:
                raise VirtualClockError(f"{self._driver} has waited without a time limit for {HORIZON:g} s")
            self.time = max(self.time, first.due)
            self.end_wait(first, is_woken=False)

    def _settle(self, wait: _Wait, poll: Callable[[], object] | None) -> None:
        """Wait until everything is at rest, or ``wait`` is over."""
        limit = time.monotonic() + self.patience
        while not wait.is_over:
            if not any(party.is_busy for party in self._parties) and not [*self._strangers()]:
                return
            if not self.changed.wait(_LOOK):
                if poll is not None and poll():
                    return
                # twice: a thread that is found blocked may have been woken by the one that is looked at next
                if not self._is_working() and not self._is_working():
                    return
            if time.monotonic() > limit:
                busy = [repr(each) for each in self._parties if each.is_busy] + [*self._strangers()]
                if busy:  # still
                    raise VirtualClockError(f"not at rest after {self.patience:g} s: {'; '.join(sorted(busy))}")

    def _is_working(self) -> bool:
        """Return whether a busy party can go on: ``threading`` does not block it, and it has not ended."""
        for party in [*self._parties]:
            thread = party.thread
            if party.is_guest and thread is not None and not thread.is_alive():
                self.leave(party)
        frames = sys._current_frames()
        for party in self._parties:
            if party.is_busy:
                thread = party.thread
                frame = None if thread is None or thread.ident is None else frames.get(thread.ident)
                if frame is None or not (_is_blocked(frame) or (party.is_guest and not _is_ours(frame))):
                    return True
        return bool([*self._strangers()])

    def _strangers(self) -> Iterator[str]:
        """Yield the threads that never waited for this clock, and run code of the project or of a test."""
        # those of the project were started before the clock, perhaps just before: the others are parties from the start
        known = {
            thread.ident
            for thread in threading.enumerate()
            if thread in self._others or thread.name.startswith("messaging-")
        }
        for ident, frame in sys._current_frames().items():
            if ident not in known and ident not in self._party_of and _is_ours(frame) and not _is_blocked(frame):
                yield f"thread {ident} at {_place(frame)}"

    # --- threads

    def enter(self, party: _Party) -> _Party:
        """Watch a thread or a job."""
        with self.changed:
            self._parties.add(party)
        return party

    def leave(self, party: _Party) -> None:
        """Watch it no more; idempotent."""
        with self.changed:
            self._parties.discard(party)
            thread = party.thread
            if party.is_guest and thread is not None and self._party_of.get(thread.ident or 0) is party:
                del self._party_of[thread.ident or 0]
            self.changed.notify_all()

    def watched(self, party: _Party, function: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
        """Return ``function``, which makes the thread that calls it the party."""

        def call(*args: *Ts) -> T:
            ident = threading.get_ident()
            with self.changed:
                party.thread = threading.current_thread()
                party.name = party.thread.name
                self._party_of[ident] = party
            try:
                return function(*args)
            finally:
                with self.changed:
                    self._party_of.pop(ident, None)

        return call

    def _own_party(self) -> _Party:
        ident = threading.get_ident()
        party = self._party_of.get(ident)
        if party is None or (party.is_guest and party.thread is not threading.current_thread()):
            thread = threading.current_thread()
            party = self._party_of[ident] = self.enter(_Party(thread.name, thread, is_guest=True))
        return party


def _wait_of_driver(owner: VirtualClock, wait: Callable[..., bool]) -> Callable[..., bool]:
    """Return ``Condition.wait``, in which the driver lets time pass if the wait has a time limit.

    Without one it may be that of ``Thread.start``, whose thread is on its way.
    """

    def wait_by_clock(condition: Any, timeout: float | None = None) -> bool:
        if timeout is None or timeout <= 0 or not owner.is_driver() or condition is owner.changed:
            return wait(condition, timeout)
        waiter = threading.Lock()
        waiter.acquire()
        condition._waiters.append(waiter)
        state = condition._release_save()
        is_notified = False

        def poll() -> bool:
            nonlocal is_notified
            is_notified = is_notified or waiter.acquire(blocking=False)
            return is_notified

        try:
            with owner.changed:
                due = owner.make_wait(owner.time + timeout, _nothing)
            owner.drive(due, poll)
            return poll()
        finally:
            condition._acquire_restore(state)
            if not is_notified:
                with contextlib.suppress(ValueError):
                    condition._waiters.remove(waiter)

    return wait_by_clock


def _nothing() -> None:
    """Wake nothing: the driver is awake."""


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def _is_ours(frame: FrameType | None) -> bool:
    """Return whether code of the project or of a test is running in a thread."""
    while frame is not None:
        if not _is_foreign(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


@cache
def _is_foreign(file: str) -> bool:
    return file.startswith("<frozen") or os.path.realpath(file).startswith(_FOREIGN)


def _is_blocked(frame: FrameType) -> bool:
    """Return whether a thread waits for another one by means of ``threading``, or for a connection."""
    if frame.f_code.co_filename == socket.__file__:
        return frame.f_code.co_name == "accept"
    if frame.f_code.co_filename != threading.__file__:
        return False
    values = frame.f_locals
    if frame.f_code.co_name == "wait" and (waiter := values.get("waiter")) is not None:
        return bool(waiter.locked())
    if frame.f_code.co_name in ("join", "_wait_for_tstate_lock"):
        return bool(values["self"].is_alive())
    return False
