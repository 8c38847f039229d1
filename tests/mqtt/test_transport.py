"""Bytes are cut into packets, and an error while writing holds none of them."""

from __future__ import annotations

import socket
import ssl
import traceback

from hypothesis import given
from hypothesis import strategies as st

from messaging.testing.tables import table
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.packets import PacketSplitter
from messaging_adapters.mqtt.transport import Transport

PACKETS = st.lists(
    st.tuples(st.integers(0, 255), st.binary(max_size=20) | st.integers(100, 20_000).map(bytes)), max_size=8
)


@given(PACKETS, st.lists(st.integers(1, 5000), max_size=20))
def test_packets_are_found_however_the_stream_is_cut(packets_: list[tuple[int, bytes]], cuts: list[int]) -> None:
    splitter = PacketSplitter()
    data = b"".join(bytes((head,)) + packets.varint(len(body)) + body for head, body in packets_)
    found: list[tuple[int, bytes]] = []
    for cut in [*cuts, len(data)]:
        if data[:cut]:
            found += splitter.split(data[:cut])
        data = data[cut:]
    assert found == packets_


def test_a_long_packet_in_many_pieces_does_not_take_quadratic_time() -> None:
    splitter = PacketSplitter()
    body = bytes(64 * 2**20)
    data = b"\x30" + packets.varint(len(body)) + body
    found: list[tuple[int, bytes]] = []
    view = memoryview(data)
    for at in range(0, len(data), 65_536):
        found += splitter.split(bytes(view[at : at + 65_536]))
    assert found == [(0x30, body)]


@table("secure", [False, True], ids=["plain", "tls"])
async def test_an_error_while_writing_keeps_no_bytes_in_the_variables_of_its_frames(secure: bool) -> None:
    """CONNECT holds the password, and a report with locals shows variables."""
    ours, theirs = socket.socketpair()
    theirs.close()
    context = ssl.create_default_context()
    sock = context.wrap_socket(ours, server_hostname="h", do_handshake_on_connect=False) if secure else ours
    errors: list[Exception] = []
    transport = Transport(lambda _: None, errors.append)
    transport.open(sock, None)
    transport.send(b"hunter2")
    transport.flush()
    transport.close()
    sock.close()
    [error] = errors  # which one, the system decides
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert frames
    assert "hunter2" not in str([frame.f_locals for frame in frames])
