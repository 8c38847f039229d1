"""Broker URLs: ``scheme://user:password@host:port,host:port/path?option=value``.

Parsing is strict, so that a typo does not connect to another broker. ``str(url)`` never shows the password.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes

from pydantic import Secret, SecretStr

from messaging.errors import InvalidUrlError
from messaging.errors.text import tolerant
from messaging.model.channels import forbidden_character

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*\Z")
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z")
#: of an IPv6 address, after its ``%``
_ZONE: Final = re.compile(r"[A-Za-z0-9._-]*\Z")
_PORT: Final = re.compile(r"[0-9]{1,5}\Z")
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SECRET_OPTION: Final = re.compile(r"pass|secret|token|\Aproxy\Z|\Aws_", re.IGNORECASE)
_MAX_LENGTH: Final = 8192
#: hosts of one URL, or of one reference to other servers
MAX_HOSTS: Final = 64


@dataclass(frozen=True, slots=True)
class Host:
    """A host of a broker URL.

    Attributes:
        name: host name or IP address, without brackets.
        port: 1 to 65535, or ``None`` for the adapter's default.
    """

    name: str
    port: int | None = None

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.port is None else f"{name}:{self.port}"

    def key(self, default_port: int | None = None) -> tuple[str, int | None]:
        """Return a value that is equal for two spellings of the same host."""
        name = self.name.lower()
        if ":" in name:
            name = str(ipaddress.ip_address(name))
        return name, default_port if self.port is None else self.port


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The target of one attempt to connect.

    Attributes:
        host: of the URL, or of a server that the broker referred to. TLS verifies its name, and sends it as SNI.
        address: the IP address to connect to, if the name of ``host`` has several of them; ``None``: connect to the
            host by its name.
    """

    host: Host
    address: str | None = None

    def __str__(self) -> str:
        return str(self.host) if self.address is None else f"{self.host} at {self.address}"


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """A parsed broker URL. Immutable; ``str()`` and ``repr()`` never show a password.

    Attributes:
        scheme: lower case.
        host: the first host, without brackets; the name of the broker for ``memory://``.
        port: of the first host, 1 to 65535, or ``None`` for the adapter's default.
        username, password: percent-decoded, or ``None``.
        path: percent-decoded, without its leading slash; ``None`` if there is none (``/`` alone is ``""``).
        options: the options of the query, percent-decoded, in order.
        others: the further hosts, in order.
    """

    scheme: str
    host: str
    port: int | None = None
    username: str | None = None
    password: SecretStr | None = None
    path: str | None = None
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    others: tuple[Host, ...] = ()

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Return all hosts, in order."""
        return (Host(self.host, self.port), *self.others)

    @property
    def address(self) -> str:
        """Return all hosts with the ports that the URL has, as ``broker:1883``, ``[::1]:1883`` or ``a:1883,b``."""
        return ",".join(map(str, self.hosts))

    def label(self, name: str, endpoint: Endpoint | None = None) -> str:
        """Return how log lines name the connection of the instance ``name``, as ``mqtt 'plant' (broker:1883)``.

        It names ``endpoint``, if that is given, instead of all hosts.
        """
        return f"{self.scheme} {name!r} ({self.address if endpoint is None else endpoint})"

    def __str__(self) -> str:
        """Return the URL with every secret masked, for logs and DTOs."""
        user = ""
        if self.username is not None:
            user = quote(self.username, safe="") + (":***" if self.password is not None else "") + "@"
        text = f"{self.scheme}://{user}{self.address}"
        if self.path is not None:
            text += "/" + quote(self.path, safe="")
        if self.options:
            text += "?" + "&".join(
                f"{quote(key, safe='')}={'***' if is_secret_option(key) else quote(value, safe='/:,')}"
                for key, value in self.options.items()
            )
        return text

    @tolerant
    def __repr__(self) -> str:
        return f"BrokerUrl({str(self)!r})"


def is_secret_option(name: str) -> bool:
    """Return whether the option ``name`` holds a secret."""
    return _SECRET_OPTION.search(name) is not None


def concealed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with secrets as ``SecretStr``, or ``Secret``, which reports with variables do not show."""
    return {name: _concealed(value) if is_secret_option(name) else value for name, value in options.items()}


def _concealed(value: Any) -> Any:
    if isinstance(value, str):
        return SecretStr(value)
    return Secret(value) if isinstance(value, Mapping) else value


def parse_url(text: str) -> BrokerUrl:
    """Parse a broker URL.

    Raises:
        InvalidUrlError: names the invalid part and a correct form. The text never repeats a part that may hold a
            password, and no frame of the traceback has it in a local variable.
    """
    try:
        return _parsed(text)
    except InvalidUrlError as error:
        failure = error.with_traceback(None)
        failure.__context__ = None  # the error of a decoder holds its input
    del text
    raise failure


def _parsed(text: str) -> BrokerUrl:
    if not isinstance(text, str):
        raise InvalidUrlError(f"a broker URL must be a str, not {type(text).__name__}")
    if len(text) > _MAX_LENGTH:
        raise InvalidUrlError(f"broker URL of {len(text)} characters; at most {_MAX_LENGTH} are allowed")
    bad = re.search(r"[\x00-\x20\x7f-\xa0\ud800-\udfff]", text)
    if bad is not None:
        raise InvalidUrlError(
            f"broker URL holds U+{ord(bad.group()):04X} at index {bad.start()}; percent-encode unprintable characters"
        )
    scheme, separator, rest = text.partition("://")
    if not separator:
        raise InvalidUrlError("broker URL has no '://'; it looks like mqtt://host:1883 or memory://name")
    scheme = scheme.lower()
    if not _SCHEME.match(scheme):
        raise InvalidUrlError("broker URL has a malformed scheme; it looks like mqtt://host:1883 or memory://name")
    if "#" in rest:
        raise InvalidUrlError(f"{scheme} URL holds a '#'; write %23 for one that belongs to a name or password")
    rest, has_query, query = rest.partition("?")
    authority, has_path, raw_path = rest.partition("/")
    userinfo, has_user, hostport = authority.rpartition("@")
    if "@" in userinfo or (not has_user and "@" in raw_path):
        raise InvalidUrlError(
            f"{scheme} URL: write %40 for '@' and %2F for '/' in a user name or password; "
            f"several hosts share one user, as {scheme}://user:password@a,b"
            if "," in rest
            else f"{scheme} URL: write %40 for '@' and %2F for '/' in a user name or password"
        )
    username: str | None = None
    password: SecretStr | None = None
    if has_user:
        raw_user, has_password, raw_password = userinfo.partition(":")
        if ":" in raw_password:
            raise InvalidUrlError(f"{scheme} URL: write %3A for ':' in a user name or password")
        username = _decoded(raw_user, scheme, "user name")
        if has_password:
            password = SecretStr(_decoded(raw_password, scheme, "password"))
        if not username:
            raise InvalidUrlError(f"{scheme} URL has an empty user name before '@'")
    first, *others = _hosts(hostport, scheme)
    return BrokerUrl(
        scheme=scheme,
        host=first.name,
        port=first.port,
        username=username,
        password=password,
        path=_decoded(raw_path, scheme, "path") if has_path else None,
        options=_options(query, scheme) if has_query else MappingProxyType({}),
        others=tuple(others),
    )


def check_hosts(url: BrokerUrl, default_port: int | None) -> None:
    """Refuse a URL that names a host twice, once with the port ``default_port`` and once without a port.

    Raises:
        InvalidUrlError: names the host.
    """
    _refuse_duplicates(url.hosts, url.scheme, default_port)


def parse_host(text: str) -> Host:
    """Parse ``host``, ``host:port``, or an IPv6 address in brackets, for which a port may follow.

    Raises:
        InvalidUrlError: ``text`` is none of these.
    """
    return _host_and_port(text, "host")


def _hosts(text: str, scheme: str) -> list[Host]:
    parts = text.split(",")
    if len(parts) > MAX_HOSTS:
        raise InvalidUrlError(f"{scheme} URL has {len(parts)} hosts; at most {MAX_HOSTS} are allowed")
    if len(parts) > 1 and not all(parts):
        raise InvalidUrlError(f"{scheme} URL has an empty host beside a ','; it looks like {scheme}://a:1234,b,c")
    if len(parts) == 1:
        return [_host_and_port(text, f"{scheme} URL", scheme)]
    # a part may belong to a password with an unescaped '/' or '?', so that errors name its place and not its text
    hosts = [
        _host_and_port(part, f"{scheme} URL, host {number}", scheme, "this")
        for number, part in enumerate(parts, start=1)
    ]
    _refuse_duplicates(hosts, scheme)
    return hosts


def _refuse_duplicates(hosts: Sequence[Host], scheme: str, default_port: int | None = None) -> None:
    known: dict[tuple[str, int | None], int] = {}
    for number, host in enumerate(hosts, start=1):
        first = known.setdefault(host.key(default_port), number)
        if first != number:
            raise InvalidUrlError(f"{scheme} URL: hosts {first} and {number} are the same; name each host once")


def _host_and_port(text: str, where: str, scheme: str = "mqtt", shown: str | None = None) -> Host:
    """Parse a host; errors begin with ``where`` and name the host as ``shown``, if that is given."""
    if text.startswith("["):
        host, bracket, after = text[1:].partition("]")
        if not bracket:
            raise InvalidUrlError(f"{where}: ']' is missing after the IPv6 address")
        try:
            ipaddress.IPv6Address(host)
            is_address = _ZONE.match(host.partition("%")[2]) is not None
        except ValueError:
            is_address = False
        if not is_address:
            raise InvalidUrlError(f"{where}: {shown or repr(host[:80])} is not an IPv6 address")
        if after and not after.startswith(":"):
            raise InvalidUrlError(f"{where}: only ':port' may follow ']'")
        has_port, port_text = after[:1], after[1:]
    else:
        host, has_port, port_text = text.partition(":")
        if ":" in port_text:
            raise InvalidUrlError(f"{where}: an IPv6 address stands in brackets, such as [::1]")
        if not host:
            raise InvalidUrlError(f"{where} has no host; it looks like {scheme}://localhost")
        if not _HOST.match(host) or ".." in host or len(host) > 253:
            raise InvalidUrlError(f"{where}: {shown or repr(host[:80])} is not a host name")
    if not has_port:
        return Host(host)
    if not _PORT.match(port_text) or not 1 <= int(port_text) <= 65_535:
        # the text may be a password with an unescaped '@' or '/', so the error does not repeat it
        raise InvalidUrlError(f"{where}: the port must be a number from 1 to 65535")
    return Host(host, int(port_text))


def _options(query: str, scheme: str) -> Mapping[str, str]:
    options: dict[str, str] = {}
    for pair in query.split("&"):
        raw_key, equals, raw_value = pair.partition("=")
        key = _decoded(raw_key, scheme, "option name")
        if not key or not equals:
            raise InvalidUrlError(f"{scheme} URL: the query must be option=value pairs joined by '&'")
        if "@" in raw_key or ":" in raw_key:
            # it may be a password, after a user name with an unescaped '?'; later errors repeat names of options
            raise InvalidUrlError(
                f"{scheme} URL: the name of an option holds '@' or ':'; write %3F for '?' in a user name or password"
            )
        if key in options:
            raise InvalidUrlError(f"{scheme} URL: option {key[:80]!r} is given twice")
        options[key] = _decoded(raw_value, scheme, f"option {key[:80]!r}")
    return MappingProxyType(options)


def _decoded(raw: str, scheme: str, what: str) -> str:
    if _BAD_ESCAPE.search(raw):
        raise InvalidUrlError(f"{scheme} URL: '%' in the {what} is not followed by two hex digits; write %25 for '%'")
    try:
        text = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise InvalidUrlError(f"{scheme} URL: the {what} is not UTF-8 after percent-decoding") from None
    bad = forbidden_character(text)
    if bad is not None:
        raise InvalidUrlError(f"{scheme} URL: the {what} holds {bad}")
    return text
