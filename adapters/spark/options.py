"""The options of the data source: names, types, defaults, and what is wrong with those that were given.

Spark hands options over as text, with names in any case. What is none of :class:`ReadOptions` or
:class:`WriteOptions` is a setting of the broker's adapter (``username``, ``cafile``, ``connect_timeout``, ...), as
in the query of a URL. Every error is an :class:`~messaging.errors.InvalidOptionError` that names the option; values
are not repeated where they may be secrets.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from messaging.errors import ConfigurationError, InvalidChannelError, InvalidOptionError, InvalidUrlError
from messaging.instance import find_adapter
from messaging.model import (
    CHECKS,
    MAX_MESSAGE_ID,
    MAX_PREFETCH,
    SUBSCRIBE_ONLY,
    BrokerUrl,
    Features,
    check_name,
    check_pattern,
    check_text,
    forbidden_character,
    overlap,
    parse_url,
)
from messaging.model.settings import URL_VARIABLE, load_settings

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.model.settings import Settings

MQTT: Final = frozenset({"mqtt", "mqtts", "ws", "wss"})
AMQP: Final = frozenset({"amqp", "amqps"})
#: which URLs each name of the format takes
FORMATS: Final = {"messaging": MQTT | AMQP, "mqtt": MQTT, "amqp": AMQP}

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
#: how long the broker keeps the MQTT session of a query that is not running, seconds
SESSION_EXPIRY: Final = 7 * 86_400

#: deadline of each message that is written, seconds
WRITE_TIMEOUT: Final = 60.0
#: of a message id; the rest is for epoch, partition, row and checksum
_MAX_PREFIX: Final = MAX_MESSAGE_ID - 75
#: settings that mean nothing, or harm, where each task has a connection for itself
_NOT_OF_SINKS: Final = {
    "outbox_size": "for writing it is called 'maxInFlight'",
    "clean_start": "tasks that write have no sessions to keep",
    "session_expiry": "tasks that write have no sessions to keep",
}
#: extensions that the sink sets
_EXTENSIONS_OF_SINKS: Final = {
    Features.EXTENSION_QOS: "use option 'qos'",
    Features.EXTENSION_TIMEOUT: "use option 'timeout'",
    Features.EXTENSION_HEADERS: "use column 'headers'",
    Features.EXTENSION_MESSAGE_ID: "the sink makes them; option 'messageIdPrefix' says what they begin with",
    Features.EXTENSION_LAST_WILL: "a task has no last will",
}

_UNITS: Final = {"": 1, "b": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30, "gb": 2**30}


@dataclass(frozen=True, slots=True)
class Broker:
    """Which broker, and how to connect to it. Holds secrets: shows none."""

    url: str = field(repr=False)
    settings: Mapping[str, Any] = field(repr=False)
    scheme: str
    #: the broker without whoever connects to it
    address: str
    #: file that holds the password; read anew for each connection
    password_file: str | None = None

    @property
    def is_mqtt(self) -> bool:
        """Whether it speaks MQTT."""
        return self.scheme in MQTT

    @property
    def adapter(self) -> type[Adapter]:
        """The adapter class."""
        return find_adapter(self.scheme)

    def keywords(self, **more: Any) -> dict[str, Any]:
        """Keywords for ``messaging.connect``."""
        found = {**self.settings, **more}
        if self.password_file is not None:
            try:
                found["password"] = Path(self.password_file).read_text().rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidOptionError(
                    "passwordFile", f"option 'passwordFile': cannot read {self.password_file!r}: {type(error).__name__}"
                ) from None
        return found


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a read was asked for; sizes in bytes, durations in seconds."""

    #: ``None`` for a batch read of a journal, which needs no broker
    broker: Broker | None
    channels: tuple[str, ...]
    #: AMQP: the queues to read; by default one for the group
    queues: tuple[str, ...]
    queue_type: str | None
    qos: str
    extensions: Mapping[str, Any]
    #: how the query calls itself at the broker; by default after its journal
    group: str | None
    journal_path: str | None
    journal_bytes: int
    adopt_journal: bool
    receivers: int
    prefetch: int
    deduplicate: bool
    starting: Any
    ending: Any
    max_rows: int | None
    max_bytes: int | None
    min_partitions: int | None
    fail_on_data_loss: bool
    fail_on_skipped_batch: bool
    #: AvailableNow: silence after which everything that was there has come, and how long that may take
    quiet: float
    patience: float
    model: str | None

    @property
    def required_broker(self) -> Broker:
        """The broker.

        Raises:
            InvalidOptionError: none was named.
        """
        return _required(self.broker)

    @property
    def required_journal(self) -> str:
        """The path of the journal.

        Raises:
            InvalidOptionError: none was named.
        """
        if self.journal_path is None:
            raise InvalidOptionError(
                "journalPath",
                "option 'journalPath' is missing: a folder for what is received and not processed yet; only RabbitMQ "
                "streams (queueType=stream) are read without one",
            )
        return self.journal_path

    @property
    def is_stream(self) -> bool:
        """Whether it reads RabbitMQ streams, which need no journal."""
        return self.queue_type == "stream"

    @classmethod
    def of(cls, given: Mapping[str, str], name: str = "messaging", *, batch: bool = False) -> Self:
        """Check the options of a read through the format ``name``.

        Raises:
            InvalidOptionError: naming the option at fault.
        """
        options = _Given(given)
        queue_type = options.take("queueType", None, _one_of("classic", "quorum", "stream"))
        journal_path = options.take("journalPath", None, _text)
        starting = options.take("startingOffsets", EARLIEST, _offsets)
        ending = options.take("endingOffsets", LATEST, _offsets)
        if not batch and "endingoffsets" in options.names:
            raise InvalidOptionError("endingOffsets", "option 'endingOffsets' is for batch reads; a stream has no end")
        found = {
            "channels": options.take("channel", (), _channels),
            "queues": options.take("queue", (), _names),
            "queue_type": queue_type,
            "qos": options.take("qos", "1", _one_of("0", "1", "2")),
            "group": options.take("group", None, _group),
            "journal_path": journal_path,
            "journal_bytes": options.take("journalBytes", 2**30, _size),
            "adopt_journal": options.take("adoptJournal", False, _flag),
            "receivers": options.take("receivers", 1, _integer(1, 64)),
            "prefetch": options.take("prefetch", 4096, _integer(1, MAX_PREFETCH)),
            "deduplicate": options.take("deduplicate", True, _flag),
            "starting": starting,
            "ending": ending,
            "max_rows": options.take("maxRowsPerBatch", None, _integer(1, None)),
            "max_bytes": options.take("maxBytesPerBatch", None, _size),
            "min_partitions": options.take("minPartitions", None, _integer(1, 100_000)),
            "fail_on_data_loss": options.take("failOnDataLoss", True, _flag),
            "fail_on_skipped_batch": options.take("failOnSkippedBatch", True, _flag),
            "quiet": options.take("availableNowQuiet", 1.0, _seconds),
            "patience": options.take("availableNowTimeout", 60.0, _seconds),
            "model": options.take("model", None, _text),
            "extensions": options.extensions(),
        }
        broker = options.broker(name)
        options.refuse_rest(broker)
        read = cls(broker=broker, **found)
        read._check(batch=batch)
        return read

    def _check(self, *, batch: bool) -> None:
        """Refuse what contradicts itself."""
        if self.is_stream:
            if self.broker is not None and self.broker.is_mqtt:
                raise InvalidOptionError("queueType", "option 'queueType': streams are RabbitMQ's; use an amqp:// URL")
            if not self.queues:
                raise InvalidOptionError("queue", "option 'queue' is missing: the stream, or streams, to read")
            if self.journal_path is not None:
                raise InvalidOptionError(
                    "journalPath", "option 'journalPath': a stream is read where it is and needs no journal"
                )
            for option, value in (("channel", self.channels), ("maxBytesPerBatch", self.max_bytes)):
                if value:
                    raise InvalidOptionError(option, f"option {option!r} means nothing to RabbitMQ streams")
            return
        if batch:
            return
        if self.required_broker.is_mqtt and (self.queues or self.queue_type):
            option = "queue" if self.queues else "queueType"
            raise InvalidOptionError(option, f"option {option!r} is for amqp:// URLs; MQTT reads channels")
        if not self.channels and not self.queues:
            raise InvalidOptionError(
                "channel", "option 'channel' is missing: the channel to read, or several, such as 'sensors/+, alarms/#'"
            )
        if self.queues and self.channels and len(self.queues) != len(self.channels):
            raise InvalidOptionError(
                "queue",
                f"option 'queue': {len(self.queues)} queues for {len(self.channels)} channels; give one for each",
            )
        for one, other in itertools.combinations(self.channels, 2):
            if overlap(one, other):
                raise InvalidOptionError(
                    "channel",
                    f"option 'channel': {one!r} and {other!r} overlap, and what is in both would come twice; "
                    "use channels apart from each other, or a query for each",
                )
        if self.qos == "2" and not self.required_broker.is_mqtt:
            raise InvalidOptionError("qos", "option 'qos': AMQP has 0 and 1")
        if self.qos == "0" and self.receivers > 1:
            raise InvalidOptionError("receivers", "option 'receivers': several need acknowledgement; use qos 1")


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a write was asked for; sizes in bytes, durations in seconds."""

    broker: Broker
    #: where rows without a ``channel`` go
    channel: str | None
    qos: str
    extensions: Mapping[str, Any]
    content_type: str | None
    #: rows that may be on their way unconfirmed, of one task
    max_in_flight: int
    #: deadline of the confirm of each message
    timeout: float
    #: what message ids begin with; by default the id of the query
    id_prefix: str | None
    #: whether properties travel in front of the payload
    has_envelope: bool

    @classmethod
    def of(cls, given: Mapping[str, str], name: str = "messaging") -> Self:
        """Check the options of a write through the format ``name``.

        Raises:
            InvalidOptionError: naming the option at fault.
        """
        options = _Given(given)
        options.ignore("checkpointLocation")
        options.ignore("queryName")
        channel = options.take("channel", None, _channel)
        qos = options.take("qos", "1", _one_of("0", "1", "2"))
        content_type = options.take("contentType", None, _content_type)
        max_in_flight = options.take("maxInFlight", 10_000, _integer(1, 1_000_000))
        timeout = options.take("timeout", None, _seconds)
        id_prefix = options.take("messageIdPrefix", None, _id_prefix)
        extensions = options.extensions()
        broker = _required(options.broker(name))
        options.refuse_rest(broker)
        if qos == "2" and not broker.is_mqtt:
            raise InvalidOptionError("qos", "option 'qos': AMQP has 0 and 1")
        settings = load_settings(broker.adapter.settings_type, parse_url(broker.url), broker.settings)
        for option, instead in _NOT_OF_SINKS.items():
            if option in settings.model_fields_set and getattr(settings, option) != _default(settings, option):
                raise InvalidOptionError(option, f"option {option!r}: {instead}")
        if timeout is None:
            timeout = settings.timeout if "timeout" in settings.model_fields_set else WRITE_TIMEOUT
        extensions = _publish_extensions(broker, extensions)
        reliable = {} if qos == "0" else {Features.EXTENSION_GUARANTEED_DELIVERY: True}
        return cls(
            broker=broker,
            channel=channel,
            qos=qos,
            extensions={**reliable, **extensions, Features.EXTENSION_QOS: qos},
            content_type=content_type,
            max_in_flight=max_in_flight,
            timeout=timeout,
            id_prefix=id_prefix,
            has_envelope=bool(getattr(settings, "envelope", False) or extensions.get("envelope", False)),
        )


class _Given:
    """The options as they were given, and which of them were looked at."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._values = {key.lower(): value for key, value in dict(given).items()}
        self._known: list[str] = ["url", "passwordFile"]
        self.names = frozenset(self._values)

    def take(self, name: str, default: Any, check: Callable[[str], Any]) -> Any:
        """The checked value of ``name``."""
        self._known.append(name)
        text = self._values.pop(name.lower(), None)
        if text is None:
            return default
        try:
            return check(text)
        except ValueError as error:
            raise InvalidOptionError(name, f"option {name!r}: {error}") from None

    def ignore(self, name: str) -> None:
        """An option that is Spark's own."""
        self._known.append(name)
        self._values.pop(name.lower(), None)

    def extensions(self) -> dict[str, Any]:
        """Options ``extension.NAME``: extensions of the context, in JSON or as text. Names are in lower case still."""
        found = {}
        for key in [key for key in self._values if key.startswith("extension.")]:
            text = self._values.pop(key)
            try:
                found[key.removeprefix("extension.")] = json.loads(text)
            except ValueError:
                found[key.removeprefix("extension.")] = text
        return found

    def broker(self, name: str) -> Broker | None:
        """The broker: options ``url`` and ``passwordFile``, and all settings of its adapter. ``None`` without a URL."""
        url = self._values.pop("url", None) or os.environ.get(URL_VARIABLE) or None
        password_file = self._values.pop("passwordfile", None)
        if url is None:
            return None
        parsed = _parsed(url, name)
        kind = find_adapter(parsed.scheme)
        fields = {field.replace("_", ""): field for field in kind.settings_type.model_fields}
        settings: dict[str, Any] = {}
        for key in list(self._values):
            setting = fields.get(key.replace("_", ""))
            if setting is not None:
                if setting in settings:
                    raise InvalidOptionError(setting, f"option {setting!r} is given twice, with '_' and without")
                settings[setting] = self._values.pop(key)
        if password_file is not None and ("password" in settings or parsed.password is not None):
            raise InvalidOptionError("passwordFile", "option 'passwordFile': there is a password already")
        load_settings(kind.settings_type, parsed, settings)
        self._known += fields.values()
        return Broker(url, settings, parsed.scheme, _address(parsed), password_file)

    def refuse_rest(self, broker: Broker | None) -> None:
        """Raise for options that nobody knows."""
        if "path" in self._values:
            raise InvalidOptionError(
                "path", "option 'path': load() and save() take none; a broker has a 'url', and a journal 'journalPath'"
            )
        for name in self._values:
            near = difflib.get_close_matches(name, [each.lower() for each in self._known], n=1, cutoff=0.7)
            proper = {each.lower(): each for each in self._known}
            hint = f"did you mean {proper[near[0]]!r}?" if near else f"known: {', '.join(sorted(set(self._known)))}"
            where = "" if broker is None else f" for {broker.scheme}://"
            raise InvalidOptionError(name, f"unknown option {name!r}{where}; {hint}")


def _parsed(url: str, name: str) -> BrokerUrl:
    try:
        parsed = parse_url(url)
    except InvalidUrlError as error:
        raise InvalidOptionError("url", f"option 'url': {error}") from None
    if parsed.scheme == "memory":
        raise InvalidOptionError(
            "url", "option 'url': memory:// is within one process, and Spark works in several; use mqtt:// or amqp://"
        )
    if parsed.scheme not in FORMATS[name]:
        raise InvalidOptionError(
            "url",
            f"option 'url': format {name!r} reads and writes {', '.join(sorted(FORMATS[name]))}, not {parsed.scheme}://",
        )
    try:
        find_adapter(parsed.scheme)
    except ConfigurationError as error:
        raise InvalidOptionError("url", f"option 'url': {error}") from None
    return parsed


def _address(url: BrokerUrl) -> str:
    host = f"[{url.host}]" if ":" in url.host else url.host
    port = "" if url.port is None else f":{url.port}"
    path = "" if url.path is None else f"/{url.path}"
    return f"{url.scheme}://{host}{port}{path}"


def _required(broker: Broker | None) -> Broker:
    if broker is None:
        raise InvalidOptionError(
            "url", f"option 'url' is missing: the broker, such as mqtt://host:1883 (or set {URL_VARIABLE})"
        )
    return broker


def _default(settings: Settings, option: str) -> Any:
    return type(settings).model_fields[option].default


def _publish_extensions(broker: Broker, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options ``extension.NAME`` of a write, with the proper names, checked as far as that goes without a broker."""
    checks = {**CHECKS, **broker.adapter.publish_extensions}
    own = SUBSCRIBE_ONLY | _EXTENSIONS_OF_SINKS.keys()
    proper = {name.lower(): name for name in checks if name not in own}
    instead = {name.lower(): text for name, text in _EXTENSIONS_OF_SINKS.items()}
    found = {}
    for key, value in given.items():
        option = f"extension.{key}"
        if key not in proper:
            hint = instead.get(key) or f"no extension for publishing; known: {', '.join(sorted(proper.values()))}"
            raise InvalidOptionError(option, f"option {option!r}: {hint}")
        name = proper[key]
        try:
            found[name] = checks[name](value)
        except ValueError as error:
            raise InvalidOptionError(f"extension.{name}", f"option 'extension.{name}': {error}") from None
    return found


# --- checks ---------------------------------------------------------------------------------------------------------


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"must be true or false, not {text!r}")
    return text.lower() == "true"


def _one_of(*values: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in values:
            raise ValueError(f"must be one of {', '.join(values)}, not {text!r}")
        return text

    return check


def _integer(low: int, high: int | None) -> Callable[[str], int]:
    wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def check(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"must be {wanted}, not {text!r}") from None
        if number < low or (high is not None and number > high):
            raise ValueError(f"must be {wanted}, not {text!r}")
        return number

    return check


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or not int(match[1]):
        raise ValueError(f"must be a number of bytes above 0, such as 1048576 or 64m, not {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number <= 1e9:
        raise ValueError(f"must be a number of seconds above 0, not {text!r}")
    return number


def _list(text: str) -> list[str]:
    values: list[str]
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("begins with '[' and is no JSON list") from None
        if not all(isinstance(value, str) for value in values):
            raise ValueError("must be a JSON list of texts")
    else:
        values = [value.strip() for value in text.split(",")]
    if not values or len(set(values)) != len(values):
        raise ValueError("names nothing, or something twice")
    return values


def _each(values: Iterable[str], check: Callable[[str], str]) -> tuple[str, ...]:
    try:
        return tuple(check(value) for value in values)
    except InvalidChannelError as error:
        raise ValueError(str(error)) from None


def _channels(text: str) -> tuple[str, ...]:
    return _each(_list(text), check_pattern)


def _channel(text: str) -> str:
    return _each([text], check_name)[0]


def _names(text: str) -> tuple[str, ...]:
    return _each(_list(text), check_name)


def _content_type(text: str) -> str:
    check_text("it", _text(text))
    return text


def _id_prefix(text: str) -> str:
    bad = forbidden_character(_text(text))
    if bad is not None:
        raise ValueError(f"holds {bad}")
    size = len(text.encode())
    if size > _MAX_PREFIX:
        raise ValueError(f"must have at most {_MAX_PREFIX} bytes in UTF-8, not {size}")
    return text


def _group(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text) is None:
        raise ValueError(f"must be letters, digits, '.', '_' and '-', at most 100 of them, not {text!r}")
    return text


def _offsets(text: str) -> Any:
    """``earliest``, ``latest``, or JSON: an offset for each partition or stream, ``{"0": 17}``."""
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    wanted = f'must be {EARLIEST}, {LATEST}, or JSON such as {{"0": 17}}, not {text!r}'
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(wanted) from None
    if not isinstance(values, dict) or not values:
        raise ValueError(wanted)
    for value in values.values():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(wanted)
    return values
