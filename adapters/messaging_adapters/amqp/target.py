"""The settings, and address, credentials and TLS of a connection, from URL and settings. Needs no AMQP library."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field, SecretStr

from messaging.connection.proxies import Proxy, parse_proxy
from messaging.connection.tls import ClientTls, check_tls
from messaging.errors import InvalidChannelError, InvalidOptionError, InvalidUrlError
from messaging.model import BrokerUrl, Endpoint, Host, check_hosts
from messaging.model.credentials import Credentials
from messaging.model.settings import Seconds, TlsSettings
from messaging_adapters.amqp import names

DEFAULT_PORT: Final = 5672
DEFAULT_TLS_PORT: Final = 5671
#: user name and password of a fresh RabbitMQ
_GUEST: Final = "guest"
#: characters of a virtual host's name (AMQP 0-9-1, 1.1: path)
MAX_VHOST: Final = 127


class AmqpSettings(TlsSettings):
    """Settings of ``amqp://`` and ``amqps://``; the path of the URL is the virtual host, ``/`` if there is none."""

    heartbeat: int = Field(
        10, ge=0, le=65_534, description="interval of heartbeats, seconds; two silent ones are a loss; 0 for none"
    )
    sasl: Literal["plain", "external"] = Field(
        "plain", description="who this client is: `plain`, user name and password; `external`, its certificate"
    )
    exchange: str = Field("amq.topic", min_length=1, description="topic exchange of channels without extension")
    publish_window: int = Field(4096, ge=1, description="messages that may await the broker's confirm")
    blocked_timeout: Seconds | None = Field(
        None,
        description="seconds for which the broker may accept no messages before another host is tried; if not given, "
        "it is waited for",
    )
    max_priority: int = Field(
        0,
        ge=0,
        le=9,
        description="levels of `priority` in queues declared here (`x-max-priority`); 0 for none, the plain queue",
    )


@dataclass(frozen=True, slots=True)
class AmqpTarget:
    """Address, credentials and TLS of a connection. Its repr shows no password."""

    host: str
    port: int
    #: ``None``, like the password, if the client's certificate names the user (SASL EXTERNAL)
    username: str | None
    password: SecretStr | None
    vhost: str
    #: interval of heartbeats, seconds; 0 turns them off
    heartbeat: int
    #: name of the connections at the broker
    name: str
    #: deadline of the second connection, and of each request to the broker, seconds
    timeout: float
    #: ``None`` for no TLS
    tls: ClientTls | None = None
    #: connected through; ``None`` for none
    proxy: Proxy | None = None
    #: when the credentials expire, in the loop's time
    expires_at: float = math.inf
    #: the IP address to connect to, if the name of the host has several; TLS verifies the name
    address: str | None = None

    def __str__(self) -> str:
        return str(Endpoint(Host(self.host, self.port), self.address))

    def at(self, endpoint: Endpoint) -> AmqpTarget:
        """Return the same target at another host or address."""
        port = endpoint.host.port or default_port(secure=self.tls is not None)
        return dataclasses.replace(self, host=endpoint.host.name, port=port, address=endpoint.address)

    @property
    def secrets(self) -> list[SecretStr]:
        """Return the password, unless it is the user name, which texts of the broker tell."""
        return [] if self.password is None or self.password.get_secret_value() == self.username else [self.password]

    @property
    def identity(self) -> str:
        """Return the identity of the client, for error texts."""
        return "the client certificate" if self.username is None else f"the credentials of {self.username!r}"


def make_target(url: BrokerUrl, settings: AmqpSettings, name: str) -> AmqpTarget:
    """Return the target of an instance.

    Raises:
        InvalidOptionError, InvalidUrlError: settings are invalid or contradict each other.
    """
    username, password = _credentials(url, settings)
    secure = url.scheme == "amqps"
    check_tls(settings, is_secure=secure, secure="amqps://")
    check_hosts(url, default_port(secure=secure))
    if len(url.path or "") > MAX_VHOST:
        raise InvalidUrlError(f"the virtual host has {len(url.path or '')} characters; at most {MAX_VHOST} fit")
    try:
        names.check_length(settings.exchange, "the exchange")
    except InvalidChannelError as error:
        raise InvalidOptionError("exchange", str(error)) from None
    if settings.sasl == "external" and not (secure and (settings.certfile or settings.ssl_context) is not None):
        raise InvalidOptionError(
            "sasl", "'external' lets the client's certificate say who it is: it needs amqps:// and 'certfile'"
        )
    return AmqpTarget(
        host=url.host,
        port=url.port or default_port(secure=secure),
        username=username,
        password=password,
        vhost=url.path or "/",
        heartbeat=settings.heartbeat,
        name=settings.client_id or name,
        timeout=settings.connect_timeout,
        tls=ClientTls(settings, url.label(name)) if secure else None,
        proxy=parse_proxy(settings.proxy),
    )


def log_in(target: AmqpTarget, credentials: Credentials, now: float) -> AmqpTarget:
    """Return ``target`` with credentials of a provider. ``now`` is the loop's time.

    Without any user name it is ``guest``: a broker that takes tokens ignores it.
    """
    username = credentials.username if credentials.username is not None else target.username
    return dataclasses.replace(
        target, username=username or _GUEST, password=credentials.password, expires_at=now + credentials.remaining
    )


def default_port(*, secure: bool) -> int:
    """Return the port of hosts without one."""
    return DEFAULT_TLS_PORT if secure else DEFAULT_PORT


def _credentials(url: BrokerUrl, settings: AmqpSettings) -> tuple[str | None, SecretStr | None]:
    username = url.username if url.username is not None else settings.username
    password = url.password if url.password is not None else settings.password
    if settings.sasl == "external":
        sources = ("credentials", "password_command", "password_file")
        named = [(option, getattr(settings, option)) for option in sources]
        for option, given in (("username", username), ("password", password), *named):
            if given is not None:
                raise InvalidOptionError(option, "sasl 'external' takes none: the certificate stands for it")
        return None, None
    if settings.has_provider:
        return username or _GUEST, None
    if username is None and password is None:
        username, password = _GUEST, SecretStr(_GUEST)
    elif username is None:
        raise InvalidOptionError("username", "a password is given, but no user name")
    elif password is None:
        raise InvalidOptionError("password", f"user {username!r} is given without a password")
    if not username or not password.get_secret_value():
        raise InvalidOptionError("password" if username else "username", "user name and password are not empty")
    return username, password
