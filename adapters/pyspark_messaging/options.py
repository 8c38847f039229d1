"""The options of the data source: names, types, defaults, and the errors of wrong ones.

Spark hands options over as text, with names in any case. Options that are neither :class:`ReadOptions` nor
:class:`WriteOptions` are settings of the broker's adapter (``username``, ``cafile``, ``connect_timeout``, ...), as in
the query of a URL. Every error is an :class:`~messaging.errors.InvalidOptionError` that names the option; values that
may be secrets are not repeated.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

import messaging
from messaging import Messaging
from messaging.adapter import Adapter
from messaging.environment import URL_VARIABLE
from messaging.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectFailedError,
    InvalidOptionError,
    InvalidUrlError,
)
from messaging.errors.text import did_you_mean
from messaging.instance import find_adapter
from messaging.model import CHECKS, MAX_PREFETCH, SUBSCRIBE_ONLY, BrokerUrl, Features, check_name, overlap, parse_url
from messaging.model.settings import load_settings
from pyspark_messaging import option_values as values
from pyspark_messaging.errors import invalid_option
from pyspark_messaging.option_values import EARLIEST, LATEST

MQTT: Final = frozenset({"mqtt", "mqtts", "ws", "wss"})
AMQP: Final = frozenset({"amqp", "amqps"})
#: the URL schemes that each format accepts
FORMATS: Final = {"messaging": MQTT | AMQP, "mqtt": MQTT, "amqp": AMQP}

#: how long the broker keeps the MQTT session of a query that is not running, in seconds
SESSION_EXPIRY: Final = 7 * 86_400

#: pauses between the attempts of a task to connect, in seconds
_RETRY_FIRST, _RETRY_LAST = 0.1, 2.0
#: MQTT: the session of a task ends with its connection
_NO_SESSION: Final = {"clean_start": True, "session_expiry": 0}
#: default deadline of each message that is written, in seconds
WRITE_TIMEOUT: Final = 60.0
#: settings that a write refuses, since each task has its own connection, and the reason
_NOT_FOR_WRITING: Final = {
    "outbox_size": "for writing it is called 'maxInFlight'",
    "clean_start": "tasks that write have no sessions to keep",
    "session_expiry": "tasks that write have no sessions to keep",
}
#: extensions that the writers set themselves, and the option or column to use instead
_SET_BY_WRITING: Final = {
    Features.EXTENSION_QOS: "use option 'qos'",
    Features.EXTENSION_TIMEOUT: "use option 'timeout'",
    Features.EXTENSION_HEADERS: "use column 'headers'",
    Features.EXTENSION_MESSAGE_ID: "the sink makes them; option 'messageIdPrefix' says what they begin with",
    Features.EXTENSION_LAST_WILL: "a task has no last will",
}


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker and the settings of a connection to it. Holds secrets; its ``repr`` shows none."""

    url: str = field(repr=False)
    settings: Mapping[str, Any] = field(repr=False)
    scheme: str
    #: the URL without credentials and settings
    address: str
    #: file with the password, read again for each connection
    password_file: str | None = None

    @property
    def is_mqtt(self) -> bool:
        """Return whether its protocol is MQTT."""
        return self.scheme in MQTT

    @property
    def adapter(self) -> type[Adapter]:
        """The adapter class."""
        return find_adapter(self.scheme)

    def keywords(self, **more: Any) -> dict[str, Any]:
        """Return the keywords for ``messaging.connect``, with the password of ``passwordFile`` and with ``more``."""
        found = {**self.settings, **more}
        if self.password_file is not None:
            try:
                found["password"] = Path(self.password_file).read_text().rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                raise invalid_option(
                    "passwordFile", f"cannot read {self.password_file!r}: {type(error).__name__}"
                ) from None
        return found

    def connect_task(self, patience: float, **settings: Any) -> Messaging:
        """Connect a task. Many connect at once: retry for ``patience`` seconds, unless the broker refuses.

        Raises:
            ConnectFailedError: no connection in that time; ``AuthenticationError`` if the broker refused the
                credentials.
        """
        keywords = self.keywords(retry_connect=False, **settings)
        if self.is_mqtt:
            keywords |= _NO_SESSION
        client_id = load_settings(self.adapter.settings_type, parse_url(self.url), keywords).client_id
        until = time.monotonic() + patience
        pause = _RETRY_FIRST
        while True:
            if client_id is not None:  # tasks, and their retries, need different ids
                keywords["client_id"] = f"{client_id}-{secrets.token_hex(4)}"
            try:
                return messaging.connect(self.url, **keywords)
            except AuthenticationError:
                raise
            except ConnectFailedError as error:
                if error.code is not None or time.monotonic() + pause > until:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _RETRY_LAST)


def _option(name: str, default: Any, check: Callable[[str], Any]) -> Any:
    """A field that has the value of the option ``name``."""
    return field(metadata={"option": (name, default, check)})


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read; sizes in bytes, durations in seconds. See the table in ``docs/spark.md``."""

    #: ``None`` for a batch read of a journal, which needs no broker
    broker: Broker | None
    #: extensions of the subscriptions; names in lower case
    extensions: Mapping[str, Any]
    channels: tuple[str, ...] = _option("channel", (), values.channels)
    #: AMQP: the queues to read; by default one for the group
    queues: tuple[str, ...] = _option("queue", (), values.names)
    queue_type: str | None = _option("queueType", None, values.one_of("classic", "quorum", "stream"))
    qos: str = _option("qos", "1", values.one_of("0", "1", "2"))
    #: the name of the query at the broker; by default derived from its journal
    group: str | None = _option("group", None, values.group)
    journal_path: str | None = _option("journalPath", None, values.nonblank)
    journal_bytes: int = _option("journalBytes", 2**30, values.size)
    adopt_journal: bool = _option("adoptJournal", False, values.flag)
    receivers: int = _option("receivers", 1, values.integer(1, 64))
    prefetch: int = _option("prefetch", 4096, values.integer(1, MAX_PREFETCH))
    deduplicate: bool = _option("deduplicate", True, values.flag)
    #: ``earliest``, ``latest``, or offsets by partition
    starting: str | Mapping[str, int] = _option("startingOffsets", EARLIEST, values.offsets)
    ending: str | Mapping[str, int] = _option("endingOffsets", LATEST, values.offsets)
    max_rows: int | None = _option("maxRowsPerBatch", None, values.integer(1, None))
    max_bytes: int | None = _option("maxBytesPerBatch", None, values.size)
    min_partitions: int | None = _option("minPartitions", None, values.integer(1, 100_000))
    fail_on_data_loss: bool = _option("failOnDataLoss", True, values.flag)
    fail_on_skipped_batch: bool = _option("failOnSkippedBatch", True, values.flag)
    #: AvailableNow: silence after which every message that the broker held has arrived
    quiet: float = _option("availableNowQuiet", 1.0, values.seconds)
    #: AvailableNow: how long to wait for that silence
    patience: float = _option("availableNowTimeout", 60.0, values.seconds)
    model: str | None = _option("model", None, values.nonblank)

    @property
    def required_broker(self) -> Broker:
        """The broker; :class:`InvalidOptionError` without the option ``url``."""
        return _required(self.broker)

    @property
    def required_journal(self) -> str:
        """The path of the journal; :class:`InvalidOptionError` without the option ``journalPath``."""
        if self.journal_path is None:
            raise InvalidOptionError(
                "journalPath",
                "option 'journalPath' is missing: a folder for messages that are received and not processed yet; only "
                "RabbitMQ streams (queueType=stream) are read without one",
            )
        return self.journal_path

    @property
    def is_stream(self) -> bool:
        """Return whether it reads RabbitMQ streams, which need no journal."""
        return self.queue_type == "stream"

    @classmethod
    def of(cls, given: Mapping[str, str], name: str = "messaging", *, batch: bool = False) -> Self:
        """Check the options of a read through the format ``name``; the error names the wrong option."""
        options = _GivenOptions(given)
        if not batch and "endingoffsets" in options.names:
            raise InvalidOptionError("endingOffsets", "option 'endingOffsets' is for batch reads; a stream has no end")
        found = options.take_fields(cls)
        found["extensions"] = options.extensions()
        found["broker"] = broker = options.broker(name)
        options.refuse_rest(broker)
        read = cls(**found)
        read._check(batch=batch)
        return read

    def _check(self, *, batch: bool) -> None:
        """Refuse options that contradict each other."""
        if self.is_stream:
            if self.broker is not None and self.broker.is_mqtt:
                raise invalid_option("queueType", "streams are RabbitMQ's; use an amqp:// URL")
            if not self.queues:
                raise InvalidOptionError("queue", "option 'queue' is missing: the stream, or streams, to read")
            if self.journal_path is not None:
                raise invalid_option("journalPath", "a stream is read where it is and needs no journal")
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
            raise invalid_option(
                "queue", f"{len(self.queues)} queues for {len(self.channels)} channels; give one for each"
            )
        for one, other in itertools.combinations(self.channels, 2):
            if overlap(one, other):
                raise invalid_option(
                    "channel",
                    f"{one!r} and {other!r} overlap, and a message of both would be read twice; "
                    "use channels that do not overlap, or a query for each",
                )
        _check_qos(self.qos, self.required_broker)
        if self.qos == "0" and self.receivers > 1:
            raise invalid_option("receivers", "several need acknowledgement; use qos 1")


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of a write; sizes in bytes, durations in seconds. See the table in ``docs/spark.md``."""

    broker: Broker
    extensions: Mapping[str, Any]
    #: whether properties travel in an envelope in front of the payload
    has_envelope: bool
    #: of rows without a ``channel``
    channel: str | None = _option("channel", None, check_name)
    qos: str = _option("qos", "1", values.one_of("0", "1", "2"))
    content_type: str | None = _option("contentType", None, values.content_type)
    #: rows of one task that may be unconfirmed
    max_in_flight: int = _option("maxInFlight", 10_000, values.integer(1, 1_000_000))
    #: deadline of the confirm of each message
    timeout: float = _option("timeout", None, values.seconds)
    #: prefix of message ids; by default the id of the query
    id_prefix: str | None = _option("messageIdPrefix", None, values.id_prefix)

    @classmethod
    def of(cls, given: Mapping[str, str], name: str = "messaging") -> Self:
        """Check the options of a write through the format ``name``; the error names the wrong option."""
        options = _GivenOptions(given)
        options.ignore("checkpointLocation")
        options.ignore("queryName")
        found = options.take_fields(cls)
        given_extensions = options.extensions()
        broker = _required(options.broker(name))
        options.refuse_rest(broker)
        _check_qos(found["qos"], broker)
        kind = broker.adapter.settings_type
        settings = load_settings(kind, parse_url(broker.url), broker.settings)
        for option, reason in _NOT_FOR_WRITING.items():
            if option in settings.model_fields_set and getattr(settings, option) != kind.model_fields[option].default:
                raise invalid_option(option, reason)
        if found["timeout"] is None:
            found["timeout"] = settings.timeout if "timeout" in settings.model_fields_set else WRITE_TIMEOUT
        extensions = _publish_extensions(broker, given_extensions)
        reliable = {} if found["qos"] == "0" else {Features.EXTENSION_GUARANTEED_DELIVERY: True}
        return cls(
            broker=broker,
            extensions={**reliable, **extensions, Features.EXTENSION_QOS: found["qos"]},
            has_envelope=bool(getattr(settings, "envelope", False) or extensions.get("envelope", False)),
            **found,
        )


class _GivenOptions:
    """The options as Spark passed them. Each method takes some of them out."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._values = {key.lower(): value for key, value in dict(given).items()}
        self._known: list[str] = ["url", "passwordFile"]
        self.names = frozenset(self._values)

    def take_fields(self, kind: type[ReadOptions | WriteOptions]) -> dict[str, Any]:
        """Return the values of all fields of ``kind`` that are options."""
        return {each.name: self._take(*each.metadata["option"]) for each in fields(kind) if "option" in each.metadata}

    def _take(self, name: str, default: Any, check: Callable[[str], Any]) -> Any:
        self._known.append(name)
        text = self._values.pop(name.lower(), None)
        if text is None:
            return default
        try:
            return check(text)
        except ValueError as error:
            raise invalid_option(name, f"{error}") from None

    def ignore(self, name: str) -> None:
        """Drop an option of Spark's own."""
        self._known.append(name)
        self._values.pop(name.lower(), None)

    def extensions(self) -> dict[str, Any]:
        """Return the options ``extension.NAME``, in JSON or as text. Names are in lower case."""
        found = {}
        for key in [key for key in self._values if key.startswith("extension.")]:
            text = self._values.pop(key)
            try:
                found[key.removeprefix("extension.")] = json.loads(text)
            except ValueError:
                found[key.removeprefix("extension.")] = text
        return found

    def broker(self, name: str) -> Broker | None:
        """Return the broker of ``url``, ``passwordFile`` and the settings of its adapter; ``None`` without a URL."""
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
            raise invalid_option("passwordFile", "there is a password already")
        load_settings(kind.settings_type, parsed, settings)
        self._known += fields.values()
        path = "" if parsed.path is None else f"/{parsed.path}"
        return Broker(url, settings, parsed.scheme, f"{parsed.scheme}://{parsed.address}{path}", password_file)

    def refuse_rest(self, broker: Broker | None) -> None:
        """Raise for an unknown option, and name the nearest known one."""
        if "path" in self._values:
            raise invalid_option(
                "path", "load() and save() take none; a broker has a 'url', and a journal 'journalPath'"
            )
        for name in self._values:
            hint = did_you_mean(name, self._known) or f"known: {', '.join(sorted(set(self._known)))}"
            where = "" if broker is None else f" for {broker.scheme}://"
            raise InvalidOptionError(name, f"unknown option {name!r}{where}; {hint}")


def _parsed(url: str, name: str) -> BrokerUrl:
    try:
        parsed = parse_url(url)
    except InvalidUrlError as error:
        raise invalid_option("url", f"{error}") from None
    if parsed.scheme == "memory":
        raise invalid_option(
            "url", "memory:// is within one process, and Spark works in several; use mqtt:// or amqp://"
        )
    if parsed.scheme not in FORMATS[name]:
        raise invalid_option(
            "url", f"format {name!r} reads and writes {', '.join(sorted(FORMATS[name]))}, not {parsed.scheme}://"
        )
    try:
        find_adapter(parsed.scheme)
    except ConfigurationError as error:
        raise invalid_option("url", f"{error}") from None
    return parsed


def _required(broker: Broker | None) -> Broker:
    if broker is None:
        raise InvalidOptionError(
            "url", f"option 'url' is missing: the broker, such as mqtt://host:1883 (or set {URL_VARIABLE})"
        )
    return broker


def _check_qos(qos: str, broker: Broker) -> None:
    if qos == "2" and not broker.is_mqtt:
        raise invalid_option("qos", "AMQP has 0 and 1")


def _publish_extensions(broker: Broker, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options ``extension.NAME`` of a write under their proper names, checked as far as possible offline."""
    checks = {**CHECKS, **broker.adapter.publish_extensions}
    refused = SUBSCRIBE_ONLY | _SET_BY_WRITING.keys()
    proper = {name.lower(): name for name in checks if name not in refused}
    instead = {name.lower(): text for name, text in _SET_BY_WRITING.items()}
    found = {}
    for key, value in given.items():
        option = f"extension.{key}"
        if key not in proper:
            hint = instead.get(key) or f"no extension for publishing; known: {', '.join(sorted(proper.values()))}"
            raise invalid_option(option, f"{hint}")
        name = proper[key]
        try:
            found[name] = checks[name](value)
        except ValueError as error:
            raise invalid_option(f"extension.{name}", f"{error}") from None
    return found
