"""An ordinary loss: noticed at once, told once, and aiormq says nothing above INFO about it."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, Any

import pytest

from messaging.errors import ConnectionLostError, UnroutableError
from messaging.testing.waiting import PATIENCE, eventually, eventually_async, subscribed, within
from tests.amqp.harness import BrokerProxy, Client, connected, make_adapter, settled, unique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pika.adapters.blocking_connection import BlockingChannel

    from messaging.testing.brokers import RabbitMQ
    from tests.amqp.conftest import Connect
    from tests.certificates import TlsRabbitMQ


@pytest.fixture(autouse=True)
def _aiormq_is_quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Neither aiormq nor asyncio says anything above INFO."""
    caplog.set_level(logging.DEBUG)
    yield
    names = ("aiormq", "aio_pika", "asyncio", "pamqp")
    loud = [each for each in caplog.get_records("call") if each.levelno > logging.INFO and each.name.startswith(names)]
    assert [(record.name, record.getMessage()) for record in loud] == []


@pytest.mark.parametrize("busy", [False, True])
async def test_a_loss_is_reported_once_and_aiormq_logs_nothing(
    rabbitmq: RabbitMQ, busy: bool, loop_factory: Any
) -> None:
    """Busy: requests are under way, messages unconfirmed, deliveries unsettled."""
    with BrokerProxy(rabbitmq) as proxy:
        client = Client(make_adapter(proxy.url))
        await client.open()
        await client.publish("loss", b"x")
        sink, _ = await client.subscribe("loss")
        waiting: list[asyncio.Task[Any]] = []
        batch = [client.message("loss", b"y" * 1000) for _ in range(500)] if busy else []
        if busy:
            proxy.hold()
            waiting = [asyncio.create_task(client.subscribe(f"more/{number}")) for number in range(5)]
            waiting.append(asyncio.create_task(client.adapter.publish(batch)))
            other = client.message(unique("exchange"), key="k")
            await eventually_async(lambda: all(message.was_sent for message in batch), "all are sent")
            before = proxy.up.bytes
            waiting.append(asyncio.create_task(client.adapter.publish([other])))
            await eventually_async(lambda: proxy.up.bytes > before, "the declaration of the exchange is on its way")
        await asyncio.to_thread(proxy.sever)
        assert isinstance(await client.lost(), ConnectionLostError)
        for result in await within(asyncio.gather(*waiting, return_exceptions=True)):
            assert result is None or isinstance(result, (ConnectionLostError, tuple))
        await settled(*(message.done for message in batch))
        await within(client.adapter.close())
        assert len(client.losses) == 1
        assert sink.error is None


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_broker_that_ends_is_a_loss_and_aiormq_keeps_quiet(
    own_rabbitmq: TlsRabbitMQ, how: signal.Signals
) -> None:
    cafile = own_rabbitmq.authority.cafile
    clients = [Client(make_adapter(own_rabbitmq.url)), Client(make_adapter(own_rabbitmq.tls_url, cafile=cafile))]
    for client in clients:
        await client.open()
        await client.subscribe("end")
        await client.publish("end", b"x")
    await asyncio.to_thread(own_rabbitmq.kill if how == signal.SIGKILL else own_rabbitmq.stop)
    for client in clients:
        assert isinstance(await client.lost(), ConnectionLostError)
        await within(client.adapter.close())
    await asyncio.to_thread(own_rabbitmq.start)


async def test_closing_in_good_order_is_no_loss_at_all(rabbitmq: RabbitMQ) -> None:
    async with connected(rabbitmq.url) as client:
        await client.subscribe("good/bye")
        await client.publish("good/bye", b"x")
    assert client.losses == []


def test_a_queue_deleted_during_an_outage_is_declared_again(
    proxy: BrokerProxy, connect: Connect, foreign: BlockingChannel, queue: str, exchange: str
) -> None:
    m, other = connect(proxy.url), connect()
    where = {"channel_extension": "k", "exchange_type": "direct"}
    received = subscribed(m, exchange, queue=queue, max_length=5, **where)
    proxy.refuse()
    foreign.queue_delete(queue)
    foreign.exchange_delete(exchange)
    proxy.accept()

    def is_bound() -> bool:
        promise = other.publish(exchange, b"x", mandatory=True, **where)
        return not isinstance(promise.exception(PATIENCE), UnroutableError)

    eventually(is_bound)
    assert received.wait_for(1)[0].payload == b"x"
    foreign.queue_declare(queue, durable=True, arguments={"x-max-length": 5})


def test_a_program_reads_one_line_about_a_loss(
    proxy: BrokerProxy, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    m = connect(proxy.url)
    received = subscribed(m, "one/line")
    for number in (b"1", b"2"):
        m.publish("one/line", number).result(PATIENCE)
        eventually(lambda: number in received.payloads)  # noqa: B023  # called at once
        if number == b"1":
            proxy.sever()
    loud = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert len(loud) == 1
    assert "connection lost" in loud[0]
