"""TLS of clients: the context for every adapter, and explanations of a failed handshake."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final

from messaging.errors import ConnectFailedError, InvalidOptionError

if TYPE_CHECKING:
    from messaging.model.settings import TlsSettings

#: settings that have a meaning with TLS only
TLS_OPTIONS: Final = ("cafile", "certfile", "keyfile", "allow_insecure")
#: reasons of OpenSSL for bytes that are no TLS
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE", "HTTP_REQUEST")
#: first bytes of a TLS alert, with which a TLS server answers bytes that are no TLS
_ALERT: Final = b"\x15\x03"


def check_tls(settings: TlsSettings, *, is_secure: bool, secure: str) -> None:
    """Refuse TLS options that contradict each other, or the scheme of the URL.

    Args:
        settings: of the instance.
        is_secure: whether the URL's scheme is one with TLS.
        secure: names the schemes with TLS, for errors.

    Raises:
        InvalidOptionError: naming the option at fault.
    """
    given = [option for option in TLS_OPTIONS if getattr(settings, option) not in (None, False)]
    if given and not is_secure:
        raise InvalidOptionError(given[0], f"option {given[0]!r} is for TLS; use {secure}")
    if settings.keyfile is not None and settings.certfile is None:
        raise InvalidOptionError("keyfile", "option 'keyfile' needs 'certfile', the certificate of that key")
    if settings.allow_insecure and settings.cafile is not None:
        raise InvalidOptionError(
            "allow_insecure", "option 'allow_insecure' accepts any certificate, so 'cafile' has no effect: give one"
        )


def client_context(settings: TlsSettings) -> ssl.SSLContext:
    """Return the TLS context of a client. Reads files, so the calling thread must be allowed to block.

    Called for each connection: certificates are replaced while programs run. A certificate that is replaced while it is
    read, before its key is, fails that connection; the next one reads both again. TLS looks at certificates in the
    handshake only, so a connection outlives the certificate that it was made with.

    The broker's certificate and host name are verified: the name must be among the certificate's alternative names,
    and the common name is ignored (RFC 6125, 6.4.4; RFC 9525). ``allow_insecure`` turns both off.

    Raises:
        ConnectFailedError: a file cannot be read or used; the text names the option.
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
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            key = settings.keyfile or settings.certfile
            reason = f"the key in {key} does not belong to this certificate; the next attempt reads both again"
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
    """Return a text that explains a failed TLS connection; ``None`` if TLS is not the cause.

    Args:
        error: raised by connecting or by the handshake.
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
        # in TLS 1.3 the broker refuses the client's certificate after the handshake
        return f"the broker ended TLS: {(error.reason or '').lower().replace('_', ' ')}"
    return f"TLS failed: {error.reason or error}"


def wants_tls(answer: bytes, secure: str, plain: str) -> str | None:
    """Return advice for an answer to plain text that is a TLS alert; ``None`` for any other answer."""
    return f"it speaks TLS there: use {secure}:// instead of {plain}://" if answer.startswith(_ALERT) else None
