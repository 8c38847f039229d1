"""The broker: its connections, virtual hosts, alarms, restarts, and what is at rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.simulation.brokers.amqp.connection import AmqpConnection
from tests.simulation.brokers.amqp.dead_letters import Letters
from tests.simulation.brokers.amqp.errors import AmqpError
from tests.simulation.brokers.amqp.faults import FORCED, AmqpFaults, Injector
from tests.simulation.brokers.amqp.messages import Entry, Message
from tests.simulation.brokers.amqp.storage import Storage
from tests.simulation.brokers.amqp.virtual_host import REPLY_TO, VirtualHost

if TYPE_CHECKING:
    from tests.simulation.brokers.amqp.channel import Channel
    from tests.simulation.brokers.amqp.consumers import Consumer
    from tests.simulation.brokers.amqp.queues import Queue
    from tests.simulation.brokers.host import Connection, Host, Peer

#: the virtual time 0, in seconds since the epoch
EPOCH: Final = 1_700_000_000
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


@dataclass(slots=True)
class Counters:
    """What the broker has done since its creation, restarts included.

    Attributes:
        published: messages that clients have published.
        accepted: of these, the ones that at least one queue has taken.
        confirmed, nacked: answers to publishers, in messages.
        returned: mandatory messages that reached no queue.
        delivered, redelivered: deliveries, also by ``basic.get``; and the ones that were not the first.
        acknowledged, rejected, requeued: what consumers have done with messages.
        dead_lettered: messages that a queue has taken as dead letters.
        dropped: messages that have left the broker without having been delivered to an end.
    """

    published: int = 0
    accepted: int = 0
    confirmed: int = 0
    nacked: int = 0
    returned: int = 0
    delivered: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    rejected: int = 0
    requeued: int = 0
    dead_lettered: int = 0
    dropped: int = 0
    connections: int = 0
    channel_errors: int = 0
    connection_errors: int = 0


class AmqpBroker:
    """A RabbitMQ 3.10.8 of one node; ``host.Broker``. Called from one thread.

    Args:
        host: time and chance.
        vhosts: names of the virtual hosts.
        heartbeat: interval that it proposes to clients, seconds.
        sync: the shortest and the longest time after which a change is on disk, seconds.

    Attributes:
        login: whether a user may log in with a password; by default anybody but with an empty name.
        alarm: why it takes no messages; ``None`` if it does. See :meth:`block`.
        on_accepted: called with exchange, routing key and body of a message that a queue has taken.
        on_confirmed: the same, of a message that is confirmed to its publisher.
        on_delivered: called with the consumer and the body of a message that is sent to it.
        on_dropped: called with a reason, exchange, routing key and body of a message that is lost to consumers:
            "unroutable", "expired", "maxlen", "rejected", "delivery_limit", "purged", "queue deleted", "not durable",
            "lost in a restart".
    """

    def __init__(
        self,
        host: Host,
        *,
        vhosts: Iterable[str] = ("/",),
        heartbeat: int = 60,
        sync: tuple[float, float] = (0.0005, 0.01),
    ) -> None:
        self.host = host
        self.heartbeat = heartbeat
        self.counters = Counters()
        self.storage = Storage(host, *sync)
        self.letters = Letters(self)
        self.vhosts: dict[str, VirtualHost] = {name: VirtualHost(self, name) for name in vhosts}
        self.connections: dict[AmqpConnection, None] = {}
        #: channels by the addresses of replies to their requests
        self.replies: dict[str, Channel] = {}
        self.alarm: str | None = None
        self.is_running = True
        self.login: Callable[[str, str], bool] = lambda user, _: bool(user)
        self.on_accepted: Callable[[str, str, bytes], object] | None = None
        self.on_confirmed: Callable[[str, str, bytes], object] | None = None
        self.on_delivered: Callable[[Consumer, bytes], object] | None = None
        self.on_dropped: Callable[[str, str, str, bytes], object] | None = None
        #: called with each connection of which a fault ends a channel or a consumer
        self.on_ended: Callable[[AmqpConnection], object] | None = None
        #: called with each connection that the broker begins to close: its channels end now, its socket ends later
        self.on_closing: Callable[[AmqpConnection], object] | None = None
        self.injector = Injector(self, AmqpFaults())
        #: whether any fault can happen
        self.is_faulty = False

    @property
    def faults(self) -> AmqpFaults:
        """Return the faults that can happen; assign others to change them."""
        return self.injector.faults

    @faults.setter
    def faults(self, faults: AmqpFaults) -> None:
        self.injector = Injector(self, faults)
        self.is_faulty = self.injector.is_on

    # --- connections

    def accept(self, peer: Peer) -> Connection:
        """See ``host.Broker``. A broker that is stopped resets the connection."""
        connection = AmqpConnection(self, peer)
        if not self.is_running:
            connection.vanish()
            peer.abort()
            return connection
        self.counters.connections += 1
        self.connections[connection] = None
        return connection

    def forget(self, connection: AmqpConnection) -> None:
        """Forget a connection that has ended."""
        self.connections.pop(connection, None)

    def close_connections(self, code: int = 320, text: str = FORCED) -> None:
        """Close all connections as an operator does."""
        for connection in [*self.connections]:
            connection.close_by_error({"reply_code": code, "reply_text": AmqpError(code, text).reply_text()})

    def block(self, reason: str = "low on memory") -> None:
        """Take no messages: a connection that publishes is not read any more."""
        self._set_alarm(reason)

    def unblock(self) -> None:
        """Take messages again."""
        self._set_alarm(None)

    def _set_alarm(self, reason: str | None) -> None:
        self.alarm = reason
        for connection in [*self.connections]:
            connection.set_alarm(reason)

    def cancel(self, consumer: Consumer) -> None:
        """Cancel a consumer, and tell its client."""
        if consumer.channel.consumers.get(consumer.tag) is consumer:
            self.host.note(f"amqp: consumer {consumer.tag!r} is cancelled")
            consumer.channel.consumer_gone(consumer)
            consumer.queue.remove_consumer(consumer)

    def cancel_consumers(self, queue: str, vhost: str = "/") -> None:
        """Cancel all consumers of a queue."""
        for consumer in [*self.vhosts[vhost].queues[queue].turns.all]:
            self.cancel(consumer)

    def take_away(self, queue: str, vhost: str = "/") -> None:
        """Let the node of a durable queue go down: its consumers are cancelled, and requests about it get 404.

        Messages do not reach it, as at RabbitMQ's classic queues: they are unroutable unless another queue gets them.
        """
        self.host.note(f"amqp: the node of queue {queue!r} is down")
        self.vhosts[vhost].take_away(queue)

    def bring_back(self, queue: str, vhost: str = "/") -> None:
        """Let the node of a queue come up again, with the messages that it had."""
        self.host.note(f"amqp: the node of queue {queue!r} is up")
        self.vhosts[vhost].bring_back(queue)

    # --- restarts

    def stop(self) -> None:
        """See ``host.Broker``."""
        if not self.is_running:
            return
        self.is_running = False
        connections = [*self.connections]
        # without consumers first: nothing is delivered any more while the channels end
        for connection in connections:
            for channel in connection.channels.values():
                channel.pause()
        self.close_connections()
        for connection in connections:
            connection.vanish()
            connection.peer.close()
        self.letters.flush()
        self.storage.sync()
        self._restart({}, was_killed=False)

    def kill(self) -> None:
        """See ``host.Broker``: messages that were not synced are lost, those whose removal was not are back."""
        if not self.is_running:
            return
        self.is_running = False
        for connection in [*self.connections]:
            connection.vanish()
            connection.peer.abort()
        self.letters.lose()
        removed: dict[Queue, list[Entry]] = {}
        for queue, entry in self.storage.lose():
            removed.setdefault(queue, []).append(entry)
        self._restart(removed, was_killed=True)

    def _restart(self, removed: dict[Queue, list[Entry]], *, was_killed: bool) -> None:
        self.replies.clear()
        self.alarm = None
        for vhost in self.vhosts.values():
            vhost.restart(removed, was_killed=was_killed)
            for queue in vhost.queues.values():
                queue.stop_timers()

    def start(self) -> None:
        """See ``host.Broker``."""
        if not self.is_running:
            self.is_running = True
            for vhost in self.vhosts.values():
                vhost.resume()

    # --- for its parts

    def token(self) -> str:
        """Return a name that no other has."""
        bits = self.host.random.getrandbits(132)
        return "".join(_LETTERS[bits >> shift & 63] for shift in range(0, 132, 6))

    def seconds(self) -> int:
        """Return the virtual time in whole seconds since the epoch."""
        return EPOCH + int(self.host.now())

    def dropped(self, reason: str, message: Message) -> None:
        """Report that a message is lost to consumers."""
        self.counters.dropped += 1
        if self.on_dropped is not None:
            self.on_dropped(reason, message.exchange, message.keys[0], message.body)

    def deliver_replies(self, message: Message) -> None:
        """Deliver a message of the default exchange to the channels that its keys are addresses of."""
        for key in message.keys:
            if key.startswith(REPLY_TO):
                channel = self.replies.get(key)
                if channel is not None:
                    channel.deliver_reply(message)

    # --- what is at rest

    def describe(self) -> dict[str, object]:
        """Return what there is: connections with their channels, and by virtual host queues, exchanges, bindings."""
        return {
            "connections": [
                {
                    "name": connection.peer.name,
                    "state": connection.state,
                    "channels": {
                        number: {
                            "consumers": [*channel.consumers],
                            "unacked": len(channel.unacked),
                            "unconfirmed": len(channel.confirms.unconfirmed),
                            "replies": bool(channel.reply_address),
                        }
                        for number, channel in connection.channels.items()
                    },
                }
                for connection in self.connections
            ],
            "vhosts": {name: vhost.describe() for name, vhost in self.vhosts.items()},
            "letters": len(self.letters),
            "synced": self.storage.is_idle,
        }
