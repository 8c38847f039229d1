"""A user's application, as mypy --strict and pyright in strict mode have to accept it.

A line that ends with ``# error`` must be refused by both. Nothing here is run.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from dataclasses import dataclass
from typing import Any, assert_type

from pydantic import BaseModel
from reactivex import operators as ops

import messaging
from messaging import (
    AcknowledgeMessageContext,
    AcknowledgeType,
    DeadlineError,
    Features,
    HandlerRegistration,
    Message,
    MessageContext,
    MessageStream,
    Messaging,
    MessagingError,
    Promise,
    ReceivedMessage,
    ReplyError,
    WouldBlockError,
)
from messaging.connection.state import ConnectionState
from messaging.replyto import CHANNEL, ReplyRegistration, ReplyToSingleSubscriptionHandler
from messaging.services import ServiceRegistration, ServiceRegistry
from messaging.typedevent import TypedEventBus

logger = logging.getLogger(__name__)


class Reading(BaseModel):
    """What a sensor tells."""

    room: str
    celsius: float


@dataclass
class Order:
    """What a customer wants."""

    id: int
    item: str


# --- publishing


def publish(m: Messaging) -> list[Promise[None]]:
    """Publish in every way there is."""
    promises = [
        m.publish("sensors/attic", Reading(room="attic", celsius=21.5)),
        m.publish("sensors/attic", b"1", qos=1, retain=True, content_type="application/json"),
        m.publish("sensors/attic", "text", qos="1", time_to_live=5.0, headers={"k": "v"}, message_id=None),
        m.publish("orders", Order(1, "tea"), guaranteed_delivery=True, timeout=2, priority=3, mandatory=True),
        m.publish("status", "gone", last_will=True, will_delay=30.0),
        m.publish("logs", "x", channel_extension="", exchange_type="fanout", declare="passive"),
    ]
    m.publish("a", retian=True)  # error
    m.publish("a", qos=1.5)  # error
    m.publish("a", time_to_live="5")  # error
    m.publish("a", queue="workers")  # error
    m.publish("a", declare="maybe")  # error
    m.publish(1)  # error
    return promises


def build(m: Messaging) -> Message:
    """Build a message as the RFC names it."""
    context = m.context_builder().channel("orders").extension_entry(Features.EXTENSION_QOS, 1).build_context()
    assert_type(context, MessageContext)
    assert_type(context.channel, str | None)
    context.channel.upper()  # error
    m.context_builder().chanel("orders")  # error
    return m.context_builder().with_context(context).content({"id": 7}).build_message()


# --- handlers


def register(m: Messaging) -> list[HandlerRegistration]:
    """Register handlers of every kind."""

    @m.on("sensors/+", qos=1, max_deliveries=3, dead_letter_channel="refused")
    def store(reading: Reading) -> None:
        logger.info("%s: %f", reading.room, reading.celsius)

    @m.on("sensors/+", model=Reading, concurrency=4, queue="workers", queue_type="quorum")
    async def forward(message: ReceivedMessage[Reading]) -> None:
        assert_type(message.value(), Reading)
        assert_type(message.context.channel, str)
        await m.publish(f"copies/{message.context.channel}", message.value())

    def plain(message: Message) -> None:
        logger.info("%d bytes", len(message.payload))

    store(Reading(room="attic", celsius=20))
    store("attic")  # error
    m.on("sensors/+", plain, concurency=2)  # error
    m.on("sensors/+", plain, on_invalid="raise")  # error
    m.on("sensors/+", plain, retain=True)  # error
    registration = m.on("sensors/+", plain, prefetch=5, packet_id=True, keep_subscription=True)
    assert_type(registration.ready, Promise[None])
    assert_type(registration.counters.invalid, int)
    registration.stop_now()  # error
    return [registration, m.on("orders", forward)]


# --- iterators


def iterate(m: Messaging) -> float:
    """Iterate over values of a model, and over messages without one."""
    total = 0.0
    with m.subscribe("sensors/+", Reading, qos=1) as stream:
        assert_type(stream, MessageStream[Reading])
        for message in stream:
            assert_type(message, ReceivedMessage[Reading])
            total += message.value().celsius
            message.value().kelvin()  # error
            channel: str = message.context.channel
            logger.info("%s", channel.upper())
            assert_type(message.value(Order), Order)
            if message.context.acknowledge_state is AcknowledgeType.RECEIVED:
                message.acknowledge()
        try:
            reading = stream.receive(timeout=5).value()
        except DeadlineError:
            return total
        total += reading.celsius
        number: float = reading.room  # error
        logger.info("%f", number)
    with m.subscribe("orders", acknowledge="manual", exclusive=True, durable=False, bindings=["a.*"]) as orders:
        anything = orders.receive().value()
        assert_type(anything, Any)
        order = orders.receive().value(Order)
        total += order.id
    m.subscribe("a", acknowledge="later")  # error
    m.subscribe("a", overflow="sometimes")  # error
    m.subscribe("a", Reading, retain=True)  # error
    return total


def handle_context(context: AcknowledgeMessageContext) -> str:
    """Use the context of a received message."""
    context.acknowledge_handler.acknowledge()
    return context.channel


# --- Rx


def celsius(message: Message[Reading]) -> float:
    """What the sensor measured."""
    return message.value().celsius


def is_warm(celsius: float) -> bool:
    """Whether to tell of it."""
    return celsius > 20


def observe(m: Messaging) -> None:
    """Observe a stream through operators."""
    warm: queue.SimpleQueue[float] = queue.SimpleQueue()
    m.subscribe("sensors/#", Reading).pipe(ops.map(celsius), ops.filter(is_warm)).subscribe(warm.put, on_error=print)
    m.subscribe("sensors/#", Order).pipe(ops.map(celsius))  # error
    disposable = m.subscribe("sensors/#", Reading).subscribe(lambda message: logger.info("%f", message.value().celsius))
    disposable.dispose()


# --- requests


class States:
    """Observes the connection."""

    def on_next(self, value: ConnectionState) -> None:
        """Take a state."""

    def on_error(self, error: Exception) -> None:
        """Take an error."""

    def on_completed(self) -> None:
        """Take the end."""


def watch(m: Messaging, bus: TypedEventBus) -> None:
    """Observe what is no message."""
    m.connection_state.subscribe(lambda state: logger.info("%s", state.name))
    m.connection_state.subscribe(on_next=lambda state: logger.info("%s %s", state.is_up, state.cause))
    disposable = m.connection_state.subscribe(print, on_error=print, on_completed=lambda: None)
    disposable.dispose()
    m.connection_state.subscribe(States())
    m.connection_state.subscribe(lambda state: state.nmae)  # error
    m.connection_state.subscribe("print")  # error
    bus.monitor.monitor_events(3).subscribe(lambda event: logger.info("%s", event.topic))
    m.request_many("sums", [1], int).subscribe(lambda message: logger.info("%d", message.value()))


def ask(m: Messaging) -> int:
    """Ask, with a model and without."""
    total = m.request("sums", [1, 2, 3], int, timeout=2).result()
    assert_type(total, int)
    reply = m.request("sums", [1, 2, 3], qos=1).result(5)
    assert_type(reply, ReceivedMessage[Any])
    for item in m.request_many("quotes", "ACME", Order, buffer_size=10):
        assert_type(item.value(), Order)
    m.request("sums", b"", timeout="soon")  # error
    m.request("sums", b"", int, retries=3)  # error
    try:
        return total + m.request("sums", [], int).result()
    except ReplyError as error:
        logger.info("%s: %s", error.kind, error.reason)
        return 0


def serve(m: Messaging, services: ServiceRegistry) -> list[ServiceRegistration]:
    """Answer requests."""

    @m.reply("sums", queue="adders", concurrency=4, expected=(LookupError, ValueError))
    def add(numbers: list[int]) -> int:
        return sum(numbers)

    def upper(request: Message) -> str:
        return request.value(str).upper()

    m.reply("text/upper", upper, quue="x")  # error
    service = services.register(ReplyToSingleSubscriptionHandler, upper, {CHANNEL: "text/upper"})
    assert_type(m.reply("x", upper), ReplyRegistration)
    return [service, m.reply("text/upper", upper, content_type="text/plain"), m.reply("sums", add)]


# --- asyncio


async def main() -> None:
    """The same in asyncio."""
    async with messaging.connect("mqtt://localhost", client_id="app") as m, m.subscribe("a", Reading) as stream:
        await m.publish("a", Reading(room="attic", celsius=20))
        async for message in stream:
            assert_type(message.value(), Reading)
            break
        total: int = await m.request("sums", [1, 2], int)
        doubled = 2 * await m.request("sums", [1, 2], int)
        doubled.upper()  # error
        logger.info("%d %d", total, doubled)
        async with m.on("a", print) as registration:
            await registration.ready
        try:
            stream.receive()
        except WouldBlockError as error:
            assert_type(error, WouldBlockError)


def run() -> None:
    """Run everything."""
    with messaging.connect("memory://app") as m:
        for promise in publish(m):
            assert_type(promise.result(timeout=5), None)
        register(m)
        observe(m)
        watch(m, TypedEventBus(m.services))
        serve(m, ServiceRegistry())
        logger.info("%f %s", iterate(m) + ask(m), build(m).context.content_type)
    try:
        asyncio.run(main())
    except MessagingError as error:
        logger.info("%s", error)
