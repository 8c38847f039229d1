"""Reading from a connection: when the socket is readable, unless reading is suspended or paced.

**Pacing.** Under load, reading waits for a millisecond where that makes each read worth more, see
:class:`~messaging_adapters.mqtt.pacing.ReadPacer`. **Suspension.** The core suspends reading while consumers are
behind: nothing is read, and packets that were read already wait as well.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from messaging.execution import clock
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.pacing import ReadPacer
from messaging_adapters.mqtt.packets import ProtocolError
from messaging_adapters.mqtt.wire import READ_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from messaging_adapters.mqtt.wire import Wire
    from messaging_adapters.mqtt.writing import Writer

logger = logging.getLogger(__name__)

#: packets between two calls of ``received_all``, and between two looks at whether reading was suspended
_BATCH: Final = 256
#: bits of the first byte of a PUBLISH that tell it from other packets, and those with QoS 0 from others
_KIND_AND_QOS: Final = 0xF0 | packets.QOS
#: types of packets that carry messages or belong to their handshakes
_DATA: Final = frozenset((packets.PUBLISH, packets.PUBACK, packets.PUBREC, packets.PUBREL, packets.PUBCOMP))


class ReaderOwner(Protocol):
    """The connection that a reader reads for."""

    #: between CONNACK and the end
    is_up: bool
    closed: bool

    def begun(self, data: bytes) -> bool:
        """Check the first bytes of the connection. Return whether they may be MQTT; may raise ``ProtocolError``."""

    def received(self, head: int, body: bytes) -> None:
        """Process a packet of data. May raise ``ProtocolError``."""

    def controlled(self, head: int, body: bytes) -> None:
        """Process any other packet. May raise ``ProtocolError``."""

    def received_all(self) -> None:
        """Called when all packets that had arrived, or a batch of them, were processed."""

    def failed(self, error: Exception) -> None:
        """End the connection.

        Args:
            error: EOFError if the broker has closed its side, OSError of the socket, ProtocolError if the broker
                violated the protocol; any other error if a packet could not be processed.
        """


class Reader:
    """The reading half of one connection. On the loop."""

    def __init__(self, owner: ReaderOwner, writer: Writer, component: str) -> None:
        self._owner = owner
        self._component = component
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._wire: Wire | None = None
        #: the loop reports when there are bytes to read
        self._listening = False
        self._suspended = False
        #: packets that were read and are not processed yet
        self._rest: Iterator[tuple[int, bytes]] | None = None
        #: nothing is read before this
        self._pause: asyncio.TimerHandle | None = None
        self._pacer = ReadPacer()
        #: whether bytes have arrived on this connection
        self.has_begun = False
        #: DISCONNECT was sent: packets that still arrive are ignored, but for messages with QoS 0 if those are wanted
        self._draining = False
        self._takes_late = False

    def open(self, wire: Wire) -> None:
        """Read from ``wire`` from now on."""
        self._wire = wire
        self._listen()

    def close(self) -> None:
        """Stop reading. Idempotent."""
        self._ignore()
        self._unpause()
        self._rest = None
        self._wire = None

    def _listen(self) -> None:
        if self._wire is not None and not (self._listening or self._suspended or self._pause):
            self._listening = True
            self._loop.add_reader(self._wire.fileno(), self.read)

    def _ignore(self) -> None:
        if self._wire is not None and self._listening:
            self._listening = False
            self._loop.remove_reader(self._wire.fileno())

    def _unpause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def suspend(self) -> None:
        """Read and process nothing until :meth:`resume`."""
        if not self._draining:
            self._suspended = True
            self._ignore()

    def resume(self) -> None:
        """Process the packets that were read, then read again."""
        self._suspended = False
        rest, self._rest = self._rest, None
        if rest is not None and self._wire is not None:
            self._process(rest)
        if self._pause is None and not self._suspended:
            # most likely bytes are there: a look is cheaper than to have the loop watch, and stop it again
            self._pause = clock.call_later(self._loop, 0, self._continue)

    def drain(self, *, takes_late: bool) -> None:
        """Process the packets that were read, then only watch for the end of the stream.

        With ``takes_late``, messages with QoS 0 that arrive before the end are processed: the broker does not send them
        again.
        """
        self._unpause()
        self._draining = True
        self._takes_late = takes_late
        self.resume()

    def _continue(self) -> None:
        self._pause = None
        self.read()
        self._listen()

    def read(self) -> None:
        """Read and process the bytes that are available."""
        wire, owner = self._wire, self._owner
        if wire is None or self._suspended:
            return
        try:
            data = wire.receive()
            if not wire.is_flushed:  # a WebSocket has answered a ping
                self._writer.flush_soon()
            if data is None:
                return
            if not data:
                if self._draining:
                    self._ignore()
                owner.failed(EOFError())
                return
            if self._draining:
                if self._takes_late:
                    self._process(each for each in wire.split(data) if each[0] & _KIND_AND_QOS == packets.PUBLISH)
                return
            if not self.has_begun:
                # at once: an answer in another protocol may look like the beginning of a long packet
                if not owner.begun(data):
                    return
                self.has_begun = True
        except (OSError, ProtocolError) as error:
            owner.failed(error)
        else:
            count = self._process(wire.split(data))
            seconds = self._pacer.pause_after(count, wire.received_at)
            if seconds and len(data) < READ_SIZE and self._pause is None and not owner.closed:
                self._ignore()
                self._pause = clock.call_later(self._loop, seconds, self._continue)

    def _process(self, found: Iterator[tuple[int, bytes]]) -> int:
        """Process packets and return how many. If reading is suspended meanwhile, the rest is kept for later."""
        owner = self._owner
        received, count = owner.received, 0
        try:
            for head, body in found:
                count += 1
                if head & 0xF0 in _DATA:
                    if not owner.is_up:
                        raise ProtocolError("a packet before CONNACK")
                    received(head, body)
                    if not count % _BATCH:
                        owner.received_all()
                        if self._suspended:
                            self._rest = found
                            break
                else:
                    owner.controlled(head, body)
                    if owner.closed:
                        break
        except ProtocolError as error:
            owner.failed(error)
        except Exception as error:
            logger.exception("%s: a packet cannot be processed; the connection ends", self._component)
            owner.failed(error)
        finally:
            if owner.is_up:
                owner.received_all()
        return count
