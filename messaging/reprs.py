"""``__repr__`` for objects whose constructor may have failed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

S = TypeVar("S")


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
