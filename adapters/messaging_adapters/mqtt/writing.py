"""Writing to a connection: packets are gathered and flushed once per turn of the loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from messaging_adapters.mqtt.packets import LimitExceededError

if TYPE_CHECKING:
    from messaging_adapters.mqtt.wire import Wire

#: Bytes of answers to the broker's packets that it may leave unread: more than the answers to all packet ids.
UNREAD: Final = 2 * 1024 * 1024


class WriterOwner(Protocol):
    """The connection that a writer writes to."""

    def written(self) -> None:
        """Called after bytes were handed to the socket: :attr:`Writer.sent` may have grown."""

    def write_failed(self, error: OSError) -> None:
        """End the connection: the socket failed."""

    def failed(self, error: Exception) -> None:
        """End the connection: the broker exceeded a limit."""


class Writer:
    """The writing half of one connection. On the loop."""

    def __init__(self, owner: WriterOwner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._wire: Wire | None = None
        self._flush_due = False
        #: the loop reports when the socket takes more
        self._watching = False
        #: DISCONNECT was queued: nothing may follow it
        self._finishing = False
        #: bytes of answers queued so far
        self._queued = 0
        #: of those, bytes that the socket is known to have: ``_marked`` of them once it has all up to ``_mark``
        self._taken = self._marked = self._mark = 0

    def open(self, wire: Wire) -> None:
        """Write to ``wire`` from now on."""
        self._wire = wire

    def close(self) -> None:
        """Stop writing. Idempotent."""
        if self._wire is not None:
            self._loop.remove_writer(self._wire.fileno())
            self._wire = None

    @property
    def unsent(self) -> int:
        """Bytes waiting for room in the socket's buffer."""
        return self._wire.unsent if self._wire is not None else 0

    @property
    def sent(self) -> int:
        """Bytes handed to the socket so far."""
        return self._wire.sent if self._wire is not None else 0

    def send(self, frame: bytes) -> int:
        """Queue a packet for the next flush.

        Returns:
            The value of :attr:`sent` from which on the socket has it.
        """
        wire = self._wire
        if wire is None or self._finishing:
            return 0
        wire.send(frame)
        if not self._flush_due:
            self.flush_soon()
        return wire.sent + wire.unsent

    def answer(self, frame: bytes) -> None:
        """Queue an answer to a packet. If the broker reads none of them, the connection ends."""
        self._queued += len(frame)
        self.send(frame)

    def finish(self, frame: bytes) -> None:
        """Write a last packet, then end this side of the stream."""
        self.send(frame)
        self._finishing = True
        self.flush()

    def flush_soon(self) -> None:
        """Flush in the next turn of the loop."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand queued bytes to the socket until it takes no more."""
        self._flush_due = False
        wire = self._wire
        if wire is None:
            return
        try:
            wire.flush()
        except OSError as error:
            self._owner.write_failed(error)
            return
        self._owner.written()
        if self._queued:
            self._check_answers(wire)
        if self._wire is None:  # the connection was ended
            return
        if wire.is_flushed is self._watching:
            self._watching = not self._watching
            if self._watching:
                self._loop.add_writer(wire.fileno(), self.flush)
            else:
                self._loop.remove_writer(wire.fileno())
        if self._finishing and wire.is_flushed:
            wire.finish()

    def _check_answers(self, wire: Wire) -> None:
        if wire.sent >= self._mark:
            self._taken, self._marked, self._mark = self._marked, self._queued, wire.sent + wire.unsent
        unread = self._queued - self._taken
        if unread > UNREAD:
            self._owner.failed(LimitExceededError(f"{unread} bytes of answers to its packets wait for it to read them"))
