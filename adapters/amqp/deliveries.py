"""Deliveries, assembled from their method, header and body frames (4.2.6)."""

from __future__ import annotations

import abc

from adapters.amqp import frames, properties


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
        #: the contents of the body frames, if the payload comes in several (4.2.6.2)
        self._pieces: list[bytes] | None = None

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
            self._missing, self._pieces = frames.read_body_size(data, at), None
            self.known = properties.read(data, at + 12, end, self._delivery[1])
            if self._keeps_raw:
                self.raw = data[at + 12 : end]
            if self._missing:
                return True
            payload = b""
        elif self._missing:
            payload = data[at:end]
            if end - at != self._missing or self._pieces is not None:
                self._missing -= end - at
                if not payload or self._missing < 0:
                    raise ValueError("an empty body frame" if not payload else "more content than announced")
                if self._pieces is None:
                    self._pieces = []
                self._pieces.append(payload)
                if self._missing:
                    return True
                payload, self._pieces = b"".join(self._pieces), None
            self._missing = 0
        else:
            return False
        tag, _, route = self._delivery
        self._delivery = None
        self.delivered(tag, route, payload)
        return True
