"""What is checked without a broker: settings, names, values."""

from __future__ import annotations

from typing import Any

import pytest

from messaging.errors import (
    ArgumentError,
    ConnectionLostError,
    InvalidChannelError,
    InvalidExtensionError,
    InvalidHeaderError,
    InvalidOptionError,
    InvalidUrlError,
    UnsupportedFeatureError,
)
from messaging.model import Features, MessageContext, PublishOptions, SubscriptionSpec
from messaging.model.extensions import SubscribeOptions, publish_options
from messaging.testing.tables import table
from tests.amqp.harness import Out, make_adapter
from tests.doubles.plans import plan_of

AMQP = "amqp://localhost"
EXTERNAL = {"sasl": "external", "certfile": "c.pem"}


def test_it_announces_the_features_of_amqp_and_no_others() -> None:
    features = make_adapter(AMQP).capabilities.features
    assert {Features.POINT_TO_POINT, Features.EXTENSION_PRIORITY, Features.BROKER_REDELIVERY} <= features
    assert not {Features.EXTENSION_LAST_WILL, Features.EXTENSION_RETAIN, Features.REPLY_TO} & features


def test_a_priority_travels_also_without_levels_of_priority_here() -> None:
    """The queue that a message reaches may be another program's."""
    for settings in ({}, {"max_priority": 0}, {"max_priority": 9}):
        adapter = make_adapter(AMQP, **settings)
        assert Features.EXTENSION_PRIORITY in adapter.capabilities.features
        assert publish_options({"priority": 3}, adapter.capabilities).priority == 3


def test_exactly_once_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="qos=2"):
        publish_options({"qos": "2"}, make_adapter(AMQP).capabilities)


@table(
    "url, settings, address, credentials",
    [
        ("amqp://h", {}, ("h", 5672, "/"), ("guest", "guest")),
        ("amqp://h/", {}, ("h", 5672, "/"), ("guest", "guest")),
        ("amqps://h", {}, ("h", 5671, "/"), ("guest", "guest")),
        ("amqp://h:1/%2F", {}, ("h", 1, "/"), ("guest", "guest")),
        ("amqp://h/a%2Fb%25", {}, ("h", 5672, "a/b%"), ("guest", "guest")),
        ("amqp://u:p%40@h", {}, ("h", 5672, "/"), ("u", "p@")),
        ("amqp://u:p@h", {"username": "other", "password": "other"}, ("h", 5672, "/"), ("u", "p")),
        ("amqp://u@h", {"password": "p"}, ("h", 5672, "/"), ("u", "p")),
        ("amqp://h", {"username": "u", "password": "p"}, ("h", 5672, "/"), ("u", "p")),
    ],
)
def test_address_and_credentials_come_from_the_url_and_the_settings(
    url: str, settings: dict[str, Any], address: tuple[str, int, str], credentials: tuple[str, str]
) -> None:
    target = make_adapter(url, **settings)._connector.target
    assert (target.host, target.port, target.vhost) == address
    assert (target.username, target.password.get_secret_value()) == credentials
    assert "p@" not in repr(target)


@table(
    "url, settings, option, right",
    [
        ("amqp://u@h", {}, "password", ""),
        ("amqp://h", {"password": "secret"}, "username", ""),
        ("amqp://u@h", {"password": ""}, "password", ""),
        ("amqp://h", {"cafile": "ca.pem"}, "cafile", ""),
        ("amqp://h", {"allow_insecure": True}, "allow_insecure", ""),
        ("amqps://h", {"keyfile": "key.pem"}, "keyfile", ""),
        ("amqp://h", {"heartbeat": -1}, "heartbeat", ""),
        ("amqp://h", {"publish_window": 0}, "publish_window", ""),
        ("amqp://h", {"exchange": ""}, "exchange", ""),
        ("amqp://h", {"exchange": "ä" * 128}, "exchange", ""),
        ("amqp://h", {"sasl": "external"}, "sasl", "amqps:// and 'certfile'"),
        ("amqps://h", {"sasl": "external"}, "sasl", "amqps:// and 'certfile'"),
        ("amqps://u:p@h", {**EXTERNAL}, "username", "the certificate stands for it"),
        ("amqps://h", {**EXTERNAL, "password": "secret"}, "password", "stands for it"),
        ("amqps://h", {"sasl": "digest"}, "sasl", "'plain' or 'external'"),
        ("amqps://h", {**EXTERNAL, "credentials": lambda: ""}, "credentials", "sasl 'external' takes none"),
        ("amqps://h", {**EXTERNAL, "password_command": "true"}, "password_command", "sasl 'external' takes none"),
        ("amqps://h", {**EXTERNAL, "password_file": "/x"}, "password_file", "sasl 'external' takes none"),
    ],
)
def test_settings_that_cannot_be(url: str, settings: dict[str, Any], option: str, right: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        make_adapter(url, **settings)
    assert caught.value.option == option
    assert right in str(caught.value)
    assert "secret" not in str(caught.value)


@table("option, value", [("credentials", lambda: ""), ("password_command", "true"), ("password_file", "/x")])
def test_credentials_that_change_need_no_certificate(option: str, value: object) -> None:
    make_adapter(AMQP, **{option: value})


@table(
    "url, match",
    [
        ("amqp://h/" + "v" * 128, "128 characters"),
        ("amqp://a,b,a:5672", "hosts 1 and 3 are the same"),  # the default port is known
        ("amqps://a:5671,A", "hosts 1 and 2 are the same"),
    ],
)
def test_urls_that_cannot_be(url: str, match: str) -> None:
    make_adapter("amqps://a:5671,a:5672")
    with pytest.raises(InvalidUrlError, match=match):
        make_adapter(url)


def test_tls_options_are_for_tls() -> None:
    assert make_adapter("amqps://h", allow_insecure=True)._connector.target.tls is not None
    assert make_adapter("amqp://h")._connector.target.tls is None


def test_the_size_limit_is_rabbitmqs_unless_set() -> None:
    assert make_adapter(AMQP).capabilities.max_message_size == 128 * 2**20
    assert make_adapter(AMQP, max_message_size=7).capabilities.max_message_size == 7


@table(
    "context, options, error, match",
    [
        (MessageContext("x" * 256), {}, InvalidChannelError, "256 bytes"),
        (MessageContext("." * 86), {}, InvalidChannelError, "258 bytes"),
        (MessageContext("e" * 256, "k"), {}, InvalidChannelError, "exchange"),
        (MessageContext("e", "ä" * 128), {}, InvalidChannelError, "routing key"),
        (MessageContext("e", "\ud800"), {}, InvalidChannelError, "surrogate"),
        (MessageContext("a", correlation_id="x" * 256), {}, ArgumentError, "correlation id"),
        (MessageContext("a"), {"time_to_live": 4_294_968.0}, InvalidExtensionError, "4294967 seconds"),
        (MessageContext("a"), {"headers": {"ä" * 65: "v"}}, InvalidHeaderError, "128 bytes"),
        (MessageContext("a"), {"headers": {"tenant": "t", "CC": "v"}}, InvalidHeaderError, "'CC' is not for text"),
        (MessageContext("a"), {"headers": {"BCC": ""}}, InvalidHeaderError, "'BCC' is not for text"),
    ],
)
def test_values_that_amqp_cannot_carry_are_refused_before_publishing(
    context: MessageContext, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make_adapter(AMQP).check_publish(plan_of(context, PublishOptions(**options)))


def test_the_longest_values_that_amqp_carries_are_accepted() -> None:
    options = PublishOptions(time_to_live=4_294_967.0, headers={"h" * 128: "", "cc": "", "x-CC": ""})
    make_adapter(AMQP).check_publish(plan_of(MessageContext("x" * 255, correlation_id="c" * 255), options))


@table(
    "spec, error, match",
    [
        (SubscriptionSpec("x" * 254 + "/+", None, SubscribeOptions()), InvalidChannelError, "256 bytes"),
        (SubscriptionSpec("e/#", "k", SubscribeOptions()), InvalidChannelError, "names an exchange"),
        (SubscriptionSpec("e", "k" * 256, SubscribeOptions()), InvalidChannelError, "routing key"),
        (SubscriptionSpec("a", None, SubscribeOptions(autocreate=False)), InvalidExtensionError, "existing queue"),
        (SubscriptionSpec("a", None, SubscribeOptions(dead_letter_channel="." * 86)), InvalidChannelError, "258"),
    ],
)
def test_subscriptions_amqp_cannot_make_are_refused(spec: SubscriptionSpec, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make_adapter(AMQP).check_subscribe(spec)


@table(
    "options, again",
    [
        (SubscribeOptions(), False),
        (SubscribeOptions(queue="q"), True),
        (SubscribeOptions(queue="q", custom={"queueType": "stream"}), True),
        (SubscribeOptions(queue="q", custom={"exclusive": False, "autoDelete": False}), True),
        (SubscribeOptions(queue="q", custom={"exclusive": True}), False),
        (SubscribeOptions(queue="q", custom={"autoDelete": True}), False),
    ],
)
def test_queues_that_end_with_their_connection_redeliver_nothing(options: SubscribeOptions, again: bool) -> None:
    assert make_adapter(AMQP).redelivers(SubscriptionSpec("a", None, options)) == again


async def test_before_it_is_open_everything_is_a_matter_of_connection() -> None:
    adapter = make_adapter(AMQP)
    message = Out(adapter, b"", MessageContext("a"))
    await adapter.publish([message])
    assert isinstance(message.error, ConnectionLostError)
    with pytest.raises(ConnectionLostError):
        await adapter.subscribe(SubscriptionSpec("a", None, SubscribeOptions()), None)  # type: ignore[arg-type]
    await adapter.close()
    await adapter.close()
