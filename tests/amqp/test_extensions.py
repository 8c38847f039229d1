"""The extensions of AMQP alone: their checks, and what contradicts what. No broker."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import InvalidExtensionError
from messaging.model import MessageContext, PublishOptions, SubscriptionSpec, publish_options, subscribe_options
from messaging.testing.tables import table
from messaging_adapters.amqp import AmqpSettings, extensions
from messaging_adapters.amqp.declarations import DelaySpec, destination, source
from tests.amqp.harness import make_adapter
from tests.doubles.plans import plan_of

ADAPTER = make_adapter("amqp://localhost")
EXTENSIONS = extensions.EXTENSIONS
JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=3)
ANYTHING = st.recursive(
    JUNK, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(JUNK, inner, max_size=3), max_leaves=5
)


def subscribing(channel: str = "c", key: str | None = None, **given: Any) -> SubscriptionSpec:
    """The spec of a subscription, checked as the core does."""
    spec = SubscriptionSpec(channel, key, subscribe_options(given, ADAPTER.capabilities, ADAPTER.settings))
    ADAPTER.check_subscribe(spec)
    return spec


def publishing(channel: str = "c", key: str | None = None, **given: Any) -> PublishOptions:
    options = publish_options(given, ADAPTER.capabilities)
    ADAPTER.check_publish(plan_of(MessageContext(channel, key), options))
    return options


# --- single values


@table(
    "key, value, checked",
    [
        ("exchangeType", "fanout", "fanout"),
        ("exchangeType", "x-consistent-hash", "x-consistent-hash"),
        ("bindings", ["a", "b", "a"], ("a", "b")),
        ("bindingArguments", {"x-match": "any", "n": 1, "yes": True}, {"x-match": "any", "n": 1, "yes": True}),
        ("queueArguments", {"x-own": (1, True)}, {"x-own": (1, True)}),
        ("bindingArguments", {"half": 0.5, "list": [1], "b": b"x"}, {"half": 0.5, "list": (1,), "b": b"x"}),
        ("messageTimeToLive", 1, 1.0),
        ("streamOffset", "first", "first"),
        ("streamOffset", "1h", "1h"),
        ("streamOffset", 0, 0),
        ("streamOffset", 1.5, 1.5),
        ("streamOffset", datetime(2024, 1, 1, tzinfo=UTC), 1_704_067_200.0),
        ("consumerPriority", -5, -5),
        ("deadLetterRoutingKey", "", ""),
    ],
)
def test_values_that_are_taken(key: str, value: Any, checked: Any) -> None:
    result = EXTENSIONS[key].check(value)
    assert result == checked
    assert type(result) is type(checked) or key.endswith("Arguments")


@table(
    "key, value, right",
    [
        ("exchangeType", "x-", "topic, direct, fanout, headers"),
        ("exchangeType", ["topic"], "topic, direct, fanout, headers"),
        ("exchangeDurable", 1, "True or False"),
        ("alternateExchange", "", "1 to 255 bytes"),
        ("alternateExchange", "ä" * 128, "1 to 255 bytes"),
        ("alternateExchange", "\ud800", "surrogate"),
        ("declare", "maybe", "create, passive, none"),
        ("bindings", "a", "list or tuple"),
        ("bindings", [1], "must be a str"),
        ("bindingArguments", {"x-match": "some"}, "all, any"),
        ("bindingArguments", {"a": {1, 2}}, "must be str, int, float"),
        ("bindingArguments", {"": "a"}, "name is empty"),
        ("bindingArguments", {"ä" * 65: "a"}, "1 to 128 bytes"),
        ("bindingArguments", {"a": 2**64}, "64 bits"),
        ("queueArguments", ["x-own"], "mapping"),
        ("exchangeArguments", {"ä" * 65: "a"}, "1 to 128 bytes"),
        ("appId", "x" * 256, "0 to 255 bytes"),
        ("type", 5, "must be a str"),
        ("queueType", "lazy", "classic, quorum, stream"),
        ("deliveryLimit", 0, "an int from 1 to"),
        ("deliveryLimit", True, "an int from 1 to"),
        ("maxPriority", 10, "0 to 9"),
        ("messageTimeToLive", 0, "above 0"),
        ("messageTimeToLive", 4_294_968, "at most 4294967"),
        ("messageTimeToLive", float("nan"), "above 0"),
        ("queueOverflow", "block", "drop-head"),
        ("streamOffset", "1 h", "an interval such as 1h"),
        ("streamOffset", -1, "an offset"),
        ("streamOffset", True, "an offset"),
        ("streamOffset", float("inf"), "seconds since the epoch"),
        ("streamOffset", datetime(2024, 1, 1), "time zone"),
        ("streamSegmentBytes", 3_000_000_001, "3000000000"),
    ],
)
def test_invalid_values_are_refused_with_the_valid_ones(key: str, value: Any, right: str) -> None:
    with pytest.raises(ValueError, match=right):
        EXTENSIONS[key].check(value)


@given(st.sampled_from(sorted(EXTENSIONS)), ANYTHING)
def test_any_value_is_accepted_or_refused_with_a_value_error(key: str, value: Any) -> None:
    with contextlib.suppress(ValueError):
        checked = EXTENSIONS[key].check(value)
        assert EXTENSIONS[key].check(checked) == checked


def test_intervals_have_the_same_lengths_as_at_the_broker() -> None:
    lengths = {"2s": 2, "2m": 120, "2h": 7200, "1D": 86_400, "1M": 2_592_000, "1Y": 31_536_000}
    assert {interval: extensions.seconds_of(interval) for interval in lengths} == lengths


def test_every_key_is_announced_and_none_is_a_common_one() -> None:
    assert set(EXTENSIONS) <= ADAPTER.capabilities.features
    assert set(ADAPTER.publish_extensions) | set(ADAPTER.subscribe_extensions) == set(EXTENSIONS)
    assert "exchangeInternal" not in ADAPTER.publish_extensions
    assert "queueType" not in ADAPTER.publish_extensions


# --- together

NAMED = {"queue": "q"}
STREAM = {"queue": "q", "queueType": "stream"}
QUORUM = {"queue": "q", "queueType": "quorum"}


@table(
    "given, key, right",
    [
        (QUORUM | {"exclusive": True}, "exclusive", "a quorum queue is shared"),
        (QUORUM | {"autoDelete": True}, "autoDelete", "queueExpires"),
        (QUORUM | {"durable": False}, "durable", "always durable"),
        (QUORUM | {"maxPriority": 5}, "maxPriority", "quorum"),
        (QUORUM | {"queueOverflow": "reject-publish-dlx"}, "queueOverflow", "'reject-publish'"),
        (STREAM | {"qos": "0"}, "qos", "acknowledgement"),
        (STREAM | {"maxPriority": 5}, "maxPriority", "order of publishing"),
        (STREAM | {"maxLength": 5}, "maxLength", "maxAge"),
        (STREAM | {"messageTimeToLive": 5}, "messageTimeToLive", "maxAge"),
        (STREAM | {"deadLetterExchange": "d"}, "deadLetterExchange", "deadLetterChannel"),
        (STREAM | {"redeliveryDelay": 1}, "redeliveryDelay", "stream"),
        (STREAM | {"consumerPriority": 1}, "consumerPriority", "stream"),
        (STREAM | {"deliveryLimit": 1}, "deliveryLimit", "maxDeliveries"),
        (NAMED | {"deliveryLimit": 5}, "deliveryLimit", "queueType 'quorum'"),
        (NAMED | {"streamOffset": "first"}, "streamOffset", "queueType 'stream'"),
        (NAMED | {"maxAge": 60}, "maxAge", "queueType 'stream'"),
        (NAMED | {"deadLetterRoutingKey": "k"}, "deadLetterRoutingKey", "deadLetterExchange"),
        (NAMED | {"bindingArguments": {"a": "b"}}, "bindingArguments", "exchangeType 'headers'"),
        (NAMED | {"bindings": ["a/#/b"]}, "bindings", "#"),
        (NAMED | {"queueArguments": {"x-max-length": 5}}, "queueArguments", "set 'maxLength'"),
        (NAMED | {"queueArguments": {"x-queue-type": "quorum"}}, "queueArguments", "set 'queueType'"),
        (NAMED | {"declare": "passive", "queueArguments": {"x-own": 1}}, "queueArguments", "nothing is declared"),
        (NAMED | {"bindings": ["." * 100]}, "bindings", "300 bytes"),
        (NAMED | {"bindings": ["d/+"], "deadLetterChannel": "d/x"}, "deadLetterChannel", "again and again"),
        (NAMED | {"autocreate": False, "maxLength": 1}, "maxLength", "autocreate=False"),
        (NAMED | {"autocreate": False, "bindings": ["a"]}, "bindings", "nothing is declared or bound"),
        (NAMED | {"autocreate": False, "declare": "create"}, "declare", "autocreate"),
        (NAMED | {"declare": "none", "durable": False}, "durable", "declare='none'"),
        ({"declare": "passive"}, "declare", "existing queue"),
        ({"queueType": "quorum"}, "queueType", "needs a name"),
        ({"exclusive": True}, "exclusive", "'queue'"),
        ({"consumerPriority": 1}, "consumerPriority", "'queue'"),
        ({"redeliveryDelay": 1.0}, "redeliveryDelay", "'queue'"),
        (NAMED | {"redeliveryDelayMax": 1.0}, "redeliveryDelayMax", "'redeliveryDelay'"),
        (NAMED | {"redeliveryDelay": 9, "redeliveryDelayMax": 1.0}, "redeliveryDelayMax", "at least the first delay"),
        (NAMED | {"redeliveryDelay": 1, "guaranteedOrdering": True}, "redeliveryDelay", "guaranteedOrdering"),
        (NAMED | {"redeliveryDelay": 1, "qos": "0"}, "redeliveryDelay", "rejected"),
        (NAMED | {"redeliveryDelay": 1, "autoAcknowledge": True}, "redeliveryDelay", "rejected"),
        (NAMED | {"exchangeType": "fanout"}, "exchangeType", "channel\\(exchange, routing_key\\)"),
    ],
)
def test_contradictions_of_a_subscription_name_the_key_and_a_remedy(
    given: dict[str, Any], key: str, right: str
) -> None:
    with pytest.raises(InvalidExtensionError, match=right) as caught:
        subscribing(**given)
    assert caught.value.key == key


@table(
    "channel, key, given, wrong, right",
    [
        ("c", None, {"mandatory": True, "qos": "0"}, "qos", "use '1'"),
        ("e", "k", {"autocreate": False, "exchangeType": "direct"}, "exchangeType", "autocreate=False"),
        ("e", "k", {"declare": "passive", "alternateExchange": "a"}, "alternateExchange", "declare='passive'"),
        ("c", None, {"alternateExchange": "a"}, "alternateExchange", "share the topic exchange 'amq.topic'"),
        ("amq.default", "q", {"exchangeType": "direct"}, "exchangeType", "always there"),
        ("e", "k", {"exchangeArguments": {"alternate-exchange": "a"}}, "exchangeArguments", "set 'alternateExchange'"),
    ],
)
def test_contradictions_of_a_publish_context_name_the_key_and_a_remedy(
    channel: str, key: str | None, given: dict[str, Any], wrong: str, right: str
) -> None:
    with pytest.raises(InvalidExtensionError, match=right) as caught:
        publishing(channel, key, **given)
    assert caught.value.key == wrong


def test_the_default_exchange_takes_the_name_of_the_queue_only() -> None:
    with pytest.raises(InvalidExtensionError, match="must be 'q', too") as caught:
        subscribing("amq.default", "q", queue="other")
    assert caught.value.key == "queue"
    with pytest.raises(InvalidExtensionError, match="default exchange"):
        subscribing("amq.default", "q", queue="q", bindings=["x"])
    with pytest.raises(InvalidExtensionError, match="always there"):
        subscribing("amq.default", "q", queue="q", exchangeType="direct")
    found = source(subscribing("amq.default", "q", queue="q"), "amq.topic", 0)
    assert (found.exchange.name, found.bindings) == ("", ())


def test_values_that_are_off_or_default_contradict_nothing() -> None:
    subscribing(queue="q", queueType="quorum", exclusive=False, autoDelete=False, durable=True, maxPriority=0)
    subscribing(queue="q", queueType="stream", singleActiveConsumer=False, consumerPriority=0, exclusive=False)
    subscribing(queue="q", autocreate=False, queueType="stream", streamOffset="first")
    subscribing("amq.match", "", bindingArguments={"a": "b"})
    publishing(mandatory=False, qos="0")


# --- compiled


def test_nothing_asked_for_is_a_durable_shared_queue_that_stays() -> None:
    found = source(subscribing(queue="q"), "amq.topic", 9)
    assert (found.queue.durable, found.queue.auto_delete, found.queue.exclusive) == (True, False, False)
    assert dict(found.queue.arguments) == {"x-max-priority": 9}
    assert dict(source(subscribing(queue="q"), "amq.topic", AmqpSettings().max_priority).queue.arguments) == {}
    private = source(subscribing(maxLength=5), "amq.topic", 0)
    assert (private.queue.name, private.queue.exclusive, private.queue.auto_delete) == (None, True, True)
    assert dict(private.queue.arguments) == {"x-max-length": 5}


@table("given", [QUORUM, STREAM])
def test_only_classic_queues_are_made_with_levels_of_priority(given: dict[str, Any]) -> None:
    assert dict(source(subscribing(**given), "amq.topic", 9).queue.arguments) == {"x-queue-type": given["queueType"]}


@table(
    "given, declare",
    [
        ({}, "create"),
        ({"autocreate": False}, "passive"),
        ({"declare": "passive"}, "passive"),
        ({"declare": "none"}, "none"),
        ({"declare": "none", "autocreate": False}, "none"),
    ],
)
def test_declare_is_the_finer_form_of_autocreate(given: dict[str, Any], declare: str) -> None:
    found = source(subscribing(queue="q", **given), "amq.topic", 0)
    assert (found.queue.declare, found.exchange.declare) == (declare, declare)
    assert bool(found.bindings) == (declare == "create")
    options = publishing(**given)
    assert destination(plan_of(MessageContext("c"), options), "amq.topic").exchange.declare == declare


@given(st.floats(0.001, 100), st.floats(1, 1000), st.integers(0, 2000))
def test_delays_double_up_to_the_longest(first: float, longest: float, count: int) -> None:
    delay = DelaySpec(first, max(first, longest), quorum=False)
    now, after = delay.milliseconds(count), delay.milliseconds(count + 1)
    assert 1 <= now <= after <= round(delay.longest * 1000) or now == 1
    assert abs(after - min(2 * now, round(delay.longest * 1000))) <= 2
    assert delay.milliseconds(0) == max(1, round(first * 1000))


def test_by_default_delays_end_at_a_minute_or_at_the_first() -> None:
    assert source(subscribing(queue="q", redeliveryDelay=1), "e", 0).delay == DelaySpec(1.0, 60.0, quorum=False)
    assert source(subscribing(queue="q", redeliveryDelay=90), "e", 0).delay == DelaySpec(90.0, 90.0, quorum=False)


VALUES = st.fixed_dictionaries(
    {},
    optional={
        key: st.sampled_from(
            {
                bool: [True, False], "queueType": ["classic", "quorum", "stream"], "declare": ["create", "passive"],
                "exchangeType": ["topic", "headers"], "bindings": [["a"], ["#"]], "bindingArguments": [{"a": "b"}],
                "queueArguments": [{"x-own": 1}], "exchangeArguments": [{"x-own": 1}],
                "queueOverflow": ["drop-head", "reject-publish-dlx"], "streamOffset": ["first", 3],
                "alternateExchange": ["x"], "deadLetterExchange": ["x"], "deadLetterRoutingKey": ["x"],
            }.get(bool if EXTENSIONS[key].value == "bool" else key, [1, 5])
        )
        for key in extensions.SUBSCRIBE_EXTENSIONS
    },
)  # fmt: skip


@given(VALUES, st.booleans(), st.sampled_from([None, "k"]))
def test_any_combination_compiles_or_is_refused_with_a_key_that_was_given(
    given: dict[str, Any], named: bool, key: str | None
) -> None:
    given = given | ({"queue": "q"} if named else {})
    refused: list[str] = []
    try:
        spec = subscribing("c", key, **given)
    except InvalidExtensionError as error:
        refused.append(error.key)
    if refused:
        assert refused[0] in given
    else:
        found = source(spec, "amq.topic", 9)
        assert found.queue.name == ("q" if named else None)
        if found.queue.arguments.get("x-queue-type") in ("quorum", "stream"):
            assert found.queue.durable
            assert not found.queue.exclusive
