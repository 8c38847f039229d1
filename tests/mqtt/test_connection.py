"""Connecting, losing the connection, closing: against mosquitto and against peers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import (
    AuthenticationError,
    ConnectFailedError,
    ConnectionLostError,
    MessagingError,
    PayloadTooLargeError,
    PublishRefusedError,
)
from messaging.model import Features
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import eventually_async, within
from messaging_adapters.mqtt import packets
from tests.certificates import LOOPBACK, Authority
from tests.doubles.core import refusing_port
from tests.mqtt.conftest import both_versions
from tests.mqtt.harness import Core, connected, settled
from tests.mqtt.peer import Peer, accept, refused, session

pytestmark = pytest.mark.usefixtures("needs_mosquitto")


def sockets() -> int:
    """How many this process has open."""
    gc.collect()
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the directory itself
            found += str(descriptor.readlink()).startswith("socket:")
    return found


@pytest.fixture(scope="module")
def tls_broker(authority: Authority) -> Iterator[Mosquitto]:
    certificate, key = authority.issue("broker", LOOPBACK)
    with Mosquitto([f"certfile {certificate}", f"keyfile {key}"]) as broker:
        yield broker


# --- what keeps a connection from being made


@both_versions
async def test_a_refused_connection_says_where_and_why(version: str) -> None:
    with refusing_port() as port:
        core = Core(f"mqtt://127.0.0.1:{port}", version=version)
        with pytest.raises(ConnectFailedError, match=rf"127\.0\.0\.1:{port}: Connection refused") as caught:
            await core.open()
    assert isinstance(caught.value.__cause__, OSError)
    assert not core.losses
    await core.adapter.close()


async def test_an_unknown_host_says_so() -> None:
    with pytest.raises(ConnectFailedError, match=r"no-such-host\.invalid:1883: "):
        await Core("mqtt://no-such-host.invalid").open()


@pytest.fixture
def closed_mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    """A broker whose only user is ``user:secret-1``."""
    passwords = tmp_path / "passwords"
    passwords.touch()
    command = ["mosquitto_passwd", "-b", str(passwords), "user", "secret-1"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    with Mosquitto(["allow_anonymous false", f"password_file {passwords}"]) as broker:
        yield broker


@both_versions
async def test_wrong_credentials_are_reported_and_never_shown(closed_mosquitto: Mosquitto, version: str) -> None:
    broker = closed_mosquitto
    for who, password in (("user", "nope"), ("stranger", "secret-1")):
        core = Core(f"mqtt://{who}:{password}@127.0.0.1:{broker.port}", version=version)
        with pytest.raises(AuthenticationError, match=f"{broker.port} refused the credentials of '{who}': ") as caught:
            await core.open()
        assert caught.value.code == 0x87  # with 3.1.1 the reason code that means the same
        assert password not in repr(caught.value) + repr(caught.value.__cause__)
    with pytest.raises(AuthenticationError, match="refused a client without user name: "):
        await Core(broker.url, version=version).open()
    async with connected(f"mqtt://user:secret-1@127.0.0.1:{broker.port}", version=version) as core:
        assert "secret-1" not in repr(core.adapter.session.target)
    async with connected(broker.url, version=version, username="user", password="secret-1"):
        pass


@table(
    "version, reason, error, text",
    [
        ("5", 0x8C, AuthenticationError, "Bad authentication method"),
        ("5", 0x88, ConnectFailedError, "Server unavailable"),
        ("5", 0x84, ConnectFailedError, "try version=3.1.1"),
        ("5", 0x01, ConnectFailedError, "try version=3.1.1"),
        ("3.1.1", 1, ConnectFailedError, "Unsupported protocol version"),
        ("3.1.1", 2, ConnectFailedError, "Client identifier not valid"),
        ("3.1.1", 3, ConnectFailedError, "Server unavailable"),
        ("3.1.1", 4, AuthenticationError, "Bad user name or password"),
        ("3.1.1", 5, AuthenticationError, "Not authorized"),
    ],
)
async def test_refusals_by_connack(
    peer: Peer, version: str, reason: int, error: type[MessagingError], text: str
) -> None:
    core = Core(peer.url, version=version)
    answer = (0x20, 3, 0, reason, 0) if version == "5" and reason != 1 else (0x20, 2, 0, reason)
    refusal = await refused(core, peer, bytes(answer))
    assert type(refusal) is error
    assert text in str(refusal)
    await peer.connections[-1].end()
    assert not core.losses


async def test_peers_that_close_or_talk_nonsense_instead_of_accepting(peer: Peer, loop_factory: Any) -> None:
    nonsense = (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x30\x03\x00\x01a", b"\x20\x01\x00", b"\xff" * 9)
    for answer in (b"", *nonsense):
        core = Core(peer.url)
        opening = asyncio.create_task(core.open())
        connection, _ = await peer.accept()
        connection.write(answer)
        if not answer:
            connection.close()
        with pytest.raises(ConnectFailedError, match=None if answer else "try version=3.1.1"):
            await opening
        await core.adapter.close()


@table("scheme", ["mqtt", "mqtts"])
async def test_cancelling_open_on_a_silent_peer_leaves_no_socket_and_no_thread(scheme: str, loop_factory: Any) -> None:
    def connecting() -> bool:
        # a worker thread that is in code of the adapter
        return any(
            "messaging_adapters" in part.f_code.co_filename
            for thread, frame in sys._current_frames().items()
            if thread != threading.get_ident()
            for part, _ in traceback.walk_stack(frame)
        )

    # a listening socket without accept: TCP connects, and that is all
    with socket.create_server(("127.0.0.1", 0)) as silent:
        before = sockets()
        for _ in range(3):
            core = Core(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await core.adapter.open(core.losses.append)
            await core.adapter.close()
            assert not core.losses
        await eventually_async(lambda: sockets() == before, "sockets are closed")
        await eventually_async(lambda: not connecting(), "threads have stopped waiting")


@table("version", ["3.1.1", "5"])
async def test_cancelling_open_tells_a_broker_that_has_taken_the_connection(peer: Peer, version: str) -> None:
    """Without DISCONNECT it would publish the will of an instance that was closed in good order."""
    core = Core(peer.url, version=version)
    opening = asyncio.create_task(core.open())
    connection, _ = await peer.accept()
    opening.cancel()
    assert await connection.expect(packets.DISCONNECT) == b""
    await connection.end()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await core.adapter.close()


async def test_cancelling_open_while_tcp_connects_ends_the_attempt_at_once() -> None:
    # a full accept queue: the kernel leaves further connections unanswered until one is accepted
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        before = sockets()
        core = Core(f"mqtt://127.0.0.1:{address[1]}", connect_timeout=600.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await core.adapter.open(core.losses.append)
        await eventually_async(lambda: sockets() <= before, "the connecting thread has given up")
        for filler in fillers:
            filler.close()


async def test_tls_connects_when_the_certificate_is_known(
    tls_broker: Mosquitto, authority: Authority, loop_factory: Any
) -> None:
    async with connected(f"mqtts://127.0.0.1:{tls_broker.port}", cafile=authority.cafile) as core:
        sink, _ = await core.subscribe("tls", qos="1")
        payload = bytes(range(256)) * 4096  # more than one record, more than the socket's buffer
        await core.send(*[core.out("tls", payload, qos="1") for _ in range(4)])
        await core.publish("tls", b"end")
        messages = await sink.count(5)
        assert sink.payloads == [payload] * 4 + [b"end"]
        core.acknowledge(*messages)


async def test_tls_verifies_unless_told_not_to(tls_broker: Mosquitto, authority: Authority) -> None:
    url = f"mqtts://127.0.0.1:{tls_broker.port}"
    with pytest.raises(ConnectFailedError, match="certificate verify failed"):
        await Core(url).open()
    with pytest.raises(ConnectFailedError, match=r"(?i)hostname mismatch|not valid for"):
        await Core(f"mqtts://localhost:{tls_broker.port}", cafile=authority.cafile).open()
    async with connected(url, allow_insecure=True) as core:
        await core.publish("x", b"", qos="1")
    assert sockets() >= 0  # collects: an unclosed socket would be an error


# --- loss


@both_versions
async def test_a_killed_broker_is_noticed_and_reopening_works(loop_factory: Any, version: str) -> None:
    with Mosquitto() as broker:
        core = Core(broker.url, version=version)
        assert await core.open() is False
        sink, handle = await core.subscribe("again", qos="1")
        await core.publish("again", b"1", qos="1")
        (message,) = await sink.count(1)
        assert not core.adapter.is_stale(message.token)
        before = sockets()
        broker.kill()
        assert isinstance(await core.lost(), ConnectionLostError)
        assert core.adapter.is_stale(message.token)
        core.acknowledge(message)  # must not reach a broker
        with pytest.raises(ConnectionLostError):
            await core.subscribe("other")
        await core.adapter.unsubscribe(handle)
        assert sockets() == before - 1
        with pytest.raises(ConnectFailedError):
            await core.open()
        broker.start()
        assert await core.reopen() is False
        sink, _ = await core.subscribe("again", qos="1")
        await core.publish("again", b"2", qos="1")
        assert (await sink.count(1))[0].payload == b"2"
        assert len(core.losses) == 1
        await core.adapter.close()
        await core.adapter.close()
        assert len(core.losses) == 1


async def test_subscribing_fails_when_the_connection_goes_meanwhile() -> None:
    async with session() as (core, _, connection):
        subscribing = asyncio.create_task(core.subscribe("x"))
        await connection.expect(0x80)
        connection.abort()
        with pytest.raises(ConnectionLostError):
            await subscribing
        await core.lost()


@table(
    "data, text",
    [
        (b"\x30\x02\x00\x05", "broke the protocol"),
        (b"\x30\xff\xff\xff\xff\x01", "broke the protocol"),
        (b"\x40\x01\x00", "broke the protocol"),
        (b"\xf0\x00", "broke the protocol: a packet of type 15"),
        (b"\x90\x00", "broke the protocol: an answer without packet id"),
        (b"\x90\x05\x00\x01\x00\x00\x00", "SUBACK with 2 reason codes"),
    ],
)
async def test_a_loss_names_its_reason(data: bytes, text: str) -> None:
    async with session() as (core, _, connection):
        connection.write(data)
        error = await core.lost()
        assert isinstance(error, ConnectionLostError)
        assert re.search(text, str(error)), error


async def test_a_loss_right_after_connack_is_a_failure_to_connect_or_a_loss_but_not_both(peer: Peer) -> None:
    core = Core(peer.url)
    opening = asyncio.create_task(core.open())
    connection, _ = await peer.accept()
    connection.write(b"\x20\x03\x00\x00\x00\xe0\x02\x8b\x00")
    try:
        await opening
    except ConnectFailedError:
        assert not core.losses
    else:
        await core.lost()
    await core.adapter.close()


# --- the will


async def test_closing_in_good_order_publishes_no_will_even_with_unread_data(mosquitto: Mosquitto) -> None:
    async with connected(mosquitto.url) as other:
        wills, _ = await other.subscribe("last")
        for number in range(5):
            core = Core(mosquitto.url)
            await core.open()
            await core.adapter.set_will(core.out("last", b"no", last_will=True))
            await core.reopen()
            await core.subscribe("flood")
            await other.send(*[other.out("flood", bytes(1000)) for _ in range(500)])
            await core.adapter.close()
            await other.publish("last", b"%d" % number)
        await wills.count(5)
        assert wills.payloads == [b"%d" % number for number in range(5)]


async def test_a_will_whose_deadline_ends_its_reconnect_leaves_the_connection_in_use() -> None:
    async with session() as (core, _, connection):
        await core.send(core.out("t", b"1", qos="1"))
        await connection.publish()  # and no confirm, for which the reconnect waits
        setting = asyncio.create_task(core.adapter.set_will(core.out("last", b"", last_will=True)))
        assert await connection.is_silent()
        setting.cancel()
        await asyncio.gather(setting, return_exceptions=True)
        await core.send(core.out("t", b"2", qos="1"))
        assert (await connection.publish()).payload == b"2"


@table("reason", [0x9B, 0x87])
async def test_a_will_that_the_broker_refuses_does_not_keep_the_instance_out(reason: int) -> None:
    async with session() as (core, peer, connection):
        will = core.out("w", b"", last_will=True, qos="2", retain=True)
        setting = asyncio.create_task(core.adapter.set_will(will))
        await connection.expect(0xE0)
        connection.close()
        await setting
        await refused(core, peer, bytes((0x20, 3, 0, reason, 0)))
        assert peer.connections[-1].connect[7] == 0x02 | 0x04 | 2 << 3 | 0x20
        assert isinstance(will.error, PublishRefusedError)
        connection, _ = await accept(core, peer)
        assert connection.connect[7] == 0x02


async def test_a_will_has_a_size_limit_of_its_own(mosquitto: Mosquitto) -> None:
    async with connected(mosquitto.url) as core:
        will = core.out("w", bytes(65_536), last_will=True)
        await core.adapter.set_will(will)
        assert isinstance(will.error, PayloadTooLargeError)
        assert not core.losses


async def test_connect_carries_the_settings(peer: Peer) -> None:
    core = Core(peer.url, keepalive=77, receive_maximum=9, session_expiry=300, client_id="me")
    for clean in (True, False):  # reconnecting resumes
        connection, _ = await accept(core, peer)
        assert connection.connect == (
            b"\x00\x04MQTT\x05" + bytes((2 if clean else 0,)) + b"\x00\x4d"
            + b"\x0b\x11\x00\x00\x01\x2c\x21\x00\x09\x22\x00\x20" + b"\x00\x02me"
        )  # fmt: skip
        connection.abort()
        await core.lost(2 - clean)
    for version_3, flags in (
        (Core(peer.url, version="3.1.1"), 2),
        (Core(peer.url, version="3.1.1", clean_start=False, client_id="x"), 0),
    ):
        opening = asyncio.create_task(version_3.open())
        connection, connect = await peer.accept()
        assert connect[:10] == b"\x00\x04MQTT\x04" + bytes((flags,)) + b"\x00\x3c"
        opening.cancel()
        await settled(opening)
    await core.adapter.close()


async def test_features_that_connack_rules_out_are_not_announced(peer: Peer) -> None:
    core = Core(peer.url, max_message_size=5000)
    assert core.adapter.capabilities.max_message_size == 5000
    everything = core.adapter.capabilities.features
    opening = asyncio.create_task(core.open())
    connection, _ = await peer.accept()
    # Maximum QoS 0, no retain, packets up to 100 bytes, no wildcards, no identifiers, no shared subscriptions
    connection.connack(b"\x24\x00\x25\x00\x27\x00\x00\x00\x64\x28\x00\x29\x00\x2a\x00")
    await opening
    adapter = core.adapter
    assert everything - adapter.capabilities.features == {
        Features.EXTENSION_RETAIN, Features.EXTENSION_GUARANTEED_DELIVERY, Features.WILDCARDS,
        Features.POINT_TO_POINT, Features.EXTENSION_QUEUE, "retainHandling", "retainAsPublished",
    }  # fmt: skip
    assert adapter.capabilities.qos_levels == ("0",)
    assert adapter.capabilities.max_message_size == 95
    subscribing = asyncio.create_task(core.subscribe("x"))
    assert (await connection.suback())[2:] == b"\x00\x00\x01x\x00"  # no identifier
    sink, _ = await subscribing
    connection.deliver("x", b"routed by topic")
    await sink.count(1)
    await adapter.close()


async def test_closing_is_quick_even_if_the_broker_is_silent(loop_factory: Any) -> None:
    with Mosquitto() as broker:
        core = Core(broker.url)
        await core.open()
        before = sockets()
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            await within(core.adapter.close(), 5)
            assert sockets() == before - 1
        finally:
            os.kill(broker.pid, signal.SIGCONT)
