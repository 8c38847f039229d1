"""The client ids, queues and extensions of the receivers of a query. The broker keeps messages under these names.

MQTT: a persistent session whose client id is the group. Several receivers share the channels (``$share``). AMQP: a
durable queue of the group for each channel, which all receivers consume; or existing queues.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from adapters.spark.options import SESSION_EXPIRY, Broker, ReadOptions
from adapters.spark.read.receiver import ReceiverSettings, ReceiverSubscription
from messaging.errors import InvalidOptionError

if TYPE_CHECKING:
    from adapters.spark.journal.folders import Folder

#: how long the first message waits for others where each write is a file, in seconds
_LINGER = 0.5


def receiver_settings(options: ReadOptions, group: str, folder: Folder) -> list[ReceiverSettings]:
    """Return the settings of each receiver.

    Raises:
        InvalidOptionError: ``passwordFile`` cannot be read, or an option is given that the query sets itself.
    """
    broker = options.required_broker
    linger = 0.0 if folder.appends else _LINGER
    # another query must not consume the queues of the group; queues of the user may be shared
    locks_group = not broker.is_mqtt and not options.queues
    return [
        ReceiverSettings(
            broker.url,
            _settings(broker, options, group, number),
            tuple(_subscriptions(broker, options, group)),
            prefetch=options.prefetch,
            journal_bytes=options.journal_bytes // options.receivers,
            linger=linger,
            deduplicate=options.deduplicate,
            group=group,
            locks_group=locks_group and number == 0,
            watches_takeover=broker.is_mqtt and number == 0,
        )
        for number in range(options.receivers)
    ]


def broker_sessions(options: ReadOptions, group: str) -> list[str]:
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


def _subscriptions(broker: Broker, options: ReadOptions, group: str) -> list[ReceiverSubscription]:
    extensions: dict[str, Any] = {"qos": options.qos}
    if options.qos != "0":
        extensions |= {"prefetch": options.prefetch, "bufferSize": options.prefetch}
        if broker.is_mqtt:
            extensions["packetId"] = True
    extensions |= options.extensions
    if broker.is_mqtt:
        if options.receivers > 1:
            extensions["queue"] = group
        return [ReceiverSubscription(channel, extensions) for channel in options.channels]
    if options.queue_type is not None:
        extensions["queueType"] = options.queue_type
    queues = options.queues or tuple(_queue(group, channel, options.channels) for channel in options.channels)
    if not options.channels:  # existing queues with bindings of their own
        return [ReceiverSubscription(queue, {**extensions, "queue": queue}) for queue in queues]
    return [
        ReceiverSubscription(channel, {**extensions, "queue": queue})
        for channel, queue in zip(options.channels, queues, strict=True)
    ]


def _queue(group: str, channel: str, channels: tuple[str, ...]) -> str:
    if len(channels) == 1:
        return group
    return f"{group}.{hashlib.sha256(channel.encode()).hexdigest()[:12]}"
