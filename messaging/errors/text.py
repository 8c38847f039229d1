"""Texts for logs and errors: names, representations, suggestions for misspelt names, and a log that never raises.

Everything here may be called from any thread.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

S = TypeVar("S")
E = TypeVar("E", bound=BaseException)


def exact(text: str) -> str:
    """Return the characters of ``text`` as a plain ``str``, whose methods no subclass overrides."""
    return text if type(text) is str else str.__str__(text)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 error``, ``2 errors``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable(name: str) -> str:
    """Return a name for one line of a log: unchanged if it is printable, else quoted and escaped."""
    return name if name.isprintable() else repr(name)


def visible(text: str, *, keep: str = "") -> str:
    """Return ``text`` with its unprintable characters escaped, such as those that change the direction of writing.

    Args:
        text: any text.
        keep: characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else ascii(each)[1:-1] for each in text)


def brief(value: Any) -> str:
    """Return the beginning of the representation of any value, for errors."""
    try:
        return f"{value!r:.80}"
    except Exception:  # noqa: BLE001  # an int of thousands of digits has no text; values may raise anything
        return f"a value of type {type(value).__name__}"


def without_frames(error: E) -> E:
    """Remove the tracebacks of ``error`` and of its causes and contexts, and return it.

    For errors of a library that was given a password: the frames of a traceback hold it in their variables.
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
    """Make a ``__repr__`` work for an object that lacks attributes because its constructor raised.

    Debuggers and error reporters show such an object: it is the ``self`` of a frame in the traceback.
    """

    @functools.wraps(method)
    def shown(self: Any) -> str:
        try:
            return method(self)
        except AttributeError:
            return f"<{type(self).__name__}, whose constructor failed>"

    return shown


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in ``known`` that is most similar to ``name``, or ``None`` if none is similar.

    Case, ``-`` and ``_`` do not count: ``time_to_live`` is ``timeToLive``.
    """
    plain = {_plain(each): each for each in known}
    wanted = _plain(name)
    found = difflib.get_close_matches(wanted, plain, n=1) if wanted not in plain else [wanted]
    return plain[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the nearest name, or an empty text if no name is similar."""
    found = nearest(name, known)
    return f"did you mean {found!r}?" if found is not None else ""


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


class SafeLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that contains the exceptions of the application's log handlers and filters.

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
            # one frame more, so that the record names the caller of this method
            super().log(level, msg, *args, stacklevel=stacklevel + 1, **options)
        except Exception:  # noqa: BLE001  # handlers and filters may raise anything
            if logging.raiseExceptions and sys.stderr is not None:
                with contextlib.suppress(Exception):
                    traceback.print_exc()
