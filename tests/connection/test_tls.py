"""TLS of every adapter that has it: whose certificate is taken, and errors that say which side speaks no TLS."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging.errors import ConnectFailedError
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import eventually_async
from tests.certificates import Authority
from tests.threads import serving

SECURE = ["mqtts", "wss", "amqps"]


def server(context: ssl.SSLContext | None = None, answer: bytes = b"") -> AbstractContextManager[int]:
    """A port that does the TLS handshake, if it has a context, then reads something, answers and closes."""

    def serve(peer: socket.socket) -> None:
        with peer if context is None else context.wrap_socket(peer, server_side=True) as wrapped:
            wrapped.recv(4096)
            wrapped.sendall(answer)

    return serving(serve)


def refusal(url: str, **settings: Any) -> str:
    """Why connecting fails."""
    with pytest.raises(ConnectFailedError) as caught:
        messaging.connect(url, services=ServiceRegistry(), **settings)
    return str(caught.value)


def context_of(authority: Authority, name: str, alternatives: str = "") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue(name, alternatives))
    return context


@table("scheme", SECURE)
@table(
    "alternatives, is_insecure, words",
    {
        "the common name alone": ("", False, "certificate verify failed: Hostname mismatch"),
        "an alternative name": ("DNS:localhost", False, ""),
        "allow_insecure": ("", True, ""),
    },
)
def test_the_alternative_names_of_a_certificate_are_those_of_the_host(
    authority: Authority, scheme: str, alternatives: str, is_insecure: bool, words: str
) -> None:
    """RFC 9525: only they say whose certificate it is."""
    given: dict[str, Any] = {"allow_insecure": True} if is_insecure else {"cafile": authority.cafile}
    with server(context_of(authority, "localhost", alternatives)) as port:
        text = refusal(f"{scheme}://localhost:{port}", **given)
    assert words in text
    assert words or "certificate" not in text  # the server ends it after the handshake


@table("answer", [b"", b"\x20\x02\x00\x00", b"AMQP\x00\x00\x09\x01", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
@table("scheme", SECURE)
def test_tls_to_a_port_without_it_says_so(scheme: str, answer: bytes) -> None:
    with server(answer=answer) as port:
        text = refusal(f"{scheme}://127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in text
    assert "speak TLS there" in text
    assert f"{scheme.removesuffix('s')}:// instead of {scheme}://" in text


@table("scheme", ["mqtt", "ws", "amqp"])
def test_plain_text_to_a_tls_port_says_so(scheme: str) -> None:
    with server(answer=b"\x15\x03\x03\x00\x02\x02\x46") as port:
        text = refusal(f"{scheme}://127.0.0.1:{port}")
    assert text == f"cannot connect to 127.0.0.1:{port}: it speaks TLS there: use {scheme}s:// instead of {scheme}://"


@table("scheme", SECURE)
def test_a_file_that_cannot_be_loaded_is_named(scheme: str) -> None:
    for option in ("cafile", "certfile"):
        text = refusal(f"{scheme}://127.0.0.1:1", **{option: "/nowhere/file.pem"})
        assert f"option '{option}': cannot load /nowhere/file.pem: No such file or directory" in text


@table("scheme", SECURE)
def test_certificates_are_read_anew_for_each_connection(
    scheme: str, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with a certificate that was replaced before its key was: that attempt fails, and the next one does not."""
    context = context_of(authority, "named", "DNS:localhost")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.cafile)
    seen: list[str] = []

    def serve(peer: socket.socket) -> None:
        with context.wrap_socket(peer, server_side=True) as wrapped:
            certificate: Any = wrapped.getpeercert()
            seen.append(dict(pair for (pair,) in certificate["subject"])["commonName"])

    old, new = authority.issue(f"old-{scheme}"), authority.issue(f"new-{scheme}")
    certfile, keyfile = tmp_path / "tls.crt", tmp_path / "tls.key"
    shutil.copy(old.certificate, certfile)
    shutil.copy(old.key, keyfile)

    async def main(port: int) -> None:
        m = messaging.connect(
            f"{scheme}://localhost:{port}", services=ServiceRegistry(), retry_connect=True, cafile=authority.cafile,
            certfile=certfile, keyfile=keyfile, reconnect_min=0.01, reconnect_max=0.05,
        )  # fmt: skip
        try:
            await eventually_async(lambda: seen, "the old certificate")
            shutil.copy(new.certificate, certfile)
            text = (
                f"option 'certfile': cannot load {certfile}: the key in {keyfile} does not belong to this certificate"
            )
            await eventually_async(lambda: text in caplog.text, "the half of the new one")
            shutil.copy(new.key, keyfile)
            await eventually_async(lambda: seen[-1] == f"new-{scheme}", "the new certificate")
        finally:
            await m.aclose()
            m.ready.exception()

    with serving(serve) as port:
        asyncio.run(main(port))
    assert set(seen) == {f"old-{scheme}", f"new-{scheme}"}
