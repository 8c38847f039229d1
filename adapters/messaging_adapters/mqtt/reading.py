"""Reading from a connection: when the socket is readable, unless reading is suspended or paced.

**Pacing.** A broker writes message by message, and a client that is waiting reads them one by one: each read, each turn
of the loop and each hand-over to a consumer's thread is then for the sake of a few bytes. Under load that is most of
the work, on both sides. So where many packets arrive in small pieces, reading waits for a millisecond, as network cards
do with their interrupts. It stops doing so when that does not bring enough, since the broker may be the one that waits.

**Suspension.** The core suspends reading while consumers are behind: nothing is read, and packets that were read
already wait as well.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from messaging.execution import clock
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.packets import PacketSplitter, ProtocolError
from messaging_adapters.mqtt.transport import READ_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from messaging_adapters.mqtt.transport import PacketEvents, Transport, TransportOwner

logger = logging.getLogger(__name__)

#: packets between two calls of ``received_all``, and between two looks at whether reading was suspended
_BATCH: Final = 256
#: bits of the first byte of a PUBLISH that tell it from other packets, and those with QoS 0 from others
_KIND_AND_QOS: Final = 0xF0 | packets.QOS
#: types of packets that carry messages or belong to their handshakes
_DATA: Final = frozenset((packets.PUBLISH, packets.PUBACK, packets.PUBREC, packets.PUBREL, packets.PUBCOMP))
#: how long reading waits, seconds: the shortest that event loops can
PAUSE: Final = 0.001
#: packets that make a read worth while
WORTH: Final = 32
#: packets a second from which on it may be worth waiting
BUSY: Final = 10_000
#: how long to look before that is said, seconds
_LOOK: Final = 0.01
#: how long not to try it again if it brought too little: doubled each time, seconds
_FIRST_BREAK: Final = 0.1
_LONGEST_BREAK: Final = 10.0


class ReadPacer:
    """Decides for one connection whether to read again at once. Not thread safe."""

    __slots__ = ("_break", "_count", "_not_before", "_paced", "_reads", "_since")

    def __init__(self) -> None:
        self._paced = False
        self._reads = self._count = 0
        self._since = self._not_before = 0.0
        self._break = _FIRST_BREAK

    def pause_after(self, count: int, now: float) -> float:
        """How long to wait before reading again, seconds; 0 for not at all.

        Args:
            count: packets in the last read.
            now: monotonic seconds.
        """
        if self._paced:
            if count >= WORTH:
                self._break = _FIRST_BREAK
                return PAUSE
            self._paced = False
            self._not_before = now + self._break
            self._break = min(self._break * 2, _LONGEST_BREAK)
            self._look(now)
            return 0.0
        self._reads += 1
        self._count += count
        seconds = now - self._since
        if seconds < _LOOK:
            return 0.0
        self._paced = self._count >= BUSY * seconds and self._count < WORTH * self._reads and now >= self._not_before
        self._look(now)
        return PAUSE if self._paced else 0.0

    def _look(self, now: float) -> None:
        self._since = now
        self._reads = self._count = 0


class PacketReader:
    """The reading half of one connection. On the loop.

    Attributes:
        has_begun: whether bytes have arrived on this connection.
    """

    def __init__(
        self, owner: TransportOwner, events: PacketEvents, transport: Transport, largest: int, component: str
    ) -> None:
        """Read packets of at most ``largest`` bytes; ``component`` is the beginning of log lines."""
        self._owner = owner
        self._events = events
        self._transport = transport
        self._splitter = PacketSplitter(largest)
        self._component = component
        self._loop = asyncio.get_running_loop()
        #: the loop reports when there are bytes to read
        self._listening = False
        self._suspended = False
        #: packets that were read and are not processed yet
        self._rest: Iterator[tuple[int, bytes]] | None = None
        #: nothing is read before this
        self._pause: asyncio.TimerHandle | None = None
        self._pacer = ReadPacer()
        self.has_begun = False
        #: DISCONNECT was sent: packets that still arrive are ignored, but for messages with QoS 0 if those are wanted
        self._draining = False
        self._takes_late = False

    def close(self) -> None:
        """Stop reading, before the transport is closed. Idempotent."""
        self._ignore()
        self._unpause()
        self._rest = None

    def listen(self) -> None:
        """Read whenever the transport, which is open, has bytes; unless reading is suspended or paused."""
        if self._transport.fileno() >= 0 and not (self._listening or self._suspended or self._pause):
            self._listening = True
            self._loop.add_reader(self._transport.fileno(), self.read)

    def _ignore(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._transport.fileno())

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
        if rest is not None:
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
        self.listen()

    def read(self) -> None:
        """Read and process the bytes that are available."""
        if self._suspended:
            return
        transport, owner = self._transport, self._owner
        try:
            data = transport.receive()
            if data is None:
                return
            if not data:
                if self._draining:
                    self._ignore()
                owner.failed(EOFError())
                return
            if self._draining:
                if self._takes_late:
                    packets_ = self._splitter.split(data)
                    self._process(each for each in packets_ if each[0] & _KIND_AND_QOS == packets.PUBLISH)
                return
            if not self.has_begun:
                # at once: an answer in another protocol may look like the beginning of a long packet
                if not owner.begun(data):
                    return
                self.has_begun = True
        except (OSError, ProtocolError) as error:
            owner.failed(error)
        else:
            count = self._process(self._splitter.split(data))
            seconds = self._pacer.pause_after(count, transport.received_at)
            if seconds and len(data) < READ_SIZE and self._pause is None and not owner.closed:
                self._ignore()
                self._pause = clock.call_later(self._loop, seconds, self._continue)

    def _process(self, found: Iterator[tuple[int, bytes]]) -> int:
        """Process packets and return how many. If reading is suspended meanwhile, the rest is kept for later."""
        owner, events = self._owner, self._events
        received, count = events.received, 0
        try:
            for head, body in found:
                count += 1
                if head & 0xF0 in _DATA:
                    if not owner.is_up:
                        raise ProtocolError("a packet before CONNACK")
                    received(head, body)
                    if not count % _BATCH:
                        events.received_all()
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
                events.received_all()
        return count
