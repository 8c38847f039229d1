"""Where and how to connect: address, credentials, TLS. Needs no AMQP library."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from messaging.connection.tls import explain

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import SecretStr


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to connect. Shows no password."""

    host: str
    port: int
    #: neither name nor password: the client's certificate says who it is (SASL EXTERNAL)
    username: str | None
    password: SecretStr | None
    vhost: str
    #: seconds between heartbeats; 0 turns them off
    heartbeat: int
    #: what the broker calls the connections
    name: str
    #: deadline of the second connection, and of any single request to the broker, seconds
    timeout: float
    #: makes the TLS context; ``None`` for no TLS
    tls: Callable[[], ssl.SSLContext] | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def who(self) -> str:
        """Whom the broker is to let in, for errors."""
        return "the client certificate" if self.username is None else f"the credentials of {self.username!r}"


def failure(error: BaseException) -> str | None:
    """What the system or OpenSSL has against a connection, in words; ``None`` for errors of other origin."""
    if isinstance(error, ssl.SSLError):
        return explain(error, "amqps", "amqp")
    if isinstance(error, OSError):
        # the numbers of the resolver are negative; asyncio puts a sentence of its own into the others
        return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error) or None
    return None
