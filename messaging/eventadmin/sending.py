"""Sending: handlers are called one after the other, and the sender waits for each of them (RFC 97 5.2.1, 5.3.2).

Without a limit a function is called on the sending thread. With one it is called on another thread, and the sender
waits no longer than the limit; the handler is blocked then.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from messaging.errors import ArgumentError
from messaging.execution import Flag, Promise, running_loop, workers

if TYPE_CHECKING:
    from messaging.eventadmin.event import Event
    from messaging.eventadmin.receiver import AdminHandler

#: tasks of handlers that did not return in time, until they end: event loops hold their tasks weakly
_overdue: Final[set[asyncio.Task[None]]] = set()


def fetch_functions(handlers: list[AdminHandler]) -> dict[AdminHandler, Exception]:
    """Find out which handlers are coroutine functions, and refuse those of the event loop that runs here.

    Returns:
        Handlers whose function could not be made.
    """
    failed: dict[AdminHandler, Exception] = {}
    here = running_loop()
    if here is None:
        return failed
    for handler in handlers:
        try:
            handler.function.fetch()
        except Exception as error:  # noqa: BLE001  # a factory may raise anything: the handler has failed
            failed[handler] = error
        if handler.function.runs_on(here):
            raise ArgumentError(f"{handler.name} runs on the event loop that would wait for it: use asend_event()")
    return failed


def receive_in_time(handler: AdminHandler, event: Event, seconds: float) -> None:
    """Deliver ``event`` on another thread, and block the handler if it does not return within ``seconds``.

    The handler's own timeout takes precedence, unless it is 0.
    """
    limit = handler.terms.timeout or seconds
    done = Flag()
    _receive_elsewhere(handler, event, limit, running_loop(), done.set)
    if not done.wait(limit):
        handler.stalled(limit)


async def asend(handlers: list[AdminHandler], event: Event, seconds: float) -> None:
    """Deliver ``event`` to each handler; see ``EventAdmin.asend_event``."""
    here = asyncio.get_running_loop()
    for handler in handlers:
        if not handler.is_active:
            continue
        limit = (handler.terms.timeout or seconds) if seconds else 0.0
        if handler.function.runs_on(here):
            in_time = await _receive_here(handler, event, limit)
        else:
            in_time = await _await_elsewhere(handler, event, limit)
        if not in_time:
            handler.stalled(limit)


async def _receive_here(handler: AdminHandler, event: Event, limit: float) -> bool:
    """Deliver ``event`` to a coroutine function; return whether it returned in time."""
    if not limit:
        await handler.receive_async(event)
        return True
    task = asyncio.ensure_future(handler.receive_async(event))
    _overdue.add(task)
    task.add_done_callback(_overdue.discard)
    try:
        done, _ = await asyncio.wait((task,), timeout=limit)
    finally:
        task.cancel()  # if it has not ended
    return bool(done)


async def _await_elsewhere(handler: AdminHandler, event: Event, limit: float) -> bool:
    """Deliver ``event`` on another thread; return whether the handler returned in time."""
    done: Promise[None] = Promise(f"the event {event.topic!r} for {handler.name}")
    _receive_elsewhere(handler, event, limit, None, lambda: done.resolve(None))
    try:
        async with asyncio.timeout(limit or None):
            await done
    except TimeoutError:
        return False
    return True


def _receive_elsewhere(
    handler: AdminHandler,
    event: Event,
    limit: float,
    waiting_loop: asyncio.AbstractEventLoop | None,
    done: Callable[[], object],
) -> None:
    context = contextvars.copy_context()

    def run() -> None:
        try:
            context.run(handler.receive, event, False, limit, waiting_loop)
        finally:
            done()

    workers().submit(run)
