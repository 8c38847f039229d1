"""Configuration of an instance (RFC 5.1.2), with pydantic.

The value of a setting is the first of: keyword of ``connect()``, query option of the URL, environment variable
``MESSAGING_<SETTING>``, for secrets the file named by ``MESSAGING_<SETTING>_FILE``, default. Adapters subclass
:class:`Settings` to add settings. Durations are float seconds, sizes bytes.

``MESSAGING_PASSWORD_FILE`` is the setting ``password_file``: adapters whose credentials may change read it anew.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
)
from pydantic import Secret as Concealed
from pydantic_core import from_json

from messaging.environment import ENVIRONMENT_PREFIX
from messaging.environment.forks import hold_over_fork
from messaging.errors import CodecError, InvalidOptionError
from messaging.errors.text import did_you_mean
from messaging.model.channels import MAX_BYTES, forbidden_character
from messaging.model.credentials import as_command, as_provider
from messaging.model.extensions import MAX_PREFETCH, MAX_SECONDS, Overflow
from messaging.model.url import BrokerUrl, concealed

logger = logging.getLogger(__name__)


Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]


def _text(value: str) -> str:
    bad = forbidden_character(value)
    if bad is not None:
        raise ValueError(f"holds {bad}")
    if len(value.encode()) > MAX_BYTES:
        raise ValueError(f"is longer than {MAX_BYTES} bytes in UTF-8")
    return value


def _secret(value: SecretStr) -> SecretStr:
    _text(value.get_secret_value())
    return value


def _path(value: object) -> object:
    if value == "":  # it would be the working directory
        raise ValueError("is empty: give a path, or leave the option out")
    if isinstance(value, (str, Path)) and "\0" in str(value):
        raise ValueError("holds a NUL character, which no path has")
    return value


def _content_type(value: str) -> str:
    from messaging.codecs import codec_for  # not at import: few instances need it

    try:
        codec_for(value)
    except CodecError as error:
        raise ValueError(str(error)) from None
    return value


def _ssl_context(value: object) -> object:
    if value is not None and not (isinstance(value, ssl.SSLContext) and value.protocol != ssl.PROTOCOL_TLS_SERVER):
        raise ValueError(f"must be an ssl.SSLContext for clients, not {type(value).__name__}")
    return value


HostOrder = Literal["ordered", "shuffled"]
Text = Annotated[str, AfterValidator(_text)]
ContentType = Annotated[Text, AfterValidator(_content_type)]
Name = Annotated[Text, StringConstraints(min_length=1, max_length=200)]
Secret = Annotated[SecretStr, AfterValidator(_secret)]
LocalPath = Annotated[Path, BeforeValidator(_path)]

#: what an environment variable gives as JSON, but for texts
_COLLECTIONS: Final = (Mapping, Sequence, Set, deque, BaseModel)
_TEXTS: Final = (str, bytes, bytearray)
_MALFORMED: Final = object()
#: one thread at a time compiles a class of settings
_compiling: Final = threading.Lock()
hold_over_fork(_compiling)

#: settings that say where passwords come from, by precedence among environment variables; at most one may be given
PASSWORD_SOURCES: Final = ("credentials", "password", "password_command", "password_file")


class Settings(BaseModel):
    """Settings common to all adapters. Immutable.

    Settings with ``exclude`` run code or are objects: they are keywords, and refused in a URL.

    Raises:
        InvalidOptionError: a value is not accepted; the text omits it, because any value may be a secret.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True, arbitrary_types_allowed=True,
        # compiling takes longer than all the rest of an adapter's import, and only one class of a family is used
        defer_build=True,
    )  # fmt: skip

    name: Name | None = Field(None, description="osgi.messaging.name; generated and unique if not given")
    client_id: Annotated[Text, StringConstraints(max_length=200)] | None = Field(
        None, description="name of this client at the broker; generated if not given"
    )
    username: Text | None = Field(None, description="user name, unless the URL has one")
    password: Secret | None = Field(None, description="password, unless the URL has one")
    credentials: Annotated[Any, BeforeValidator(as_provider)] = Field(
        None,
        exclude=True,
        repr=False,
        description="callable or coroutine function that returns the credentials: asked before each connection, and "
        "before they expire; a keyword only",
    )
    password_command: Annotated[Any, BeforeValidator(as_command)] = Field(
        None,
        exclude=True,
        repr=False,
        description="command, run without a shell, that prints the password: run before each connection, and before "
        "the password expires; not in URLs",
    )
    password_file: LocalPath | None = Field(
        None,
        description="file with the password: read before each connection, and when the file changes",
    )
    timeout: Seconds = Field(
        30.0, description="deadline of a publish or request, including waiting, sending and confirm, seconds"
    )
    connect_timeout: Seconds = Field(
        10.0, description="deadline of one attempt to connect to one host, or one of its addresses, seconds"
    )
    host_order: HostOrder = Field(
        "ordered", description="order in which the hosts of the URL are tried: `ordered`, as written; `shuffled`"
    )
    close_timeout: Seconds = Field(5.0, description="longest wait of closing for accepted messages, seconds")
    retry_connect: bool = Field(False, description="retry if the first attempt to connect fails")
    start_offline: bool = Field(
        False, description="return from connect() before the first connection is made, and retry to make it"
    )
    keep_session: bool = Field(
        False,
        description="MQTT: keep the subscriptions and their messages at the broker while this instance is away: sets "
        "`clean_start`, `session_expiry` and `client_id` where they are not given, the last one to `name`",
    )
    reconnect_min: Seconds = Field(0.1, description="shortest delay before connecting to a host again, seconds")
    reconnect_max: Seconds = Field(30.0, description="longest delay before connecting to a host again, seconds")
    outbox_size: int = Field(10_000, ge=1, description="messages that may wait to be published or confirmed")
    outbox_bytes: int = Field(64 * 2**20, ge=1, description="payload bytes that may wait to be published or confirmed")
    outbox_path: LocalPath | None = Field(
        None, description="folder of a durable outbox: messages are stored before they are sent; in memory if not given"
    )
    outbox_fsync: Literal["always", "interval", "never"] = Field(
        "always", description="when a message counts as stored: on the disk, or with the operating system"
    )
    outbox_disk_bytes: int = Field(
        2**30, ge=2**16, description="bytes of messages that a durable outbox may hold on the disk"
    )
    outbox_full: Literal["block", "drop_oldest", "reject"] = Field(
        "block", description="policy of a durable outbox without room for a message"
    )
    inbox_path: LocalPath | None = Field(
        None, description="folder in which deduplicate stores the ids of settled messages; in memory if not given"
    )
    inbox_size: int = Field(
        100_000, ge=1, description="ids of settled messages that deduplicate knows, per subscription"
    )
    buffer_size: int = Field(1024, ge=1, description="messages a stream buffers, unless its context sets it")
    prefetch: int | None = Field(
        None, ge=1, le=MAX_PREFETCH, description="unsettled messages a broker may send ahead, unless a context sets it"
    )
    overflow: Overflow = Field("block", description="policy of a full stream buffer, unless its context sets it")
    max_pending_requests: int = Field(10_000, ge=1, description="requests that may wait for their replies")
    generate_correlation_id: bool = Field(True, description="generate correlation ids for requests that have none")
    generate_reply_channel: bool = Field(True, description="generate reply channels for requests that have none")
    reply_channels: Text | None = Field(
        None, description="channel patterns that handlers may reply to, separated by commas; any channel if not given"
    )
    max_message_size: int | None = Field(None, ge=1, description="largest payload that may be published, bytes")
    default_content_type: ContentType | None = Field(
        None, description="content type of received messages without one, such as application/json"
    )

    def __init__(self, **given: Any) -> None:
        if not type(self).__pydantic_complete__:
            with _compiling:  # pydantic's own compiling on first use is not thread safe
                type(self).model_rebuild()
        values = {**_from_secret_files(type(self)), **from_environment(type(self)), **given}
        try:
            super().__init__(**values)
            return
        except ValidationError as error:
            first = error.errors(include_input=False, include_context=False, include_url=False)[0]
        option = str(first["loc"][0]) if first["loc"] else "?"
        source = "" if option in given else f" (from {ENVIRONMENT_PREFIX}{option.upper()})"
        # a report of the error could show them, and the context of one that is raised in the handler
        values.clear()
        given.clear()
        raise InvalidOptionError(option, f"option {option!r}{source}: {first['msg'].removeprefix('Value error, ')}")

    @property
    def has_provider(self) -> bool:
        """Whether the credentials may change while the instance is connected."""
        return any(each is not None for each in (self.credentials, self.password_command, self.password_file))

    @classmethod
    def for_options(cls, given: Mapping[str, Any]) -> type[Settings]:  # noqa: ARG003  # a subclass reads it
        """Return the settings class of an instance with these options: an option may bring others along."""
        return cls


class NetworkSettings(Settings):
    """Settings of adapters that connect to a host."""

    proxy: Secret | None = Field(
        None,
        description="URL of the proxy to connect through: `http://`, `socks5://` or `socks4://user:password@host:port`",
    )


class TlsSettings(NetworkSettings):
    """Settings of adapters with TLS."""

    ssl_context: Annotated[Any, BeforeValidator(_ssl_context)] = Field(
        None,
        exclude=True,
        repr=False,
        description="`ssl.SSLContext` to use as it is, instead of the files and options below; a keyword only",
    )
    cafile: LocalPath | None = Field(
        None, description="PEM file of the authorities that may sign the broker's certificate"
    )
    capath: LocalPath | None = Field(None, description="folder of such files, as `openssl rehash` names them")
    cadata: str | None = Field(None, min_length=1, description="the authorities' certificates themselves, PEM")
    certfile: LocalPath | None = Field(None, description="PEM file of this client's certificate")
    keyfile: LocalPath | None = Field(None, description="PEM file of this client's private key")
    keyfile_password: Secret | None = Field(None, description="password of an encrypted private key")
    server_name: Annotated[Text, StringConstraints(min_length=1, max_length=253)] | None = Field(
        None,
        description="name to ask the broker for (SNI), which its certificate must have; that of the host if not given",
    )
    check_hostname: bool = Field(
        True,
        description="whether the certificate must have the name of the host; if not, any of theirs will do",
    )
    alpn: Text | None = Field(
        None, description="protocols to offer with ALPN, separated by commas, such as `mqtt` or `x-amzn-mqtt-ca`"
    )
    ciphers: Text | None = Field(None, description="OpenSSL cipher list for TLS 1.2; that of TLS 1.3 is OpenSSL's own")
    tls_min_version: Literal["1.2", "1.3"] = Field("1.2", description="lowest version of TLS to accept")
    allow_insecure: bool = Field(False, description="accept any certificate of the broker: for tests only")


def variables() -> dict[str, str]:
    """Return the variables of the environment that are for settings: setting -> variable. Case does not matter.

    Variables of secrets in files are under the name of the setting with ``_file``.
    """
    prefix = ENVIRONMENT_PREFIX.lower()
    return {name.lower().removeprefix(prefix): name for name in os.environ if name.lower().startswith(prefix)}


def from_environment(kind: type[Settings]) -> dict[str, Any]:
    """Return the values of environment variables; of several that say where the password is from, the first counts.

    A collection is written as JSON; keyword, query option and variable replace each other as a whole.

    Raises:
        InvalidOptionError: the JSON is malformed. The text omits it: it may hold a secret.
    """
    known = variables()
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        variable = known.get(name.lower())
        if variable is None:
            continue
        # no variable of this frame is a value: a report of the error could show it
        if _is_collection(field.annotation):
            found[name] = _parsed(os.environ[variable], field.annotation)
        else:
            found[name] = SecretStr(os.environ[variable]) if is_secret(kind, name) else os.environ[variable]
        if found[name] is _MALFORMED:
            variable = f"{ENVIRONMENT_PREFIX}{name.upper()}"
            found.clear()
            raise InvalidOptionError(name, f"option {name!r} (from {variable}): the value does not parse")
    for name in [each for each in PASSWORD_SOURCES if each in found][1:]:
        del found[name]
    return found


def _parsed(value: str, annotation: Any) -> Any:
    try:
        return from_json(value)
    except ValueError:  # it would hold the value as its context
        is_union = get_origin(annotation) in (Union, UnionType)
        return value if is_union else _MALFORMED  # another member may take the text


def _is_collection(annotation: Any) -> bool:
    origin = get_origin(annotation) or annotation
    if origin is Annotated:
        return _is_collection(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return any(map(_is_collection, get_args(annotation)))
    return isinstance(origin, type) and (
        is_dataclass(origin) or (issubclass(origin, _COLLECTIONS) and not issubclass(origin, _TEXTS))
    )


def _from_secret_files(kind: type[Settings]) -> dict[str, Any]:
    """Return the secrets in files that ``MESSAGING_<SETTING>_FILE`` name, as container platforms mount them."""
    known = variables()
    found: dict[str, Any] = {}
    for name in kind.model_fields:
        if not is_secret(kind, name):
            continue
        variable = known.get(f"{name}_file".lower(), "")
        path = os.environ.get(variable)
        if path:
            try:
                found[name] = SecretStr(Path(path).read_text().rstrip("\r\n"))
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidOptionError(name, f"{variable}: cannot read {path!r}: {type(error).__name__}") from None
    return found


S = TypeVar("S", bound=Settings)
#: keywords of ``connect`` that are no settings
PARAMETERS: Final = ("services", "interceptors", "will", "birth")


def load_settings(kind: type[S], url: BrokerUrl, keywords: Mapping[str, Any]) -> S:
    """Return the settings of one instance.

    Raises:
        InvalidOptionError: an option is unknown (the text names the most similar one) or its value is not accepted.
            The text omits values, because any of them may be a secret.
    """
    given = concealed({**url.options, **keywords})
    kind = cast("type[S]", kind.for_options(given))
    for option in given:
        if option not in kind.model_fields:
            near = (*kind.model_fields, *PARAMETERS) if option in keywords else kind.model_fields
            hint = did_you_mean(option, near) or f"known: {', '.join(sorted(kind.model_fields))}"
            raise InvalidOptionError(option, f"unknown option {option!r} for {url.scheme}://; {hint}")
        value = given[option]
        # concealed because of its name, but a text or a mapping in its adapter's settings
        if isinstance(value, Concealed) or (isinstance(value, SecretStr) and not is_secret(kind, option)):
            given[option] = value.get_secret_value()
    for option in url.options:
        if kind.model_fields[option].exclude:
            raise InvalidOptionError(
                option, f"option {option!r}: not in a URL, which may come from elsewhere; it is a keyword of connect()"
            )
    _check_password_source(url, given)
    try:
        settings = kind(**given)
    except InvalidOptionError:
        given.clear()  # a report of the error could show its values
        raise
    _check_combinations(given, settings)
    return settings


def _check_password_source(url: BrokerUrl, given: dict[str, Any]) -> None:
    """Refuse two sources of the password, and have one that is given win over those of the environment.

    Raises:
        InvalidOptionError: naming one of the two.
    """
    chosen = [option for option in PASSWORD_SOURCES if given.get(option) is not None]
    if url.password is not None and "password" not in chosen:
        chosen.append("password")
    if len(chosen) > 1:
        first, second = (f"option {option!r}" for option in chosen[:2])
        if url.password is not None and "password" in chosen[:2]:
            second = "the password of the URL"
        raise InvalidOptionError(chosen[0], f"{first} and {second} exclude each other: give one of them")
    if chosen:
        for option in PASSWORD_SOURCES:
            # the other ones may be set in the environment; a password there gives way to that of the URL by itself
            if option not in chosen and (option != "password" or option not in given):
                given[option] = None


def _check_combinations(given: Mapping[str, Any], settings: Settings) -> None:
    """Refuse options that have no effect without another one, and warn of bounds that exclude each other.

    Raises:
        InvalidOptionError: naming the option at fault.
    """
    bounds = {"reconnect_min", "reconnect_max"}
    if bounds <= settings.model_fields_set and settings.reconnect_min > settings.reconnect_max:
        logger.warning(
            "option 'reconnect_min' (%g s) is above 'reconnect_max' (%g s), which has no effect",
            settings.reconnect_min, settings.reconnect_max,
        )  # fmt: skip
    for option in ("outbox_fsync", "outbox_disk_bytes", "outbox_full"):
        if given.get(option) is not None and settings.outbox_path is None:
            raise InvalidOptionError(option, f"option {option!r} is for a durable outbox: set 'outbox_path' too")


def is_secret(kind: type[Settings], option: str) -> bool:
    """Return whether an option holds a password, a token, or a text that may have one."""
    return "SecretStr" in str(kind.model_fields[option].annotation)
