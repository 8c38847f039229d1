"""Certificates for tests, made with the ``openssl`` command, and a broker that has one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from messaging.testing.brokers import RabbitMQ, accepts, free_port

#: the alternative name of servers on 127.0.0.1; not that of ``localhost``
LOOPBACK: Final = "IP:127.0.0.1"

_TIMEOUT: Final = 30.0
#: what a certificate must have by RFC 5280, which Python looks at from 3.13 on: of an authority, and of others
_SIGNS: Final = "keyUsage=critical,keyCertSign,cRLSign"
_SIGNED_BY: Final = "authorityKeyIdentifier=keyid"
_NEW_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Certificate(NamedTuple):
    """Files in PEM."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority.

    Args:
        folder: for its files and those it makes. Authorities that share it sign for the same keys.
        name: of its own.

    Attributes:
        cafile: its certificate, for those who trust it.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self.cafile = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl("req", "-x509", *_NEW_KEY, "-days", "2", "-subj", f"/CN={name}", "-addext", _SIGNS,
                 "-keyout", self._key, "-out", self.cafile)  # fmt: skip

    def issue(self, name: str, alternatives: str = "", *, expired: bool = False) -> Certificate:
        """Sign for ``CN=name`` and other names. A certificate of that name is replaced, whole; its key stays."""
        made = Certificate(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        request, extensions, signed = (self.folder / f"{name}{suffix}" for suffix in (".csr", ".ext", ".new"))
        if not made.key.exists():
            _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", made.key, "-out", request)
        lines = [_SIGNED_BY, f"subjectAltName={alternatives}" if alternatives else "basicConstraints=CA:FALSE"]
        extensions.write_text("".join(f"{line}\n" for line in lines))
        _openssl("x509", "-req", "-in", request, "-CA", self.cafile, "-CAkey", self._key, "-CAcreateserial",
                 *(_expired() if expired else ("-days", "2")), "-extfile", extensions, "-out", signed)  # fmt: skip
        shutil.move(signed, made.certificate)
        return made


class TlsRabbitMQ(RabbitMQ):
    """Listens with TLS on a second port.

    Attributes:
        authority: of its certificate, which is called ``broker``.
    """

    def __init__(self, config_lines: Iterable[str] = (), plugins: Sequence[str] = ()) -> None:
        super().__init__(config_lines, plugins)
        self.tls_port = free_port()
        self.authority = Authority(self.directory)
        certificate, key = self.authority.issue("broker", LOOPBACK)
        self._lines += [
            f"listeners.ssl.1 = {self.host}:{self.tls_port}",
            f"ssl_options.cacertfile = {self.authority.cafile}",
            f"ssl_options.certfile = {certificate}",
            f"ssl_options.keyfile = {key}",
        ]

    def _answers(self) -> bool:
        return super()._answers() and accepts(self.tls_port)

    @property
    def tls_url(self) -> str:
        """``amqps://guest:guest@127.0.0.1:PORT``."""
        return f"amqps://guest:guest@{self.host}:{self.tls_port}"


class CertifiedRabbitMQ(TlsRabbitMQ):
    """Knows its users by their certificates: ``gateway`` alone. Clients without one are refused on its TLS port."""

    def __init__(self) -> None:
        lines = [
            "ssl_options.verify = verify_peer",
            "ssl_options.fail_if_no_peer_cert = true",
            "ssl_cert_login_from = common_name",
            "auth_mechanisms.1 = EXTERNAL",
            "auth_mechanisms.2 = PLAIN",
        ]
        super().__init__(lines, plugins=["rabbitmq_auth_mechanism_ssl"])

    def start(self) -> None:
        """See ``Broker.start``."""
        is_new = not self._started_before
        super().start()
        if is_new:
            self.ctl("add_user", "gateway", "a password that nobody uses")
            self.ctl("set_permissions", "gateway", ".*", ".*", ".*")


def _expired() -> tuple[str, ...]:
    """Return the options for an expired certificate: OpenSSL before 3.4 takes no dates, later ones no negative days."""
    known = subprocess.run(["openssl", "x509", "-help"], capture_output=True, text=True, timeout=_TIMEOUT)
    if "-not_after" in known.stderr + known.stdout:
        return ("-not_before", "20200101000000Z", "-not_after", "20200102000000Z")
    return ("-days", "-1")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=_TIMEOUT)
