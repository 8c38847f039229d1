"""TLS of clients: the context that every adapter uses, and what a failed handshake means, in words."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final

from messaging.errors import ConnectFailedError

if TYPE_CHECKING:
    from messaging.model.settings import TlsSettings

#: what OpenSSL says of bytes that are no TLS
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE", "HTTP_REQUEST")
#: how an alert of TLS begins: what a TLS server answers to bytes that are no TLS
_ALERT: Final = b"\x15\x03"


def client_context(settings: TlsSettings) -> ssl.SSLContext:
    """Make the context of a client. Reads files, so it is for a thread that may block.

    The broker's certificate is verified, and its host name with it: the name has to be among the certificate's
    alternative names, the common name does not count (RFC 6125, 6.4.4; RFC 9525). ``allow_insecure`` turns both off.

    Raises:
        ConnectFailedError: a file cannot be read or used; names the option.
    """
    option = "cafile"
    try:
        context = ssl.create_default_context(cafile=settings.cafile)
        if settings.certfile is not None:
            option = "certfile"
            # without a password OpenSSL would ask for one on the terminal, and wait
            context.load_cert_chain(settings.certfile, settings.keyfile, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConnectFailedError(f"option {option!r}: cannot load {getattr(settings, option)}: {reason}") from error
    if settings.allow_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.check_hostname = True
        context.verify_mode = ssl.CERT_REQUIRED
        context.hostname_checks_common_name = False
    return context


def explain(error: OSError, secure: str, plain: str) -> str | None:
    """Return why a connection with TLS could not be made, in words; ``None`` if TLS has nothing to do with it.

    Args:
        error: what connecting, or the handshake, raised.
        secure, plain: the adapter's URL schemes with and without TLS.
    """
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError, BrokenPipeError)):
        return (
            f"the other end closed the connection during the TLS handshake; if it does not speak TLS there, "
            f"use the broker's TLS port, or {plain}:// instead of {secure}://"
        )
    if not isinstance(error, ssl.SSLError):
        return None
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message or error.reason}"
    if error.reason in _NOT_TLS:
        return f"it does not speak TLS there: use the broker's TLS port, or {plain}:// instead of {secure}://"
    if "ALERT" in (error.reason or ""):
        # the broker's opinion of the client's certificate comes after the handshake, in TLS 1.3
        return f"the broker ended TLS: {(error.reason or '').lower().replace('_', ' ')}"
    return f"TLS failed: {error.reason or error}"


def wants_tls(answer: bytes, secure: str, plain: str) -> str | None:
    """Return what to do about an answer to plain text that is an alert of TLS; ``None`` if it is none."""
    return f"it speaks TLS there: use {secure}:// instead of {plain}://" if answer.startswith(_ALERT) else None
