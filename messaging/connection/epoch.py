"""Which connection is in use: answers and verdicts of an earlier one do not count."""

from __future__ import annotations


class Epoch:
    """The connections of one instance, as far as its parts need to know. Written on the engine loop.

    Attributes:
        number: of the current connection, or of the last one; 0 before the first.
        is_usable: there is a connection, and it was not lost.
    """

    __slots__ = ("is_usable", "number")

    def __init__(self) -> None:
        self.number = 0
        self.is_usable = False
