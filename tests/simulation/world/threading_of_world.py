"""The stand-ins of ``threading``, ``_thread``, ``queue`` and ``time``: they ask the scheduler of the world.

:func:`install` puts them in place, for the rest of the process, before anything of the project is imported. What the
standard library builds on locks (``Condition``, ``Event``, ``Semaphore``, executors) is built on these then.
"""

from __future__ import annotations

import _thread
import itertools
import queue
import sys
import threading
import time
from math import inf
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.world import current
from tests.simulation.world.scheduler import EPOCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tests.simulation.world.scheduler import Fiber

_RealLock: Final = _thread.LockType
#: modules whose locks belong to the interpreter
_UNTOUCHED: Final = frozenset({"_thread", "threading"})
#: longest time-out that ``threading`` accepts, seconds
_TIMEOUT_MAX: Final = 1e9


class Lock:
    """``threading.Lock``. A released lock goes to whoever comes first, not to the one that waits longest."""

    __slots__ = ("__weakref__", "_holder", "_is_locked", "_waiters")

    def __init__(self) -> None:
        self._is_locked = False
        self._holder: Fiber | None = None
        self._waiters: list[Fiber] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See ``threading.Lock``."""
        world = current.scheduler
        world.point()
        if not self._is_locked or self._is_abandoned():
            self._is_locked = True
            self._holder = world.current
            return True
        if not blocking or timeout == 0:
            return False
        return self._wait(inf if timeout < 0 else world.now + timeout)

    def _is_abandoned(self) -> bool:
        """Return whether a process holds it that was killed: the lock is one of a module, which others share."""
        return self._holder is not None and self._holder.is_crashed

    def _wait(self, until: float) -> bool:
        world = current.scheduler
        fiber = world.current
        if fiber is None:
            return False  # between fibers nobody can release it
        while True:
            self._waiters.append(fiber)
            is_woken = world.block(until, "a lock")
            if not is_woken and fiber in self._waiters:
                self._waiters.remove(fiber)
            if not self._is_locked or self._is_abandoned():
                self._is_locked = True
                self._holder = fiber
                return True
            if world.now >= until:
                return False

    def release(self) -> None:
        """See ``threading.Lock``."""
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False
        self._holder = None
        world = current.scheduler
        waiters = self._waiters
        while waiters:
            fiber = waiters.pop(int(world.random.random() * len(waiters)) if len(waiters) > 1 else 0)
            if not fiber.is_crashed:
                world.wake(fiber)
                break
        world.point()

    def locked(self) -> bool:
        """See ``threading.Lock``."""
        return self._is_locked

    def _at_fork_reinit(self) -> None:
        self._is_locked = False
        self._holder = None
        self._waiters = []

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """``threading.RLock``."""

    __slots__ = ("__weakref__", "_count", "_lock", "_owner")

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: Fiber | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See ``threading.RLock``."""
        fiber = current.scheduler.current
        if self._count and self._owner is fiber:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = fiber, 1
        return True

    def release(self) -> None:
        """See ``threading.RLock``."""
        if not self._count or self._owner is not current.scheduler.current:
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # --- for threading.Condition

    def _release_save(self) -> int:
        count, self._count, self._owner = self._count, 0, None
        self._lock.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self._lock.acquire()
        self._count, self._owner = count, current.scheduler.current

    def _is_owned(self) -> bool:
        return bool(self._count) and self._owner is current.scheduler.current

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()
        self._owner, self._count = None, 0


class Local:
    """``threading.local``."""

    def __new__(cls, /, *args: Any, **keywords: Any) -> Local:
        """Remember the arguments: each thread initialises its own attributes with them."""
        made = object.__new__(cls)
        object.__setattr__(made, "_made_with", (next(_numbers), args, keywords))
        _slots_of(made, is_first=True)
        return made

    def __getattribute__(self, name: str) -> Any:
        _slots_of(self)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _slots_of(self)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        _slots_of(self)
        object.__delattr__(self, name)


_numbers: Final = itertools.count()
#: the attributes of locals outside of all fibers
_outside: Final[dict[int, dict[str, Any]]] = {}


def _slots_of(local: Local, *, is_first: bool = False) -> None:
    """Give ``local`` the attributes that it has for the current fiber."""
    fiber = current.scheduler.current
    slots = _outside if fiber is None else fiber.slots
    made_with = object.__getattribute__(local, "__dict__")["_made_with"]
    number, arguments, keywords = made_with
    found = slots.get(number)
    if found is None:
        found = slots[number] = {"_made_with": made_with}
        object.__setattr__(local, "__dict__", found)
        if not is_first and type(local).__init__ is not object.__init__:
            type(local).__init__(local, *arguments, **keywords)
    else:
        object.__setattr__(local, "__dict__", found)


class Thread:
    """``threading.Thread``. All are daemons: a world ends with its program."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        del group
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self._fiber: Fiber | None = None
        self._joining: list[Fiber] = []

    @property
    def ident(self) -> int | None:
        """See ``threading.Thread``."""
        return None if self._fiber is None else self._fiber.number

    native_id = ident

    def start(self) -> None:
        """See ``threading.Thread``."""
        world = current.scheduler
        if self._fiber is not None:
            raise RuntimeError("threads can only be started once")
        process = world.current.process if world.current is not None else None
        if process is not None and process.threads_left <= 0:
            raise RuntimeError("can't start new thread")
        self._fiber = world.spawn(self._run, self.name, process)
        self._fiber.thread = self
        world.point()

    def _run(self) -> None:
        try:
            self.run()
        finally:
            for fiber in self._joining:
                current.scheduler.wake(fiber)

    def run(self) -> None:
        """See ``threading.Thread``."""
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        """See ``threading.Thread``."""
        world = current.scheduler
        until = inf if timeout is None else world.now + timeout
        if self._fiber is None or world.current is None:
            raise RuntimeError("cannot join thread before it is started")
        while self.is_alive() and world.now < until:
            self._joining.append(world.current)
            world.block(until, f"the end of {self.name}")

    def is_alive(self) -> bool:
        """See ``threading.Thread``."""
        return self._fiber is not None and not self._fiber.has_ended


class MainThread(Thread):
    """Stands for every thread that the world has not started."""

    def __init__(self) -> None:
        super().__init__(name="MainThread")

    @property
    def ident(self) -> int:
        """Return the identifier of no fiber."""
        return 0

    def is_alive(self) -> bool:
        """Return True."""
        return True

    def _reset_internal_locks(self, _: bool) -> None:
        """Do nothing after a fork; until Python 3.12."""

    def _after_fork(self, new_ident: int | None = None) -> None:
        """Do nothing after a fork; since Python 3.13."""


class Timer(Thread):
    """``threading.Timer``."""

    def __init__(self, interval: float, function: Callable[..., object], args: Any = None, kwargs: Any = None) -> None:
        super().__init__(target=function, args=args or (), kwargs=kwargs or {}, name="timer")
        self._interval = interval
        self.finished = threading.Event()

    def cancel(self) -> None:
        """See ``threading.Timer``."""
        self.finished.set()

    def run(self) -> None:
        """See ``threading.Timer``."""
        if not self.finished.wait(self._interval):
            super().run()
        self.finished.set()


_main: Final = MainThread()


def current_thread() -> Thread:
    """See ``threading.current_thread``."""
    fiber = current.scheduler.current
    return _main if fiber is None or fiber.thread is None else fiber.thread


def get_ident() -> int:
    """See ``threading.get_ident``."""
    fiber = current.scheduler.current
    return 0 if fiber is None else fiber.number


def enumerate_threads() -> list[Thread]:
    """See ``threading.enumerate``: those of the current process."""
    world = current.scheduler
    process = None if world.current is None else world.current.process
    living = [each.thread for each in world.fibers if each.process is process and not each.has_ended]
    return [_main, *(each for each in living if each is not None)]


def start_new_thread(function: Callable[..., object], args: Any = (), kwargs: Any = None) -> int:
    """See ``_thread.start_new_thread``."""
    world = current.scheduler
    process = None if world.current is None else world.current.process
    return world.spawn(lambda: function(*args, **(kwargs or {})), "raw thread", process).number


# --- time


def _monotonic() -> float:
    return current.scheduler.now


def _monotonic_ns() -> int:
    return round(current.scheduler.now * 1e6) * 1000


def _time() -> float:
    return EPOCH + current.scheduler.now + current.wall_offset()


def _time_ns() -> int:
    return round(_time() * 1e6) * 1000


def _sleep(seconds: float) -> None:
    world = current.scheduler
    world.block(world.now + max(seconds, 0.0), "time to pass")


def _clock_gettime(_: int) -> float:
    return current.scheduler.now


def install() -> None:
    """Replace the functions and classes of the standard library. Once, and for ever."""
    threading._dangling.discard(threading.main_thread())  # type: ignore[attr-defined]  # what forks look for
    threading._active[0] = _main  # type: ignore[attr-defined]
    replaced: dict[Any, dict[str, Any]] = {
        threading: {
            "Lock": Lock, "RLock": RLock, "_CRLock": None, "_PyRLock": RLock, "_allocate_lock": Lock, "local": Local,
            "Thread": Thread, "Timer": Timer, "get_ident": get_ident, "get_native_id": get_ident,
            "current_thread": current_thread, "currentThread": current_thread, "main_thread": lambda: _main,
            "enumerate": enumerate_threads, "active_count": lambda: len(enumerate_threads()),
        },
        _thread: {"start_new_thread": start_new_thread},  # the rest belongs to the machinery of imports
        queue: {"SimpleQueue": queue._PySimpleQueue},  # type: ignore[attr-defined]
        time: {
            "monotonic": _monotonic, "monotonic_ns": _monotonic_ns, "perf_counter": _monotonic,
            "perf_counter_ns": _monotonic_ns, "time": _time, "time_ns": _time_ns, "sleep": _sleep,
            "clock_gettime": _clock_gettime, "process_time": _monotonic,
        },
    }  # fmt: skip
    for module, names in replaced.items():
        for name, value in names.items():
            setattr(module, name, value)
    # the locks that modules have made already: whoever waits for one of those would stop the whole world
    for module in [*sys.modules.values()]:
        if module.__name__ not in _UNTOUCHED and not module.__name__.startswith(("importlib", "_frozen_importlib")):
            for name, value in [*vars(module).items()]:
                if type(value) is _RealLock:
                    setattr(module, name, Lock())
