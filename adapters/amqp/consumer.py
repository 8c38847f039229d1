"""One subscription at the broker: its channel, its deliveries, its acknowledgements.

Each has a channel of its own, so that an error of one hurts no other, and its own credit there (``prefetch``). What
arrives in one turn of the loop is handed over as one batch; what is settled in one turn leaves in one write, the
contiguous part of the acknowledgements in a single frame.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

import aiormq

from adapters.amqp import frames, names, properties, topology
from adapters.amqp.connection import BasicConsume, Wire, describe
from messaging import channels
from messaging.adapter import Incoming, Sink, SubscriptionSpec
from messaging.errors import ConnectionLostError, SubscriptionRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)

#: routes whose translation is kept
_ROUTES: Final = 1024

#: channel and extension, or ``None`` for what was not subscribed to
_Route = tuple[str, str | None] | None


class Consumer:
    """A subscription; the handle of the adapter, and with a delivery tag the token of a delivery.

    Args:
        wire: the connection.
        spec: what to subscribe to.
        sink: where it goes.
        exchange: where channels without extension are looked for.
        max_priority: of queues that are made.
        tag: what the broker calls the consumer.
        spawn: runs what has to be told to the broker later.
    """

    def __init__(
        self,
        wire: Wire,
        spec: SubscriptionSpec,
        sink: Sink,
        *,
        exchange: str,
        max_priority: int,
        tag: str,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._wire = wire
        self._sink = sink
        self._spec = spec
        self._exchange = exchange
        self._max_priority = max_priority
        self._tag = tag
        self._spawn = spawn
        self._matches = channels.matcher(spec.channel)
        self._routes: dict[bytes, _Route] = {}
        self._settles = spec.options.qos != "0"
        self._open = False
        #: whether ``open`` is through, so that an end is the sink's business
        self._established = False
        #: whether nobody waits for ``open`` any more
        self._given_up = False
        self._error: SubscriptionRefusedError | None = None
        self._channel: aiormq.Channel | None = None
        self._private_queue: str | None = None
        self._number = 0
        # the delivery whose content is arriving
        self._arriving: tuple[int, bool, bytes] | None = None
        self._properties = properties.Properties()
        self._missing = 0
        self._body: list[bytes] = []
        self._batch: list[Incoming] = []
        #: every delivery tag up to here is settled; above it, those in the set
        self._floor = 0
        self._above: set[int] = set()
        self._acks: list[int] = []
        self._requeues: list[int] = []
        self._flushing = False

    @property
    def is_open(self) -> bool:
        """Whether a delivery can still be settled. May be read by any thread."""
        return self._open and self._wire.alive

    # --- life cycle

    async def open(self) -> None:
        """Subscribe.

        Raises:
            SubscriptionRefusedError: the broker said no.
            ConnectionLostError: the connection went away.
        """
        # not cancelled with the caller: a request that was sent has its effect, and it must be known to be undone
        opening = asyncio.get_running_loop().create_task(self._subscribe())
        try:
            await asyncio.shield(opening)
        except BaseException as error:
            self._given_up = True
            self._spawn(self._clean_up(opening))
            if isinstance(error, aiormq.AMQPChannelError):
                raise self._refusal(describe(error), error) from error
            raise
        if self._error is not None:  # cancelled between the broker's confirmation and here
            raise self._error
        self._established = True

    async def _subscribe(self) -> None:
        wire, options = self._wire, self._spec.options
        extension = self._spec.channel_extension
        exchange = self._exchange if extension is None else self._spec.channel
        key = names.binding_key(self._spec.channel) if extension is None else extension
        await topology.ensure_exchange(wire, exchange, create=options.autocreate)
        if options.queue is None:
            self._channel = channel = await wire.channel()
            queue = await topology.make_private_queue(wire, channel, max_priority=self._max_priority)
            self._private_queue = queue
        else:
            queue = options.queue
            self._channel = channel = await topology.find_queue(
                wire, queue, create=options.autocreate, max_priority=self._max_priority
            )
        if options.autocreate:
            await topology.bind(wire, channel, queue, exchange, key)
        await wire.ask(channel.basic_qos(prefetch_count=options.prefetch))
        self._number = channel.number
        wire.lanes[channel.number] = self
        self._open = not self._given_up
        await wire.ask(channel.rpc(BasicConsume(queue=queue, consumer_tag=self._tag, no_ack=not self._settles)))

    async def close(self) -> None:
        """Unsubscribe: what is not settled goes back to the queue. Idempotent.

        Raises:
            ConnectionLostError: the connection went away, and the subscription with it.
        """
        if not self.is_open:
            return
        self._flush()
        self._open = False
        self._batch.clear()
        assert self._channel is not None  # noqa: S101  # open
        await self._wire.close_channel(self._channel)

    async def _clean_up(self, opening: asyncio.Task[None]) -> None:
        """Undo what ``opening`` did before it failed or was given up."""
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            self._private_queue = None  # it has a consumer, and ends with it
        self._open = False
        try:
            if self._channel is not None:
                await self._wire.close_channel(self._channel)
            if self._private_queue is not None:
                await topology.delete_queue(self._wire, self._private_queue)
        except (ConnectionLostError, aiormq.AMQPChannelError) as error:
            logger.debug("not cleaned up after %r: %s", self._spec.channel, error)

    async def _close_channel(self) -> None:
        try:
            if self._channel is not None:
                await self._wire.close_channel(self._channel)
        except ConnectionLostError as error:
            logger.debug("channel %d ended with its connection: %s", self._number, error)

    def closed(self, reason: str) -> None:
        """The broker closed the channel; see ``connection.Lane``."""
        if self._open:
            self._open = False
            self._batch.clear()
            self._error = self._refusal(reason, None)
            if self._established:
                self._sink.fail(self._error)

    def _refusal(self, reason: str, cause: BaseException | None) -> SubscriptionRefusedError:
        queue = self._spec.options.queue
        where = f" (queue {queue!r})" if queue is not None else ""
        error = SubscriptionRefusedError(f"subscription to {self._spec.channel!r}{where}: {reason}")
        error.__cause__ = cause
        return error

    # --- deliveries

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        """Take the frames of deliveries; see ``connection.Lane``."""
        if kind == frames.METHOD:
            method = data[at : at + 4]
            if method == frames.BASIC_DELIVER:
                self._arriving = frames.read_delivery(data, at, end)
                return True
            if method == frames.BASIC_CANCEL:
                self.closed("cancelled by the broker; the queue was probably deleted")
                self._spawn(self._close_channel())
                return True
            return False
        if self._arriving is None:
            return False
        if kind == frames.HEADER:
            self._missing = frames.read_body_size(data, at)
            self._properties = properties.read(data, at + 12, end, self._arriving[1])
        else:
            self._body.append(data[at:end])
            self._missing -= end - at
        if self._missing <= 0:
            tag, _, route = self._arriving
            self._arriving = None
            body = self._body
            self._arrived(tag, route, body[0] if len(body) == 1 else b"".join(body))
            self._body = []
        return True

    def _arrived(self, tag: int, route: bytes, payload: bytes) -> None:
        if not self.is_open:
            return  # it goes back to the queue with the channel
        try:
            wanted = self._routes[route]
        except KeyError:
            wanted = self._route(route)
        if wanted is None:
            if self._settles:
                self.settle(tag, requeue=False)
            return
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._deliver)
        known = self._properties
        self._batch.append(
            Incoming(
                payload,
                wanted[0],
                wanted[1],
                known.content_type,
                known.content_encoding,
                known.correlation_id,
                known.reply_to_channel,
                known.extensions,
                (self, tag) if self._settles else None,
                known.delivery_count,
            )
        )

    def _deliver(self) -> None:
        batch, self._batch = self._batch, []
        if batch and self.is_open:
            self._sink.deliver(batch)

    def _route(self, raw: bytes) -> _Route:
        exchange, key = frames.read_route(raw)
        wanted = self._translate(exchange, key)
        if len(self._routes) >= _ROUTES:
            self._routes.clear()
        self._routes[raw] = wanted
        return wanted

    def _translate(self, exchange: str, key: str) -> _Route:
        subscribed = self._spec.channel
        if self._spec.channel_extension is not None and exchange == subscribed:
            return exchange, key
        if exchange not in (self._exchange, ""):
            return exchange, key  # a queue that somebody bound to more than we did
        name = names.channel_name(key)
        if self._spec.options.queue is None:
            return (name, None) if self._matches(name) else None
        # A shared queue holds what others bound it to as well, and that must not be lost. Only what our own binding
        # let in although the pattern does not match is not wanted: a wildcard in the first level and '$...'.
        if name.startswith("$") and subscribed[0] in (channels.ANY_LEVEL, channels.ANY_LEVELS):
            return None
        return name, None

    # --- settling

    def settle(self, tag: int, *, requeue: bool) -> None:
        """Acknowledge a delivery, or put it back into its queue; what comes too late, or twice, is dropped."""
        if not self.is_open or tag <= self._floor or tag in self._above:
            return
        self._above.add(tag)
        (self._requeues if requeue else self._acks).append(tag)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        acks, self._acks = self._acks, []
        requeues, self._requeues = self._requeues, []
        if not self._open:
            return
        floor, above = self._floor, self._above
        while floor + 1 in above:
            floor += 1
            above.remove(floor)
        self._floor = floor
        # what goes back first: the acknowledgement of everything up to a tag must not take it along
        parts = [frames.requeue(self._number, tag) for tag in requeues]
        contiguous = [tag for tag in acks if tag <= floor]
        if contiguous:
            parts.append(frames.ack(self._number, max(contiguous), multiple=len(contiguous) > 1))
        parts += [frames.ack(self._number, tag, multiple=False) for tag in acks if tag > floor]
        self._wire.write(b"".join(parts))
