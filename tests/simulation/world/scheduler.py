"""The scheduler: runs the threads of a world one at a time, and lets virtual time pass.

Each thread of the product is a *fiber*, a greenlet. All fibers share the one thread of the operating system, so exactly
one of them runs, until it blocks, ends, or comes to a *point*: an operation by which threads affect each other, such
as acquiring a lock. There the scheduler may put another one in its place. Which, and after how many points, the seed
decides. Between two points nothing else runs.

Virtual time stands still while a fiber runs, takes a few microseconds for each change of fibers, and jumps to the next
timer when all of them wait. A fiber may also be *held up* at a point: it goes on after up to some seconds, as a thread
whose page is swapped out. Otherwise no timer would ever fall due in the midst of work.

Timers of the network, the brokers and the disk run between fibers, on the *hub*: they never block.
"""

from __future__ import annotations

import heapq
import sys
from asyncio import _get_running_loop, _set_running_loop
from math import inf, log
from typing import TYPE_CHECKING, Any, Final

import greenlet

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Callable

#: virtual time that a change of fibers takes, seconds
SWITCH_TIME: Final = 2e-6
#: monotonic time at which each world begins, seconds. Not 0: a time that is mistaken for "never" would stay unnoticed
BEGIN: Final = 10_000.0
#: wall time at which each world begins, seconds since the epoch
EPOCH: Final = 1_750_000_000.0


class WorldError(Exception):
    """The world itself came to no end: fibers wait for ever, or never stop working."""


class Timer:
    """A function that the hub calls at some moment."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self.function: Callable[[], object] | None = function

    def cancel(self) -> None:
        """Do not call the function any more. Idempotent."""
        self.function = None


class Fiber:
    """A thread of the world.

    Attributes:
        name: for the history.
        process: the process that the thread belongs to.
        thread: the object that stands for it in ``threading``.
        slots: the attributes of ``threading.local`` objects.
        is_crashed: its process was killed: it never runs again, and nothing it holds counts.
        has_ended: its function returned.
    """

    __slots__ = (
        "_greenlet",
        "asyncgen_hooks",
        "due",
        "has_ended",
        "held_up",
        "is_crashed",
        "is_ready",
        "loop",
        "name",
        "number",
        "process",
        "slots",
        "thread",
        "waits_for",
    )

    def __init__(
        self, function: Callable[[], object], name: str, process: Any, number: int, hub: greenlet.greenlet
    ) -> None:
        self.name = name
        self.process = process
        #: identifier of the thread, as ``threading.get_ident`` returns it
        self.number = number
        self.thread: Any = None
        self.slots: dict[int, dict[str, Any]] = {}
        self.is_crashed = False
        self.has_ended = False
        self.is_ready = False
        #: the loop that runs on it
        self.loop: asyncio.AbstractEventLoop | None = None
        #: the interpreter's hooks for asynchronous generators, which that loop has set. There is one pair per thread
        #: of the operating system
        self.asyncgen_hooks: tuple[Any, Any] = (None, None)
        #: the moment at which a wait ends by itself; each wait has one of its own
        self.due: Timer | None = None
        #: what it waits for, for reports
        self.waits_for = ""
        self._greenlet = greenlet.greenlet(function, hub)

    def run(self) -> None:
        """Let it go on until it gives the turn back. On the hub."""
        self._greenlet.switch()

    def where(self) -> str:
        """Return the place of the project's code at which it waits."""
        frame = self._greenlet.gr_frame
        found = "?"
        while frame is not None:
            file = frame.f_code.co_filename
            if ("/messaging/" in file or "/adapters/" in file) and "/site-packages/" not in file:
                found = f"{file.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_qualname}"
                break
            frame = frame.f_back
        return f"{self.name} waits for {self.waits_for or 'its turn'} at {found}"


class Scheduler:
    """Runs fibers and timers of one world.

    Args:
        random: decides who runs next, where a fiber is interrupted, and how long it is held up.
        gap: mean number of points between two interruptions of a fiber; infinite: none.
        hold_up: probability that an interrupted fiber is held up.
        longest: the longest time for which it is, seconds.
    """

    def __init__(
        self, random: random.Random, *, gap: float = 20.0, hold_up: float = 0.02, longest: float = 0.5
    ) -> None:
        self.now = BEGIN
        self.random = random
        self.current: Fiber | None = None
        self.switches = 0
        #: a number that two histories share if, and only if, the same fibers ran in the same order
        self.digest = 0
        self._gap = gap
        self._hold_up = hold_up
        #: how many more times a fiber may be held up: a world in which all are, all the time, gets nowhere
        self.hold_ups = int(random.random() * 40)
        self._longest = longest
        self._points = self._next_gap()
        self._ready: list[Fiber] = []
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._numbers = 0
        self._hub = greenlet.getcurrent()
        self.fibers: list[Fiber] = []
        #: called on the hub with each exception that leaves a fiber
        self.failed: Callable[[Fiber, BaseException], object] | None = None

    # --- fibers

    def spawn(self, function: Callable[[], object], name: str, process: Any) -> Fiber:
        """Start a fiber, which runs ``function`` when its turn comes."""
        self._numbers += 1
        fiber: Fiber

        def run() -> None:
            _set_running_loop(None)
            sys.set_asyncgen_hooks(None, None)
            try:
                function()
            except greenlet.GreenletExit:
                raise
            except BaseException as error:  # noqa: BLE001  # of whatever kind: it must not end the hub
                if self.failed is not None:
                    self.failed(fiber, error)
            finally:
                fiber.has_ended = True

        fiber = Fiber(run, name, process, self._numbers, self._hub)
        self.fibers.append(fiber)
        self.wake(fiber)
        return fiber

    def wake(self, fiber: Fiber) -> None:
        """End the wait of a fiber; idempotent."""
        if not fiber.is_ready and not fiber.is_crashed and not fiber.has_ended:
            fiber.is_ready = True
            self._ready.append(fiber)

    def crash(self, fiber: Fiber) -> None:
        """Never let ``fiber`` run again: nothing of it is executed, no ``finally`` either."""
        fiber.is_crashed = True
        if fiber.is_ready:
            fiber.is_ready = False
            self._ready.remove(fiber)

    def block(self, until: float, waits_for: str) -> bool:
        """Let other fibers run until this one is woken, or until the moment ``until``; return whether it was woken."""
        fiber = self.current
        if fiber is None:
            raise WorldError(f"the hub must not wait for {waits_for}")
        if until <= self.now:
            self.give_way()
            return False
        timer: Timer | None = None
        is_late = False

        def end() -> None:
            nonlocal is_late
            is_late = True
            self.wake(fiber)

        if until < inf:
            timer = self.call_at(until, end)
        fiber.waits_for = waits_for
        self._leave(fiber)
        fiber.waits_for = ""
        if timer is not None:
            timer.cancel()
        return not is_late

    def point(self) -> None:
        """Let another fiber run here, if the seed says so."""
        self._points -= 1
        if self._points <= 0:
            self._interrupt()

    def give_way(self) -> None:
        """Let other fibers run."""
        fiber = self.current
        if fiber is not None:
            fiber.is_ready = True
            self._ready.append(fiber)
            self._leave(fiber)

    def hold(self, seconds: float, why: str) -> None:
        """Keep the current fiber from running for a time. On the hub: do nothing."""
        fiber = self.current
        if fiber is None:
            return
        self.call_at(self.now + seconds, lambda: self.wake(fiber))
        fiber.waits_for = why
        self._leave(fiber)
        fiber.waits_for = ""

    def _interrupt(self) -> None:
        self._points = self._next_gap()
        if self.current is None:
            return
        if self.hold_ups > 0 and self.random.random() < self._hold_up:
            self.hold_ups -= 1
            # evenly over the orders of magnitude: races are as narrow as microseconds, or as wide as a time-out
            self.hold(1e-5 * (self._longest / 1e-5) ** self.random.random(), "its turn, held up")
        else:
            self.give_way()

    def _next_gap(self) -> float:
        return inf if self._gap == inf else 1 - log(1.0 - self.random.random()) * self._gap

    def _leave(self, fiber: Fiber) -> None:
        fiber.loop = _get_running_loop()
        fiber.asyncgen_hooks = sys.get_asyncgen_hooks()
        self._hub.switch()
        _set_running_loop(fiber.loop)
        sys.set_asyncgen_hooks(*fiber.asyncgen_hooks)

    # --- time

    def call_at(self, when: float, function: Callable[[], object]) -> Timer:
        """Have the hub call ``function`` at the moment ``when``, which is a value of ``now``."""
        timer = Timer(function)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, timer))
        return timer

    def call_later(self, delay: float, function: Callable[[], object]) -> Timer:
        """Have the hub call ``function`` after ``delay`` seconds."""
        return self.call_at(self.now + delay, function)

    def run(self, is_over: Callable[[], bool], *, most: int, horizon: float) -> None:
        """Run until ``is_over()``, which is asked after each change of fibers. On the hub.

        Args:
            is_over: returns whether to stop.
            most: number of changes of fibers.
            horizon: virtual time that may pass, seconds.

        Raises:
            WorldError: one of the limits was reached, or every fiber waits and nothing is due.
        """
        end = self.now + horizon
        most += self.switches
        ready, timers, random = self._ready, self._timers, self.random.random
        while not is_over():
            while timers and timers[0][0] <= self.now:
                self._fire()
            if ready:
                at = int(random() * len(ready)) if len(ready) > 1 else 0
                fiber = ready[at]
                ready[at] = ready[-1]
                ready.pop()
                fiber.is_ready = False
                self.now += SWITCH_TIME
                self.switches += 1
                self.digest = (self.digest * 31 + fiber.number) & 0xFFFFFFFFFFFF
                self.current = fiber
                fiber.run()
                self.current = None
                _set_running_loop(None)
            elif timers:
                self.now = max(self.now, timers[0][0])
                self._fire()
            else:
                raise WorldError("nothing is left to do: " + self.waiting())
            if self.switches > most:
                raise WorldError(f"not at rest after {self.switches} changes of threads: " + self.waiting())
            if self.now > end:
                raise WorldError(f"not at rest after {horizon:g} virtual seconds: " + self.waiting())

    def _fire(self) -> None:
        _, _, timer = heapq.heappop(self._timers)
        function, timer.function = timer.function, None
        if function is not None:
            function()

    def waiting(self) -> str:
        """Return where the living fibers wait, for reports."""
        living = [fiber.where() for fiber in self.fibers if not (fiber.has_ended or fiber.is_crashed)]
        return "; ".join(living) or "no thread is left"
