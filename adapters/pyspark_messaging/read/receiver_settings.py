"""The client ids, queues and extensions of the receivers of a query. The broker keeps messages under these names.

MQTT: a persistent session whose client id is the group. Several receivers share the channels (``$share``). AMQP: a
durable queue of the group for each channel, which all receivers consume; or existing queues.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from messaging.errors import InvalidOptionError
from pyspark_messaging.options import SESSION_EXPIRY, ReadOptions


def broker_sessions(options: ReadOptions, group: str) -> Sequence[str]:
    """Return the names of the MQTT sessions, or of the group's AMQP queues, in which the broker keeps messages."""
    if options.required_broker.is_mqtt:
        return [_client_id(options, group, number) for number in range(options.receivers)]
    return [] if options.queues else _queues(options, group)


def connection_settings(options: ReadOptions, group: str, number: int) -> dict[str, Any]:
    """Return the keywords of ``messaging.connect`` for the receiver with a number. Holds secrets.

    Raises:
        InvalidOptionError: ``passwordFile`` cannot be read, or an option is given that the query sets itself.
    """
    broker = options.required_broker
    for setting in ("client_id", "clean_start"):
        if setting in broker.settings:
            raise InvalidOptionError(setting, f"option {setting!r} is set by the query itself; use 'group' to name it")
    own: dict[str, Any] = {"client_id": _client_id(options, group, number)}
    if broker.is_mqtt:
        own |= {"clean_start": False, "receive_maximum": options.prefetch}
        if broker.settings.get("version", "5") in ("5", "v5") and "session_expiry" not in broker.settings:
            own["session_expiry"] = SESSION_EXPIRY
    return broker.keywords(**own)


def subscriptions(options: ReadOptions, group: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the channel of each subscription of a receiver, and its extensions."""
    is_mqtt = options.required_broker.is_mqtt
    extensions: dict[str, Any] = {"qos": options.qos}
    if options.qos != "0":
        extensions |= {"prefetch": options.prefetch, "bufferSize": options.prefetch}
        if is_mqtt:
            extensions["packetId"] = True
    extensions |= options.extensions
    if is_mqtt:
        if options.receivers > 1:
            extensions["queue"] = group
        return [(channel, extensions) for channel in options.channels]
    if options.queue_type is not None:
        extensions["queueType"] = options.queue_type
    queues = options.queues or _queues(options, group)
    channels = options.channels or queues  # existing queues may have bindings of their own
    return [(channel, {**extensions, "queue": queue}) for channel, queue in zip(channels, queues, strict=True)]


def _client_id(options: ReadOptions, group: str, number: int) -> str:
    return group if options.receivers == 1 else f"{group}-{number}"


def _queues(options: ReadOptions, group: str) -> list[str]:
    if len(options.channels) == 1:
        return [group]
    return [f"{group}.{hashlib.sha256(channel.encode()).hexdigest()[:12]}" for channel in options.channels]
