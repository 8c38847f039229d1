"""The payload of a message that arrives in several body frames (4.2.6.2), in linear time and memory."""

from __future__ import annotations

from typing import Final

#: pieces kept before they are joined: an object costs 33 bytes beside its content, and a frame may hold one byte
_PIECES: Final = 64


class Body:
    """Collect the body frames of one message.

    Args:
        size: bytes that the content header announced.
    """

    __slots__ = ("_joined", "_missing", "_pieces")

    def __init__(self, size: int) -> None:
        self._missing = size
        self._pieces: list[bytes] = []
        #: pieces of a body of many frames; it grows in place
        self._joined = bytearray()

    def add(self, piece: bytes) -> bytes | None:
        """Take the next frame's content; return the whole payload once it is complete.

        Raises:
            ValueError: the frame is empty, or holds more than the content header announced.
        """
        self._missing -= len(piece)
        if not piece or self._missing < 0:
            raise ValueError("an empty body frame" if not piece else "more content than announced")
        self._pieces.append(piece)
        if self._missing == 0 and not self._joined:
            return b"".join(self._pieces)
        if self._missing == 0 or len(self._pieces) == _PIECES:
            self._joined += b"".join(self._pieces)
            self._pieces.clear()
        return bytes(self._joined) if self._missing == 0 else None
