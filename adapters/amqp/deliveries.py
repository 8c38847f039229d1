"""Deliveries, assembled from their method, header and body frames (4.2.6)."""

from __future__ import annotations

import abc
from typing import Final

from adapters.amqp import frames, properties

#: pieces kept before they are joined: an object costs 33 bytes beside its content, and a frame may hold one byte
_PIECES: Final = 64


class Body:
    """The payload of a message in several body frames (4.2.6.2), joined in linear time and memory.

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
        """Add the next frame's content, and return the payload once it is complete.

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


class DeliveryLane(abc.ABC):
    """A ``protocol.FrameLane`` that assembles the deliveries of one channel.

    Attributes:
        known: the properties of the delivery.
        raw: the same, flags and values as on the wire, if ``keeps_raw`` is set.
    """

    def __init__(self, *, keeps_raw: bool = False) -> None:
        self.known = properties.Properties()
        self.raw = b""
        self._keeps_raw = keeps_raw
        #: delivery tag, "redelivered" and route of the delivery whose content is arriving
        self._delivery: tuple[int, bool, bytes] | None = None
        #: bytes of the payload that are missing
        self._missing = 0
        #: the payload, if it comes in several frames
        self._body: Body | None = None

    @abc.abstractmethod
    def delivered(self, tag: int, route: bytes, payload: bytes) -> None:
        """Handle a complete delivery; ``route`` is as ``frames.read_delivery`` returns it."""

    def take_method(self, method: bytes) -> bool:
        """Take a method other than ``basic.deliver``; see ``FrameLane.take``. By default none is taken."""
        del method
        return False

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        """Take the frames of deliveries; see ``FrameLane.take``."""
        if kind == frames.METHOD:
            method = data[at : at + 4]
            if method == frames.BASIC_DELIVER:
                self._delivery, self._missing = frames.read_delivery(data, at, end), 0
                return True
            return self.take_method(method)
        if self._delivery is None:
            return False
        if kind == frames.HEADER:
            self._missing, self._body = frames.read_body_size(data, at), None
            self.known = properties.read(data, at + 12, end, self._delivery[1])
            if self._keeps_raw:
                self.raw = data[at + 12 : end]
            if self._missing:
                return True
            payload = b""
        elif self._missing:
            payload = data[at:end]
            if end - at != self._missing or self._body is not None:
                self._body = self._body or Body(self._missing)
                whole = self._body.add(payload)
                if whole is None:
                    return True
                payload, self._body = whole, None
            self._missing = 0
        else:
            return False
        tag, _, route = self._delivery
        self._delivery = None
        self.delivered(tag, route, payload)
        return True
