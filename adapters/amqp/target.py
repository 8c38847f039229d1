"""Where and how to connect: address, credentials, TLS. Needs no AMQP library."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from messaging.errors import ConnectFailedError

if TYPE_CHECKING:
    from pathlib import Path

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
    #: ``None`` without TLS
    tls: Tls | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def who(self) -> str:
        """Whom the broker is to let in, for errors."""
        return "the client certificate" if self.username is None else f"the credentials of {self.username!r}"


@dataclass(frozen=True, slots=True)
class Tls:
    """What TLS needs to know: paths of PEM files, and whether the broker's certificate is left unverified."""

    cafile: Path | None
    certfile: Path | None
    keyfile: Path | None
    insecure: bool

    def context(self) -> ssl.SSLContext:
        """Make the context; reads files.

        Raises:
            ConnectFailedError: one of the files cannot be used.
        """
        try:
            context = ssl.create_default_context(cafile=self.cafile)
            if self.certfile is not None:
                # without a password callback OpenSSL would ask at the terminal
                context.load_cert_chain(self.certfile, self.keyfile, password="")
        except (OSError, ssl.SSLError) as error:
            shown = ", ".join(str(path) for path in (self.cafile, self.certfile, self.keyfile) if path is not None)
            raise ConnectFailedError(f"cannot use the TLS files {shown}: {error}") from error
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def failure(error: BaseException) -> str | None:
    """What the system or OpenSSL has against a connection, in words; ``None`` for errors of other origin."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message or error.reason}"
    if isinstance(error, ssl.SSLError):
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE", "HTTP_REQUEST"):
            return "it does not speak TLS there: use the broker's TLS port, or amqp:// instead of amqps://"
        if "ALERT" in (error.reason or ""):
            # what the broker says of our certificate comes after the handshake, in TLS 1.3
            return f"the broker ended TLS: {(error.reason or '').lower().replace('_', ' ')}"
        return f"TLS failed: {error.reason or error}"
    if isinstance(error, OSError):
        # the numbers of the resolver are negative; asyncio puts a sentence of its own into the others
        return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error) or None
    return None
