"""Certificates for tests, made with openssl: an authority, and whom it vouches for."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class Authority:
    """A certificate authority in a directory of its own."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self.cafile = directory / f"{name}.pem"
        self._key = directory / f"{name}.key"
        _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
                 "-addext", "basicConstraints=critical,CA:TRUE", "-out", self.cafile, "-keyout", self._key)  # fmt: skip

    def issue(self, name: str, subject: str = "", *, expired: bool = False) -> tuple[Path, Path]:
        """A certificate and its key, for ``CN=name`` and the alternative names ``subject``."""
        certificate, key, request = (self._directory / f"{name}{suffix}" for suffix in (".pem", ".key", ".csr"))
        _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        extensions = self._directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={subject}\n" if subject else "basicConstraints=CA:FALSE\n")
        period = (
            # openssl before 3.4 knows no other way to a date in the past
            ["-days", "-1"] if expired else ["-days", "2"]
        )
        _openssl("x509", "-req", "-in", request, "-CA", self.cafile, "-CAkey", self._key, "-CAcreateserial",
                 "-extfile", extensions, *period, "-out", certificate)  # fmt: skip
        return certificate, key
