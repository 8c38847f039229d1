"""The request of a WebSocket: a query and headers of the program."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import messaging
from messaging.errors import ConnectFailedError, InvalidOptionError
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.threads import serving


@pytest.fixture
def requests() -> Iterator[tuple[str, list[str]]]:
    """The URL of a server that refuses every WebSocket, and the requests that it was sent."""
    seen: list[str] = []

    def serve(peer: socket.socket) -> None:
        data = b""
        while not data.endswith(b"\r\n\r\n"):
            received = peer.recv(4096)
            if not received:  # the client has no headers, and leaves
                return
            data += received
        seen.append(data.decode())
        peer.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

    with serving(serve) as port:
        yield f"ws://127.0.0.1:{port}", seen


def request(requests: tuple[str, list[str]], rest: str = "", **settings: Any) -> list[str]:
    with pytest.raises(ConnectFailedError, match="403") as caught:
        messaging.connect(requests[0] + rest, services=ServiceRegistry(), **settings)
    assert "hush" not in str(caught.value)
    return requests[1].pop().split("\r\n")


@table(
    "rest, settings, line",
    {
        "none": ("", {}, "/mqtt"),
        "text": ("", {"ws_query": "token=hush&x=%20"}, "/mqtt?token=hush&x=%20"),
        "with its mark": ("/a/b", {"ws_query": "?token=hush"}, "/a/b?token=hush"),
        "a mapping": ("", {"ws_query": {"sign": "hush=/", "x": "ü"}}, "/mqtt?sign=hush%3D%2F&x=%C3%BC"),
        "in the URL": ("/mqtt?ws_query=token%3Dhush%26x%3D1", {}, "/mqtt?token=hush&x=1"),
    },
)  # fmt: skip
def test_a_query_is_part_of_the_request(
    requests: tuple[str, list[str]], rest: str, settings: dict[str, Any], line: str
) -> None:
    assert request(requests, rest, **settings)[0] == f"GET {line} HTTP/1.1"


def test_headers_are_part_of_the_request(requests: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"Authorization": "Bearer hush", "Host": "other.example", "User-Agent": "plant/7", "Origin": "https://x"}
    calls: list[int] = []

    def asked() -> dict[str, str]:
        calls.append(1)
        return given

    for headers in (given, asked, asked):
        lines = request(requests, ws_headers=headers)
        assert {f"{name}: {value}" for name, value in given.items()} <= set(lines)
        assert [each.split(":")[0] for each in lines].count("Host") == 1
        assert "Sec-WebSocket-Protocol: mqtt" in lines
    assert len(calls) == 2  # once for each connection
    monkeypatch.setenv("MESSAGING_WS_HEADERS", '{"X-Plant": "7"}')
    assert "X-Plant: 7" in request(requests)


def test_headers_that_cannot_be_had_fail_the_attempt(requests: tuple[str, list[str]]) -> None:
    def fails() -> dict[str, str]:
        raise RuntimeError("hush")

    for call, words in ((fails, "it raised RuntimeError"), (lambda: None, "NoneType"), (lambda: {"a": "\n"}, "'a'")):
        with pytest.raises(ConnectFailedError) as caught:
            messaging.connect(requests[0], services=ServiceRegistry(), ws_headers=call)
        assert words in str(caught.value)
        assert "hush" not in str(caught.value)


def test_headers_that_hang_cost_one_thread_for_all_attempts(
    requests: tuple[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """The error names them. The next attempt waits for the same call, and uses what it returns."""
    calls: list[int] = []
    release = threading.Event()

    def hang() -> dict[str, str]:
        calls.append(1)
        assert release.wait(PATIENCE)
        return {"X-Plant": "7"}

    timing = {"connect_timeout": 0.2, "reconnect_min": 0.001, "reconnect_max": 0.01}
    with messaging.connect(requests[0], services=ServiceRegistry(), start_offline=True, ws_headers=hang, **timing):
        eventually(lambda: caplog.text.count("did not return within 0.16 s") >= 3, "three attempts")
        assert len(calls) == 1
        release.set()
        eventually(lambda: any("X-Plant: 7" in each for each in requests[1]), "the same call")


async def _coroutine() -> dict[str, str]:
    return {}


@table(
    "url, settings, option",
    [
        ("ws://h", {"ws_headers": {"Upgrade": "x"}}, "ws_headers"),
        ("ws://h", {"ws_headers": {"Sec-WebSocket-Protocol": "x"}}, "ws_headers"),
        ("ws://h", {"ws_headers": {"a b": "x"}}, "ws_headers"),
        ("ws://h", {"ws_headers": {"a": "hush\r\nb: c"}}, "ws_headers"),
        ("ws://h", {"ws_headers": {"a": 1}}, "ws_headers"),
        ("ws://h", {"ws_headers": "[]"}, "ws_headers"),
        ("ws://h", {"ws_headers": "hush"}, "ws_headers"),
        ("ws://h", {"ws_headers": _coroutine}, "ws_headers"),
        ("ws://h?ws_headers=%7B%7D", {}, "ws_headers"),
        ("ws://h", {"ws_query": "hush with spaces"}, "ws_query"),
        ("ws://h", {"ws_query": "hush#x"}, "ws_query"),
        ("ws://h", {"ws_query": 7}, "ws_query"),
        ("mqtt://h", {"ws_query": "hush=1"}, "ws_query"),
        ("mqtts://h", {"ws_headers": {}}, "ws_headers"),
    ],
)
def test_what_http_does_not_carry_is_refused_and_not_shown(url: str, settings: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        messaging.connect(url, services=ServiceRegistry(), **settings)
    assert caught.value.option == option
    assert "hush" not in str(caught.value)


def test_query_and_headers_are_shown_nowhere() -> None:
    url = "ws://h?ws_query=token%3Dhush"
    with messaging.connect(url, start_offline=True, services=ServiceRegistry(), ws_headers={"a": "hush"}) as m:
        assert "hush" not in repr(m) + repr(m._adapter.settings) + repr(m._adapter.session.target)  # type: ignore[attr-defined]
