"""Stands in for the core: drives one adapter directly, on a loop of the test's own."""

from __future__ import annotations

import contextlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

from messaging.errors import ConnectFailedError
from messaging.model import Incoming, MessageContext, SubscribeOptions, SubscriptionSpec, parse_url
from messaging.model.extensions import subscribe_options
from messaging.model.settings import load_settings
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import eventually_async, within
from messaging_adapters.amqp import AmqpAdapter
from messaging_adapters.amqp.consumer import QueueConsumer
from messaging_adapters.amqp.declarations import source
from messaging_adapters.amqp.deliveries import QueueSubscription
from tests.doubles.core import Out as Out
from tests.doubles.core import Sink as Sink
from tests.doubles.core import run as run
from tests.doubles.core import settled as settled
from tests.doubles.core import unique as unique
from tests.doubles.events import Recorded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from messaging.errors import MessagingError
    from messaging.testing.brokers import RabbitMQ
    from messaging_adapters.amqp.connection import AmqpWire
    from messaging_adapters.amqp.link import AmqpLink


class BrokerProxy(Proxy):
    """A proxy before a broker."""

    def __init__(self, broker: RabbitMQ) -> None:
        super().__init__(broker.host, broker.port)
        self._broker = broker

    @property
    def url(self) -> str:
        """The URL that leads through the proxy to the virtual host of the tests."""
        return self._broker.url_at(self.host, self.port)


def make_adapter(url: str, name: str = "test", **settings: Any) -> AmqpAdapter:
    parsed = parse_url(url)
    return AmqpAdapter(parsed, load_settings(AmqpAdapter.settings_type, parsed, settings), name)


def bare_consumer(wire: Any) -> QueueConsumer:
    """A consumer of ``c`` that no broker has answered yet."""
    spec = SubscriptionSpec("c", None, SubscribeOptions())
    return QueueConsumer(
        wire,
        QueueSubscription(spec, Sink(), source(spec, "e", 0)),
        exchange="e",
        tag="t",
        spawn=lambda coroutine: coroutine.close(),
    )


class Client:
    """An adapter with what a test needs around it."""

    def __init__(self, adapter: AmqpAdapter) -> None:
        self.adapter = adapter
        self.events = Recorded()
        self.losses = self.events.losses

    async def open(self) -> None:
        assert await self.adapter.open(self.events) is False

    async def reopen(self) -> None:
        """Connect again, and forget the loss."""
        self.losses.clear()
        await self.open()

    @property
    def link(self) -> AmqpLink:
        return self.adapter._connector.linked()

    @property
    def wires(self) -> list[AmqpWire]:
        """The connections: for publishing, and for consuming if there is a subscription."""
        return self.link.wires

    async def lost(self) -> MessagingError:
        await eventually_async(lambda: self.losses, "the loss")
        return self.losses[-1]

    def message(
        self, channel: str, payload: bytes = b"x", *, key: str | None = None,
        extensions: Mapping[str, Any] | None = None, **context: Any,
    ) -> Out:  # fmt: skip
        known = MappingProxyType(dict(extensions or {}))
        return Out(self.adapter, payload, MessageContext(channel, key, extensions=known, **context))

    async def publish(self, channel: str, *payloads: bytes, **more: Any) -> None:
        """Publish and wait for the confirms."""
        batch = [self.message(channel, payload, **more) for payload in payloads]
        await within(self.adapter.publish(batch))
        for message in batch:
            await message.result()

    async def subscribe(
        self, channel: str, *, key: str | None = None, sink: Sink | None = None, **extensions: Any
    ) -> tuple[Sink, QueueConsumer]:
        sink = sink or Sink()
        spec = SubscriptionSpec(
            channel, key, subscribe_options(extensions, self.adapter.capabilities, self.adapter.settings)
        )
        self.adapter.check_subscribe(spec)
        return sink, await within(self.adapter.subscribe(spec, sink))

    def acknowledge(self, *arrived: Incoming) -> None:
        self.adapter.acknowledge([incoming.token for incoming in arrived])

    def reject(self, *arrived: Incoming) -> None:
        self.adapter.reject([incoming.token for incoming in arrived])


@contextlib.asynccontextmanager
async def connected(url: str, **settings: Any) -> AsyncIterator[Client]:
    """A client that is connected, and closed afterwards."""
    client = Client(make_adapter(url, **settings))
    await within(client.open())
    try:
        yield client
    finally:
        await within(client.adapter.close())


async def open_fails(
    url: str, error: type[ConnectFailedError] = ConnectFailedError, **settings: Any
) -> ConnectFailedError:
    """Open, check that it fails in time and leaves nothing behind, and return the error."""
    client = Client(make_adapter(url, **settings))
    try:
        with pytest.raises(error) as caught:
            await within(client.open())
    finally:
        await client.adapter.close()
    assert client.losses == []
    return caught.value
