"""Continues the work of a task that was cancelled from outside: most likely its event loop is about to end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from messaging.execution.clock import clock

if TYPE_CHECKING:
    from collections.abc import Callable

#: pause before the next task, seconds
_PAUSE: Final = 0.1
#: turns of the loop without a sign of its end: between the coroutines that end it there is one
_TURNS: Final = 2
#: what ``asyncio.run`` runs between the end of the tasks and the end of the loop
_ENDING: Final = frozenset({"shutdown_asyncgens", "shutdown_default_executor"})


def after_cancelled(loop: asyncio.AbstractEventLoop, proceed: Callable[[], object]) -> None:
    """Call ``proceed`` on ``loop`` after a pause, unless the loop ends. On its thread.

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
