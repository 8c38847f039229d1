"""TLS, and client certificates instead of passwords: what fails says why, and nothing hangs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING

import pytest

from messaging.errors import AuthenticationError, InvalidOptionError
from tests.amqp.harness import Client, connected, make_adapter, open_fails
from tests.brokers import RabbitMQ, require
from tests.certificates import Authority, TlsRabbitMQ

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def certified() -> Iterator[TlsRabbitMQ]:
    """Knows its users by their certificates, and takes nobody without one on its TLS port."""
    require("rabbitmq")
    lines = [
        "ssl_options.verify = verify_peer",
        "ssl_options.fail_if_no_peer_cert = true",
        "ssl_cert_login_from = common_name",
        "auth_mechanisms.1 = EXTERNAL",
        "auth_mechanisms.2 = PLAIN",
    ]
    with TlsRabbitMQ(lines, plugins=["rabbitmq_auth_mechanism_ssl"]) as broker:
        broker.ctl("add_user", "gateway", "a password that nobody uses")
        broker.ctl("set_permissions", "gateway", ".*", ".*", ".*")
        yield broker


def without_user(broker: TlsRabbitMQ) -> str:
    """Its URL for those whose certificate says who they are."""
    return f"amqps://{broker.host}:{broker.tls_port}"


# --- who the broker is


class TlsServer:
    """Runs something on a TLS port with a certificate of choice; nobody gets further than the handshake."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    async def refused(self, name: str, subject: str, *, expired: bool = False, **settings: object) -> str:
        """Return why connecting to it fails."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._authority.issue(name, subject, expired=expired))
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        async with server:
            error = await open_fails(f"amqps://127.0.0.1:{server.sockets[0].getsockname()[1]}", **settings)
        assert isinstance(error.__cause__, Exception)
        return str(error)


@pytest.fixture
def tls_server(authority: Authority) -> TlsServer:
    return TlsServer(authority)


async def test_an_expired_certificate_is_refused(tls_server: TlsServer, authority: Authority) -> None:
    error = await tls_server.refused("old", "IP:127.0.0.1", expired=True, cafile=authority.cafile)
    assert "certificate verify failed: certificate has expired" in error


async def test_a_certificate_for_another_host_is_refused(tls_server: TlsServer, authority: Authority) -> None:
    error = await tls_server.refused("elsewhere", "DNS:broker.example", cafile=authority.cafile)
    assert "certificate verify failed: IP address mismatch" in error
    assert "127.0.0.1" in error


async def test_a_certificate_of_an_unknown_authority_is_refused(tls_server: TlsServer, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    error = await tls_server.refused("unknown", "IP:127.0.0.1", cafile=other.cafile)
    assert "certificate verify failed: unable to get local issuer certificate" in error


async def test_tls_to_a_plain_port_says_so(rabbitmq: RabbitMQ) -> None:
    error = await open_fails(f"amqps://{rabbitmq.host}:{rabbitmq.port}")
    assert "it does not speak TLS there" in str(error)
    assert "amqp:// instead of amqps://" in str(error)


async def test_plain_text_to_a_tls_port_says_so(certified: TlsRabbitMQ) -> None:
    error = await open_fails(f"amqp://{certified.host}:{certified.tls_port}")
    assert str(error).endswith("it speaks TLS there: use amqps:// instead of amqp://")


async def test_a_tls_handshake_that_never_ends_ends_with_the_attempt() -> None:
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    async with server:
        client = Client(make_adapter(f"amqps://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.open()
        await client.adapter.close()
        for writer in writers:
            writer.close()


# --- who the client is


async def test_a_client_certificate_stands_for_user_and_password(certified: TlsRabbitMQ) -> None:
    certfile, keyfile = certified.authority.issue("gateway")
    files = {"cafile": certified.authority.cafile, "certfile": certfile, "keyfile": keyfile}
    async with connected(without_user(certified), sasl="external", **files) as client:
        sink, _ = await client.subscribe("certified")
        await client.publish("certified", b"x")
        await sink.count(1)
        users = await asyncio.to_thread(certified.ctl, "list_connections", "user", "auth_mechanism")
        assert {tuple(line.split()) for line in users.splitlines()[-2:]} == {("gateway", "EXTERNAL")}


async def test_a_certificate_of_an_unknown_user_is_refused(
    certified: TlsRabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    certfile, keyfile = certified.authority.issue("stranger")
    error = await open_fails(
        without_user(certified), AuthenticationError,
        sasl="external", cafile=certified.authority.cafile, certfile=certfile, keyfile=keyfile,
    )  # fmt: skip
    assert "refused the client certificate: 403 ACCESS_REFUSED" in str(error)
    assert error.code == 403
    assert (error.detail or "").startswith("ACCESS_REFUSED")


async def test_no_certificate_where_one_is_asked_for_is_a_failure_with_the_brokers_reason(
    certified: TlsRabbitMQ,
) -> None:
    # with TLS 1.3 the reason comes when this side is writing already: now and then a reset overtakes it
    for _ in range(20):
        if "certificate required" in str(await open_fails(certified.tls_url, cafile=certified.authority.cafile)):
            return
    pytest.fail("the reason did not arrive")


async def test_a_broker_without_the_mechanism_says_so(own_rabbitmq: TlsRabbitMQ) -> None:
    certfile, keyfile = own_rabbitmq.authority.issue("gateway")
    error = await open_fails(
        without_user(own_rabbitmq), AuthenticationError,
        sasl="external", cafile=own_rabbitmq.authority.cafile, certfile=certfile, keyfile=keyfile,
    )  # fmt: skip
    assert "takes no client certificate (SASL EXTERNAL)" in str(error)


@pytest.mark.parametrize(
    ("url", "settings", "option", "right"),
    [
        ("amqp://h", {"sasl": "external"}, "sasl", "amqps:// and 'certfile'"),
        ("amqps://h", {"sasl": "external"}, "sasl", "amqps:// and 'certfile'"),
        ("amqps://u:p@h", {"sasl": "external", "certfile": "c.pem"}, "username", "the certificate stands for it"),
        ("amqps://h", {"sasl": "external", "certfile": "c.pem", "password": "secret"}, "password", "stands for it"),
        ("amqps://h", {"sasl": "digest"}, "sasl", "'plain' or 'external'"),
    ],
)
def test_settings_that_contradict_the_mechanism(url: str, settings: dict[str, str], option: str, right: str) -> None:
    with pytest.raises(InvalidOptionError, match=right) as caught:
        make_adapter(url, **settings)
    assert caught.value.option == option
    assert "secret" not in str(caught.value)
