"""The proxy does to connections what it is told, and counts what it did."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from messaging.testing.proxy import UNDER_WAY, Flow, Proxy
from messaging.testing.waiting import PATIENCE, eventually

#: long enough to see that nothing comes, on a connection where everything takes microseconds; seconds
SILENCE = 0.3


class Wires:
    """Connections through a proxy, both ends in the test's hands."""

    def __init__(self, proxy: Proxy, server: socket.socket) -> None:
        self.proxy = proxy
        self._server = server
        self._stack = contextlib.ExitStack()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """The client's end of a new connection, and the broker's."""
        client = self._stack.enter_context(socket.create_connection((self.proxy.host, self.proxy.port), PATIENCE))
        broker = self._stack.enter_context(self._server.accept()[0])
        for end in (client, broker):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.settimeout(PATIENCE)
        eventually(lambda: all(side.peer for side in self.proxy.sides.copy()), "both ends are connected to each other")
        return client, broker

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def wires() -> Iterator[Wires]:
    with socket.create_server(("127.0.0.1", 0)) as server, Proxy("127.0.0.1", server.getsockname()[1]) as proxy:
        wires = Wires(proxy, server)
        yield wires
        wires.close()


@pytest.fixture(params=["up", "down"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ends(wires: Wires, way: str) -> tuple[Flow, socket.socket, socket.socket]:
    """The flow of that direction, and a connection's sending and receiving end."""
    client, broker = wires.connect()
    return (wires.proxy.up, client, broker) if way == "up" else (wires.proxy.down, broker, client)


def take(end: socket.socket, count: int) -> list[bytes]:
    """What arrives until there are ``count`` bytes, as it came."""
    pieces: list[bytes] = []
    while sum(map(len, pieces)) < count:
        piece = end.recv(65_536)
        assert piece, f"ended after {pieces}"
        pieces.append(piece)
    return pieces


def assert_silent(end: socket.socket) -> None:
    """Nothing arrives, and the connection does not end."""
    end.settimeout(SILENCE)
    with pytest.raises(TimeoutError):
        end.recv(1)
    end.settimeout(PATIENCE)


def assert_reset(end: socket.socket) -> None:
    with pytest.raises(ConnectionResetError):
        end.recv(1)


def test_latency_delays_one_direction_and_keeps_the_order(wires: Wires, way: str) -> None:
    flow, sender, receiver = ends(wires, way)
    flow.shape(latency=0.5)
    start = time.monotonic()
    for number in range(50):
        sender.sendall(b"%02d" % number)
    assert b"".join(take(receiver, 100)) == b"".join(b"%02d" % number for number in range(50))
    assert time.monotonic() - start >= 0.49
    start = time.monotonic()
    receiver.sendall(b"back")
    take(sender, 4)
    assert time.monotonic() - start < 0.49
    flow.shape()
    assert flow.is_plain


def test_a_rate_is_kept_and_holds_the_sender_back(wires: Wires, way: str) -> None:
    flow, sender, receiver = ends(wires, way)
    flow.shape(rate=100_000)
    sender.settimeout(SILENCE)
    start = time.monotonic()
    sent = 0
    with contextlib.suppress(TimeoutError):
        while True:
            sent += sender.send(bytes(65_536))
    # what lies in the buffers of two sockets, beside what the proxy holds
    assert sent < UNDER_WAY + 16 * 2**20
    got = sum(map(len, take(receiver, 50_000)))
    assert got <= 1.3 * 100_000 * (time.monotonic() - start)
    flow.shape()
    assert got + sum(map(len, take(receiver, sent - got))) == sent == flow.bytes


def test_holding_keeps_everything_back_and_loses_nothing(wires: Wires, way: str) -> None:
    flow, sender, receiver = ends(wires, way)
    flow.hold()
    sender.sendall(b"kept")
    assert_silent(receiver)
    receiver.sendall(b"back")
    assert take(sender, 4)
    flow.release()
    assert b"".join(take(receiver, 4)) == b"kept"
    assert flow.swallowed == 0


def test_swallowing_both_directions_is_a_pulled_cable(wires: Wires) -> None:
    client, broker = wires.connect()
    other_client, other_broker = wires.connect()
    untouched_client, untouched_broker = wires.connect()
    proxy = wires.proxy
    proxy.up.swallow()
    proxy.down.swallow()
    client.sendall(b"into the void")
    assert_silent(broker)
    broker.close()
    assert_silent(client)
    other_client.close()
    assert_silent(other_broker)
    assert proxy.up.swallowed == 13
    assert proxy.connections == 2
    proxy.up.restore()
    proxy.down.restore()
    # bytes are missing there: what follows must not be taken for what they were
    client.sendall(b"more")
    assert proxy.up.bytes == 0
    untouched_client.sendall(b"ping")
    assert take(untouched_broker, 4) == [b"ping"]
    new_client, new_broker = wires.connect()
    new_client.sendall(b"ping")
    assert take(new_broker, 4) == [b"ping"]
    assert proxy.attempts == 4


@pytest.mark.parametrize("when", ["before", "after"])
def test_swallowing_one_direction_leaves_the_other(wires: Wires, way: str, when: str) -> None:
    """On connections to come, too."""
    if when == "before":
        getattr(wires.proxy, way).swallow()
    flow, sender, receiver = ends(wires, way)
    flow.swallow()
    sender.sendall(b"gone")
    receiver.sendall(b"back")
    assert take(sender, 4) == [b"back"]
    assert_silent(receiver)
    receiver.close()
    assert sender.recv(1) == b""
    assert flow.swallowed == 4


@pytest.mark.parametrize("reset", [True, False])
def test_a_cut_comes_after_exactly_that_many_bytes(wires: Wires, way: str, reset: bool) -> None:
    flow, sender, receiver = ends(wires, way)
    sender.sendall(b"before")
    take(receiver, 6)
    flow.cut_after(1000, reset=reset)
    sender.sendall(bytes(999))
    assert b"".join(take(receiver, 999)) == bytes(999)
    assert flow.cuts == 0
    sender.sendall(b"XY")
    assert b"".join(take(receiver, 1)) == b"X"
    for end in (sender, receiver):
        if reset:
            assert_reset(end)
        else:
            assert end.recv(1) == b""
    assert (flow.cuts, flow.bytes) == (1, 1006)
    # it was meant once
    _, sender, receiver = ends(wires, way)
    sender.sendall(bytes(2000))
    take(receiver, 2000)


@pytest.mark.parametrize("which", ["client", "broker"])
def test_a_reset_at_one_end_is_an_end_at_the_other_or_nothing(wires: Wires, which: str) -> None:
    for quietly in (False, True):
        client, broker = wires.connect()
        told, other = (client, broker) if which == "client" else (broker, client)
        wires.proxy.reset("client" if which == "client" else "broker", quietly=quietly)
        assert_reset(told)
        if quietly:
            assert_silent(other)
            other.sendall(b"into the void")
            other.close()
        else:
            assert other.recv(1) == b""
    assert wires.proxy.resets == 2


def test_bytes_in_flight_arrive_before_the_end(wires: Wires, way: str) -> None:
    flow, sender, receiver = ends(wires, way)
    flow.shape(latency=0.1, piece=100)
    sender.sendall(bytes(1000))
    sender.close()
    take(receiver, 1000)
    assert receiver.recv(1) == b""
