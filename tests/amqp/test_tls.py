"""TLS, and client certificates instead of passwords: what fails says why, and nothing hangs."""

from __future__ import annotations

import asyncio
import logging
import shutil
from typing import TYPE_CHECKING

import pytest

from messaging.errors import AuthenticationError
from messaging.testing.brokers import require
from messaging.testing.proxy import Proxy
from tests.amqp.harness import connected, open_fails
from tests.certificates import CertifiedRabbitMQ, TlsRabbitMQ

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from messaging.testing.servers import Servers


@pytest.fixture
def certified(servers: Servers) -> Iterator[TlsRabbitMQ]:
    """A broker that knows its users by their certificates, and refuses clients without one on its TLS port."""
    require("rabbitmq")
    with servers.borrow(CertifiedRabbitMQ, limit=1) as broker:
        yield broker


def without_user(broker: TlsRabbitMQ) -> str:
    """Its URL for those whose certificate says who they are."""
    return f"amqps://{broker.host}:{broker.tls_port}"


async def test_a_client_certificate_stands_for_user_and_password(certified: TlsRabbitMQ) -> None:
    certfile, keyfile = certified.authority.issue("gateway")
    files = {"cafile": certified.authority.cafile, "certfile": certfile, "keyfile": keyfile}
    async with connected(without_user(certified), sasl="external", **files) as client:
        sink, _ = await client.subscribe("certified")
        await client.publish("certified", b"x")
        await sink.count(1)
        users = await asyncio.to_thread(certified.ctl, "list_connections", "user", "auth_mechanism")
        assert {tuple(line.split()) for line in users.splitlines()[-2:]} == {("gateway", "EXTERNAL")}


async def test_a_certificate_that_was_replaced_serves_the_next_connection(
    certified: TlsRabbitMQ, tmp_path: Path
) -> None:
    """Of one link: the second connection is made with the first subscription."""
    certified.ctl("add_user", "renewed", "a password that nobody uses")
    certified.ctl("set_permissions", "renewed", ".*", ".*", ".*")
    files = {"certfile": tmp_path / "tls.crt", "keyfile": tmp_path / "tls.key"}

    def install(name: str) -> None:
        for source, target in zip(certified.authority.issue(name), files.values(), strict=True):
            shutil.copy(source, target)

    install("gateway")
    settings = {"cafile": certified.authority.cafile, **files}
    async with connected(without_user(certified), sasl="external", **settings) as client:
        install("renewed")
        await client.subscribe("renewed")
        users = await asyncio.to_thread(certified.ctl, "list_connections", "user", "--silent")
        assert set(users.split()[-2:]) == {"gateway", "renewed"}


async def test_a_certificate_of_an_unknown_user_is_refused(
    certified: TlsRabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    certfile, keyfile = certified.authority.issue("stranger")
    files = {"cafile": certified.authority.cafile, "certfile": certfile, "keyfile": keyfile}
    error = await open_fails(without_user(certified), AuthenticationError, sasl="external", **files)
    assert "refused the client certificate: 403 ACCESS_REFUSED" in str(error)
    assert error.code == 403
    assert (error.detail or "").startswith("ACCESS_REFUSED")


async def test_no_certificate_where_one_is_asked_for_is_a_failure_with_the_brokers_reason(
    certified: TlsRabbitMQ,
) -> None:
    with Proxy(certified.host, certified.tls_port) as proxy:
        # with TLS 1.3 the reason comes when this side is writing already: a reset would overtake it if the broker
        # closed the connection with bytes of this side unread
        proxy.up.shape(piece=16, pause=0.02)
        url = certified.tls_url.replace(str(certified.tls_port), str(proxy.port))
        for _ in range(20):
            if "certificate required" in str(await open_fails(url, cafile=certified.authority.cafile)):
                return
    pytest.fail("the reason did not arrive")


async def test_a_broker_without_the_mechanism_says_so(own_rabbitmq: TlsRabbitMQ) -> None:
    certfile, keyfile = own_rabbitmq.authority.issue("gateway")
    files = {"cafile": own_rabbitmq.authority.cafile, "certfile": certfile, "keyfile": keyfile}
    error = await open_fails(without_user(own_rabbitmq), AuthenticationError, sasl="external", **files)
    assert "takes no client certificate (SASL EXTERNAL)" in str(error)
