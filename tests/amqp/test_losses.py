"""An ordinary loss: noticed at once, told once, and aiormq says nothing above INFO about it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

import messaging
from messaging.errors import ConnectionLostError, UnroutableError
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import eventually_async, within
from tests.amqp.conftest import foreign_channel
from tests.amqp.harness import Client, make_adapter, settled, unique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from messaging.testing.brokers import RabbitMQ
    from tests.certificates import TlsRabbitMQ


@pytest.fixture
def aiormq_log(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """What aiormq and asyncio said above INFO; checked to be nothing."""
    found: list[logging.LogRecord] = []
    caplog.set_level(logging.DEBUG)
    yield found
    found += [
        record
        for record in caplog.records
        if record.levelno > logging.INFO and record.name.startswith(("aiormq", "aio_pika", "asyncio", "pamqp"))
    ]
    assert [(record.name, record.getMessage()) for record in found] == []


@pytest.mark.parametrize("busy", [False, True])
async def test_a_loss_is_reported_once_and_aiormq_logs_nothing(
    rabbitmq: RabbitMQ, aiormq_log: list[logging.LogRecord], busy: bool, loop_factory: Any
) -> None:
    """Busy: requests are under way, messages unconfirmed, deliveries unsettled."""
    with Proxy(rabbitmq.host, rabbitmq.port) as proxy:
        client = Client(make_adapter(f"amqp://guest:guest@{proxy.host}:{proxy.port}"))
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
            waiting.append(asyncio.create_task(client.adapter.publish([other])))
            await asyncio.sleep(0.05)
        await asyncio.to_thread(proxy.sever)
        assert isinstance(await client.lost(), ConnectionLostError)
        for result in await within(asyncio.gather(*waiting, return_exceptions=True)):
            assert result is None or isinstance(result, (ConnectionLostError, tuple))
        await settled(*(message.done for message in batch))
        await within(client.adapter.close())
        assert len(client.losses) == 1
        assert sink.error is None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_broker_that_ends_is_a_loss_and_aiormq_keeps_quiet(
    own_rabbitmq: TlsRabbitMQ, aiormq_log: list[logging.LogRecord], how: signal.Signals
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


async def test_closing_in_good_order_is_no_loss_at_all(rabbitmq: RabbitMQ, aiormq_log: list[logging.LogRecord]) -> None:
    client = Client(make_adapter(rabbitmq.url))
    await client.open()
    await client.subscribe("good/bye")
    await client.publish("good/bye", b"x")
    await client.adapter.close()
    assert client.losses == []


def test_a_queue_deleted_during_an_outage_is_declared_again(rabbitmq: RabbitMQ) -> None:
    queue, exchange = unique("outage"), unique("outage")
    with Proxy(rabbitmq.host, rabbitmq.port) as proxy:
        url = f"amqp://guest:guest@{proxy.host}:{proxy.port}"
        with (
            messaging.connect(url, reconnect_min=0.02, reconnect_max=0.1) as m,
            messaging.connect(rabbitmq.url) as other,
            m.subscribe(exchange, channel_extension="k", exchange_type="direct", queue=queue, max_length=5) as stream,
        ):
            stream.ready.result(timeout=10)
            proxy.refuse()
            with foreign_channel(rabbitmq) as foreign:
                foreign.queue_delete(queue)
                foreign.exchange_delete(exchange)
            proxy.accept()
            deadline = time.monotonic() + 15
            while True:  # until it is bound again
                assert time.monotonic() < deadline
                with contextlib.suppress(UnroutableError):
                    other.publish(exchange, b"x", channel_extension="k", exchange_type="direct", mandatory=True).result(
                        timeout=10
                    )
                    break
                time.sleep(0.02)
            assert stream.receive(timeout=10).payload == b"x"
    with foreign_channel(rabbitmq) as foreign:
        foreign.queue_declare(queue, durable=True, arguments={"x-max-length": 5})
        foreign.queue_delete(queue)
        foreign.exchange_delete(exchange)


def test_a_program_reads_one_line_about_a_loss(
    rabbitmq: RabbitMQ, aiormq_log: list[logging.LogRecord], caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(rabbitmq.host, rabbitmq.port) as proxy:
        url = f"amqp://guest:guest@{proxy.host}:{proxy.port}"
        with messaging.connect(url, reconnect_min=0.02) as m, m.subscribe("one/line") as stream:
            m.publish("one/line", b"1").result(timeout=10)
            assert stream.receive(timeout=10).payload == b"1"
            proxy.sever()
            m.publish("one/line", b"2").result(timeout=10)
            assert stream.receive(timeout=10).payload == b"2"
    loud = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert len(loud) == 1
    assert "connection lost" in loud[0]
