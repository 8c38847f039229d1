"""``connect`` and the instance: bad input, names, services, the three faces, the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

import messaging
from messaging import (
    AcknowledgeMessageContextBuilder,
    Features,
    Message,
    MessageContext,
    MessageContextBuilder,
    MessagePublisher,
    MessageServiceRuntime,
    MessageSubscription,
    ReplyToManyPublisher,
    ReplyToPublisher,
    ReplyToWhiteboard,
)
from messaging.errors import (
    ArgumentError,
    ClosedError,
    ConfigurationError,
    DuplicateNameError,
    InvalidOptionError,
    InvalidUrlError,
    MessagingError,
    PublishRefusedError,
    UnknownSchemeError,
    UnsupportedFeatureError,
)
from messaging.instance import (
    FEATURE_PROPERTY,
    NAME_PROPERTY,
    PROTOCOL_PROPERTY,
    PROVIDER_PROPERTY,
    Messaging,
    find_adapter,
)
from messaging.instance.services import _names
from messaging.model import GENERATE_REPLY_CHANNEL_ALIAS
from messaging.services import ServiceEvent, ServiceRegistry, default_registry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread, results
from tests.doubles.fake import FakeBroker, settle_loop
from tests.doubles.fixtures import QUICK, Connect
from tests.doubles.plans import sent_values
from tests.threads import in_threads

# --- bad input


@table(
    ("url", "settings", "error", "says"),
    [
        ("", {}, ConfigurationError, "MESSAGING_URL"),
        ("nowhere", {}, InvalidUrlError, "://"),
        ("memory://", {}, InvalidUrlError, "no host"),
        ("memory://x:99999", {}, InvalidUrlError, "port"),
        ("nats://x", {}, UnknownSchemeError, "installed: .*memory"),
        ("memory://x?nmae=y", {}, InvalidOptionError, "did you mean 'name'"),
        ("memory://x", {"tiemout": 3}, InvalidOptionError, "did you mean 'timeout'"),
        ("memory://x?timeout=soon", {}, InvalidOptionError, "option 'timeout'"),
        ("memory://x", {"max_queue_length": 0}, InvalidOptionError, "option 'max_queue_length'"),
        ("memory://x", {"name": "a\nb"}, InvalidOptionError, "option 'name'"),
        (7, {}, InvalidUrlError, "must be a str"),
    ],
)
def test_bad_configuration_is_typed_and_says_what(
    registry: ServiceRegistry, url: Any, settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        messaging.connect(url or None, services=registry, **settings)
    assert issubclass(error, MessagingError)
    assert registry.find() == []
    assert not _names.get(registry)


def test_a_missing_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, registry: ServiceRegistry) -> None:
    monkeypatch.setenv("MESSAGING_URL", "memory://from-environment?name=env")
    with messaging.connect(services=registry) as m:
        assert m.name == "env"
        assert m.runtime.get_runtime_dto().connection_uri == "memory://from-environment?name=env"
    with messaging.connect("memory://given", services=registry) as m:
        assert m.runtime.get_runtime_dto().connection_uri == "memory://given"


def test_every_refusal_of_a_call_leaves_the_instance_as_it_was(broker: FakeBroker, connect: Connect) -> None:
    broker.limit = 100
    m = connect(broker)
    calls: list[Callable[[], object]] = [
        lambda: m.publish("", b"1"),
        lambda: m.publish("a\x00", b"1"),
        lambda: m.publish("a/+", b"1"),
        lambda: m.publish("a" * 70_000, b"1"),
        lambda: m.publish("\ud800", b"1"),
        lambda: m.publish("a", b"x" * 101),
        lambda: m.publish(7, b"1"),  # type: ignore[arg-type]
        lambda: m.publish(["a"], b"1"),  # type: ignore[arg-type]
        lambda: m.publish("a", object()),
        lambda: m.publish("a", {"a"}, content_type="text/plain"),
        lambda: m.publish("a", "x", content_type="application/x-unknown"),
        lambda: m.publish("a", "x", content_encoding="shrink"),
        lambda: m.publish("a", b"1", content_type=7),
        lambda: m.publish("a", b"1", channel_extension=7),
        lambda: m.publish("a", b"1", headers={"a": 1}),
        lambda: m.publish("a", b"1", headers="a"),
        lambda: m.publish("a", b"1", qos="7"),
        lambda: m.publish("a", b"1", qos=2),
        lambda: m.publish("a", b"1", nonsense=1),
        lambda: m.subscribe(""),
        lambda: m.subscribe("a+"),
        lambda: m.subscribe("a/#/b"),
        lambda: m.subscribe("a\x00"),
        lambda: m.subscription.subscribe(MessageContext()),
        lambda: m.subscription.subscribe(object()),  # type: ignore[arg-type]
        lambda: m.subscribe("a", overflow="explode"),
        lambda: m.subscribe("a", buffer_size=0),
        lambda: m.subscribe("a", on_invalid="explode"),  # type: ignore[arg-type]
        lambda: m.subscribe("a", on_invalid="dead_letter"),
    ]
    for call in calls:
        with pytest.raises((ArgumentError, UnsupportedFeatureError, messaging.CodecError)) as caught:
            call()
        assert str(caught.value)
    with m.subscribe("a") as stream:
        assert m.publish("a", b"1").result(PATIENCE) is None
        broker.deliver(b"2")
        assert stream.receive(PATIENCE).payload == b"2"
    assert broker.payloads == [b"1"]
    assert broker.calls == ["open", "subscribe", "publish", "unsubscribe"]
    assert m.runtime.get_runtime_dto().publisher.pending == 0


# --- names


def test_a_name_is_unique_in_its_registry(broker: FakeBroker, connect: Connect) -> None:
    """Scenario 102 [S]; a duplicate leaves the first alone, and costs nothing."""
    first = connect(name="one")
    with pytest.raises(DuplicateNameError, match=r"'one'.*name="):
        connect(broker, name="one")
    assert broker.calls == []
    with pytest.raises(DuplicateNameError):
        connect("memory://x?name=one")
    elsewhere = connect(name="one", services=ServiceRegistry())
    assert first.publish("a", b"1").result(PATIENCE) is None
    assert elsewhere.name == first.name
    first.close()
    assert connect(name="one").name == "one"


def test_generated_names_are_unique_and_one_of_many_instances_gets_a_given_one(connect: Connect) -> None:
    names = {connect().name for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith("memory-") for name in names)
    connected: list[Messaging] = []

    def attempt(_: int) -> None:
        with contextlib.suppress(DuplicateNameError):
            connected.append(connect(name="one"))

    in_threads(8, attempt)
    assert len(connected) == 1


# --- services


def test_its_services_are_in_the_registry_with_the_properties_of_the_rfc(
    broker: FakeBroker, connect: Connect, registry: ServiceRegistry
) -> None:
    """Scenario 96 [S]: every service lists the features; RFC 5.1."""
    m = connect(broker, name="one")
    expected = {MessagePublisher: m.publisher, MessageSubscription: m.subscription, MessageServiceRuntime: m.runtime}
    for interface in (*expected, MessageContextBuilder, AcknowledgeMessageContextBuilder):
        (reference,) = registry.find(interface, f"({NAME_PROPERTY}=one)")
        properties = reference.properties
        assert properties[NAME_PROPERTY] == "one"
        assert properties[PROVIDER_PROPERTY] == "tests.fake"
        assert [*properties[PROTOCOL_PROPERTY]] == ["fake"]
        assert {*properties[FEATURE_PROPERTY]} == m.features == broker.features | {GENERATE_REPLY_CHANNEL_ALIAS}
        service = registry.get(reference)
        if interface in expected:
            assert service is expected[interface]
        else:
            assert isinstance(service, interface)
            assert registry.get(reference) is not service
    assert registry.find_one(MessagePublisher, f"({FEATURE_PROPERTY}={Features.EXTENSION_RETAIN})")
    m.close()
    assert registry.find() == []


def test_features_that_the_broker_turns_out_not_to_have_are_no_longer_announced(
    broker: FakeBroker, connect: Connect, registry: ServiceRegistry
) -> None:
    broker.gates["open"].close()

    async def main() -> Messaging:
        m = connect(broker)
        assert Features.EXTENSION_RETAIN in m.features
        broker.features = broker.features - {Features.EXTENSION_RETAIN}
        broker.gates["open"].open()
        return await m

    m = asyncio.run(main())
    assert Features.EXTENSION_RETAIN not in m.features
    publisher = registry.find_one(MessagePublisher)
    assert publisher is not None
    eventually(lambda: Features.EXTENSION_RETAIN not in publisher.properties[FEATURE_PROPERTY])
    with pytest.raises(UnsupportedFeatureError):
        m.publish("a", b"1", retain=True)


def test_the_default_registry_is_the_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    with messaging.connect("memory://x") as m:
        assert m.services is default_registry()
        assert default_registry().find_one(MessagePublisher, f"({NAME_PROPERTY}={m.name})")
    assert default_registry().find(MessagePublisher, f"({NAME_PROPERTY}={m.name})") == []


def test_a_listener_that_closes_the_instance_does_not_deadlock(m: Messaging, registry: ServiceRegistry) -> None:
    seen: list[ServiceEvent] = []

    def listener(event: ServiceEvent) -> None:
        seen.append(event)
        m.close()

    registry.add_listener(listener, MessagePublisher)
    in_thread(m.close).result(PATIENCE)
    assert seen


def test_a_listener_that_hangs_does_not_hang_closing(
    broker: FakeBroker, connect: Connect, registry: ServiceRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.connection.connection._TELL_SECONDS", 0.2)
    m = connect(broker)
    release = threading.Event()
    registry.add_listener(lambda _: release.wait(60), MessagePublisher)
    try:
        in_thread(m.close).result(PATIENCE)
    finally:
        release.set()
    eventually(lambda: registry.find() == [])


# --- features


def test_every_announced_name_is_known_to_features() -> None:
    """Scenario 97 [I], as far as this process can tell: nothing is announced that has no name here."""
    known = {value for name, value in vars(Features).items() if name.isupper()} | {GENERATE_REPLY_CHANNEL_ALIAS}
    adapter = find_adapter("memory")
    known |= {*adapter.publish_extensions, *adapter.subscribe_extensions}
    with messaging.connect("memory://x", services=ServiceRegistry()) as m:
        assert m.features <= known
        assert m.features == {*m.runtime.get_runtime_dto().features}


def test_without_a_feature_its_services_are_absent_and_its_calls_refused(bare: FakeBroker, connect: Connect) -> None:
    """Scenario 54 [S]: calls name the missing feature."""
    bare.features = bare.features - {Features.ACKNOWLEDGE}
    m = connect(bare)
    absent = (ReplyToPublisher, ReplyToManyPublisher, ReplyToWhiteboard, AcknowledgeMessageContextBuilder)
    assert [m.services.find(interface) for interface in absent] == [[]] * 4
    calls: list[tuple[str, Callable[[], object]]] = [
        ("replyTo", lambda: m.request("c")),
        ("replyTo", lambda: m.request_many("c")),
        ("replyTo", lambda: m.reply("c", lambda: b"")),
        ("acknowledge", m.acknowledge_context_builder),
    ]
    for feature, call in calls:
        with pytest.raises(UnsupportedFeatureError, match=feature):
            call()


# --- the three faces


def test_the_short_way_offers_every_setting_of_a_context(broker: FakeBroker, m: Messaging) -> None:
    broker.hold = True
    m.publish(
        "a",
        b"1",
        content_type="text/plain",
        content_encoding="identity",
        correlation_id="id",
        reply_to="r",
        channel_extension="key",
    )
    broker.wait_sent(1)
    assert sent_values(broker.held[0]) == ("a", "key", "text/plain", "identity", "id", "r")
    broker.confirm()
    m.publish("a", b"1", content_type=None, correlation_id=None, reply_to=None, channel_extension=None)
    broker.wait_sent(2)
    assert sent_values(broker.held[0]) == ("a", None, None, None, None, None)
    broker.confirm()


def test_public_signatures_stay() -> None:
    """Programs outside the project call these."""
    assert [*inspect.signature(messaging.connect).parameters] == [
        "url", "services", "interceptors", "will", "birth", "settings",
    ]  # fmt: skip
    assert [*inspect.signature(Messaging.publish).parameters][:3] == ["self", "channel", "content"]
    assert [*inspect.signature(Messaging.subscribe).parameters][:3] == ["self", "channel", "model"]
    assert [*inspect.signature(MessagePublisher.publish).parameters] == ["self", "message", "channel_or_context"]
    for name in ("publisher", "subscription", "services", "runtime", "ready", "name"):
        assert name in (Messaging.__doc__ or "")


# --- the runtime; see also messaging/testing/conformance/test_runtime.py


def test_publishing_is_counted(broker: FakeBroker, m: Messaging) -> None:
    broker.hold = True
    promises = [m.publish("a", b"1") for _ in range(3)]
    broker.wait_sent(3)
    assert dataclasses.astuple(m.runtime.get_runtime_dto().publisher) == (3, 0, 0)
    broker.fail(PublishRefusedError("no"))
    broker.confirm(1)
    promises[0].exception(PATIENCE)
    promises[1].result(PATIENCE)
    assert dataclasses.astuple(m.runtime.get_runtime_dto().publisher) == (1, 1, 1)
    broker.confirm()
    promises[2].result(PATIENCE)


def test_asking_while_everything_changes_is_safe(m: Messaging) -> None:
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            repr(m.runtime.get_runtime_dto())

    asking = [in_thread(ask) for _ in range(3)]
    for _ in range(30):
        streams = [m.subscribe("a") for _ in range(5)]
        m.publish("a", b"1")
        results(stream.close() for stream in streams)
    m.close()
    stop.set()
    results(asking)


# --- the end


def test_everything_after_close_is_refused(connect: Connect) -> None:
    """Leaving by an exception closes, too."""
    m = connect()
    with pytest.raises(ValueError, match="mine"), m:
        raise ValueError("mine")
    m.close()
    calls: list[Callable[[], object]] = [
        *(lambda: m.publish("a", b"1"), lambda: m.publisher.publish(Message(b"1", MessageContext("a")))),
        *(lambda: m.subscribe("a"), lambda: m.request("a"), lambda: m.request_many("a")),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match=m.name):
            call()
    with pytest.raises(messaging.InvalidChannelError):  # arguments are checked as before
        m.publish("+", b"1")
    assert m.runtime.get_runtime_dto().connection.state == "closed"
    uri = m.runtime.get_runtime_dto().connection_uri
    assert repr(m) == f"<Messaging {m.name!r} closed at {uri}>"
    assert isinstance(m.context_builder(), MessageContextBuilder)


async def test_closing_on_a_loop_returns_at_once_and_is_done_in_the_background(
    broker: FakeBroker, m: Messaging
) -> None:
    broker.gates["close"].close()
    m.close()
    assert broker.closed == 0
    broker.gates["close"].open()
    await m.aclose()
    assert broker.closed == 1


def test_an_instance_that_is_forgotten_goes_on_until_the_end(broker: FakeBroker, connect: Connect) -> None:
    """Its observers may be all that matters; closing at exit is the last resort."""
    m = messaging.connect(broker.url, services=ServiceRegistry(), **QUICK)
    seen: Recorder[bytes] = Recorder()
    m.subscribe("a").subscribe(lambda message: seen.append(message.payload))
    close = m.close
    del m
    gc.collect()
    settle_loop()
    broker.deliver(b"1")
    assert seen.wait_for(1) == [b"1"]
    close()
