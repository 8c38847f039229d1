from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

import pika
import pytest

from tests.brokers import RabbitMQ, accepts, free_port, require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pika.adapters.blocking_connection import BlockingChannel


class TlsRabbitMQ(RabbitMQ):
    """Listens with TLS on a second port, with a certificate that signs itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tls_port = free_port()
        self.cafile = self.directory / "cert.pem"
        key = self.directory / "key.pem"
        subprocess.run(
            [
                "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test",
                "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(self.cafile), "-keyout", str(key),
            ],
            check=True,
            capture_output=True,
        )  # fmt: skip
        self._lines += [
            f"listeners.ssl.1 = {self.host}:{self.tls_port}",
            f"ssl_options.cacertfile = {self.cafile}",
            f"ssl_options.certfile = {self.cafile}",
            f"ssl_options.keyfile = {key}",
        ]

    def _answers(self) -> bool:
        return super()._answers() and accepts(self.tls_port)

    @property
    def tls_url(self) -> str:
        """``amqps://guest:guest@127.0.0.1:PORT``."""
        return f"amqps://guest:guest@{self.host}:{self.tls_port}"


@pytest.fixture(scope="session")
def own_rabbitmq() -> Iterator[TlsRabbitMQ]:
    """A RabbitMQ that may be killed, stopped and starved; and one that speaks TLS, too."""
    require("rabbitmq")
    with TlsRabbitMQ() as broker:
        yield broker


@pytest.fixture
def foreign(rabbitmq: RabbitMQ) -> Iterator[BlockingChannel]:
    """A channel of another AMQP client, pika, to the shared broker."""
    with foreign_channel(rabbitmq) as channel:
        yield channel


@contextlib.contextmanager
def foreign_channel(broker: RabbitMQ) -> Iterator[BlockingChannel]:
    connection = pika.BlockingConnection(pika.ConnectionParameters(broker.host, broker.port))
    try:
        yield connection.channel()
    finally:
        connection.close()
