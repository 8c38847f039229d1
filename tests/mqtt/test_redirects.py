"""Brokers that send a client to other servers, that are busy or shut down; and sessions, which live on one broker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest

import messaging
from messaging.errors import ConnectFailedError, ConnectionLostError, RedirectedError, SubscriptionRefusedError
from messaging.model import Endpoint, Host
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto, RabbitMQ, free_port
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually_async
from messaging_adapters.mqtt import packets
from tests.certificates import LOOPBACK, Authority
from tests.doubles.core import refusing_port
from tests.mqtt.conftest import QUICK, both_versions
from tests.mqtt.harness import Core, lasting
from tests.mqtt.peer import Connection, Peer, accept, farewell, refused, sent, subscribed


@pytest.fixture(autouse=True)
def _peers_do_not_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer leaves it to the client to close the connection after its DISCONNECT."""
    monkeypatch.setattr("messaging_adapters.mqtt.connection._CLOSE_TIMEOUT", 0.05)


#: delays that no test waits for
NEVER = {"reconnect_min": 3 * PATIENCE, "reconnect_max": 3 * PATIENCE}
USE_ANOTHER, MOVED = packets.USE_ANOTHER_SERVER, packets.SERVER_MOVED


def reference(servers: str) -> bytes:
    """Properties without their length: a server reference."""
    return b"\x1c" + packets.text(servers) if servers else b""


def refer(connection: Connection, code: int, servers: str) -> None:
    """Refuse a connection."""
    connection.connack(reference(servers), reason=code)


def dismiss(connection: Connection, code: int, servers: str = "") -> None:
    """End a connection."""
    given = reference(servers)
    connection.send(packets.DISCONNECT, bytes((code,)) + packets.varint(len(given)) + given)


class TlsPeer(Peer):
    """A peer behind TLS."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__("mqtts")
        self._context = context

    async def __aenter__(self) -> TlsPeer:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def stop_accepting(self) -> None:
        """Begin no further handshake, which would be in progress when the test ends."""
        self._server.close()


@contextlib.asynccontextmanager
async def instance(url: str, *others: Peer, **settings: Any) -> AsyncIterator[messaging.Messaging]:
    """An instance that is connecting to ``url`` and further hosts."""
    url += "".join(f",127.0.0.1:{other.port}" for other in others)
    m = messaging.connect(url, services=ServiceRegistry(), **{**QUICK, "close_timeout": 0.1, **settings})
    try:
        async with asyncio.timeout(2 * PATIENCE):
            yield m
    finally:
        await m.aclose()


def at(peer: Peer) -> str:
    return f"127.0.0.1:{peer.port}"


async def connected_at(m: messaging.Messaging, where: str) -> None:
    state = m.connection_state
    await eventually_async(
        lambda: state.value.is_up and state.value.host == where, f"connected to {where}, not {state.value}"
    )


# --- the adapter


@table("code, is_permanent", [(USE_ANOTHER, False), (MOVED, True)])
async def test_a_reference_to_other_servers_is_an_error_that_names_them(
    peer: Peer, code: int, is_permanent: bool
) -> None:
    core = Core(peer.url)
    opening = asyncio.create_task(core.open())
    connection, _ = await peer.accept()
    refer(connection, code, "b:1884 [::1]:1885 c")
    with pytest.raises(RedirectedError, match="b:1884") as caught:
        await opening
    connection, _ = await accept(core, peer)
    dismiss(connection, code, "b:1884 [::1]:1885 c")
    lost = await core.lost()
    for error in (caught.value, lost):
        assert isinstance(error, RedirectedError)
        assert error.servers == ("b:1884", "[::1]:1885", "c")
        assert error.is_permanent is is_permanent
        assert error.code == code


async def test_a_reference_right_after_the_connection_was_accepted_is_one_too(peer: Peer) -> None:
    core = Core(peer.url)
    opening = asyncio.create_task(core.open())
    connection, _ = await peer.accept()
    connection.connack()
    dismiss(connection, MOVED, "b")
    (error,) = await asyncio.gather(opening, return_exceptions=True)
    if not isinstance(error, BaseException):  # the loop read the packets one by one
        error = await core.lost()
    assert isinstance(error, RedirectedError)
    assert error.servers == ("b",)


@table("settings, servers", [({}, ""), ({"follow_redirects": False}, "b:1884")], ids=["no reference", "not followed"])
async def test_without_a_server_to_follow_it_is_a_refusal_and_a_loss_like_any_other(
    peer: Peer, settings: dict[str, Any], servers: str
) -> None:
    core = Core(peer.url, **settings)
    given = reference(servers)
    body = bytes((0, USE_ANOTHER)) + packets.varint(len(given)) + given
    error = await refused(core, peer, bytes((packets.CONNACK, len(body))) + body)
    assert type(error) is ConnectFailedError
    connection, _ = await accept(core, peer)
    dismiss(connection, USE_ANOTHER, servers)
    assert type(await core.lost()) is ConnectionLostError


# --- followed by an instance


@table("when", ["connecting", "connected"])
@table("code", [USE_ANOTHER, MOVED])
async def test_a_redirect_is_followed_with_everything_that_waits(
    mosquitto: Mosquitto, caplog: pytest.LogCaptureFixture, when: str, code: int
) -> None:
    caplog.set_level(logging.INFO)
    async with Peer() as peer, instance(peer.url, username="me", password="secret-1") as m:
        connection, connect = await peer.accept()
        assert b"secret-1" in connect
        promise = None
        if when == "connected":
            connection.connack()
            await m
            promise = m.publish("t", b"x", qos=1)
            await connection.expect(packets.PUBLISH)
            dismiss(connection, code, f"127.0.0.1:{mosquitto.port}")
        else:
            refer(connection, code, f"127.0.0.1:{mosquitto.port}")
            await m
        await connected_at(m, f"127.0.0.1:{mosquitto.port}")
        await (promise if promise is not None else m.publish("t", b"x", qos=1))
        dto = m.runtime.get_runtime_dto()
        assert dto.connection.host == f"127.0.0.1:{mosquitto.port}"
    assert ("has moved to" if code == MOVED else "sends this client to") in caplog.text
    assert "secret-1" not in caplog.text


async def test_of_several_servers_the_first_that_answers_is_taken(peer: Peer) -> None:
    async with Peer() as other, instance(peer.url) as m:
        with refusing_port() as port:
            refer((await peer.accept())[0], USE_ANOTHER, f"no!host 127.0.0.1:{port} {at(other)}")
            connection, _ = await other.accept()
        connection.connack()
        await connected_at(m, at(other))


async def test_hosts_that_redirect_in_a_circle_are_an_error_of_connect(peer: Peer) -> None:
    async with Peer() as other:
        connecting = asyncio.create_task(_entered(peer.url))
        refer((await peer.accept())[0], USE_ANOTHER, at(other))
        refer((await other.accept())[0], USE_ANOTHER, at(peer))
        with pytest.raises(ConnectFailedError, match="sent this client away, too"):
            await connecting


async def _entered(url: str, **settings: Any) -> None:
    async with instance(url, **settings) as m:
        await m


# --- other reasons to go elsewhere


@table("code", [0x88, 0x89, 0x97, USE_ANOTHER], ids=hex)
async def test_a_host_that_refuses_is_followed_by_the_next_at_once(code: int) -> None:
    async with Peer() as peer, Peer() as other, instance(peer.url, other, **NEVER) as m:
        refer((await peer.accept())[0], code, "")
        (await other.accept())[0].connack()
        await m
        assert m.connection_state.value.host == at(other)


@table("code", [0x89, 0x8B, 0x97, 0x98, USE_ANOTHER, MOVED], ids=hex)
async def test_a_host_that_sends_its_clients_away_is_followed_by_the_next_at_once(code: int) -> None:
    async with Peer() as peer, Peer() as other, instance(peer.url, other, **NEVER) as m:
        connection, _ = await peer.accept()
        connection.connack()
        await m
        dismiss(connection, code)
        (await other.accept())[0].connack()
        await connected_at(m, at(other))


async def test_a_client_that_was_taken_over_tries_no_other_host_at_once(peer: Peer) -> None:
    """Hosts that share their sessions would see two clients take each other over as fast as they can."""
    async with Peer() as other, instance(peer.url, other, reconnect_max=10 * PATIENCE) as m:
        connection, _ = await peer.accept()
        connection.connack()
        await m
        dismiss(connection, packets.SESSION_TAKEN_OVER)
        await eventually_async(lambda: m.connection_state.value.name == "refused")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not other.connections


@table(
    "name, port, words",
    [("IP:127.0.0.1", "tls", ""), ("DNS:elsewhere.invalid", "tls", "certificate verify failed"), ("", "plain", "TLS")],
    ids=["right name", "wrong name", "plain text"],
)
async def test_a_redirect_keeps_tls_and_verifies_the_name_of_the_new_host(
    authority: Authority, needs_mosquitto: None, name: str, port: str, words: str
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue("first", LOOPBACK))
    certificate, key = authority.issue("second", name or LOOPBACK)
    plain = free_port()
    lines = [f"certfile {certificate}", f"keyfile {key}", f"listener {plain} 127.0.0.1", "log_type all"]
    with Mosquitto(lines) as second:
        where = f"127.0.0.1:{second.port if port == 'tls' else plain}"
        async with TlsPeer(context) as first, instance(first.url, cafile=authority.cafile, retry_connect=True) as m:
            connection, _ = await first.accept()
            first.stop_accepting()
            refer(connection, USE_ANOTHER, where)
            if words:
                await eventually_async(lambda: words in str(m.connection_state.value.cause))
                assert not m.ready.done()
            else:
                await m
                assert m.connection_state.value.host == where


@both_versions
async def test_another_brokers_session_of_this_client_is_not_taken_for_the_last_one(version: str) -> None:
    """Subscribed again, unconfirmed messages sent as new ones, and tokens of the other session are stale."""
    async with Peer() as peer, Peer() as other:
        core = Core(peer.url, **lasting(version))
        v5 = version == "5"
        core.adapter.set_endpoint(Endpoint(Host("127.0.0.1", peer.port)))
        connection, resumed = await accept(core, peer)
        assert not resumed
        sink, _ = await subscribed(core, connection, qos="1")
        out = core.out("t", b"unconfirmed", qos="1")
        await core.send(out)
        first = await connection.publish(v5)
        if v5:
            connection.deliver("t", b"unsettled", packet_id=7, qos=1)
            message = await sink.next()
        connection.abort()
        await core.lost()
        core.adapter.set_endpoint(Endpoint(Host("127.0.0.1", other.port)))
        connection, resumed = await accept(core, other, present=True)
        assert not resumed
        again = await connection.publish(v5)
        assert (first.payload, again.payload, again.dup) == (b"unconfirmed", b"unconfirmed", False)
        assert not v5 or core.adapter.is_stale(message.token)
        await connection.confirm(out, again)
        # what the old session holds is for the subscriptions that are made again
        if v5:
            connection.deliver("t", b"kept", packet_id=7, qos=1)
            sink, _ = await subscribed(core, connection, qos="1")
            assert (await sink.next()).payload == b"kept"
        await farewell(core, connection)


async def test_the_session_at_the_same_host_is_resumed(peer: Peer) -> None:
    core = Core(peer.url, **lasting("5"))
    endpoint = Endpoint(Host("127.0.0.1", peer.port))
    core.adapter.set_endpoint(endpoint)
    connection, _ = await accept(core, peer)
    await sent(core, connection, "t", b"unconfirmed", qos="1")
    connection.abort()
    await core.lost()
    core.adapter.set_endpoint(endpoint)
    connection, resumed = await accept(core, peer, present=True)
    assert resumed
    assert (await connection.publish()).dup
    await farewell(core, connection)


async def test_hosts_that_answer_no_connection_keep_no_thread_from_the_others(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.connection.opening._LEAST_SHARE", 0.1)
    with contextlib.ExitStack() as stack:
        hosts = []
        for _ in range(12):
            # a full accept queue: the kernel leaves further connections unanswered
            full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            hosts.append("{}:{}".format(*full.getsockname()))
            for _ in range(2):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(full.getsockname())
        # each attempt would take its thread for longer than the peer waits for the last one
        async with instance(f"mqtt://{','.join(hosts)}", peer, timeout=0.2, connect_timeout=2 * PATIENCE):
            connection, _ = await peer.accept()
            connection.connack()


# --- what belongs to a host


async def test_features_that_one_host_lacks_are_announced_again_at_the_next(peer: Peer) -> None:
    core = Core(peer.url)
    everything = core.adapter.capabilities.features
    connection, _ = await accept(core, peer, b"\x25\x00\x2a\x00")  # no retain, no shared subscriptions
    assert core.adapter.capabilities.features < everything
    connection.close()
    await core.lost()
    await accept(core, peer)
    assert core.adapter.capabilities.features == everything
    await core.adapter.close()


async def test_an_address_is_connected_to_and_the_name_is_verified(authority: Authority, needs_mosquitto: None) -> None:
    """The certificate is for 127.0.0.1, not for the name of the host that has this address."""
    certificate, key = authority.issue("broker", LOOPBACK)
    with Mosquitto([f"certfile {certificate}", f"keyfile {key}"]) as broker:
        core = Core(f"mqtts://{broker.host}:{broker.port}", cafile=authority.cafile)
        await core.open()
        await core.adapter.close()
        core.adapter.set_endpoint(Endpoint(Host("elsewhere.invalid", broker.port), broker.host))
        with pytest.raises(ConnectFailedError, match="Hostname mismatch") as caught:
            await core.open()
        assert f"elsewhere.invalid:{broker.port} at {broker.host}" in str(caught.value)


async def test_another_host_is_asked_again_whether_it_has_shared_subscriptions(
    mosquitto: Mosquitto, rabbitmq_mqtt: RabbitMQ
) -> None:
    """MQTT 3.1.1, where a queue would stay empty without."""
    core = Core(mosquitto.url, version="3.1.1", username="guest", password="guest")
    await core.open()
    await core.subscribe("jobs", queue="workers", qos="1")
    core.vanish()
    await core.lost()
    core.adapter.set_endpoint(Endpoint(Host(rabbitmq_mqtt.host, rabbitmq_mqtt.mqtt_port)))
    await core.open()
    with pytest.raises(SubscriptionRefusedError, match="no shared subscriptions"):
        await core.subscribe("jobs", queue="workers", qos="1")
    await core.adapter.close()
