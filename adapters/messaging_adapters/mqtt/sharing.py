"""Finds out whether a broker has shared subscriptions with MQTT 3.1.1, where it cannot announce them as with MQTT 5.

A broker without them takes ``$share/queue/channel`` for a channel like any other: it confirms the subscription, and no
message ever arrives. So the first subscription of an instance to a queue is preceded by a probe, on a connection of its
own, where no other subscription interferes. The probe subscribes to one channel through a queue, and to a second
channel without one (the control), and publishes to both. If the message through the queue arrives, the broker has
shared subscriptions. If only the control arrives, it has none, and the subscription is refused. If neither arrives, or
the probe cannot connect or subscribe, a warning says that the queue may stay empty.

The channels are ``messaging/probe/<random>/...``. The messages are empty, not retained, of QoS 0, and sent up to three
times. Subscribers of ``#`` see them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from typing import Final

from messaging.errors import ConnectFailedError, ConnectionLostError, SubscriptionRefusedError
from messaging.execution import clock
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.capabilities import NO_SHARING
from messaging_adapters.mqtt.connection import NetworkConnection, NetworkEvents
from messaging_adapters.mqtt.handshake import ConnectTarget

logger = logging.getLogger(__name__)

#: first levels of the probe channels
CHANNEL: Final = "messaging/probe"
#: how many times both messages are sent
_ROUNDS: Final = 3
#: length of a round in seconds, at least and at most; between them, so many times the time to a SUBACK
_LEAST_WAIT: Final = 0.3
_MOST_WAIT: Final = 5.0
_WAIT_FACTOR: Final = 3


class Sharing:
    """Finds out whether the broker of one instance has shared subscriptions. Everything runs on the loop."""

    def __init__(self) -> None:
        self._probing = asyncio.Lock()
        #: ``None`` until a probe has connected; ``True`` also if the probe had no result
        self._is_there: bool | None = None
        #: the broker that this is known of
        self._probed = ""

    async def require(self, target: ConnectTarget) -> None:
        """Return once shared subscriptions are known to work, or after a warning that the probe had no result.

        Args:
            target: where and how the instance connects.

        Raises:
            SubscriptionRefusedError: the broker has none.
        """
        async with self._probing:
            if self._probed != str(target):  # another host
                self._probed, self._is_there = str(target), None
            if self._is_there is None:
                self._is_there = await self._probe(target)
            if self._is_there is False:
                raise SubscriptionRefusedError(f"{target}: {NO_SHARING}")

    async def _probe(self, target: ConnectTarget) -> bool | None:
        is_there: bool | None = True
        token = secrets.token_hex(8)
        probe = _Probe(f"{CHANNEL}/{token}/shared", f"{CHANNEL}/{token}/control")
        target = dataclasses.replace(target, client_id=f"probe{token}")
        connection = NetworkConnection(target, probe)
        options = packets.subscribe_options(0, no_local=False, as_published=False, retain_handling=0)
        try:
            async with clock.timeout(target.settings.connect_timeout):
                await connection.connect(clean_start=True, will=None)
                began = clock.monotonic()
                answers = [
                    await connection.requests.subscribe(each, options, None)
                    for each in (f"$share/{token}/{probe.shared}", probe.control)
                ]
                wait = min(max(_LEAST_WAIT, _WAIT_FACTOR * (clock.monotonic() - began)), _MOST_WAIT)
            if any(answer.code >= packets.FAILURE for answer in answers):
                reason = "it refuses the subscriptions"
            elif (found := await probe.outcome(connection, wait)) is not None:
                return found
            elif probe.ended is None:
                reason = "no message arrives"
            else:
                raise probe.ended
        except (ConnectFailedError, ConnectionLostError, TimeoutError) as error:
            if not (isinstance(error, ConnectFailedError) and error.code is not None):
                is_there = None  # the next subscription to a queue asks again
            reason = str(error) or "it does not answer in time"
        finally:
            await connection.close()
        logger.warning(
            "%s: cannot find out whether the broker has shared subscriptions: %s on %s/#; without them "
            "queues stay empty; let this client use these channels, or set version=5",
            target.component, reason, CHANNEL,
        )  # fmt: skip
        return is_there


class _Probe(NetworkEvents):
    """Collects the messages on the probe's connection: ``connection.NetworkEvents``."""

    def __init__(self, shared: str, control: str) -> None:
        self.shared = shared
        self.control = control
        self._arrived: set[str] = set()
        self._changed = asyncio.Event()
        #: why the connection ended, if it was lost
        self.ended: ConnectionLostError | None = None

    async def outcome(self, connection: NetworkConnection, wait: float) -> bool | None:
        """Publish, and return whether the message through the queue arrived; ``None`` if neither message did.

        Args:
            connection: connected and subscribed.
            wait: length of a round, seconds.
        """
        for _ in range(_ROUNDS):
            for channel in (self.shared, self.control):
                connection.transport.send(packets.plain_publish(channel))
            try:
                async with clock.timeout(wait):
                    while self.shared not in self._arrived and self.ended is None:
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                continue
            break
        if self.shared in self._arrived:
            return True
        return False if self.control in self._arrived else None

    def received(self, head: int, body: bytes) -> None:
        """See ``connection.NetworkEvents``."""
        if head & 0xF0 == packets.PUBLISH:
            self._arrived.add(packets.parse_publish(head, body, False).topic)
            self._changed.set()

    def lost(self, connection: NetworkConnection, error: ConnectionLostError) -> None:  # noqa: ARG002  # there is one
        """See ``connection.NetworkEvents``."""
        self.ended = error
        self._changed.set()
