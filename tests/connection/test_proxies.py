"""Connections through proxies: HTTP CONNECT, SOCKS 4 and 5, to MQTT, WebSocket and AMQP, with and without TLS."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest

import messaging
from messaging.errors import ConnectFailedError, InvalidOptionError
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto, free_port, require
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.certificates import LOOPBACK, Authority, TlsRabbitMQ
from tests.connection.proxies import PASSWORD, USER, proxy_server
from tests.threads import serving


@pytest.fixture(scope="module")
def mosquitto() -> Iterator[tuple[Mosquitto, Authority, dict[str, int]]]:
    """Listens with MQTT, MQTT over TLS, and WebSocket."""
    require("mosquitto")
    ports = {"mqtts": free_port(), "ws": free_port()}
    broker = Mosquitto()
    authority = Authority(broker.directory)
    certificate, key = authority.issue("broker", f"{LOOPBACK},DNS:broker.invalid")
    broker._lines += [
        f"listener {ports['mqtts']} 127.0.0.1", f"certfile {certificate}", f"keyfile {key}",
        f"listener {ports['ws']} lo", "protocol websockets",
    ]  # fmt: skip
    with broker:
        yield broker, authority, {"mqtt": broker.port, **ports}


def passes(url: str, **settings: Any) -> None:
    """A message goes to the broker and back."""
    with messaging.connect(url, services=ServiceRegistry(), **settings) as m, m.subscribe("proxies/t", qos=1) as stream:
        m.publish("proxies/t", b"x" * 100_000, qos=1).result(PATIENCE)
        assert len(stream.receive(PATIENCE).payload) == 100_000


@table("kind", ["http", "socks5", "socks5h", "socks4", "socks4a"])
@table("scheme", ["mqtt", "mqtts", "ws"])
@table("host", ["127.0.0.1", "broker.invalid"])
def test_mqtt_passes_through_a_proxy(
    mosquitto: tuple[Mosquitto, Authority, dict[str, int]], kind: str, scheme: str, host: str
) -> None:
    """The proxy looks up the name, and TLS verifies the broker's."""
    _, authority, ports = mosquitto
    given: dict[str, Any] = {"cafile": authority.cafile} if scheme == "mqtts" else {}
    with proxy_server() as proxy:
        passes(f"{scheme}://{host}:{ports[scheme]}", proxy=f"{kind}://{proxy.address}", **given)
        assert proxy.asked == [(kind.rstrip("ah"), host, ports[scheme])]


@table("kind", ["http", "socks5", "socks4"])
@table("scheme", ["amqp", "amqps"])
def test_amqp_passes_through_a_proxy(own_rabbitmq: TlsRabbitMQ, kind: str, scheme: str) -> None:
    secure = scheme == "amqps"
    url = own_rabbitmq.tls_url if secure else own_rabbitmq.url
    given: dict[str, Any] = {"cafile": own_rabbitmq.authority.cafile} if secure else {}
    port = own_rabbitmq.tls_port if secure else own_rabbitmq.port
    with proxy_server() as proxy:
        passes(url, proxy=f"{kind}://{proxy.address}", **given)
        assert proxy.asked == [(kind, "127.0.0.1", port)] * 2  # to publish and to consume


@table("kind", ["http", "socks5"])
def test_a_proxy_gets_the_log_in_of_its_url(
    mosquitto: tuple[Mosquitto, Authority, dict[str, int]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy_server(log_in=True) as proxy:
        given = f"{kind}://{USER}:{quote(PASSWORD, safe='')}@{proxy.address}"
        passes(mosquitto[0].url, proxy=given)
        passes(f"{mosquitto[0].url}?proxy={quote(given, safe='')}")
        monkeypatch.setenv("MESSAGING_PROXY", given)
        passes(mosquitto[0].url)
        assert len(proxy.asked) == 3


def failure(url: str, **settings: Any) -> str:
    with pytest.raises(ConnectFailedError) as caught:
        messaging.connect(url, services=ServiceRegistry(), connect_timeout=PATIENCE, **settings)
    return str(caught.value)


both = table("scheme", ["mqtt", "amqp"])


@both
@table(
    "kind, words", {"http": ("http", "502 Nobody"), "socks5": ("socks5", "refused"), "socks4": ("socks4", "rejected")}
)
def test_a_broker_that_the_proxy_does_not_reach_is_named(scheme: str, kind: str, words: str) -> None:
    port = free_port()
    with proxy_server() as proxy:
        text = failure(f"{scheme}://broker.invalid:{port}", proxy=f"{kind}://{proxy.address}")
    assert f"proxy {proxy.address} does not connect to broker.invalid:{port}: " in text
    assert words in text


@both
@table(
    "kind, log_in, words",
    {
        "http, none": ("http", "", "407 Proxy Authentication Required; give user and password"),
        "http, wrong": ("http", "joe:wr0ng@", "407 Proxy Authentication Required"),
        "socks5, none": ("socks5", "", "asks for a log-in"),
        "socks5, wrong": ("socks5", "joe:wr0ng@", "refused the credentials of 'joe'"),
    },
)
def test_a_refused_log_in_is_an_error_without_the_password(scheme: str, kind: str, log_in: str, words: str) -> None:
    with proxy_server(log_in=True) as proxy:
        text = failure(f"{scheme}://broker.invalid", proxy=f"{kind}://{log_in}{proxy.address}")
    assert words in text
    assert "wr0ng" not in text


def answering(data: bytes) -> Callable[[socket.socket], None]:
    def serve(peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer.recv(4096)
            peer.sendall(data)

    return serve


@both
@table("kind", ["http", "socks5", "socks4"])
@table(
    "data",
    [
        b"",
        b"\5",
        b"220 mail.example ESMTP\r\n",
        b"\x15\x03\x03\x00\x02\x02\x46" * 4,
        b"HTTP/1.1 2\r\n\r\n",
        b"HTTP/1.1 ",
    ],
)
def test_something_else_at_the_port_of_the_proxy_is_an_error(scheme: str, kind: str, data: bytes) -> None:
    with serving(answering(data)) as port:
        text = failure(f"{scheme}://broker.invalid", proxy=f"{kind}://127.0.0.1:{port}")
    assert f"proxy 127.0.0.1:{port}" in text


@both
def test_a_proxy_that_is_not_there_is_named(scheme: str) -> None:
    port = free_port()
    text = failure(f"{scheme}://broker.invalid", proxy=f"http://127.0.0.1:{port}")
    assert f"cannot connect to the HTTP proxy 127.0.0.1:{port}: Connection refused" in text


@both
def test_the_look_up_of_a_proxy_that_hangs_costs_one_thread_for_all_attempts(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the resolver's of the project: once at a time for each name, with the deadline of the attempt."""
    name = f"proxy-of-{scheme}.invalid"  # the look-up of another row may not have ended
    asked: list[str] = []
    release = threading.Event()
    resolve = socket.getaddrinfo

    def hang(host: str, *args: Any, **options: Any) -> Any:
        if host != name:
            return resolve(host, *args, **options)
        asked.append(host)
        release.wait(PATIENCE)
        raise socket.gaierror(socket.EAI_NONAME, "released")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        for _ in range(3):
            with pytest.raises(
                ConnectFailedError, match=f"the name of its proxy, '{re.escape(name)}', is still being looked"
            ):
                messaging.connect(
                    f"{scheme}://broker.invalid",
                    services=ServiceRegistry(),
                    connect_timeout=0.1,
                    proxy=f"http://{name}",
                )
    finally:
        release.set()
    assert asked == [name]


@both
def test_a_proxy_whose_name_has_no_address_is_named(scheme: str) -> None:
    text = failure(f"{scheme}://broker.invalid", proxy="socks5://proxy.invalid")
    assert "cannot connect to the SOCKS 5 proxy proxy.invalid:1080: " in text


@both
@table("kind", ["http", "socks5", "socks4"])
def test_a_refusal_of_a_proxy_is_none_of_the_broker(scheme: str, kind: str) -> None:
    """It has no code, and the state is not ``refused``: the broker was not asked."""
    url = f"{scheme}://broker.invalid:{free_port()}"
    states = Recorder[Any]()
    with (
        proxy_server() as proxy,
        messaging.connect(
            url, services=ServiceRegistry(), start_offline=True, proxy=f"{kind}://{proxy.address}", reconnect_min=0.001
        ) as m,
    ):
        m.connection_state.subscribe(states.append)
        refusal = eventually(lambda: next((each for each in states if each.cause is not None), None))
    assert f"proxy {proxy.address} does not connect to broker.invalid" in str(refusal.cause)
    assert (refusal.name, refusal.cause.code) == ("connecting", None)


@both
def test_a_silent_proxy_costs_one_attempt(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConnectFailedError, match=r"within 0\.3 s|timed out"):
            messaging.connect(
                f"{scheme}://broker.invalid",
                services=ServiceRegistry(),
                connect_timeout=0.3,
                proxy=f"http://127.0.0.1:{port}",
            )


@both
@table(
    "proxy",
    [
        "ftp://h",
        "http://h/path",
        "http://a,b",
        "h:8080",
        "socks4://joe:hush@h",
        f"socks5://{'j' * 256}:hush@h",
        "http://",
    ],
)
def test_a_malformed_proxy_is_refused_at_once_and_shows_no_password(scheme: str, proxy: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        messaging.connect(f"{scheme}://localhost", services=ServiceRegistry(), proxy=proxy)
    assert caught.value.option == "proxy"
    assert "hush" not in str(caught.value)


def test_the_password_of_a_proxy_is_shown_nowhere() -> None:
    given = quote("http://joe:hush@127.0.0.1:1", safe="")
    with messaging.connect(f"mqtt://h?proxy={given}", start_offline=True, services=ServiceRegistry()) as m:
        assert "hush" not in repr(m) + repr(m._adapter.settings) + repr(m._adapter.session.target)  # type: ignore[attr-defined]
