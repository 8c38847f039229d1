from __future__ import annotations

import asyncio
import contextlib
import inspect
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import pika
import pytest
import uvloop

from messaging.testing.brokers import RabbitMQ, require
from tests.amqp.harness import Client, connected, run, unique
from tests.amqp.peer import Peer
from tests.certificates import TlsRabbitMQ

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pika.adapters.blocking_connection import BlockingChannel


@pytest.fixture(scope="session")
def own_rabbitmq() -> Iterator[TlsRabbitMQ]:
    """A RabbitMQ that may be killed, stopped and starved; and one that speaks TLS, too."""
    require("rabbitmq")
    with TlsRabbitMQ() as broker:
        yield broker


@pytest.fixture
def foreign(rabbitmq: RabbitMQ) -> Iterator[BlockingChannel]:
    """A channel of another AMQP client, pika, to the shared broker."""
    with foreign_channel(rabbitmq) as channel:
        yield channel


@contextlib.contextmanager
def foreign_channel(broker: RabbitMQ) -> Iterator[BlockingChannel]:
    connection = pika.BlockingConnection(pika.ConnectionParameters(broker.host, broker.port))
    try:
        yield connection.channel()
    finally:
        connection.close()


@pytest.fixture
def client(rabbitmq: RabbitMQ) -> AbstractAsyncContextManager[Client]:
    """A client that is connected to the shared broker."""
    return connected(rabbitmq.url)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> Any:
    """Has a test run on both kinds of event loop."""
    return request.param


@pytest.fixture
def queue(foreign: BlockingChannel) -> Iterator[str]:
    """The name of a queue, which is deleted after the test with the queues of its delays."""
    name = unique("queue")
    yield name
    for found in (name, *(f"{name}.delay.{delay}" for delay in (50, 100, 200, 300, 500, 60_000))):
        foreign.queue_delete(found)  # a queue that does not exist is no error


@pytest.fixture
def exchange(foreign: BlockingChannel) -> Iterator[str]:
    """The name of an exchange, which is deleted after the test."""
    name = unique("exchange")
    yield name
    foreign.exchange_delete(name)  # an exchange that does not exist is no error


@pytest.fixture
def peer() -> Peer:
    """A broker that is scripted frame by frame."""
    return Peer()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests on a loop of their own, made by the fixture ``loop_factory`` if a test has it.

    Arguments that are asynchronous context managers are entered.
    """
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            arguments = {}
            for name in inspect.signature(test).parameters:
                value = pyfuncitem.funcargs[name]
                is_entered = isinstance(value, AbstractAsyncContextManager)
                arguments[name] = await stack.enter_async_context(value) if is_entered else value
            await test(**arguments)

    run(main(), pyfuncitem.funcargs.get("loop_factory"))
    return True
