"""Settings of MQTT instances, and checks of their combinations.

Those of a WebSocket add headers and a query to its request, which may hold secrets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlencode

from pydantic import BeforeValidator, Field, SecretStr, StringConstraints, model_validator

from messaging.connection.tls import check_tls
from messaging.errors import ConnectFailedError, InvalidOptionError, InvalidUrlError
from messaging.errors.checks import is_coroutine
from messaging.execution import clock, on_worker, shielded
from messaging.model import BrokerUrl, check_hosts
from messaging.model.settings import Text, TlsSettings

logger = logging.getLogger(__name__)

Version = Literal["5", "3.1.1"]

#: spellings of the versions; 4 and 5 are the protocol levels in CONNECT
_VERSIONS: Final = {"5": "5", "5.0": "5", "v5": "5", "3.1.1": "3.1.1", "v3.1.1": "3.1.1", "311": "3.1.1", "4": "3.1.1"}

#: schemes served here -> default port
PORTS: Final = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
#: schemes with TLS, and schemes with WebSocket, where a path may follow the host
SECURE: Final = frozenset({"mqtts", "wss"})
WEB: Final = frozenset({"ws", "wss"})
#: path of a WebSocket URL that names none: that of most brokers
WEB_PATH: Final = "mqtt"
#: how long the broker keeps the session of an instance with ``keep_session``, seconds: a week
KEPT_SESSION_EXPIRY: Final = 604_800
#: seconds that the broker keeps the session of a bridged connection that is lost: the least there is. DISCONNECT may
#: change the time only if CONNECT asked for more than none (MQTT 5, 3.14.2.2.2).
_SHORTEST: Final = 1
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
#: printable ASCII without space; "#" would begin a fragment
_QUERY: Final = re.compile(r"[!\"$-~]*\Z")
#: the handshake's own
_RESERVED: Final = re.compile(
    r"(connection|upgrade|content-length|transfer-encoding|sec-websocket-.*)\Z", re.IGNORECASE
)

#: share of the time to connect that the program's callable may take
_CALL_SHARE: Final = 0.8


class WebHeaders:
    """The setting ``ws_headers``. Its repr shows no value."""

    __slots__ = ("_calling", "_source")

    def __init__(self, source: Mapping[str, str] | Callable[[], Mapping[str, str]]) -> None:
        self._source = source
        #: the call of the program's callable that has not returned
        self._calling: asyncio.Future[Mapping[str, str]] | None = None

    def __repr__(self) -> str:
        return "<WebHeaders>"

    async def now(self, timeout: float) -> Mapping[str, str]:
        """Return the headers of the next request. On the engine loop.

        The program's callable runs on a worker thread, once at a time. While it hangs, the next attempt waits for the
        same result, so that one thread at most hangs with it.

        Args:
            timeout: of the attempt to connect, seconds. The callable gets most of it, so that the error names it.

        Raises:
            ConnectFailedError: the callable failed, returned something else, or did not return in time.
        """
        source = self._source
        if isinstance(source, Mapping):
            return source
        limit = timeout * _CALL_SHARE
        try:
            if self._calling is None:
                self._calling = on_worker(lambda: _called(source))
                self._calling.add_done_callback(self._returned)
            async with clock.timeout(limit):
                return await shielded(self._calling)
        except TimeoutError:
            why = f"it did not return within {limit:g} s"
        except (_WebHeaderError, RuntimeError) as error:  # or no thread can be started
            why = str(error)
        raise ConnectFailedError(f"option 'ws_headers': the callable returned no headers: {why}")

    def _returned(self, _: object) -> None:
        self._calling = None


def _called(source: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
    try:
        headers = source()
    except BaseException as error:  # noqa: BLE001  # the caller of ``now`` is told
        # its text may hold a secret
        raise _WebHeaderError(f"it raised {type(error).__name__}") from None
    return _checked(headers)


class _WebHeaderError(ValueError):
    """Headers that HTTP does not carry. Its text shows no value."""


def _checked(headers: object) -> Mapping[str, str]:
    if not isinstance(headers, Mapping):
        raise _WebHeaderError(f"must be a mapping of str to str, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.match(name) or _RESERVED.match(name):
            raise _WebHeaderError(f"{name!r:.80} is no name of a header, or one that the handshake sets")
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise _WebHeaderError(f"the value of {name!r:.80} must be a str of printable ASCII")
    return dict(headers)


def as_headers(value: Any) -> WebHeaders | None:
    """Return the setting ``ws_headers``: a mapping, its JSON, or a callable without parameters that returns one.

    Raises:
        ValueError: it is neither.
    """
    if value is None or isinstance(value, WebHeaders):
        return value
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("must be a JSON object of names and values") from None
    if callable(value) and not isinstance(value, type):
        if is_coroutine(value):
            raise ValueError("must be a plain function: it runs on a worker thread")
        return WebHeaders(value)
    return WebHeaders(_checked(value))


def as_query(value: Any) -> Any:
    """Return the setting ``ws_query``: text that is percent-encoded already, or a mapping that is encoded here.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, Mapping):
        return SecretStr(urlencode(value))
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    if isinstance(text, str):
        text = text.removeprefix("?")
        if not _QUERY.match(text):
            raise ValueError("holds characters that a query does not: percent-encode them, or give a mapping")
        return SecretStr(text)
    return value


def _version(value: Any) -> str:
    version = _VERSIONS.get(str(value).strip().lower())
    if version is None:
        raise ValueError("must be '5' or '3.1.1'")
    return version


class MqttSettings(TlsSettings):
    """Options of ``mqtt://``, ``mqtts://``, ``ws://`` and ``wss://`` URLs beside the common ones."""

    version: Annotated[Version, BeforeValidator(_version)] = Field("5", description="protocol version, 5 or 3.1.1")
    keepalive: int = Field(
        60, ge=0, le=65_535, description="longest silence on the link, seconds; 0: a dead peer is never noticed"
    )
    clean_start: bool = Field(
        default=True,
        description="whether the broker forgets the last session of the client_id",
    )
    session_expiry: int = Field(
        0, ge=0, le=4_294_967_295, description="MQTT 5: how long the broker keeps the session of a lost client, seconds"
    )
    receive_maximum: int = Field(
        1024, ge=1, le=65_535, description="unacknowledged QoS 1 and 2 messages that the broker is to send ahead"
    )
    max_packet_size: int | None = Field(
        None,
        ge=64,
        le=268_435_460,
        description="MQTT 5: largest packet the broker may send, bytes; it drops larger ones",
    )
    topic_alias_maximum: int = Field(
        32, ge=0, le=65_535, description="MQTT 5: topics the broker may send as a number; 0 for none"
    )
    max_inflight: int | None = Field(
        None, ge=1, le=65_535, description="unconfirmed QoS 1 and 2 publishes; never more than the broker allows"
    )
    auth_method: Annotated[Text, StringConstraints(min_length=1)] | None = Field(
        None,
        description="MQTT 5: authentication method of the broker, which gets the password as authentication data",
    )
    follow_redirects: bool = Field(
        default=True,
        description="MQTT 5: whether to connect to the servers that a broker refers to, with the same credentials",
    )
    ws_headers: Annotated[Any, BeforeValidator(as_headers)] = Field(
        None,
        exclude=True,
        repr=False,
        description="WebSocket: headers of the request: a mapping, its JSON, or a function that returns one and is "
        "called before each connection; not in URLs",
    )
    ws_query: Annotated[SecretStr | None, BeforeValidator(as_query)] = Field(
        None, description="WebSocket: query of the request: percent-encoded text, or a mapping"
    )
    envelope: bool = Field(
        default=False,
        description="MQTT 3.1.1: carry message properties in front of the payload",
    )

    @model_validator(mode="after")
    def _apply_keep_session(self) -> Self:
        if self.keep_session:
            kept: dict[str, Any] = {"clean_start": False, "client_id": self.name}
            if self.v5:
                kept["session_expiry"] = KEPT_SESSION_EXPIRY
            for option, value in kept.items():
                if option not in self.model_fields_set:
                    # the model is frozen from here on; a copy would not replace the instance that is being made
                    object.__setattr__(self, option, value)
        return self

    @property
    def v5(self) -> bool:
        """Whether the protocol is MQTT 5."""
        return self.version == "5"

    @property
    def persistent(self) -> bool:
        """Whether the broker keeps the session while this client is away."""
        return self.session_expiry > 0 if self.v5 else not self.clean_start

    @property
    def bridges_session(self) -> bool:
        """Whether the broker keeps the session for planned reconnects alone; see :mod:`.session`."""
        return self.v5 and self.has_provider and not self.persistent

    @property
    def connect_expiry(self) -> int:
        """The session expiry interval of CONNECT, seconds."""
        return _SHORTEST if self.bridges_session else self.session_expiry


def check(url: BrokerUrl, settings: MqttSettings) -> None:
    """Refuse settings that contradict each other or the URL.

    Raises:
        InvalidUrlError: the URL has a path.
        InvalidOptionError: naming the option at fault.
    """
    check_hosts(url, PORTS.get(url.scheme))
    if url.path and url.scheme not in WEB:
        raise InvalidUrlError(f"{url.scheme} URL: no path is expected; channels are named when publishing")
    for option in ("ws_headers", "ws_query"):
        if getattr(settings, option) is not None and url.scheme not in WEB:
            raise InvalidOptionError(option, f"option {option!r} is for WebSocket; use ws:// or wss://")
    check_tls(settings, is_secure=url.scheme in SECURE, secure="mqtts:// or wss://")
    _check_session(settings)
    if settings.keep_session and not settings.client_id:
        raise InvalidOptionError(
            "keep_session", "option 'keep_session' resumes the session of a client id: set 'name' or 'client_id' too"
        )
    if not settings.clean_start and not settings.client_id:
        raise InvalidOptionError(
            "clean_start", "option 'clean_start' false resumes the session of a client id: set 'client_id' too"
        )
    if settings.v5 and settings.envelope:
        raise InvalidOptionError("envelope", "option 'envelope' is for version 3.1.1; MQTT 5 has properties of its own")
    for option in ("session_expiry", "max_packet_size", "auth_method"):
        if not settings.v5 and getattr(settings, option):
            raise InvalidOptionError(option, f"option {option!r} needs version 5")
    username, password = credentials(url, settings)
    if settings.auth_method is not None:
        if password is None and not settings.has_provider:
            raise InvalidOptionError("auth_method", "option 'auth_method' needs a password: the data of that method")
    elif username is None:
        for option in ("password_command", "password_file"):
            if getattr(settings, option) is not None:
                raise InvalidOptionError(option, f"option {option!r} needs 'username'")
        if password is not None:
            raise InvalidOptionError("password", "option 'password' needs 'username'")


def _check_session(settings: MqttSettings) -> None:
    """Refuse options that end a session which others keep; warn of those that keep it for a part of the time only."""
    if settings.keep_session and not settings.persistent:
        option, value = ("session_expiry", "0") if settings.v5 else ("clean_start", "true")
        raise InvalidOptionError(
            option,
            f"option {option!r} {value} ends the session with the connection, 'keep_session' keeps it: leave one out",
        )
    if settings.keep_session and settings.clean_start:
        logger.warning(
            "mqtt '%s': option 'clean_start' true drops the session that 'keep_session' has kept for the next process: "
            "leave it out to receive the messages of the meantime",
            settings.name or settings.client_id,
        )
    elif settings.v5 and not settings.clean_start and not settings.session_expiry:
        logger.warning(
            "mqtt '%s': option 'clean_start' false resumes a session, and without 'session_expiry' the broker ends it "
            "with the connection: set 'session_expiry', or 'keep_session' instead of both",
            settings.name or settings.client_id,
        )


def credentials(url: BrokerUrl, settings: MqttSettings) -> tuple[str | None, SecretStr | None]:
    """Return user name and password: the URL's, else the settings'."""
    username = url.username if url.username is not None else settings.username
    return username, url.password if url.password is not None else settings.password


def client_id(settings: MqttSettings, name: str) -> str:
    """Return the client id. A generated one is unique, names the instance, and fits the strictest broker.

    For an empty one the broker assigns an id. Brokers must accept 1 to 23 letters and digits, and may refuse others
    (MQTT-3.1.3-5).
    """
    if settings.client_id is not None:
        return settings.client_id
    return re.sub(r"[^0-9A-Za-z]", "", name)[:11] + secrets.token_hex(6)
