"""One subscription at the broker: its channel, its deliveries, its acknowledgements.

Each has a channel of its own, so that an error of one hurts no other, and its own credit there (``prefetch``). What
arrives in one turn of the loop is handed over as one batch; what is settled in one turn leaves in one write, the
contiguous part of the acknowledgements in a single frame.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import aiormq

from adapters.amqp import frames, names, properties, topology
from adapters.amqp.body import Body
from adapters.amqp.connection import CLOSE_GRACE, BasicConsume, BasicQos, Wire, refusal, reply
from adapters.amqp.declarations import DEFAULT_EXCHANGE, Source
from adapters.amqp.delays import Delays, Kept
from adapters.amqp.extensions import ENVELOPE, STREAM_OFFSET
from messaging.errors import ConnectionLostError, SubscriptionRefusedError
from messaging.model import Features, Incoming, channels, envelope
from messaging.receiving import redelivery

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from adapters.amqp.streams import StreamPosition
    from messaging.adapter import Sink, SubscriptionSpec
    from messaging.model.envelope import Unwrapped

logger = logging.getLogger(__name__)

#: header that RabbitMQ gives to what its MQTT plugin publishes
_MQTT_QOS: Final = "x-mqtt-publish-qos"
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
        source: the same, compiled.
        exchange: where channels without extension are looked for.
        tag: what the broker calls the consumer.
        spawn: runs what has to be told to the broker later.
        position: how far the stream was read, if it is one.
        delays: where rejected messages wait, if they do.
    """

    def __init__(
        self,
        wire: Wire,
        spec: SubscriptionSpec,
        sink: Sink,
        source: Source,
        *,
        exchange: str,
        tag: str,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        position: StreamPosition | None = None,
        delays: Delays | None = None,
    ) -> None:
        self._wire = wire
        self._sink = sink
        self._spec = spec
        self._source = source
        self._position = position
        self._delays = delays
        self._exchange = exchange
        self._tag = tag
        self._spawn = spawn
        self._matchers = [channels.matcher(pattern) for pattern in source.patterns]
        self._routes: dict[bytes, _Route] = {}
        #: by the default exchange to this queue
        self._own_route = b"\x00" + frames.short_string(source.queue.name or "")
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
        #: where the payload comes in several frames
        self._body: Body | None = None
        self._batch: list[Incoming] = []
        #: what is not settled, by delivery tag: kept where this side redelivers, or has it delayed
        self._kept: dict[int, tuple[Kept, Incoming]] = {}
        self._keeps = position is not None or source.delay is not None
        self._raw = b""
        #: what a stream sent beyond its credit, which it counts by the chunk, and how much was handed over
        self._ahead: deque[Incoming] = deque()
        self._handed = 0
        #: the deliveries of a message that says nothing of it, where they are counted
        self._first: int | None = 1 if self._keeps else None
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
                raise refusal(SubscriptionRefusedError, self._what(), error, self._way_out(error)) from error
            raise
        if self._error is not None:  # cancelled between the broker's confirmation and here
            raise self._error
        self._established = True

    def _way_out(self, error: aiormq.AMQPChannelError) -> str:
        """Return a hint for a queue that differs from its declaration; empty for any other refusal."""
        code, text = reply(error)
        # "inequivalent arg 'x-max-priority' for queue ...", "invalid arg ..."
        return topology.declared(self._source.queue) if code == 406 and " arg '" in (text or "") else ""

    async def _subscribe(self) -> None:
        wire, source = self._wire, self._source
        await topology.ensure_exchange(wire, source.exchange)
        if source.queue.name is None:
            self._channel = channel = await wire.channel()
            queue = await topology.make_queue(wire, channel, source.queue)
            self._private_queue = queue
        else:
            queue = source.queue.name
            self._channel = channel = await topology.find_queue(wire, source.queue)
        for key in source.bindings:
            await topology.bind(wire, channel, queue, source.exchange.name, key, source.binding_arguments)
        await wire.command(channel, BasicQos(prefetch_count=self._spec.options.prefetch))
        self._number = channel.number
        wire.lanes[channel.number] = self
        self._open = not self._given_up
        arguments = dict(source.consumer_arguments)
        if self._position is not None:
            arguments["x-stream-offset"] = self._position.attach()
        request = BasicConsume(queue=queue, consumer_tag=self._tag, no_ack=not self._settles, arguments=arguments)
        await wire.command(channel, request)

    async def close(self) -> None:
        """Unsubscribe: what is not settled goes back to the queue. Idempotent.

        Raises:
            ConnectionLostError: the connection went away, and the subscription with it.
        """
        if not self.is_open:
            return
        self._flush()
        if self._delays is not None and self._kept:
            # what the broker has twice by now should not come again
            await self._delays.settle(CLOSE_GRACE)
            self._flush()
        self._open = False
        self._forget()
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

    def closed(self, code: int, text: str) -> None:
        """The broker closed the channel; see ``connection.Lane``."""
        self._end(SubscriptionRefusedError(f"{self._what()}: {code} {text}", code=code, detail=text))

    def _end(self, error: SubscriptionRefusedError) -> None:
        if self._open:
            self._open = False
            self._forget()
            self._error = error
            if self._established:
                self._sink.fail(error)

    def _forget(self) -> None:
        self._batch.clear()
        self._kept.clear()
        self._ahead.clear()

    def _what(self) -> str:
        queue = self._spec.options.queue
        return f"subscription to {self._spec.channel!r}" + (f" (queue {queue!r})" if queue is not None else "")

    # --- deliveries

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        """Take the frames of deliveries; see ``connection.Lane``."""
        if kind == frames.METHOD:
            method = data[at : at + 4]
            if method == frames.BASIC_DELIVER:
                self._arriving = frames.read_delivery(data, at, end)
                return True
            if method == frames.BASIC_CANCEL:
                self._end(
                    SubscriptionRefusedError(f"{self._what()}: cancelled by the broker; the queue was probably deleted")
                )
                self._spawn(self._close_channel())
                return True
            return False
        if self._arriving is None:
            return False
        if kind == frames.HEADER:
            self._missing, self._body = frames.read_body_size(data, at), None
            self._properties = properties.read(data, at + 12, end, self._arriving[1])
            if self._keeps:
                self._raw = data[at + 12 : end]
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
        tag, _, route = self._arriving
        self._arriving = None
        self._arrived(tag, route, payload)
        return True

    def _arrived(self, tag: int, route: bytes, payload: bytes) -> None:
        if not self.is_open:
            return  # it goes back to the queue with the channel
        known = self._properties
        if self._position is not None and (offset := known.extensions.get(STREAM_OFFSET)) is not None:
            self._position.arrived(tag, offset)
        try:
            wanted = self._routes[route]
        except KeyError:
            wanted = self._route(route)
        if known.origin is not None and route == self._own_route:
            # only where a delay sends it: elsewhere anybody could claim to have published to another channel
            wanted = self._translate(*known.origin)
        if wanted is None:
            if self._settles:
                self.settle(tag, requeue=False)
            return
        content: Unwrapped | properties.Properties = known
        body = payload
        if payload.startswith(envelope.START) and _is_of_mqtt(known):
            unwrapped = envelope.unwrap(payload, MappingProxyType({**known.extensions, ENVELOPE: True}))
            if unwrapped is None:  # expired
                if self._settles:
                    self.settle(tag, requeue=False)
                return
            content, body = unwrapped, unwrapped.payload
        incoming = Incoming(
            body,
            wanted[0],
            wanted[1],
            content.content_type,
            content.content_encoding,
            content.correlation_id,
            content.reply_to_channel,
            content.extensions,
            (self, tag) if self._settles else None,
            known.delivery_count or self._first,
        )
        if self._keeps:
            self._kept[tag] = Kept(self._raw, route, payload), incoming
            if self._position is not None:
                self._ahead.append(incoming)
                self._advance()
                return
        self._hand_over(incoming)

    def _advance(self) -> None:
        """Hand over what a stream sent, as far as there is credit."""
        while self._ahead and self._handed < self._spec.options.prefetch:
            self._handed += 1
            self._hand_over(self._ahead.popleft())

    def _hand_over(self, incoming: Incoming) -> None:
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._batch.append(incoming)

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
        if self._spec.channel_extension is not None and exchange == self._source.exchange.name:
            return exchange or DEFAULT_EXCHANGE, key
        if exchange not in (self._exchange, ""):
            return exchange, key  # a queue that somebody bound to more than we did
        name = names.channel_name(key)
        if not self._matchers:
            return name, None  # by way of another exchange
        if any(matches(name) for matches in self._matchers):
            return name, None
        # A shared queue holds what others bound it to as well, and that must not be lost. Only what our own bindings
        # let in although no pattern matches is not wanted: a wildcard in the first level and '$...'.
        wanted = self._source.queue.name is not None and not (
            name.startswith("$")
            and any(pattern[0] in (channels.ANY_LEVEL, channels.ANY_LEVELS) for pattern in self._source.patterns)
        )
        return (name, None) if wanted else None

    # --- settling

    def reject(self, tag: int) -> None:
        """Have a delivery come again: from the broker, at once or later, or from here if the broker cannot."""
        if not self._keeps:
            self.settle(tag, requeue=True)
            return
        if not self.is_open or tag not in self._kept:
            return
        kept, incoming = self._kept[tag]
        if self._delays is not None and self._source.delay is not None:
            self._delays.put(
                self._source.queue.name or "",
                self._source.delay,
                kept,
                lambda waits: self.settle(tag, requeue=not waits),
            )
        else:
            # nothing is returned to a stream
            again = redelivery.again(incoming, (incoming.delivery_count or 1) + 1)
            self._kept[tag] = kept, again
            self._hand_over(again)

    def settle(self, tag: int, *, requeue: bool) -> None:
        """Acknowledge a delivery, or put it back into its queue; what comes too late, or twice, is dropped."""
        if not self.is_open or tag <= self._floor or tag in self._above:
            return
        self._above.add(tag)
        if self._kept and self._kept.pop(tag, None) is not None and self._position is not None:
            self._handed -= 1
            self._advance()
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
        if self._position is not None:
            self._position.settled(floor)
        # what goes back first: the acknowledgement of everything up to a tag must not take it along
        parts = [frames.requeue(self._number, tag) for tag in requeues]
        contiguous = [tag for tag in acks if tag <= floor]
        if contiguous:
            parts.append(frames.ack(self._number, max(contiguous), multiple=len(contiguous) > 1))
        parts += [frames.ack(self._number, tag, multiple=False) for tag in acks if tag > floor]
        self._wire.write(b"".join(parts))


def _is_of_mqtt(known: properties.Properties) -> bool:
    """Whether RabbitMQ's MQTT plugin published a message."""
    headers: Mapping[str, str] = known.extensions.get(Features.EXTENSION_HEADERS, {})
    return _MQTT_QOS in headers
