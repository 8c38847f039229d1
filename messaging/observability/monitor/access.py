"""Who may use the page: the token, the Host and Origin headers, and the headers that confine the page in a browser."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from messaging.errors import ArgumentError, ConfigurationError
from messaging.observability.web import HttpRequest, address, is_loopback

#: environment variables with the token, and with the name of a file that holds it
TOKEN_VARIABLE: Final = "MESSAGING_MONITOR_TOKEN"  # noqa: S105  # the name of a variable
TOKEN_FILE_VARIABLE: Final = "MESSAGING_MONITOR_TOKEN_FILE"  # noqa: S105
#: characters of a token
_MIN_TOKEN: Final = 16
_MAX_TOKEN: Final = 512
_MAX_HOSTS: Final = 100

#: sent with every response
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


class AccessToken:
    """A secret that viewers have to know. Only its hash is kept."""

    __slots__ = ("_digest",)

    def __init__(self, token: str) -> None:
        self._digest = _digest(token)

    def matches(self, given: str) -> bool:
        """Return whether ``given`` is the token; takes the same time for each text of one length."""
        return hmac.compare_digest(self._digest, _digest(given))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def find_token(token: str | None, token_file: str | os.PathLike[str] | None) -> AccessToken | None:
    """Return the token that is given, is in the file, or is named by the environment; ``None``: there is none.

    Raises:
        ArgumentError: the token is too short or too long, or has other characters than visible ASCII; or both are
            given.
        ConfigurationError: the file cannot be read.
    """
    if token is not None and token_file is not None:
        raise ArgumentError("both token and token_file are given; give one of them")
    if token_file is not None and not isinstance(token_file, (str, os.PathLike)):
        raise ArgumentError(f"token_file must be a path, not {type(token_file).__name__}")
    if token is None and token_file is None:
        token = os.environ.get(TOKEN_VARIABLE) or None
        token_file = None if token is not None else os.environ.get(TOKEN_FILE_VARIABLE) or None
    if token_file is not None:
        try:
            with Path(token_file).open(encoding="utf-8") as file:
                token = file.read(2 * _MAX_TOKEN).strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigurationError(f"cannot read the token file {os.fspath(token_file)!r:.200}: {reason}") from None
    if token is None:
        return None
    if (
        not isinstance(token, str)
        or not _MIN_TOKEN <= len(token) <= _MAX_TOKEN
        or not all("!" <= each <= "~" for each in token)
    ):
        token = None  # not for the variables of a traceback
        raise ArgumentError(f"a token must have {_MIN_TOKEN} to {_MAX_TOKEN} characters of visible ASCII, no spaces")
    return AccessToken(token)


class Access:
    """The rules of one monitor. Immutable.

    Args:
        host: that the server is bound to.
        token: that viewers need; ``None``: none.
        allowed_hosts: further names that the page may be opened by, such as that of a proxy.

    Raises:
        ArgumentError: an argument is not as described.
        ConfigurationError: without a token, the server would be reachable from other machines.
    """

    def __init__(self, host: str, token: AccessToken | None, allowed_hosts: Iterable[str] = ()) -> None:
        if not isinstance(host, str) or not host or len(host) > 255 or not host.isprintable():
            raise ArgumentError("host must be the name or the address to listen at, such as '127.0.0.1'")
        if isinstance(allowed_hosts, str) or not isinstance(allowed_hosts, Iterable):
            raise ArgumentError("allowed_hosts must be a list of names, such as ['monitor.example.com']")
        names: list[str] = []
        for each in allowed_hosts:
            if not isinstance(each, str) or _host_of(each) is None or len(names) >= _MAX_HOSTS:
                raise ArgumentError(f"an allowed host must be a name without a port, not {each!r:.80}")
            names.append(each.lower())
        self._is_loopback = is_loopback(host)
        if not self._is_loopback and token is None:
            raise ConfigurationError(
                f"a monitor at {host!r} is reachable from other machines and needs a token: pass token_file, "
                f"or set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}; or bind it to 127.0.0.1"
            )
        self._token = token
        self._names = frozenset((host.lower(), *names))

    def allows_host(self, header: str) -> bool:
        """Return whether the page may be opened by this Host header.

        A name of another site that was made to resolve to this machine (DNS rebinding) is refused: only addresses,
        ``localhost``, and the names that the server was given are allowed.
        """
        host = _host_of(header)
        if host is None:
            return False
        if host in self._names:
            return True
        return is_loopback(host) if self._is_loopback else host == "localhost" or address(host) is not None

    def allows_origin(self, origin: str | None, host: str, site: str | None) -> bool:
        """Return whether a request that changes something comes from the page itself, or from no browser."""
        if site is not None and site not in ("same-origin", "none"):
            return False
        if origin is None:
            return True
        try:
            return urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:
            return False

    def allows(self, authorization: str | None) -> bool:
        """Return whether an Authorization header has the token."""
        if self._token is None:
            return True
        scheme, _, given = (authorization or "").partition(" ")
        return self._token.matches(given.strip()) and scheme.lower() == "bearer"

    def problem(self, request: HttpRequest) -> tuple[int, str] | None:
        """Return status and text of the refusal of a request, or ``None`` if the rules allow it."""
        headers = request.headers
        host = headers.get("Host", "")
        if not self.allows_host(host):
            return 421, "unknown host: open the page by an address, or allow the name of the host"
        if request.query:
            return 400, "no query is expected; a token belongs into the Authorization header"
        if request.method not in ("GET", "HEAD", "POST"):
            return 405, "method not allowed"
        is_data = request.path.startswith("/api/")
        is_ours = self.allows_origin(headers.get("Origin"), host, headers.get("Sec-Fetch-Site"))
        if (request.method == "POST" or is_data) and not is_ours:
            return 403, "a page of another site asks"
        if is_data and not self.allows(headers.get("Authorization")):
            return 401, "a token is needed"
        return None


def _host_of(header: str) -> str | None:
    """Return the host of a Host header in lower case, without its port; ``None`` if it is malformed."""
    if not header or len(header) > 300 or any(each in header for each in "/?#@\\ \t"):
        return None
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname
