"""How the ingests of a query present themselves to the broker, so that it keeps what comes while the query is away.

MQTT: a persistent session with a client id of the group's. Several receivers share the channels (``$share``). AMQP: a
durable queue of the group's for each channel, which all receivers consume; or queues that are there already.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from adapters.spark.ingest import Feed, Subscription
from adapters.spark.options import SESSION_EXPIRY, Broker, ReadOptions
from messaging.errors import InvalidOptionError

if TYPE_CHECKING:
    from adapters.spark.folders import Folder

#: where each write is a file of its own the first message waits that long for others, seconds
_LINGER = 0.5


def feeds(options: ReadOptions, group: str, folder: Folder) -> list[Feed]:
    """One feed for each receiver.

    Raises:
        InvalidOptionError: ``passwordFile`` cannot be read, or an option that is this module's to set was given.
    """
    broker = options.required_broker
    linger = 0.0 if folder.appends else _LINGER
    # another query must not consume the queues of the group; queues of the user's own may be shared
    guard = group if not broker.is_mqtt and not options.queues else None
    return [
        Feed(
            broker.url,
            _settings(broker, options, group, number),
            tuple(_subscriptions(broker, options, group)),
            prefetch=options.prefetch,
            journal_bytes=options.journal_bytes // options.receivers,
            linger=linger,
            deduplicate=options.deduplicate,
            group=group,
            guard=guard if number == 0 else None,
            rivals=broker.is_mqtt and number == 0,
        )
        for number in range(options.receivers)
    ]


def sessions(options: ReadOptions, group: str) -> list[str]:
    """Return the names of the MQTT sessions, or of the group's AMQP queues, in which the broker keeps messages."""
    if options.required_broker.is_mqtt:
        return [_client_id(options, group, number) for number in range(options.receivers)]
    return [] if options.queues else [_queue(group, channel, options.channels) for channel in options.channels]


def _client_id(options: ReadOptions, group: str, number: int) -> str:
    return group if options.receivers == 1 else f"{group}-{number}"


def _settings(broker: Broker, options: ReadOptions, group: str, number: int) -> dict[str, Any]:
    for setting in ("client_id", "clean_start"):
        if setting in broker.settings:
            raise InvalidOptionError(setting, f"option {setting!r} is set by the query itself; use 'group' to name it")
    own: dict[str, Any] = {"client_id": _client_id(options, group, number)}
    if broker.is_mqtt:
        own |= {"clean_start": False, "receive_maximum": options.prefetch}
        if broker.settings.get("version", "5") in ("5", "v5") and "session_expiry" not in broker.settings:
            own["session_expiry"] = SESSION_EXPIRY
    return broker.keywords(**own)


def _subscriptions(broker: Broker, options: ReadOptions, group: str) -> list[Subscription]:
    extensions: dict[str, Any] = {"qos": options.qos}
    if options.qos != "0":
        extensions |= {"prefetch": options.prefetch, "bufferSize": options.prefetch}
        if broker.is_mqtt:
            extensions["packetId"] = True
    extensions |= options.extensions
    if broker.is_mqtt:
        if options.receivers > 1:
            extensions["queue"] = group
        return [Subscription(channel, extensions) for channel in options.channels]
    if options.queue_type is not None:
        extensions["queueType"] = options.queue_type
    queues = options.queues or tuple(_queue(group, channel, options.channels) for channel in options.channels)
    if not options.channels:  # queues that somebody else feeds
        return [Subscription(queue, {**extensions, "queue": queue}) for queue in queues]
    return [
        Subscription(channel, {**extensions, "queue": queue})
        for channel, queue in zip(options.channels, queues, strict=True)
    ]


def _queue(group: str, channel: str, channels: tuple[str, ...]) -> str:
    if len(channels) == 1:
        return group
    return f"{group}.{hashlib.sha256(channel.encode()).hexdigest()[:12]}"
