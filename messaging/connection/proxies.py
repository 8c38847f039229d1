"""Connections through a proxy: HTTP CONNECT (RFC 9110, 9.3.6), SOCKS 5 (RFC 1928, 1929), and SOCKS 4 with names.

The dialogue is a generator without I/O. It yields bytes to send and how many to read, and never reads beyond the
proxy's answer: what follows is the broker's. The proxy looks up the broker's name. TLS is made with the broker, through
the proxy, so the proxy sees the broker's name and port and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import os
import socket
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from messaging.connection.names import reach
from messaging.errors import ConnectFailedError, InvalidOptionError, InvalidUrlError
from messaging.model import parse_url

if TYPE_CHECKING:
    from pydantic import SecretStr

#: yields bytes to send and the number of bytes to read after them, and is sent those: fewer at the end of the stream
Dialogue = Generator[tuple[bytes, int], bytes, None]

#: schemes -> kind and default port
_SCHEMES: Final = {
    "http": ("HTTP", 8080), "socks5": ("SOCKS 5", 1080), "socks5h": ("SOCKS 5", 1080),
    "socks4": ("SOCKS 4", 1080), "socks4a": ("SOCKS 4", 1080),
}  # fmt: skip
#: bytes of an answer to CONNECT
_MAX_ANSWER: Final = 16_384
#: characters of the proxy's words that an error shows
_SHOWN: Final = 200
#: bytes of a name, a user name and a password in SOCKS
_MAX_TEXT: Final = 255
_REPLIES: Final = {
    1: "general failure", 2: "not allowed by its rules", 3: "network unreachable", 4: "host unreachable",
    5: "connection refused", 6: "time to live expired", 7: "command not supported", 8: "address type not supported",
}  # fmt: skip
_REPLIES_V4: Final = {91: "rejected or failed", 92: "it cannot reach this client", 93: "another user name is expected"}


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy to connect through. Its repr shows no password."""

    kind: str
    host: str
    port: int
    username: str | None = None
    password: SecretStr | None = None

    def __str__(self) -> str:
        return f"the {self.kind} proxy {self.host}:{self.port}"

    def dialogue(self, host: str, port: int) -> Dialogue:
        """Ask the proxy for a connection to ``host``.

        Raises:
            ConnectFailedError: the proxy refuses, or is no such proxy.
        """
        steps = {"HTTP": _connect, "SOCKS 5": _socks5, "SOCKS 4": _socks4}[self.kind]
        try:
            yield from steps(self, host.partition("%")[0], port)
        except EOFError:
            raise ConnectFailedError(f"{self} closed the connection without an answer") from None

    def refusal(self, host: str, port: int, why: str) -> ConnectFailedError:
        """Return the error for a refusal. It has no ``code``, which would be the broker's."""
        return ConnectFailedError(f"{self} does not connect to {host}:{port}: {why}")


def parse_proxy(url: SecretStr | None) -> Proxy | None:
    """Return the setting ``proxy``.

    Raises:
        InvalidOptionError: it is no URL of a proxy. The text repeats nothing of it.
    """
    if url is None:
        return None
    try:
        parsed = parse_url(url.get_secret_value())
    except InvalidUrlError as error:
        raise InvalidOptionError("proxy", f"option 'proxy': {error}") from None
    if parsed.scheme not in _SCHEMES or parsed.path or parsed.options or parsed.others:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise InvalidOptionError("proxy", f"option 'proxy' is a URL with user, password, host and port; known: {known}")
    kind, port = _SCHEMES[parsed.scheme]
    proxy = Proxy(kind, parsed.host, parsed.port or port, parsed.username, parsed.password)
    texts = (proxy.username or "", proxy.password.get_secret_value() if proxy.password else "")
    if kind != "HTTP" and any(len(text.encode()) > _MAX_TEXT for text in texts):
        raise InvalidOptionError("proxy", f"option 'proxy': SOCKS takes at most {_MAX_TEXT} bytes of user and password")
    if kind == "SOCKS 4" and proxy.password is not None:
        raise InvalidOptionError("proxy", "option 'proxy': SOCKS 4 has no passwords; use socks5://")
    return proxy


# --- the dialogues


def _read(size: int, data: bytes = b"") -> Generator[tuple[bytes, int], bytes, bytes]:
    """Send ``data``, and return the next ``size`` bytes."""
    answer = yield data, size
    if len(answer) < size:
        raise EOFError
    return answer


def _connect(proxy: Proxy, host: str, port: int) -> Dialogue:
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    request = f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n"
    if proxy.username is not None:
        password = proxy.password.get_secret_value() if proxy.password is not None else ""
        token = base64.b64encode(f"{proxy.username}:{password}".encode()).decode()
        request += f"Proxy-Authorization: Basic {token}\r\n"
    answer = yield from _read(1, f"{request}\r\n".encode())
    while not answer.endswith(b"\r\n\r\n"):
        if len(answer) > _MAX_ANSWER or not b"HTTP/1."[: len(answer)].startswith(answer[:7]):
            raise ConnectFailedError(f"{proxy} does not speak HTTP")
        answer += yield from _read(1)
    status = answer.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 1)[-1]
    code = int(status[:3]) if status[:3].isdecimal() else 0
    if not 200 <= code < 300:
        shown = "".join(each for each in status[:_SHOWN] if each.isprintable())
        hint = "; give user and password in its URL" if code == 407 and proxy.username is None else ""
        raise proxy.refusal(host, port, shown + hint)


def _socks5(proxy: Proxy, host: str, port: int) -> Dialogue:
    has_user = proxy.username is not None
    chosen = yield from _read(2, b"\5\2\0\2" if has_user else b"\5\1\0")
    if chosen[0] != 5:
        raise ConnectFailedError(f"{proxy} does not speak SOCKS 5")
    if chosen[1] == 2 and has_user:
        username = (proxy.username or "").encode()
        password = proxy.password.get_secret_value().encode() if proxy.password is not None else b""
        status = yield from _read(2, b"\1" + _counted(username) + _counted(password))
        if status[1]:
            raise proxy.refusal(host, port, f"it refused the credentials of {proxy.username!r}")
    elif chosen[1]:
        raise proxy.refusal(host, port, "it asks for a log-in that this client has not; give user and password")
    head = yield from _read(4, b"\5\1\0" + _address(proxy, host, port) + port.to_bytes(2, "big"))
    if head[1]:
        raise proxy.refusal(host, port, _REPLIES.get(head[1], f"reply {head[1]}"))
    size = {1: 4, 4: 16}.get(head[3])
    if size is None:
        size = (yield from _read(1))[0]
    yield from _read(size + 2)


def _address(proxy: Proxy, host: str, port: int) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return b"\3" + _counted(_name(proxy, host, port))
    return (b"\1" if address.version == 4 else b"\4") + address.packed


def _socks4(proxy: Proxy, host: str, port: int) -> Dialogue:
    name = b""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address, name = ipaddress.ip_address("0.0.0.1"), _name(proxy, host, port) + b"\0"
    if address.version != 4:
        raise proxy.refusal(host, port, "SOCKS 4 has no IPv6; use socks5://")
    request = b"\4\1" + port.to_bytes(2, "big") + address.packed + (proxy.username or "").encode() + b"\0" + name
    answer = yield from _read(8, request)
    if answer[0]:
        raise ConnectFailedError(f"{proxy} does not speak SOCKS 4")
    if answer[1] != 90:
        raise proxy.refusal(host, port, _REPLIES_V4.get(answer[1], f"reply {answer[1]}"))


def _name(proxy: Proxy, host: str, port: int) -> bytes:
    name = host.encode("ascii", "ignore")
    if not name or len(name) > _MAX_TEXT:
        raise proxy.refusal(host, port, f"SOCKS takes names of 1 to {_MAX_TEXT} bytes")
    return name


def _counted(data: bytes) -> bytes:
    return bytes((len(data),)) + data


# --- I/O


def reason_of(error: OSError | UnicodeError) -> str:
    """Return the system's words: asyncio has sentences of its own for some errors, and the resolver other numbers."""
    if isinstance(error, UnicodeError):
        return f"its name is malformed: {error}"
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or str(error)


async def open_through(proxy: Proxy, host: str, port: int) -> socket.socket:
    """Return a socket that is connected to ``host`` through ``proxy``. On the loop; the caller keeps the deadline.

    Raises:
        ConnectFailedError: the proxy cannot be reached, or refuses.
    """
    loop = asyncio.get_running_loop()
    dialogue = proxy.dialogue(host, port)
    answer: bytes | None = None
    with contextlib.ExitStack() as undo:
        try:
            sock = await reach(proxy.host, proxy.port)
            undo.callback(sock.close)
            with contextlib.suppress(StopIteration):
                while True:
                    data, size = dialogue.send(answer)  # type: ignore[arg-type]  # begins with None
                    await loop.sock_sendall(sock, data)
                    answer = b""
                    while len(answer) < size and (more := await loop.sock_recv(sock, size - len(answer))):
                        answer += more
        except (OSError, UnicodeError) as error:
            raise ConnectFailedError(f"cannot connect to {proxy}: {reason_of(error)}") from error
        undo.pop_all()
    return sock
