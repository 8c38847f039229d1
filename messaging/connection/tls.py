"""TLS of clients: the context for every adapter, and explanations of a failed handshake."""

from __future__ import annotations

import ssl
from typing import Final

from messaging.errors import ConnectFailedError, InvalidOptionError
from messaging.errors.text import SafeLog
from messaging.model.settings import NetworkSettings, TlsSettings

logger = SafeLog(__name__)

#: settings that have a meaning with TLS only
TLS_OPTIONS: Final = tuple(name for name in TlsSettings.model_fields if name not in NetworkSettings.model_fields)
#: options that a context of the program's own stands for
_OF_CONTEXT: Final = frozenset(TLS_OPTIONS) - {"ssl_context", "server_name"}
#: options that have no meaning if any certificate is accepted
_OF_VERIFICATION: Final = frozenset({"cafile", "capath", "cadata", "check_hostname"})
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
    given = [each for each in TLS_OPTIONS if getattr(settings, each) != type(settings).model_fields[each].default]
    if given and not is_secure:
        raise InvalidOptionError(given[0], f"option {given[0]!r} is for TLS; use {secure}")
    for option in ("keyfile", "keyfile_password"):
        if getattr(settings, option) is not None and settings.certfile is None and settings.ssl_context is None:
            raise InvalidOptionError(option, f"option {option!r} needs 'certfile', the certificate of that key")
    for option, excluded in (("ssl_context", _OF_CONTEXT), ("allow_insecure", _OF_VERIFICATION)):
        second = next((each for each in given if each in excluded), None)
        if option in given and second is not None:
            raise InvalidOptionError(option, f"option {option!r} leaves {second!r} without effect: give one of them")
    if settings.ciphers is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).set_ciphers(settings.ciphers)
        except ssl.SSLError:
            raise InvalidOptionError("ciphers", "option 'ciphers': OpenSSL knows none of them") from None
    if not all(0 < len(each) < 256 for each in _protocols(settings)):
        raise InvalidOptionError("alpn", "option 'alpn': names of protocols have 1 to 255 ASCII characters")


def client_context(settings: TlsSettings) -> ssl.SSLContext:
    """Return the TLS context of a client. Reads files, so the calling thread must be allowed to block.

    Called for each connection: certificates are replaced while programs run. A certificate that is replaced while it is
    read, before its key is, fails that connection; the next one reads both again. TLS looks at certificates in the
    handshake only, so a connection outlives the certificate that it was made with.

    The broker's certificate and host name are verified: the name must be among the certificate's alternative names,
    and the common name is ignored (RFC 6125, 6.4.4; RFC 9525). ``allow_insecure`` turns both off. A context of the
    program's own is used as it is.

    Raises:
        ConnectFailedError: a file cannot be read or used; the text names the option.
    """
    if settings.ssl_context is not None:
        own: ssl.SSLContext = settings.ssl_context
        return own
    option = next((each for each in ("cafile", "capath", "cadata") if getattr(settings, each) is not None), "cafile")
    try:
        context = ssl.create_default_context(cafile=settings.cafile, capath=settings.capath, cadata=settings.cadata)
        if settings.certfile is not None:
            option = "certfile"
            secret = settings.keyfile_password
            # without a password OpenSSL would ask for one on the terminal, and wait
            context.load_cert_chain(
                settings.certfile, settings.keyfile, password="" if secret is None else secret.get_secret_value()
            )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            key = settings.keyfile or settings.certfile
            reason = f"the key in {key} does not belong to this certificate; the next attempt reads both again"
        what = "the certificates" if option == "cadata" else getattr(settings, option)
        raise ConnectFailedError(f"option {option!r}: cannot load {what}: {reason}") from error
    if settings.allow_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.check_hostname = settings.check_hostname
        context.verify_mode = ssl.CERT_REQUIRED
        context.hostname_checks_common_name = False
    if settings.tls_min_version == "1.3":  # the lowest of Python is 1.2, and that of the system may be higher
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    if settings.ciphers is not None:
        context.set_ciphers(settings.ciphers)
    if settings.alpn is not None:
        context.set_alpn_protocols(_protocols(settings))
    return context


class ClientTls:
    """TLS of one instance: makes the context of each connection, and looks at what the broker has chosen."""

    def __init__(self, settings: TlsSettings, component: str) -> None:
        self._settings = settings
        self._component = component
        self._has_warned = False

    def context(self) -> ssl.SSLContext:
        """See :func:`client_context`."""
        return client_context(self._settings)

    def name_of(self, host: str) -> str:
        """Return the name that the broker is asked for, and that its certificate must have."""
        return self._settings.server_name or host

    def made(self, connection: ssl.SSLSocket | ssl.SSLObject) -> None:
        """Warn, once, if the broker has chosen none of the protocols that ALPN offered it."""
        if self._settings.alpn is not None and connection.selected_alpn_protocol() is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the broker chose none of the protocols of option 'alpn' (%s); it may not know ALPN",
                self._component, self._settings.alpn,
            )  # fmt: skip


def _protocols(settings: TlsSettings) -> list[str]:
    """Return the names to offer with ALPN; an empty one for each that is no ASCII."""
    if settings.alpn is None:
        return []
    return [each.strip() if each.isascii() else "" for each in settings.alpn.split(",")]


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
