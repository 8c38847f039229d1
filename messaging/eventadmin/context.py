"""The context of a delivery: the EventAdmins whose handlers the running code is part of.

A context variable carries it: it holds for a thread, or for a task and the tasks that it starts.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import TYPE_CHECKING, Any, Final

from messaging.eventadmin.constants import LOG_TOPIC

if TYPE_CHECKING:
    from messaging.eventadmin.event import Event

#: stands among the EventAdmins of a context that handles a log event, or an event caused by one
_LOG_EVENT: Final = object()

_admins: Final[contextvars.ContextVar[tuple[object, ...]]] = contextvars.ContextVar("admins", default=())


def is_inside(admin: object) -> bool:
    """Return whether the running code is part of a handler of ``admin``."""
    return admin in _admins.get()


def is_quiet() -> bool:
    """Return whether the running code handles a log event, or an event caused by one: its log is not posted."""
    return _LOG_EVENT in _admins.get()


class DeliveryContext:
    """The context in which the handlers of one EventAdmin run."""

    __slots__ = ("_inside", "_inside_quietly")

    def __init__(self, admin: object) -> None:
        self._inside: tuple[object, ...] = (admin,)
        self._inside_quietly: tuple[object, ...] = (admin, _LOG_EVENT)

    def enter(self, event: Event, is_quiet: bool = False) -> contextvars.Token[Any]:
        """Begin the delivery of ``event``; returns what :func:`leave` takes."""
        inside = self._inside_quietly if is_quiet or event.topic == LOG_TOPIC else self._inside
        outside = _admins.get()
        return _admins.set(tuple(dict.fromkeys((*outside, *inside))) if outside else inside)


#: ends the delivery that ``DeliveryContext.enter`` began
leave: Final = _admins.reset


def leave_anywhere(token: contextvars.Token[Any]) -> None:
    """End a delivery even in another context, where a coroutine ends whose event loop was closed."""
    with contextlib.suppress(ValueError):
        leave(token)
