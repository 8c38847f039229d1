"""The extensions of a source and of a target: keys of the file, its table ``extensions``, and what the gateway sets.

A key of the file and the extension with the same meaning may both be used, not at once. The check and the gateway use
the same functions: what is checked is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from messaging.gateway.settings import RouteSettings, SourceSettings, TargetSettings
from messaging.model import Capabilities, Features, publishing_only, subscribing_only

#: subscription option of MQTT 5: retained messages keep their flag
RETAIN_AS_PUBLISHED: Final = "retainAsPublished"
#: subscription option of MQTT 5: without messages of the own instance
_NO_LOCAL: Final = "noLocal"
#: keys of a source, and of a target -> the extensions with the same meaning
SOURCE_KEYS: Final[Mapping[str, str]] = {
    "qos": Features.EXTENSION_QOS,
    "queue": Features.EXTENSION_QUEUE,
    "deduplicate": Features.EXTENSION_DEDUPLICATE,
}
TARGET_KEYS: Final[Mapping[str, str]] = {
    "qos": Features.EXTENSION_QOS,
    "retain": Features.EXTENSION_RETAIN,
    "headers": Features.EXTENSION_HEADERS,
    "time_to_live": Features.EXTENSION_TIME_TO_LIVE,
    "priority": Features.EXTENSION_PRIORITY,
}
#: extensions that a gateway sets itself -> why a file cannot
SOURCE_REFUSED: Final[Mapping[str, str]] = {
    Features.EXTENSION_AUTO_ACKNOWLEDGE: "messages are acknowledged when they are on the disk",
    Features.EXTENSION_PREFETCH: "use the key 'prefetch'",
    Features.EXTENSION_BUFFER_SIZE: "use the key 'prefetch'",
}
TARGET_REFUSED: Final[Mapping[str, str]] = {
    Features.EXTENSION_HEADERS: "use the key 'headers'",
    Features.EXTENSION_LAST_WILL: "the gateway publishes its messages; the table 'status' sets a last will",
    "willDelay": "the gateway publishes its messages; the table 'status' sets a last will",
    Features.EXTENSION_MESSAGE_ID: "each message has its own id: that of the source, or one that the gateway makes",
    Features.EXTENSION_TIMEOUT: "a stored message is published until the target has confirmed it",
    Features.EXTENSION_STORE_AND_FORWARD: "the buffer of the route stores the messages",
}


def refusals(
    side: SourceSettings | TargetSettings, capabilities: Capabilities, *, publishing: bool
) -> Iterator[tuple[str, str]]:
    """Yield the extensions of a source or target that the gateway refuses, each with the reason."""
    refused, keys = (TARGET_REFUSED, TARGET_KEYS) if publishing else (SOURCE_REFUSED, SOURCE_KEYS)
    other = subscribing_only(capabilities) if publishing else publishing_only(capabilities)
    named = {extension: key for key, extension in keys.items() if key in side.model_fields_set}
    for extension in side.extensions:
        if extension in refused:
            yield extension, f"the gateway sets {extension!r} itself: {refused[extension]}"
        elif extension in other:
            yield extension, f"{extension!r} is for {'subscribing' if publishing else 'publishing'}"
        elif extension in named:
            yield extension, f"{extension!r} and the key {named[extension]!r} exclude each other: give one of them"


def of_source(settings: SourceSettings, features: frozenset[str]) -> dict[str, Any]:
    """Return the extensions with which a source is subscribed, apart from ``prefetch``; by default QoS 1."""
    found: dict[str, Any] = dict(settings.extensions)
    for key, extension in SOURCE_KEYS.items():
        value = getattr(settings, key)
        if value is not None:
            found[extension] = value
    if Features.EXTENSION_QOS in features:
        found.setdefault(Features.EXTENSION_QOS, 1)
    return found


def of_route(settings: RouteSettings, features: frozenset[str]) -> dict[str, Any]:
    """Return the extensions with which the source of a route is subscribed, apart from ``prefetch``."""
    found = of_source(settings.source, features)
    if settings.target.retain == "keep" and RETAIN_AS_PUBLISHED in features:
        found.setdefault(RETAIN_AS_PUBLISHED, True)
    return found


def exclude_each_other(first: Mapping[str, Any], second: Mapping[str, Any], features: frozenset[str]) -> bool:
    """Return whether an instance refuses one of two subscriptions to a channel with these extensions.

    MQTT 5 has one subscription for each filter of a session, with one value of each option. With
    ``retainAsPublished`` it has one consumer, unless it has a queue.

    Args:
        first, second: extensions of the subscriptions.
        features: of the instance.
    """
    queue = first.get(Features.EXTENSION_QUEUE)
    if RETAIN_AS_PUBLISHED not in features or queue != second.get(Features.EXTENSION_QUEUE):
        return False
    options = [tuple(each.get(key) is True for key in (RETAIN_AS_PUBLISHED, _NO_LOCAL)) for each in (first, second)]
    return options[0] != options[1] or (options[0][0] and queue is None)


def with_prefetch(extensions: Mapping[str, Any], prefetch: int) -> dict[str, Any]:
    """Return extensions of a source with the number of messages that it sends ahead, and buffers.

    At QoS 0 nothing can be held back: the number is that of the buffer alone.
    """
    found = {**extensions, Features.EXTENSION_BUFFER_SIZE: prefetch}
    if not is_unacknowledged(extensions):
        found[Features.EXTENSION_PREFETCH] = prefetch
    return found


def is_unacknowledged(extensions: Mapping[str, Any]) -> bool:
    """Return whether messages with these extensions, of a source or to a target, are sent once and not confirmed."""
    return str(extensions.get(Features.EXTENSION_QOS)) == "0"


def of_target(settings: TargetSettings, features: frozenset[str]) -> dict[str, Any]:
    """Return the extensions that all messages to a target have; confirmed ones where nothing else is said."""
    found: dict[str, Any] = dict(settings.extensions)
    given = {
        "qos": settings.qos,
        "time_to_live": settings.time_to_live,
        "priority": settings.priority,
        "retain": True if settings.retain == "always" else None,
    }
    found |= {TARGET_KEYS[key]: value for key, value in given.items() if value is not None}
    if Features.EXTENSION_GUARANTEED_DELIVERY in features and Features.EXTENSION_QOS not in found:
        found.setdefault(Features.EXTENSION_GUARANTEED_DELIVERY, True)
    return found
