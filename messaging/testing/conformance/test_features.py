"""Asking for what an instance cannot do fails before anything is sent (MSG090, MSG100)."""

from __future__ import annotations

from typing import Any

import pytest

from messaging import (
    Features,
    InvalidExtensionError,
    MessageContextBuilder,
    MessagePublisher,
    MessageServiceRuntime,
    MessageSubscription,
    Messaging,
    UnsupportedFeatureError,
)
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import nothing_more
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE

#: extension -> a value that asks for something, and values of the wrong type or range
VALUES: dict[str, tuple[Any, list[Any]]] = {
    Features.EXTENSION_GUARANTEED_ORDERING: (True, ["maybe", 1, None]),
    Features.EXTENSION_GUARANTEED_DELIVERY: (True, ["true", 0]),
    Features.EXTENSION_AUTO_ACKNOWLEDGE: (True, ["yes"]),
    Features.EXTENSION_LAST_WILL: (True, ["will"]),
    Features.EXTENSION_QOS: ("1", [5, "5", "", None, True, 1.0]),
    Features.EXTENSION_RETAIN: (True, ["1", 1]),
    Features.EXTENSION_TIME_TO_LIVE: (5.0, [0, -1, "5", float("inf"), float("nan"), True]),
    Features.EXTENSION_PRIORITY: (3, [-1, 10, 1.5, "3", True]),
    Features.EXTENSION_HEADERS: ({"k": "v"}, ["k=v", {"k": 1j}, {1: "v"}, {"": "v"}, {"k": "\0"}, {"k": "\ud800"}]),
    Features.EXTENSION_MANDATORY: (True, ["yes", 1, None]),
    Features.EXTENSION_MESSAGE_ID: ("own", ["", "x" * 256, "a\nb", "\0", "\ud800", 7, b"own", None]),
    Features.EXTENSION_TIMEOUT: (5.0, [0, -1, "5", float("nan"), None]),
    Features.EXTENSION_QUEUE: ("q", ["", "a/b", 7]),
    Features.EXTENSION_AUTOCREATE: (False, ["no", 1]),
    Features.EXTENSION_DEAD_LETTER_CHANNEL: ("a/b", ["", "a/+", 7]),
    Features.EXTENSION_STORE_AND_FORWARD: (True, [1, "true", None]),
    Features.EXTENSION_DEDUPLICATE: (60.0, [0, -1, "1", None]),
    Features.EXTENSION_MAX_DELIVERIES: (3, [0, -1, 1.5, "3", True]),
    Features.EXTENSION_PREFETCH: (10, [0, 65_536, "10", True]),
    Features.EXTENSION_BUFFER_SIZE: (10, [0, "10", 1.5]),
    Features.EXTENSION_OVERFLOW: ("drop_oldest", ["drop", 1, None]),
}


def test_every_extension_is_in_the_table() -> None:
    assert set(VALUES) == {value for name, value in vars(Features).items() if name.startswith("EXTENSION_")}


@pytest.mark.envelope
@table("key", [*VALUES])
def test_an_extension_is_announced_or_refused(backend: Backend, m: Messaging, key: str) -> None:
    """Scenario 91 [S]: known, and not supported here: refused both ways, naming feature and instance."""
    if key in m.features:
        return
    channel = backend.channel()
    with m.subscribe(channel) as stream:
        context = m.context_builder().channel(channel).extension_entry(key, VALUES[key][0])
        for attempt in (
            lambda: m.publisher.publish(context.content(b"x").build_message()),
            lambda: m.subscription.subscribe(context.build_context()),
        ):
            with pytest.raises(UnsupportedFeatureError) as refusal:
                attempt()
            assert (refusal.value.feature, refusal.value.instance) == (key, m.name)
        nothing_more(m, channel, stream)


@table("key", [*VALUES])
def test_values_of_the_wrong_type_or_range_are_refused(backend: Backend, m: Messaging, key: str) -> None:
    """Scenario 92 [S]: an argument error that names the key, whether or not the feature is announced."""
    channel = backend.channel()
    with m.subscribe(channel) as stream:
        for value in VALUES[key][1]:
            context = m.context_builder().channel(channel).extension_entry(key, value)
            with pytest.raises(InvalidExtensionError) as refusal:
                m.publisher.publish(context.content(b"x").build_message())
            assert refusal.value.key == key
            with pytest.raises(InvalidExtensionError):
                m.subscription.subscribe(context.build_context())
        nothing_more(m, channel, stream)


@table("key", ["colour", "Retain", "guaranteeddelivery", "x-own"])
def test_an_unknown_extension_is_refused(backend: Backend, m: Messaging, key: str) -> None:
    """Scenario 90 [S], MSG100: never ignored."""
    channel = backend.channel()
    with m.subscribe(channel) as stream:
        context = m.context_builder().channel(channel).extension_entry(key, True)
        with pytest.raises(UnsupportedFeatureError, match=key):
            m.publisher.publish(context.content(b"x").build_message())
        with pytest.raises(UnsupportedFeatureError, match=key):
            m.subscription.subscribe(context.build_context())
        nothing_more(m, channel, stream)


def test_functional_features_are_announced_or_refused(m: Messaging, channel: str) -> None:
    """Scenario 91 [S], for features that are no extensions."""
    if Features.WILDCARDS not in m.features:
        with pytest.raises(UnsupportedFeatureError):
            m.subscribe(f"{channel}/+")
    if Features.ROUTING_KEY not in m.features:
        with pytest.raises(UnsupportedFeatureError):
            m.publish(channel, b"x", channel_extension="key")
        with pytest.raises(UnsupportedFeatureError):
            m.subscribe(channel, channel_extension="key")
    if Features.ACKNOWLEDGE not in m.features:
        with pytest.raises(UnsupportedFeatureError):
            m.acknowledge_context_builder()
    assert m.publish(channel, b"x").result(PATIENCE) is None


@pytest.mark.envelope
@table("interface", [MessageServiceRuntime, MessagePublisher, MessageSubscription, MessageContextBuilder])
def test_services_list_the_features_and_have_the_capabilities_of_the_specification(
    backend: Backend, m: Messaging, interface: type
) -> None:
    """Scenario 96 [S], RFC 5.1.3, 5.7.1, 5.8.3: found by a filter, with the version of the specification."""
    name = f"(osgi.messaging.name={m.name})"
    (reference,) = backend.services.find(interface, name)
    assert set(reference.properties["osgi.messaging.feature"]) == m.features
    assert reference.properties["osgi.messaging.protocol"]
    assert reference.properties["osgi.messaging.provider"]
    assert set(m.runtime.get_runtime_dto().features) == m.features
    assert backend.services.find(interface, f"(&{name}(osgi.implementation=osgi.messaging)(version=1.0))")
    # as the tools of OSGi write it: the version is a Version there
    required = f"(&{name}(osgi.implementation=osgi.messaging)(version>=1.0.0)(!(version>=2.0.0)))"
    assert backend.services.find(interface, required)
    assert not backend.services.find(interface, f"(&{name}(version>=1.0.1))")
    # announced features only
    found = backend.services.find(
        interface, f"(&{name}(osgi.implementation=osgi.messaging.replyto)(many=publish)(many=subscribe))"
    )
    assert bool(found) == (Features.REPLY_TO in m.features)
    found = backend.services.find(interface, f"(&{name}(osgi.implementation=osgi.messaging.acknowledge))")
    assert bool(found) == (Features.ACKNOWLEDGE in m.features)
