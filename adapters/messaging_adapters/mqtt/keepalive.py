"""Keepalive: pings, and whether the broker still answers.

A ping goes out when nothing was received, or nothing sent, for three quarters of the interval, which the broker may
have set. A broker that does not answer it for as long again is lost. So a dead peer is noticed within twice the
interval, whatever this side does meanwhile. A ping may stand behind megabytes, here and in the kernel: as long as the
peer takes some of them, it is slow and not dead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from messaging.execution import clock
from messaging_adapters.mqtt import packets

if TYPE_CHECKING:
    from messaging_adapters.mqtt.wire import Wire
    from messaging_adapters.mqtt.writing import Writer

#: seconds between two checks, at most
_TICK: Final = 1.0
#: part of the interval after which silence is answered by a ping, and a ping without answer ends the connection
_PATIENCE: Final = 0.75


class Keepalive:
    """The keepalive of one connection.

    Attributes:
        interval: seconds; 0 for none.
    """

    def __init__(self, interval: int) -> None:
        self.interval = float(interval)
        #: value of ``Wire.sent`` from which on a ping was handed to the socket; ``None`` without a ping
        self._ping: int | None = None
        #: when it was queued, or when the backlog before it last shrank; monotonic seconds
        self._ping_at = 0.0
        #: value of ``Wire.delivered`` at that time
        self._delivered = 0

    @property
    def tick(self) -> float:
        """Seconds until the next check."""
        return min(_TICK, self.interval / 8 or _TICK)

    @property
    def patience(self) -> float:
        """Seconds that the broker has for an answer to a ping."""
        return self.interval * _PATIENCE

    def is_lost(self, wire: Wire, writer: Writer) -> bool:
        """Send a ping if one is due. Return whether the broker has not answered one in time."""
        if not self.interval:
            return False
        now, patience = clock.monotonic(), self.patience
        if self._ping is None:
            if now - min(wire.received_at, wire.sent_at) >= patience:
                self._ping, self._ping_at = writer.send(packets.PING), now
                self._delivered = wire.delivered
        elif wire.received_at > self._ping_at:
            self._ping = None
        elif self._delivered < self._ping and wire.delivered > self._delivered:
            # the backlog before the ping shrinks: the connection is slow
            self._delivered, self._ping_at = wire.delivered, now
        return self._ping is not None and now - self._ping_at >= patience
