"""The clock of the project: every part asks it for the time, and waits with it.

No other module of ``messaging`` and ``adapters`` calls the functions of ``time``, sets a timer on an event loop or
waits with a time limit by other means. So one object decides what time it is: in a test,
:class:`messaging.testing.clock.VirtualClock` takes over.

=====================  =================================  ===========================================================
name                   in real time                       with a virtual clock
=====================  =================================  ===========================================================
``monotonic()``        ``time.monotonic``                 virtual seconds, which pass when nothing else is left to do
``wall()``             ``time.time``                      virtual, and set apart by ``set_wall``
``wall_ns()``          ``time.time_ns``                   the same in nanoseconds
``now()``              ``datetime.now(UTC)``              the same as a ``datetime``
``boot()``             ``CLOCK_BOOTTIME``                 virtual, and advanced by ``suspend`` alone
``pause(seconds)``     ``time.sleep``                     waits for virtual time
``lock()``             ``threading.Lock``                 its waits end in virtual time
``new_loop()``         an event loop, uvloop if there is  an event loop whose timers are virtual
``thread(target)``     ``target``                         ``target``, whose thread the clock watches
``timer(…)``           ``threading.Timer``                real time: it guards a socket
=====================  =================================  ===========================================================

The other functions (:meth:`Clock.sleep`, :meth:`Clock.timeout`, :meth:`Clock.call_later` …) use the time of an event
loop. They are the same with a virtual clock, because the loop is virtual then.

In real time each name is the function of the standard library itself: reading the clock takes no call more than
reading it there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVarTuple, Unpack

Ts = TypeVarTuple("Ts")

if TYPE_CHECKING:
    Loop: TypeAlias = asyncio.AbstractEventLoop


class CallLater(Protocol):
    """Method ``call_later`` of an event loop."""

    def __call__(self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> asyncio.TimerHandle:
        """Call ``callback`` on the loop after ``delay`` seconds."""


def _same(target: Callable[[], object]) -> Callable[[], object]:
    return target


def _new_loop() -> Loop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: Loop = uvloop.new_event_loop()
    return loop


def _boot_time() -> Callable[[], float]:
    identifier = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic if identifier is None else partial(time.clock_gettime, identifier)


class Clock:
    """Time, timers and waits with a time limit. Use :data:`clock`, the only one of the process.

    All times and durations are seconds, unless the name says otherwise. The attributes may be called from any thread;
    a method says where it may be called.

    Attributes:
        monotonic: seconds since some moment. They pass evenly, whatever happens to the wall clock.
        wall: seconds since the epoch. The wall clock may be set back or forward.
        wall_ns: the same in nanoseconds.
        now: the same as a ``datetime`` in UTC.
        boot: seconds since some moment. Other than ``monotonic`` they include the time during which the machine is
            suspended, where the system has such a clock.
        pause: blocks the calling thread for a number of seconds. Not on a thread that runs an event loop.
        lock: returns a lock like ``threading.Lock()``. Threads that wait for each other, rather than exclude each
            other for moments, wait for locks of the clock: a virtual clock must know that they wait.
        new_loop: returns a new event loop for the engine.
        thread: returns the function that a new thread runs in the place of ``target``. To be called for each thread
            that may wait, before it is started. If the thread cannot be started, the function is dropped uncalled.
        timer: ``threading.Timer``, for sockets of blocking servers. A virtual clock does not change it.
    """

    __slots__ = ("boot", "lock", "monotonic", "new_loop", "now", "pause", "thread", "wall", "wall_ns")

    monotonic: Callable[[], float]
    wall: Callable[[], float]
    wall_ns: Callable[[], int]
    now: Callable[[], datetime]
    boot: Callable[[], float]
    pause: Callable[[float], object]
    lock: Callable[[], threading.Lock]
    new_loop: Callable[[], Loop]
    thread: Callable[[Callable[[], object]], Callable[[], object]]

    #: ``asyncio.sleep``: suspends the calling coroutine. On a running loop
    sleep = staticmethod(asyncio.sleep)
    #: ``asyncio.timeout``: the block is cancelled after some seconds; ``None``: never. On a running loop
    timeout = staticmethod(asyncio.timeout)
    #: ``asyncio.wait_for``: awaits, and cancels what it awaits after some seconds. On a running loop
    wait_for = staticmethod(asyncio.wait_for)
    #: ``asyncio.wait``: awaits several futures for at most ``timeout`` seconds. On a running loop
    wait = staticmethod(asyncio.wait)
    timer = staticmethod(threading.Timer)

    def __init__(self) -> None:
        self.use_real_time()

    def use_real_time(self) -> None:
        """Use the functions of the standard library. For tests, after a virtual clock."""
        self.monotonic = time.monotonic
        self.wall = time.time
        self.wall_ns = time.time_ns
        self.now = partial(datetime.now, UTC)
        self.boot = _boot_time()
        self.pause = time.sleep
        self.lock = threading.Lock
        self.new_loop = _new_loop
        self.thread = _same

    # --- event loops

    @staticmethod
    def time_of(loop: Loop) -> float:
        """Return the time of ``loop``, to which :meth:`call_at` refers. On its thread.

        It may differ from :attr:`monotonic`: uvloop reads its time once per turn, in milliseconds. Compare it with no
        other clock.
        """
        return loop.time()

    @staticmethod
    def call_later(
        loop: Loop, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts
    ) -> asyncio.TimerHandle:
        """Call ``callback`` on ``loop`` after ``delay`` seconds. On its thread.

        With uvloop the call may come a millisecond early.
        """
        return loop.call_later(delay, callback, *args)

    @staticmethod
    def call_at(loop: Loop, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> asyncio.TimerHandle:
        """Call ``callback`` on ``loop`` when :meth:`time_of` is ``when``. On its thread; see :meth:`call_later`."""
        return loop.call_at(when, callback, *args)

    #: returns the function ``call_later`` of a loop. For paths that each message takes: it saves a call per timer
    timers_of: Final[Callable[[Any], CallLater]] = attrgetter("call_later")
    #: returns the function ``time`` of a loop, likewise
    clock_of: Final[Callable[[Any], Callable[[], float]]] = attrgetter("time")


#: the clock of the process
clock: Final = Clock()
