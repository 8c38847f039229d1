"""Connecting and disconnecting: failures, their errors, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aiormq
import pytest

from messaging.errors import AuthenticationError, ConnectFailedError, ConnectionLostError
from messaging.testing.tables import table
from messaging.testing.waiting import within
from messaging_adapters.amqp import connection, link
from tests.amqp.harness import Client, connected, make_adapter, open_fails, unique
from tests.doubles.core import refusing_port

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from messaging.testing.brokers import RabbitMQ
    from tests.certificates import TlsRabbitMQ

    Break = Callable[[connection.Wire], Awaitable[None]]


async def test_it_opens_and_closes_and_opens_again(rabbitmq: RabbitMQ) -> None:
    client = Client(make_adapter(rabbitmq.url))
    for _ in range(2):
        await client.open()
        sink, _ = await client.subscribe("open/close")
        await client.publish("open/close", b"x")
        await sink.count(1)
        await client.adapter.close()
        await client.adapter.close()
    assert client.losses == []


async def test_a_refused_connection_is_reported_with_the_reason() -> None:
    with refusing_port() as port:
        error = await open_fails(f"amqp://u:{'secret'}@127.0.0.1:{port}", ConnectFailedError)
    assert str(error) == f"cannot connect to 127.0.0.1:{port}: Connection refused"


async def test_no_such_virtual_host(rabbitmq: RabbitMQ) -> None:
    error = await open_fails(f"{rabbitmq.url.rpartition('/')[0]}/nowhere", ConnectFailedError)
    assert not isinstance(error, AuthenticationError)
    assert "530 NOT_ALLOWED - vhost nowhere not found" in str(error)


async def test_with_tls_the_certificate_is_verified(own_rabbitmq: TlsRabbitMQ) -> None:
    async with connected(own_rabbitmq.tls_url, cafile=own_rabbitmq.authority.cafile) as client:
        sink, _ = await client.subscribe("tls")
        await client.publish("tls", *[b"x" * 200_000] * 3)
        await sink.count(3)
    error = await open_fails(own_rabbitmq.tls_url)
    assert "certificate verify failed" in str(error)


async def test_opening_can_be_cancelled_at_any_time(rabbitmq: RabbitMQ) -> None:
    for milliseconds in range(0, 30, 2):
        client = Client(make_adapter(rabbitmq.url))
        opening = asyncio.create_task(client.open())
        await asyncio.sleep(milliseconds / 1000)  # sleeps: the moment at which it is cancelled is what varies
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await opening
        await client.adapter.close()
        assert client.losses == []


@table("which", [0, 1])
async def test_the_end_of_either_connection_is_the_end_of_both(client: Client, which: int) -> None:
    sink, handle = await client.subscribe("either")
    await client.publish("either", b"x")
    [arrived] = await sink.count(1)
    publishing, consuming = client.wires
    (publishing, consuming)[which].abort("test")
    assert "test" in str(await client.lost())
    assert client.adapter.is_stale(arrived.token)
    assert not publishing.alive
    assert not consuming.alive
    message = client.message("either")
    await client.adapter.publish([message])
    assert isinstance(message.error, ConnectionLostError)
    with pytest.raises(ConnectionLostError):
        await client.subscribe("either")
    client.acknowledge(arrived)
    await client.adapter.unsubscribe(handle)
    assert len(client.losses) == 1
    await client.reopen()
    await client.publish("either", b"x")
    assert (client.losses, sink.error) == ([], None)


async def test_a_second_connection_that_comes_too_late_is_closed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[connection.Wire] = []
    first = client.link

    async def connect(*arguments: Any) -> connection.Wire:
        late.append(await connection.connect(*arguments))
        first.wires[0].abort("in that very moment")
        return late[0]

    monkeypatch.setattr(link, "connect", connect)
    with pytest.raises(ConnectionLostError):
        await client.subscribe("late")
    await client.lost()
    assert not late[0].alive
    assert late[0].writer.is_closing()


# --- a transport that is closed already, which aiormq has not noticed yet


async def aiormq_closes(wire: connection.Wire) -> None:
    """As aiormq does when its reader has ended: from here on, both kinds of loop raise at a write."""
    wire.writer.write_eof()
    wire.writer.close()
    assert wire.alive


async def the_loop_closed(wire: connection.Wire) -> None:
    """As after a reset."""
    wire.writer.transport.abort()


@table("breaks", [aiormq_closes, the_loop_closed])
async def test_publishing_to_a_closed_transport_is_a_loss(client: Client, breaks: Break, loop_factory: Any) -> None:
    await client.publish("closed", b"", extensions={"qos": "0"})
    await client.publish("closed", b"")
    # more than goes out in one write
    batch = [client.message("closed", bytes(30_000), extensions={"qos": qos}) for _ in range(5) for qos in ("0", "1")]
    batch[0].confirm()  # nor does it help to have one settled at the head
    await breaks(client.wires[0])
    await within(client.adapter.publish(batch))
    assert all(isinstance(message.error, ConnectionLostError) for message in batch[1:])
    assert not any(message.was_sent for message in batch)
    assert isinstance(await client.lost(), ConnectionLostError)
    assert len(client.losses) == 1
    await client.reopen()
    await client.publish("closed", b"again")
    assert client.losses == []
    # a message that is failed twice would be sent twice
    assert {message.settlements for message in batch[1:]} == {1}


@table("breaks", [aiormq_closes, the_loop_closed])
async def test_settling_and_unsubscribing_on_a_closed_transport_is_a_loss(
    client: Client, breaks: Break, loop_factory: Any
) -> None:
    for end in (None, client.adapter.unsubscribe):
        sink, handle = await client.subscribe("closed", queue=(queue := unique("closed")))
        await client.publish("closed", b"x")
        [arrived] = await sink.count(1)
        await breaks(client.wires[1])
        client.acknowledge(arrived)
        if end is not None:
            with contextlib.suppress(ConnectionLostError):
                await within(end(handle))
        await client.lost()
        assert client.adapter.is_stale(arrived.token)
        await client.reopen()
        # it was not acknowledged, so it is still there
        again, _ = await client.subscribe("closed", queue=queue)
        assert (await again.next()).payload == b"x"
        assert client.losses == []


@table("breaks", [aiormq_closes, the_loop_closed])
async def test_closing_with_a_closed_transport_goes_well(client: Client, breaks: Break, loop_factory: Any) -> None:
    sink, _ = await client.subscribe("closed")
    await client.publish("closed", b"x")
    [arrived] = await sink.count(1)
    for wire in client.wires:
        await breaks(wire)
    client.acknowledge(arrived)
    await within(client.adapter.close())
    await client.reopen()


@table("error", [TimeoutError(110, "?"), OSError(113, "?"), RuntimeError("?")])
async def test_any_error_of_the_transport_is_a_loss_for_a_waiting_publisher(client: Client, error: Exception) -> None:
    await client.reopen()
    await client.publish("ended", b"")
    wire = client.wires[0]

    async def drain() -> None:
        raise error

    wire.writer.drain = drain  # type: ignore[method-assign]
    batch = [client.message("ended", bytes(70_000)) for _ in range(3)]
    await within(client.adapter.publish(batch))
    assert all(isinstance(message.error, ConnectionLostError) for message in batch)
    assert (await client.lost()).__cause__ is error
    assert {message.settlements for message in batch} == {1}


# --- aiormq cancels the requests on a connection that breaks; a caller of the adapter would take that for its own end


async def cancelled(*_: Any, **__: Any) -> Any:
    waiting = asyncio.get_running_loop().create_future()
    waiting.cancel()
    await waiting


async def test_opening_that_aiormq_cancels_has_failed(rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiormq.Connection, "connect", cancelled)
    await open_fails(rabbitmq.url, ConnectFailedError)


async def refused(*_: Any, **__: Any) -> Any:
    raise ConnectionRefusedError


@table("connects", [cancelled, refused])
async def test_a_second_connection_that_is_not_to_be_had_is_a_loss(
    client: Client, monkeypatch: pytest.MonkeyPatch, connects: Any
) -> None:
    await client.reopen()
    monkeypatch.setattr(aiormq.Connection, "connect", connects)
    with pytest.raises(ConnectionLostError):
        await client.subscribe("cancelled")
    assert len(client.losses) == 1


async def test_requests_that_aiormq_cancels_are_a_loss(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in ("publish", "subscribe", "unsubscribe"):
        _, handle = await client.subscribe("cancelled")
        with monkeypatch.context() as patch:
            patch.setattr(aiormq.Connection, "channel", cancelled)
            patch.setattr(aiormq.Channel, "close", cancelled)
            if attempt == "publish":
                message = client.message("cancelled")
                await within(client.adapter.publish([message]))
                assert isinstance(message.error, ConnectionLostError)
            else:
                again = client.subscribe("again")
                with pytest.raises(ConnectionLostError):
                    await (again if attempt == "subscribe" else client.adapter.unsubscribe(handle))
                again.close()
            await client.lost()
        await client.open()
    assert len(client.losses) == 3


async def test_idle_connections_stay(rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENT_HEARTBEATS", 1)
    async with connected(rabbitmq.url, heartbeat=1) as client:
        sink, _ = await client.subscribe("idle")
        await asyncio.sleep(2.5)  # sleeps: the broker's heartbeats are in real time
        assert client.losses == []
        await client.publish("idle", b"x")
        await sink.count(1)
