"""Other event loops: callbacks for them, handed over in bursts, and the time before their end."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

from messaging.environment.forks import in_child
from messaging.environment.signals import WakeUp
from messaging.execution.clock import clock

#: number of pending callbacks, less one, after which a mailbox wakes its loop again: a power of two, less one
_LOST: Final = 1023
#: pause before the next task, seconds
_PAUSE: Final = 0.1
#: turns of the loop without a sign of its end: between the coroutines that end it there is one
_TURNS: Final = 2
#: what ``asyncio.run`` runs between the end of the tasks and the end of the loop
_ENDING: Final = frozenset({"shutdown_asyncgens", "shutdown_default_executor"})


class Mailbox:
    """Hands callbacks to another event loop, and wakes it once per burst rather than once per callback.

    ``call_soon_threadsafe`` costs microseconds and a system call, an append to a deque neither.
    """

    __slots__ = ("_loop", "_pending", "_retried", "_wake_up")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # weak: the mailbox must not keep the loop, by which it is found, alive
        self._loop = weakref.ref(loop)
        self._pending: deque[Callable[[], object]] = deque()
        self._wake_up = WakeUp(self._wake)
        #: the callback whose first call was interrupted, and that is called a second time
        self._retried: Callable[[], object] | None = None

    def post(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` on the loop soon. Thread safe. A closed loop drops it.

        The callback must not raise. A second call of it, after an interrupted first one, must do no harm.
        """
        self._pending.append(callback)
        # again after many callbacks: asyncio may lose one if an interrupt comes in its own code
        if not self._wake_up.is_pending or not len(self._pending) & _LOST:
            self._wake_up.request()

    def _wake(self) -> None:
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._drain)
                return
        except RuntimeError:  # it is closed
            pass
        self._pending.clear()
        self._wake_up.is_pending = False

    def _drain(self) -> None:
        pending = self._pending
        try:
            # cleared before draining: a thread that appends after this line schedules the loop again
            self._wake_up.is_pending = False
            for _ in range(len(pending)):
                pending[0]()
                pending.popleft()
        except BaseException:
            # an interrupt of the loop's thread: the interrupted callback is called once more, then the others
            if pending and pending[0] is self._retried:
                pending.popleft()
            self._retried = pending[0] if pending else None
            self._wake_up.request()
            raise


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()
in_child(_mailboxes.clear)


def mailbox(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """Return the mailbox of ``loop``. Thread safe."""
    box = _mailboxes.get(loop)
    return _mailboxes.setdefault(loop, Mailbox(loop)) if box is None else box  # atomic: the first thread's wins


def after_cancelled(loop: asyncio.AbstractEventLoop, proceed: Callable[[], object]) -> None:
    """Continue the work of a task that was cancelled from outside: most likely its event loop is about to end.

    Calls ``proceed`` on ``loop`` after a pause, unless the loop ends. On its thread.

    ``asyncio.run`` cancels all tasks, waits for them, and closes the loop when the threads of its executor have ended.
    A task that is made meanwhile would be begun, and destroyed.
    """

    def look(left: int) -> None:
        if _is_ending(loop):
            after_cancelled(loop, proceed)
        elif left:
            loop.call_soon(look, left - 1)
        else:
            proceed()

    clock.call_later(loop, _PAUSE, look, _TURNS)


def _is_ending(loop: asyncio.AbstractEventLoop) -> bool:
    return any(getattr(task.get_coro(), "__name__", None) in _ENDING for task in asyncio.all_tasks(loop))
