"""Text from outside: names that cannot be printed, objects that are half made, logs that fail, names misspelt.

Everything here may be called from any thread.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

S = TypeVar("S")
E = TypeVar("E", bound=BaseException)


def exact(text: str) -> str:
    """Return the same characters as a ``str``, so that a name that was checked is the name that is used."""
    return text if type(text) is str else str.__str__(text)


def printable(name: str) -> str:
    """Return a name as a line of a log can show it: as it is, or quoted and escaped."""
    return name if name.isprintable() else repr(name)


def without_frames(error: E) -> E:
    """Return ``error`` without its traceback, and those of the errors behind it without theirs.

    For errors of a library that was given a password: its frames hold it in their variables.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            pending += [each.__cause__, each.__context__]
    return error


def tolerant(method: Callable[[S], str]) -> Callable[[S], str]:
    """Have a ``__repr__`` answer also for an object that lacks attributes because its constructor raised.

    Debuggers and error reporters show such an object: it is the ``self`` of a frame in the traceback.
    """

    @functools.wraps(method)
    def __repr__(self: Any) -> str:  # noqa: N807  # it becomes one
        try:
            return method(self)
        except AttributeError:
            return f"<{type(self).__name__}, whose constructor failed>"

    return __repr__


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name of ``known`` that ``name`` is most likely meant to be, or ``None``.

    Case, ``-`` and ``_`` do not count: ``time_to_live`` is ``timeToLive``.
    """
    plain = {_plain(each): each for each in known}
    wanted = _plain(name)
    found = difflib.get_close_matches(wanted, plain, n=1) if wanted not in plain else [wanted]
    return plain[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the nearest name, or an empty text if none is near."""
    found = nearest(name, known)
    return f"did you mean {found!r}?" if found is not None else ""


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


class SafeLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that does not pass on what handlers and filters of the application's log raise.

    An exception of a logging handler must neither stop a stream or a delivery thread, nor leave a message unsettled. As
    :mod:`logging` does, this class writes such errors to stderr, unless ``logging.raiseExceptions`` is false. Thread
    safe.

    Args:
        name: of the logger.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: object, stacklevel: int = 1, **options: Any) -> None:
        """See :meth:`logging.Logger.log`."""
        try:
            # the caller is who called the caller of this
            super().log(level, msg, *args, stacklevel=stacklevel + 1, **options)
        except Exception:  # noqa: BLE001  # whatever they raise
            if logging.raiseExceptions and sys.stderr is not None:
                with contextlib.suppress(Exception):
                    traceback.print_exc()
