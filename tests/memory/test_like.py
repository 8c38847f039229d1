"""``memory://`` takes the options of other adapters: what it models, and with ``like`` the rest."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

import messaging
from messaging.errors import (
    ArgumentError,
    DeadlineError,
    InvalidExtensionError,
    InvalidOptionError,
    MessagingError,
    UnsupportedFeatureError,
)
from messaging.instance import find_adapter
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.doubles.core import unique
from tests.doubles.fixtures import Connect

REAL = {"amqp": "amqp://h", "mqtt5": "mqtt://h?version=5", "mqtt311": "mqtt://h?version=3.1.1"}
each = table("like", [*REAL])


@each
@table("settings", [{}, {"outbox_path": "box"}, {"generate_correlation_id": False}])
def test_the_features_are_those_of_that_adapter(connect: Connect, tmp_path: Any, like: str, settings: Any) -> None:
    settings = {key: value if key != "outbox_path" else tmp_path / value for key, value in settings.items()}
    with (
        messaging.connect(f"memory://x?like={like}", services=ServiceRegistry(), **settings) as m,
        messaging.connect(REAL[like], services=ServiceRegistry(), start_offline=True, close_timeout=0.01) as real,
    ):
        expected = real.features | ({"storeAndForward"} if "outbox_path" in settings else set())
        if "generate_correlation_id" in settings and "generateCorrelationId" in expected:
            expected -= {"generateCorrelationId"}
        assert m.features == expected
        assert m._adapter.capabilities.qos_levels == real._adapter.capabilities.qos_levels
        assert m._adapter.capabilities.default_qos == real._adapter.capabilities.default_qos


def test_the_envelope_of_mqtt_3_1_1_brings_its_features(connect: Connect) -> None:
    assert "headers" not in connect("memory://x?like=mqtt311").features
    assert "headers" in connect("memory://x?like=mqtt311&envelope=true").features


@table(
    "like, call",
    {
        "amqp retain": ("amqp", lambda m: m.publish("a", b"", retain=True)),
        "amqp qos 2": ("amqp", lambda m: m.publish("a", b"", qos=2)),
        "amqp noLocal": ("amqp", lambda m: m.subscribe("a", no_local=True)),
        "amqp long header": ("amqp", lambda m: m.publish("a", b"", headers={"x" * 300: "1"})),
        "amqp maxPriority of a quorum queue": (
            "amqp", lambda m: m.subscribe("a", queue="q", queue_type="quorum", max_priority=3)
        ),
        "mqtt5 priority": ("mqtt5", lambda m: m.publish("a", b"", priority=1)),
        "mqtt5 queueType": ("mqtt5", lambda m: m.subscribe("a", queue="q", queue_type="quorum")),
        "mqtt5 routing key": ("mqtt5", lambda m: m.publish("a", b"", channel_extension="k")),
        "mqtt5 int header": ("mqtt5", lambda m: m.publish("a", b"", headers={"a": 1})),
        "mqtt5 $SYS": ("mqtt5", lambda m: m.publish("$SYS/a", b"")),
        "mqtt311 headers": ("mqtt311", lambda m: m.publish("a", b"", headers={"a": "1"})),
        "mqtt311 content type": ("mqtt311", lambda m: m.publish("a", b"", content_type="text/plain")),
        "mqtt311 request": ("mqtt311", lambda m: m.request("a", b"")),
    },
)  # fmt: skip
def test_what_the_real_one_refuses_is_refused_likewise(connect: Connect, like: str, call: Any) -> None:
    m = connect(f"memory://x?like={like}")
    with pytest.raises(MessagingError) as caught:
        call(m)
    with (
        messaging.connect(REAL[like], services=ServiceRegistry(), start_offline=True, close_timeout=0.01) as real,
        pytest.raises(MessagingError) as refused,
    ):
        call(real)
    assert type(caught.value) is type(refused.value)
    assert str(caught.value) == str(refused.value).replace(real.name, m.name)


@each
def test_every_option_of_that_adapter_is_accepted(like: str) -> None:
    given: dict[str, Any] = {
        "amqp": {"heartbeat": 5, "exchange": "e", "publish_window": 7, "max_priority": 9, "sasl": "plain"},
        "mqtt5": {"version": 5, "keepalive": 7, "keep_session": True, "name": "n", "receive_maximum": 3},
        "mqtt311": {"version": "3.1.1", "clean_start": False, "client_id": "x", "envelope": True},
    }[like]
    common = {"cafile": "ca.pem", "username": "u", "password": "p", "proxy": "http://h", "alpn": "mqtt"}
    with messaging.connect(f"memory://x?like={like}", services=ServiceRegistry(), **given, **common) as m:
        m.publish("a", b"x").result(PATIENCE)
    scheme = REAL[like].split(":")[0]
    known = find_adapter(scheme).settings_type.model_fields
    assert known.keys() <= type(m._adapter.settings).model_fields.keys()


@table(
    "settings, option",
    [
        ({"like": "amqp1"}, "like"),
        ({"heartbeat": 5}, "heartbeat"),
        ({"like": "mqtt5", "heartbeat": 5}, "heartbeat"),
        ({"like": "mqtt5", "version": "3.1.1"}, "version"),
        ({"like": "mqtt5", "session_expiry": -1}, "session_expiry"),
        ({"like": "mqtt5", "ssl_context": ssl.create_default_context(), "cafile": "x"}, "ssl_context"),
        ({"like": "amqp", "sasl": "external"}, "sasl"),
    ],
)
def test_options_that_the_real_one_refuses_are_refused(settings: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        messaging.connect("memory://x", services=ServiceRegistry(), **settings)
    assert caught.value.option == option


# --- what is modelled


@table("url", ["memory://x", "memory://x?like=amqp"])
def test_a_rejected_message_comes_again_after_its_delay(connect: Connect, url: str) -> None:
    """And others come before it; each further delay is twice as long."""
    m, seen = connect(url.replace("//x", f"//{unique('delays')}")), Recorder()

    def handle(message: messaging.ReceivedMessage) -> None:
        seen((message.payload, message.context.extensions.get("redelivered", False)))
        if message.payload == b"bad":
            raise ValueError

    options = {"queue": "q", "redelivery_delay": 0.05, "max_deliveries": 3, "dead_letter_channel": "dead"}
    with m.subscribe("dead") as dead:
        m.on("a", handle, **options).ready.result(PATIENCE)
        m.publish("a", b"bad").result(PATIENCE)
        m.publish("a", b"good").result(PATIENCE)
        letter = dead.receive(PATIENCE)
    assert letter.context.extensions["headers"]["x-dead-letter-deliveries"] == "3"
    assert [*seen] == [(b"bad", False), (b"good", False), (b"bad", True), (b"bad", True)]


@table(
    "url, settings, order",
    {
        "every priority": ("memory://x", {}, ["9", "5", "1", "0"]),
        "three levels": ("memory://x", {"max_priority": 3}, ["5", "9", "1", "0"]),
        "levels of the queue": ("memory://x", {"extension": 0}, ["0", "5", "1", "9"]),
        "the plain queue of AMQP": ("memory://x?like=amqp", {}, ["0", "5", "1", "9"]),
        "AMQP with levels": ("memory://x?like=amqp&max_priority=9", {}, ["9", "5", "1", "0"]),
    },
)
def test_a_queue_has_the_levels_of_priority_that_it_was_made_with(
    connect: Connect, url: str, settings: dict[str, Any], order: list[str]
) -> None:
    settings = {**settings}
    options = {"max_priority": settings.pop("extension")} if "extension" in settings else {}
    m = connect(url.replace("//x", f"//{unique('levels')}"), **settings)
    with m.subscribe("a", queue="q", **options):
        pass  # from here on the queue is there
    for priority in (0, 5, 1, 9):
        m.publish("a", str(priority), priority=priority).result(PATIENCE)
    with m.subscribe("a", queue="q") as stream:
        assert [stream.receive(PATIENCE).value(str) for _ in range(4)] == order


@table("url", ["memory://x", "memory://x?like=mqtt5"])
def test_own_and_retained_messages_can_be_left_out(connect: Connect, url: str) -> None:
    m, other = connect(url), connect(url)
    m.publish("a", b"old", retain=True).result(PATIENCE)
    with m.subscribe("a", no_local=True, retain_handling=2) as stream:
        m.publish("a", b"own").result(PATIENCE)
        other.publish("a", b"new").result(PATIENCE)
        assert stream.receive(PATIENCE).payload == b"new"


def test_a_message_has_the_properties_of_amqp(connect: Connect) -> None:
    m = connect("memory://x?like=amqp")
    with m.subscribe("a") as stream:
        m.publish("a", b"x", type="order", app_id="shop").result(PATIENCE)
        told = stream.receive(PATIENCE).context.extensions
    assert (told["type"], told["appId"]) == ("order", "shop")


@table(
    "options",
    [
        {"redelivery_delay": 1.0},
        {"redelivery_delay_max": 1.0, "queue": "q"},
        {"redelivery_delay": 2.0, "redelivery_delay_max": 1.0, "queue": "q"},
        {"redelivery_delay": 2.0, "guaranteed_ordering": True, "queue": "q"},
        {"queue": "q", "queue_type": "stream"},
        {"queue": "q", "single_active_consumer": True},
    ],
)
def test_what_it_does_not_model_is_refused_without_like(connect: Connect, options: dict[str, Any]) -> None:
    with pytest.raises((ArgumentError, UnsupportedFeatureError)):
        connect("memory://x").subscribe("a", **options)


@table(
    "like, options",
    [
        ("amqp", {"queue": "q", "redelivery_delay": 1.0, "qos": 0}),
        ("amqp", {"queue": "q", "redelivery_delay": 1.0, "auto_acknowledge": True}),
        ("amqp", {"queue": "q", "redelivery_delay": 1.0, "guaranteed_ordering": True}),
        ("amqp", {"queue": "q", "redelivery_delay": 2.0, "redelivery_delay_max": 1.0}),
        ("amqp", {"queue": "q", "redelivery_delay_max": 1.0}),
        ("amqp", {"redelivery_delay": 1.0}),
        ("amqp", {"queue_type": "quorum"}),
        ("amqp", {"queue": "q", "queue_type": "quorum", "max_priority": 2}),
        ("amqp", {"queue": "q", "max_priority": 10}),
        ("mqtt5", {"queue": "q", "no_local": True}),
        ("mqtt5", {"retain_handling": 3}),
    ],
)
def test_extensions_that_contradict_each_other_are_refused_without_like_too(
    connect: Connect, like: str, options: dict[str, Any]
) -> None:
    refused = []
    for m in (connect("memory://x"), connect(f"memory://x?like={like}"), connect(REAL[like], start_offline=True)):
        with pytest.raises(InvalidExtensionError) as caught:
            m.subscribe("a", **options)
        refused.append(caught.value.key)
        m.close(0.01)
    assert len({*refused}) == 1


def test_the_extensions_of_memory_are_those_of_the_real_adapters() -> None:
    """Each name is one of theirs, on the same side; what memory:// takes of a value, one of them takes."""
    ours = find_adapter("memory")
    theirs = [find_adapter("amqp"), find_adapter("mqtt")]
    values = [True, False, -1, 0, 1, 2, 3, 9, 10, 0.5, 4_294_967.0, 1e9, "classic", "quorum", "stream", "x", None]

    def taken(check: Any, value: Any) -> bool:
        try:
            check(value)
        except ValueError:
            return False
        return True

    for side in ("subscribe_extensions", "publish_extensions"):
        for name, check in getattr(ours, side).items():
            checks = [getattr(each, side)[name] for each in theirs if name in getattr(each, side)]
            assert checks, f"{name} is known to memory:// only"
            for value in values:
                assert not taken(check, value) or any(taken(each, value) for each in checks), (name, value)


@each
def test_the_extensions_with_like_are_exactly_those_of_that_adapter(connect: Connect, like: str) -> None:
    m, real = connect(f"memory://x?like={like}"), connect(REAL[like], start_offline=True)
    for side in ("subscribe_extensions", "publish_extensions"):
        found, wanted = (getattr(each._adapter.capabilities, side) for each in (m, real))
        assert found.keys() == wanted.keys()
        assert all(found[name] is wanted[name] for name in wanted)
    real.close(0.01)


@table("variable", ["MESSAGING_LIKE", "messaging_like"])
@table("keyword, features", [({}, True), ({"like": None}, False)])
def test_like_is_read_from_the_environment_as_every_setting(
    monkeypatch: pytest.MonkeyPatch, variable: str, keyword: dict[str, Any], features: bool
) -> None:
    monkeypatch.setenv(variable, "amqp")
    with messaging.connect("memory://x", services=ServiceRegistry(), **keyword) as m:
        assert ("declare" in m.features) is features


@pytest.mark.usefixtures("virtual_clock")
def test_delayed_messages_take_room_in_a_bounded_queue(connect: Connect) -> None:
    m = connect(f"memory://{unique('room')}", max_queue_length=1)
    with m.subscribe("a", queue="q", redelivery_delay=100.0, acknowledge="manual", prefetch=1) as stream:
        m.publish("a", b"1").result(PATIENCE)
        message = stream.receive(PATIENCE)
        message.reject()
        eventually(lambda: stream.counters.rejected == 1)
        waiting = m.publish("a", b"2", timeout=1000.0)
        with pytest.raises(DeadlineError):
            stream.receive(50.0)
        assert not waiting.done()
        assert stream.receive(100.0).payload == b"1"
        waiting.result(PATIENCE)
