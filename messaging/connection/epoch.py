"""The number of the current connection: replies and verdicts of an earlier one are void."""

from __future__ import annotations


class Epoch:
    """Identifies the current connection of an instance. Written on the engine loop.

    Attributes:
        number: of the current connection, or of the last one; 0 before the first.
        is_usable: whether the connection is up.
    """

    __slots__ = ("is_usable", "number")

    def __init__(self) -> None:
        self.number = 0
        self.is_usable = False
