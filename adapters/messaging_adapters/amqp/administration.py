"""Requests about queues that consume nothing; see ``AdministersQueues``.

Each has a connection of its own: RabbitMQ answers some requests by closing the connection, such as ``basic.get`` on a
stream. Functions raise ``aiormq.AMQPChannelError`` for a refusal, and ``ConnectionLostError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from aiormq import spec

from messaging.model import Incoming
from messaging_adapters.amqp import frames, names, topology
from messaging_adapters.amqp.connection import AmqpWire
from messaging_adapters.amqp.declarations import QueueSource
from messaging_adapters.amqp.deliveries import DeliveryLane

#: messages that are asked for at once, and bytes of payloads after which no more are
_AT_ONCE: Final = 16
_MAX_BYTES: Final = 64 * 2**20


async def declare(wire: AmqpWire, sources: Sequence[QueueSource], *, is_bound: bool) -> None:
    """Declare one queue and bind it for each source; with ``declare="passive"`` check that it exists."""
    wanted = sources[0].queue
    if is_bound:
        # a channel with a routing key has an exchange of its own
        for exchange in {source.exchange.name: source.exchange for source in sources}.values():
            await topology.ensure_exchange(wire, exchange)
    channel = await wire.channel()
    if wanted.declare == "passive":
        await topology.check_queue(wire, channel, wanted)
        return
    # not checked for first, unlike a subscription's: the broker compares one that exists with the declaration
    queue = await topology.declare_queue(wire, channel, wanted)
    for source in sources if is_bound else ():
        for key in source.bindings:
            await topology.bind(wire, queue, source.exchange, key, source.binding_arguments)


async def purge(wire: AmqpWire, name: str) -> int:
    """Remove the messages of a queue that no consumer has, and return their number."""
    queue = await (await wire.channel()).get_queue(name, ensure=False)
    purged = await wire.command(queue.purge(), spec.Queue.Purge)
    return cast("int", purged.message_count)


async def delete(wire: AmqpWire, name: str, *, if_empty: bool, if_unused: bool) -> int:
    """Delete a queue, and return the number of its messages."""
    # the broker takes a queue that is not there for a deleted one
    await wire.command((await wire.channel()).get_queue(name), spec.Queue.Declare)
    return await topology.delete_queue(wire, name, if_empty=if_empty, if_unused=if_unused)


async def peek(wire: AmqpWire, name: str, limit: int, exchange: str) -> list[Incoming]:
    """Return the first messages of a queue, and requeue them; ``exchange`` is that of channels without extension."""
    channel = await wire.channel()
    number = cast("int", channel.number)
    lane = wire.lanes[number] = _PeekLane(name, exchange)
    while not lane.is_over and len(lane.found) < limit:
        wire.write(frames.get(number, name) * min(_AT_ONCE, limit - len(lane.found)))
        # replies come in the order of the requests: with this one, all messages are here, or the refusal is
        await wire.command(channel.set_qos(0), spec.Basic.Get)
    # requeues them at the front; a quorum queue without a delivery limit appends what basic.nack requeues
    await wire.close_channel(channel)
    return lane.found


class _PeekLane(DeliveryLane):
    """Collects the replies to ``basic.get``."""

    def __init__(self, queue: str, exchange: str) -> None:
        super().__init__()
        self.found: list[Incoming] = []
        #: whether the queue is empty, or enough was read
        self.is_over = False
        self._exchange = exchange
        self._own_route = b"\x00" + frames.short_string(queue)
        self._bytes = 0

    def take_method(self, method: bytes) -> bool:
        """Take ``basic.get-empty``."""
        if method != frames.BASIC_GET_EMPTY:
            return False
        self.is_over = True
        return True

    def delivered(self, tag: int, route: bytes, payload: bytes) -> None:
        """Keep a message as a subscription would hand it over."""
        del tag
        self._bytes += len(payload)
        self.is_over = self.is_over or self._bytes > _MAX_BYTES
        known = self.known
        exchange, key = frames.read_route(route)
        if known.origin is not None and route == self._own_route:
            exchange, key = known.origin
        arrival = (names.channel_name(key), None) if exchange in (self._exchange, "") else (exchange, key)
        incoming = self.message(payload, arrival, None, known.delivery_count)
        if incoming is not None:  # not expired
            self.found.append(incoming)

    def closed(self, code: int, text: str) -> None:
        """See ``protocol.FrameLane``: the request that waits is refused."""
