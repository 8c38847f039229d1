"""The settings of a gateway: what a configuration file holds, as validated values.

:mod:`messaging.gateway.files` reads a file and reports each problem with its line and key. Durations are seconds,
or text such as ``"5 s"``, ``"10 min"``, ``"7 d"``; sizes are bytes, or text such as ``"64 MiB"``, ``"2 GB"``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from messaging.errors import ConfigurationError, InvalidUrlError
from messaging.model import MAX_PREFETCH, parse_host, parse_url
from messaging.model.extensions import DEDUPLICATE_SECONDS
from messaging.model.settings import PARAMETERS, LocalPath, variables

#: settings of instances that name a folder that is made, and all that name a file or a folder
FOLDER_OPTIONS: Final = ("inbox_path", "outbox_path")
PATH_OPTIONS: Final = ("password_file", "cafile", "capath", "certfile", "keyfile", *FOLDER_OPTIONS)
#: seconds of each unit of a duration
_DURATIONS: Final = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
#: bytes of each unit of a size
_SIZES: Final = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_MAX_SECONDS: Final = 1e9
#: bounds of numbers of messages, and of sizes in bytes
_MOST: Final = 10**9
_MOST_BYTES: Final = 2**60
#: where editors find the JSON schema once it is published
SCHEMA_ID: Final = "https://rx-messaging.github.io/gateway.schema.json"
#: a value that is an environment variable, and what a number or boolean has beside it, in the JSON schema
_VARIABLE: Final = {"type": "string", "pattern": r"^\$\{[^{}]*\}$"}
_RULES: Final = frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "const"})
#: what names of gateways, instances and routes may hold: they become names of folders, metrics and channels
_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"


def _quantity(value: Any, units: Mapping[str, float], what: str, example: str) -> Any:
    if not isinstance(value, str):
        return value
    found = _QUANTITY.fullmatch(value)
    unit = found.group(2) if found is not None else ""
    if found is None or unit not in units:
        raise ValueError(f"must be {what}: a number with one of the units {', '.join(units)}, such as {example!r}")
    return float(found.group(1)) * units[unit]


def _duration(value: Any) -> Any:
    return _quantity(value, _DURATIONS, "a duration", "5 s")


def _deduplicate(value: Any) -> Any:
    return {True: DEDUPLICATE_SECONDS, False: None}[value] if isinstance(value, bool) else value


def _size(value: Any) -> Any:
    found = _quantity(value, _SIZES, "a size", "64 MiB")
    return int(found) if isinstance(value, str) else found


def _quantity_schema(kind: str, units: Mapping[str, float]) -> WithJsonSchema:
    pattern = rf"^\s*[0-9]+(\.[0-9]+)?\s*({'|'.join(units)})\s*$"
    return WithJsonSchema({"anyOf": [{"type": kind, "exclusiveMinimum": 0}, {"type": "string", "pattern": pattern}]})


#: seconds above 0
Duration = Annotated[
    float, BeforeValidator(_duration), Field(gt=0, le=_MAX_SECONDS), _quantity_schema("number", _DURATIONS)
]
#: bytes above 0
Size = Annotated[int, BeforeValidator(_size), Field(gt=0, le=_MOST_BYTES), _quantity_schema("integer", _SIZES)]
Name = Annotated[str, StringConstraints(pattern=_NAME)]
#: a channel pattern with captures, such as ``site/{site}/+/telemetry``
PatternText = Annotated[str, StringConstraints(min_length=1)]
#: a channel with the values of captures, such as ``uplink/{site}``
TemplateText = Annotated[str, StringConstraints(min_length=1)]
#: ``package.module:name``
ImportPath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
#: the path of a field of a JSON object, such as ``status.battery``
FieldPath = Annotated[str, StringConstraints(min_length=1)]


#: the way out for arguments of ``connect()`` that are no settings, where it is not ``Gateway()``
_INSTEAD: Final[Mapping[str, str]] = {
    "will": "the table 'status' publishes the state of the gateway, offline by last will",
    "birth": "the table 'status' publishes the state of the gateway after each connection",
}


class StrictSettings(BaseModel):
    """The base of all settings: unknown keys are errors, values are strict and do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, populate_by_name=True, hide_input_in_errors=True
    )


# --- instances


class InstanceSettings(StrictSettings):
    """A messaging instance that the gateway connects: a URL, and settings of its adapter."""

    model_config = ConfigDict(extra="allow")

    url: str = Field(description="URL of the broker; several hosts separated by commas are tried in turn")
    password_file: LocalPath | None = Field(None, description="file with the password", strict=False)
    credential: Name | None = Field(
        None, description="name of a systemd credential with the password: a file in $CREDENTIALS_DIRECTORY"
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Show the URL without its secrets, and of texts of the adapter's settings their names only."""
        try:
            url = str(parse_url(self.url))
        except InvalidUrlError:
            url = "***"
        yield "url", url
        for name in ("password_file", "credential"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)
        for name, value in (self.model_extra or {}).items():
            yield name, value if isinstance(value, bool | int | float) else "***"

    __str__ = BaseModel.__repr__

    @property
    def password_path(self) -> Path | None:
        """Return the file with the password, also of a credential; ``None``: there is none.

        Raises:
            ConfigurationError: systemd gives this process no credentials.
        """
        if self.credential is None:
            return self.password_file
        folder = os.environ.get("CREDENTIALS_DIRECTORY")
        if not folder:
            raise ConfigurationError(
                f"credential {self.credential!r}: $CREDENTIALS_DIRECTORY is not set; systemd sets it for a unit "
                "with LoadCredential="
            )
        return Path(folder) / self.credential

    def keywords(self, name: str) -> dict[str, Any]:
        """Return the settings for :func:`messaging.connect`: those of the file, and what a gateway asks for.

        The password is given by its file, which is read before each connection, and when it changes. What a gateway
        asks for is a default: the file, the URL and the environment win.

        Args:
            name: of the instance, unless the file or the URL has one.

        Raises:
            ConfigurationError: systemd gives this process no credentials.
        """
        found: dict[str, Any] = dict(self.model_extra or {})
        path = self.password_path
        if path is not None:
            found["password_file"] = path
        wanted = {"start_offline": True, "keep_session": True}
        given = {*found, *parse_url(self.url).options, *(wanted.keys() & variables().keys())}
        return {key: value for key, value in {**wanted, "name": name}.items() if key not in given} | found

    def refusals(self) -> Iterator[tuple[str, str]]:
        """Yield the keys that are arguments of ``connect()`` and no settings, each with the way out."""
        for key in PARAMETERS:
            if key in (self.model_extra or {}):
                why = _INSTEAD.get(key, "an argument of Gateway() in Python")
                yield key, f"{key!r} is no setting of an instance: {why}"

    def check_password_file(self) -> None:
        """Refuse a file of the password that cannot be read; it is read when the instance connects.

        Raises:
            ConfigurationError: the file cannot be read, or systemd gives this process no credentials.
        """
        path = self.password_path
        if path is not None:
            try:
                path.open("rb").close()
            except OSError as error:
                raise ConfigurationError(f"password file {path}: {type(error).__name__}") from None


# --- routes: source and target


class SourceSettings(StrictSettings):
    """Where the messages of a route come from."""

    instance: Name = Field(description="name of an instance")
    channel: PatternText = Field(description="channel pattern; {name} captures a level, {name#} all last levels")
    qos: Literal[0, 1, 2] | None = Field(None, description="MQTT quality of service; by default 1 where there is one")
    queue: str | None = Field(None, description="queue, or shared subscription, that several consumers share")
    prefetch: Annotated[int, Field(ge=1, le=MAX_PREFETCH)] = Field(
        1024, description="messages that the broker sends ahead: as many as are on their way to the disk"
    )
    deduplicate: Annotated[
        Duration | None, BeforeValidator(_deduplicate, json_schema_input_type=bool | Duration | None)
    ] = Field(None, description="drop messages whose message id was received within this time before; true: one hour")
    extensions: dict[str, Any] = Field(default_factory=dict, description="further extensions of the subscription")


class TargetSettings(StrictSettings):
    """Where the messages of a route go to, and how they are published."""

    instance: Name = Field(description="name of an instance")
    channel: TemplateText = Field(
        "{channel}", description="channel; {name} is the value of a capture, {channel} the channel of the source"
    )
    qos: Literal[0, 1, 2] | None = Field(None, description="MQTT quality of service; by default 1 where there is one")
    retain: Literal["keep", "never", "always"] = Field(
        "never", description="keep: retained as at the source, so that the retained state is mirrored"
    )
    content_type: str | None = Field(None, description="content type, in place of that of the source")
    headers: dict[str, str] = Field(
        default_factory=dict, description="headers to add; {name} is the value of a capture"
    )
    time_to_live: Duration | None = Field(None, description="time after which brokers drop the message")
    priority: Annotated[int, Field(ge=0, le=9)] | None = Field(
        None, description="priority of the messages at the broker"
    )
    extensions: dict[str, Any] = Field(default_factory=dict, description="further extensions of the messages")


class BufferSettings(StrictSettings):
    """The messages of a route on disk, between acceptance and the confirmation of the target."""

    full: Literal["block", "drop_oldest", "drop_newest"] = Field(
        description="block: the source is held back; drop_oldest, drop_newest: messages are dropped and counted"
    )
    max_bytes: Size = Field(2**30, description="bytes of stored messages")
    max_age: Duration | None = Field(None, description="age from which stored messages are dropped and counted")
    order: Literal["oldest_first", "newest_first"] = Field(
        "oldest_first", description="newest_first: new messages overtake the backlog of an outage"
    )
    in_flight: Annotated[int, Field(ge=1, le=MAX_PREFETCH)] = Field(
        1000, description="messages sent and not confirmed: the most that may arrive twice"
    )
    fsync: Literal["always", "interval", "never"] = Field(
        "always", description="when a message counts as stored; always: it survives the loss of power"
    )
    max_dead_letters: Annotated[int, Field(ge=1, le=_MOST)] = Field(
        100_000, description="dead letters that are kept; the oldest beyond are dropped and counted"
    )


class RateSettings(StrictSettings):
    """A token bucket that limits how fast a route publishes."""

    messages: Annotated[float, Field(gt=0, le=_MOST)] = Field(description="messages per second")
    burst: Annotated[int, Field(ge=1, le=_MOST)] | None = Field(
        None, description="messages at once; by default those of a second"
    )


# --- routes: which messages, and how they change


class DeadbandSettings(StrictSettings):
    """Report by exception: a message passes if its value has changed enough since the last one that passed."""

    field: FieldPath = Field(description="a number of the payload, a JSON object; $ is the payload itself")
    absolute: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(None, description="least difference")
    percent: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="least difference in percent of the value"
    )
    max_silence: Duration | None = Field(None, description="time after which a message passes unchanged")

    @model_validator(mode="after")
    def _has_one_band(self) -> Self:
        if (self.absolute is None) == (self.percent is None):
            raise ValueError("a deadband needs either absolute or percent")
        return self


class SampleSettings(StrictSettings):
    """Passes one message of each key in an interval."""

    every: Duration = Field(description="interval")
    keep: Literal["first", "last"] = Field("first", description="last: the last one is passed when the interval ends")


class UnitSettings(StrictSettings):
    """Converts a number of the payload from one unit to another."""

    field: FieldPath = Field(description="a number of the payload")
    source: str = Field(alias="from", description="unit of the source, such as degF")
    target: str = Field(alias="to", description="unit of the target, such as degC")


class TransformSettings(StrictSettings):
    """One step that changes the payload, or its fields; exactly one key."""

    rename: dict[str, FieldPath] | None = Field(None, description="field -> its new name")
    select: list[FieldPath] | None = Field(None, description="fields to keep")
    drop: list[FieldPath] | None = Field(None, description="fields to remove")
    set: dict[str, Any] | None = Field(None, description="fields to set; {name} in a text is the value of a capture")
    map: dict[str, str] | None = Field(None, description="new field -> path of an old one: the payload anew")
    unit: UnitSettings | None = Field(None, description="conversion of a number between units")
    model: ImportPath | None = Field(None, description="type, such as a pydantic model, that the payload must fit")
    call: ImportPath | None = Field(None, description="function of a message that returns a message, several, or None")
    sparkplug: Literal[True] | None = Field(
        None, description="Sparkplug B payloads to typed readings, one message each"
    )

    @model_validator(mode="after")
    def _is_one_step(self) -> Self:
        if len(self.model_fields_set) != 1 or getattr(self, next(iter(self.model_fields_set))) is None:
            raise ValueError(f"a transform has exactly one of {', '.join(type(self).model_fields)}; write one per step")
        return self


class BatchSettings(StrictSettings):
    """Combines messages of a route, with the same target channel, to one."""

    count: Annotated[int, Field(ge=1, le=_MOST)] = Field(1000, description="messages of a batch, at most")
    max_bytes: Size = Field(2**18, description="bytes of a batch, at most, before compression")
    delay: Duration = Field(1.0, description="time that the first message of a batch waits, at most")
    format: Literal["json_lines", "json_array"] = Field("json_lines", description="how payloads are combined")
    envelope: bool = Field(False, description="whether each payload is wrapped with its channel, time and headers")


class RouteSettings(StrictSettings):
    """A route: messages of a source are stored, and published to a target."""

    source: SourceSettings = Field(alias="from", description="where the messages come from")
    target: TargetSettings = Field(alias="to", description="where they are published")
    buffer: BufferSettings = Field(description="how they are stored in between")
    where: str | None = Field(None, description="LDAP filter over fields, header.NAME, channel and captures")
    transform: list[TransformSettings] = Field(default_factory=list, description="steps, in order")
    key: str | None = Field(
        None, description="template of the key of deadband and sample, such as {site}/{device}; default: the channel"
    )
    deadband: DeadbandSettings | None = Field(None, description="only messages whose value has changed enough pass")
    sample: SampleSettings | None = Field(None, description="one message of each key passes in an interval")
    batch: BatchSettings | None = Field(None, description="several messages become one")
    compress: Literal["gzip", "zstd"] | None = Field(None, description="content encoding of the published payloads")
    rate: RateSettings | None = Field(None, description="limit of the rate of publishing")
    priority: Annotated[int, Field(ge=0, le=9)] = Field(
        4, description="routes of higher priority publish first where routes share a target"
    )
    enabled: bool = Field(True, description="whether it runs; the buffer is kept meanwhile")


class RequestSettings(StrictSettings):
    """A route of requests: a request at the source is answered by a responder at the target."""

    source: SourceSettings = Field(alias="from", description="where requests come from")
    target: TargetSettings = Field(alias="to", description="where the responder is")
    timeout: Duration = Field(30.0, description="time for the reply")
    concurrency: Annotated[int, Field(ge=1, le=10_000)] = Field(64, description="requests at a time")
    many: bool = Field(False, description="whether a request has many replies")
    enabled: bool = Field(True, description="whether it runs")


class DeviceStateSettings(StrictSettings):
    """Publishes the state of bridged devices, and that they are unreachable while their source is disconnected."""

    source: SourceSettings = Field(alias="from", description="where the devices publish their state, and their wills")
    target: TargetSettings = Field(alias="to", description="where their states are published")
    offline: str = Field(
        description="payload for each known device when its source is unreachable, or the gateway ends"
    )
    after: Duration = Field(30.0, description="time for which the source may be disconnected")
    max_devices: Annotated[int, Field(ge=1, le=_MOST)] = Field(10_000, description="devices that are known, at most")


# --- the gateway


class StatusSettings(StrictSettings):
    """The state of the gateway at a broker: a retained message, offline by last will, and a heartbeat."""

    instance: Name = Field(description="name of an instance")
    channel: TemplateText = Field("gateways/{gateway}/state", description="where the state is published")
    interval: Duration = Field(30.0, description="time between two heartbeats")


class MonitorSettings(StrictSettings):
    """Publishes the numbers of the gateway at a broker, where ``messaging monitor`` shows them."""

    instance: Name = Field(description="name of an instance")
    channel: TemplateText = Field("messaging/monitor", description="first levels of the channel; the last is the name")
    interval: Duration = Field(5.0, description="time between two snapshots, 0.1 s to 1 h")


class GatewaySettings(StrictSettings):
    """A gateway: the content of its configuration file."""

    name: Name = Field(description="name of the gateway, unique among the gateways of its brokers")
    data: LocalPath = Field(description="folder of the buffers, made if it is missing", strict=False)
    instances: dict[Name, InstanceSettings] = Field(min_length=1, description="connections to brokers, by name")
    routes: dict[Name, RouteSettings] = Field(default_factory=dict, description="store-and-forward routes, by name")
    requests: dict[Name, RequestSettings] = Field(default_factory=dict, description="routes of requests, by name")
    devices: dict[Name, DeviceStateSettings] = Field(
        default_factory=dict, description="states of bridged devices, by name of the group"
    )
    status: StatusSettings | None = Field(None, description="publishes the state of the gateway")
    monitor: MonitorSettings | None = Field(None, description="publishes snapshots for the live page")
    monitoring: str | None = Field(
        None, description="HOST:PORT of /healthz, /readyz and /metrics; only loopback unless named"
    )
    drain_timeout: Duration = Field(10.0, description="time for which a stop sends what is stored")
    max_hops: Annotated[int, Field(ge=1, le=255)] = Field(
        16, description="gateways that a message may pass; a message that returns to a gateway is dropped at once"
    )


def listening_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, such as ``127.0.0.1:9464`` or ``[::1]:9464``.

    Raises:
        ValueError: the text is malformed, or its port is outside of 1 to 65535.
    """
    try:
        found = parse_host(text)
    except InvalidUrlError as error:
        raise ValueError(f"must be HOST:PORT, such as 127.0.0.1:9464: {error}") from None
    if found.port is None:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:9464: the port is missing")
    return found.name, found.port


# --- the JSON schema: completion, descriptions, and marks at wrong keys in editors


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a configuration."""
    found = GatewaySettings.model_json_schema(by_alias=True)
    _admit_texts(found)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **found}


def _admit_texts(node: Any) -> None:
    """Admit variables for numbers and booleans, in place."""
    if isinstance(node, list):
        for each in node:
            _admit_texts(each)
        return
    if not isinstance(node, dict):
        return
    for name, each in node.items():
        if name in ("properties", "$defs"):
            for inner in each.values():
                _admit_texts(inner)
        elif name not in ("default", "enum", "const"):
            _admit_texts(each)
    if node.get("type") in ("number", "integer", "boolean"):
        rules = {key: node.pop(key) for key in [*node] if key in _RULES}
        node["anyOf"] = [rules, _VARIABLE]
