"""Brokers whose certificate is wrong are refused, at the first connection and at any later one, without a storm."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest

import messaging
from messaging import ConnectFailedError
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Broker, Mosquitto, free_port, require
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import PATIENCE, eventually
from tests.certificates import LOOPBACK, Authority, TlsRabbitMQ
from tests.faults.scenario import attempts_to_connect, attempts_within, state

Kind = Literal["good", "expired", "wrong host", "wrong authority"]

#: attempts in one second that the delays allow, from a tenth of a second upwards
STORM = 10


@dataclass
class Endpoint:
    """A broker with a TLS port, and how to give it another certificate."""

    scheme: str
    broker: Broker
    port: int
    plain_port: int
    authority: Authority
    reload: Callable[[], object]

    def connect(self, port: int, *, scheme: str | None = None, **settings: Any) -> messaging.Messaging:
        url = f"{scheme or self.scheme}://127.0.0.1:{port}"
        trust = {"cafile": self.authority.cafile} if url.split(":")[0].endswith("s") else {}
        return messaging.connect(url, services=ServiceRegistry(), **{**trust, "reconnect_max": 2.0, **settings})

    def present(self, kind: Kind) -> None:
        """Have the broker show a certificate of that kind."""
        issuer = Authority(self.authority.folder, "stranger") if kind == "wrong authority" else self.authority
        issuer.issue("broker", "DNS:elsewhere.invalid" if kind == "wrong host" else LOOPBACK, expired=kind == "expired")
        self.reload()


@pytest.fixture(params=["mqtts", "amqps"])
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    if request.param == "amqps":
        rabbitmq: TlsRabbitMQ = request.getfixturevalue("own_rabbitmq")
        yield Endpoint(
            "amqps", rabbitmq, rabbitmq.tls_port, rabbitmq.port, rabbitmq.authority,
            lambda: rabbitmq.ctl("eval", "ssl:clear_pem_cache()."),
        )  # fmt: skip
        return
    require("mosquitto")
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    certificate, key = authority.issue("broker", LOOPBACK)
    plain = free_port()
    lines = [f"certfile {certificate}", f"keyfile {key}", f"listener {plain} 127.0.0.1"]
    with Mosquitto(lines) as mosquitto:
        yield Endpoint("mqtts", mosquitto, mosquitto.port, plain, authority, mosquitto.reload)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("expired", "certificate has expired"),
        ("wrong host", "IP address mismatch"),
        ("wrong authority", "unable to get local issuer"),
    ],
)
def test_a_bad_certificate_keeps_out_until_it_is_renewed(endpoint: Endpoint, kind: Kind, words: str) -> None:
    def refusal() -> str:
        try:
            endpoint.connect(endpoint.port).close()
        except ConnectFailedError as error:
            return str(error)
        return ""  # the broker has not read the file yet

    with Proxy(endpoint.broker.host, endpoint.port) as proxy, endpoint.connect(proxy.port) as m:
        m.publish("tls", b"x", qos=1).result(PATIENCE)
        endpoint.present(kind)
        try:
            assert words in eventually(refusal, "the certificate is refused")
            before = proxy.attempts
            proxy.sever()
            waiting = m.publish("tls", b"x", qos=1)
            eventually(lambda: proxy.attempts > before, "another attempt")
            assert attempts_within(proxy, 1.0) <= STORM
            eventually(lambda: words in (m.runtime.get_runtime_dto().connection.cause or ""), words)
            assert state(m) == "reconnecting"
            assert not waiting.done()
        finally:
            endpoint.present("good")
        waiting.result(PATIENCE)
        assert state(m) == "connected"


@pytest.mark.parametrize("secure", [True, False], ids=["tls-to-a-plain-port", "plain-to-a-tls-port"])
def test_tls_on_one_side_only_says_so_and_is_no_storm(endpoint: Endpoint, secure: bool) -> None:
    scheme = endpoint.scheme if secure else endpoint.scheme.removesuffix("s")
    with Proxy(endpoint.broker.host, endpoint.plain_port if secure else endpoint.port) as proxy:
        with pytest.raises(ConnectFailedError, match="instead of " + scheme + "://"):
            endpoint.connect(proxy.port, scheme=scheme)
        attempts = attempts_to_connect(proxy, f"{scheme}://{proxy.host}:{proxy.port}", 1.0, reconnect_max=2.0)
        assert attempts <= STORM


def test_a_silent_server_is_abandoned_after_the_connect_timeout(endpoint: Endpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConnectFailedError):
        endpoint.connect(silent.getsockname()[1], connect_timeout=0.5)
