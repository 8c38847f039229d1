"""Certificates for brokers: good ones, and each kind of bad one. Made with the ``openssl`` command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final, Literal

Kind = Literal["good", "expired", "wrong host", "wrong authority"]

_TIMEOUT: Final = 30.0
_CURVE: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Certificates:
    """A broker's certificate, and the authority that signs it. What the broker reads is replaced in place.

    Args:
        folder: for the files; must exist.

    Attributes:
        authority: whom clients trust.
        certificate, key: for the broker's configuration.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = self._authority("authority")
        self._stranger = self._authority("stranger")
        self.certificate, self.key = folder / "broker.pem", folder / "broker.key"
        _openssl("req", *_CURVE, "-subj", "/CN=broker", "-keyout", self.key, "-out", folder / "request.pem")
        self.present("good")

    def _authority(self, name: str) -> Path:
        path = self._folder / f"{name}.pem"
        _openssl("req", "-x509", *_CURVE, "-days", "2", "-subj", f"/CN={name}", "-keyout", path.with_suffix(".key"),
                 "-out", path)  # fmt: skip
        return path

    def present(self, kind: Kind) -> None:
        """Give the broker a certificate of that kind; it has to be told to read it."""
        authority = self._stranger if kind == "wrong authority" else self.authority
        name = "DNS:elsewhere.invalid" if kind == "wrong host" else "IP:127.0.0.1,DNS:localhost"
        extensions, made = self._folder / "extensions", self._folder / "made.pem"
        extensions.write_text(f"subjectAltName={name}\n")
        _openssl(
            "x509", "-req", "-in", self._folder / "request.pem", "-CA", authority, "-CAkey",
            authority.with_suffix(".key"), "-days", "-1" if kind == "expired" else "2", "-extfile", extensions,
            "-out", made,
        )  # fmt: skip
        shutil.move(made, self.certificate)  # whole, or not at all


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=_TIMEOUT)
