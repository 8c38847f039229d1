"""TLS of every adapter that has it: whose certificate is taken, and errors that say which side speaks no TLS."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging.errors import ConnectFailedError, InvalidOptionError
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually_async
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


def shaken(url: str, server_context: ssl.SSLContext, **settings: Any) -> tuple[str, tuple[str | None, str | None]]:
    """Why connecting fails after the handshake; and what was agreed: the protocol of ALPN and the version of TLS."""
    agreed: list[tuple[str | None, str | None]] = []

    def serve(peer: socket.socket) -> None:
        with server_context.wrap_socket(peer, server_side=True) as wrapped:
            agreed.append((wrapped.selected_alpn_protocol(), wrapped.version()))
            wrapped.recv(4096)

    with serving(serve) as port:
        text = refusal(url.format(port=port), **settings)
    return text, agreed[-1]


@table("scheme", SECURE)
def test_a_context_of_the_program_is_used_as_it_is(authority: Authority, scheme: str) -> None:
    own = ssl.create_default_context(cafile=str(authority.cafile))
    own.set_alpn_protocols(["own"])
    own.maximum_version = ssl.TLSVersion.TLSv1_2
    given = context_of(authority, "localhost", "DNS:localhost")
    given.set_alpn_protocols(["own"])
    text, agreed = shaken(f"{scheme}://localhost:{{port}}", given, ssl_context=own)
    assert "certificate" not in text
    assert agreed == ("own", "TLSv1.2")


@table("scheme", SECURE)
@table(
    "settings, agreed",
    {
        "offered": ({"alpn": "x-amzn-mqtt-ca, mqtt"}, ("mqtt", "TLSv1.3")),
        "TLS 1.2": ({"ciphers": "ECDHE-RSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-GCM-SHA256"}, (None, "TLSv1.3")),
    },
)
def test_options_of_tls_reach_the_handshake(
    authority: Authority, scheme: str, settings: dict[str, Any], agreed: tuple[str | None, str]
) -> None:
    given = context_of(authority, "localhost", "DNS:localhost")
    given.set_alpn_protocols(["mqtt"])
    _, made = shaken(f"{scheme}://localhost:{{port}}", given, cafile=authority.cafile, **settings)
    assert made == agreed


@table("scheme", SECURE)
def test_a_broker_that_chooses_no_protocol_of_alpn_is_a_warning(
    authority: Authority, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = context_of(authority, "localhost", "DNS:localhost")
    shaken(f"{scheme}://localhost:{{port}}", given, cafile=authority.cafile, alpn="mqtt")
    assert "chose none of the protocols of option 'alpn' (mqtt)" in caplog.text


@table("scheme", SECURE)
def test_old_versions_and_weak_ciphers_are_refused(authority: Authority, scheme: str) -> None:
    old = context_of(authority, "localhost", "DNS:localhost")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.set_ciphers("ECDHE+AESGCM")
    for settings in ({"tls_min_version": "1.3"}, {"ciphers": "ECDHE+CHACHA20"}):
        with server(old) as port:
            text = refusal(f"{scheme}://localhost:{port}", cafile=authority.cafile, **settings)
        assert "TLS" in text, settings


@table("scheme", SECURE)
@table(
    "settings, words",
    {
        "another name": ({}, "Hostname mismatch"),
        "that name": ({"server_name": "broker.example"}, ""),
        "no name": ({"check_hostname": False}, ""),
        "no name of another authority": ({"check_hostname": False, "cadata": "other"}, "certificate verify failed"),
        "the authority itself": ({"cadata": "own", "server_name": "broker.example"}, ""),
    },
)
def test_whose_certificate_is_taken_is_an_option(
    authority: Authority, tmp_path: Path, scheme: str, settings: dict[str, Any], words: str
) -> None:
    authorities = {"own": authority, "other": Authority(tmp_path, f"other-{scheme}-{len(words)}")}
    if "cadata" in settings:
        settings = {**settings, "cadata": Path(authorities[settings["cadata"]].cafile).read_text()}
    else:
        settings = {**settings, "cafile": authority.cafile}
    with server(context_of(authority, "broker", "DNS:broker.example")) as port:
        text = refusal(f"{scheme}://localhost:{port}", **settings)
    assert words in text
    assert words or "certificate" not in text


@table("scheme", SECURE)
def test_an_encrypted_key_is_opened_with_its_password(authority: Authority, tmp_path: Path, scheme: str) -> None:
    certificate, key = authority.issue(f"client-{scheme}")
    encrypted = tmp_path / f"{scheme}.key"
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:hush", "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    asking = context_of(authority, "localhost", "DNS:localhost")
    asking.verify_mode = ssl.CERT_REQUIRED
    asking.load_verify_locations(authority.cafile)
    files = {"cafile": authority.cafile, "certfile": certificate, "keyfile": encrypted}
    _, agreed = shaken(f"{scheme}://localhost:{{port}}", asking, keyfile_password="hush", **files)
    assert agreed == (None, "TLSv1.3")
    for wrong in ({}, {"keyfile_password": "wr0ng"}):
        text = refusal(f"{scheme}://127.0.0.1:1", **files, **wrong)
        assert "option 'certfile'" in text
        assert "wr0ng" not in text


@table("scheme", SECURE)
@table(
    "settings, option",
    [
        ({"ssl_context": "x"}, "ssl_context"),
        ({"ssl_context": ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)}, "ssl_context"),
        ({"ssl_context": ssl.create_default_context(), "cafile": "x.pem"}, "ssl_context"),
        ({"ssl_context": ssl.create_default_context(), "alpn": "mqtt"}, "ssl_context"),
        ({"ssl_context": ssl.create_default_context(), "check_hostname": False}, "ssl_context"),
        ({"allow_insecure": True, "check_hostname": False}, "allow_insecure"),
        ({"allow_insecure": True, "capath": "/etc"}, "allow_insecure"),
        ({"keyfile_password": "hush"}, "keyfile_password"),
        ({"ciphers": "no-such"}, "ciphers"),
        ({"alpn": "mqtt,"}, "alpn"),
        ({"alpn": "mütt"}, "alpn"),
        ({"tls_min_version": "1.1"}, "tls_min_version"),
    ],
)
def test_options_of_tls_that_do_not_fit_are_named(scheme: str, settings: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        messaging.connect(f"{scheme}://localhost:1", services=ServiceRegistry(), **settings)
    assert caught.value.option == option
    assert "hush" not in str(caught.value)


def test_a_context_is_no_option_of_a_url() -> None:
    with pytest.raises(InvalidOptionError, match="not in a URL"):
        messaging.connect("mqtts://localhost?ssl_context=x", services=ServiceRegistry())
