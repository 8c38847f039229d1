"""A name is checked and used as the characters that it has, whatever a subclass of ``str`` says that it equals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import messaging
from messaging import MessageContext
from messaging.dispatch import DISTRIBUTED_EVENTS, EVENT_ADMIN, TYPED_EVENTS
from messaging.dispatch.permission import TopicPermission, TopicPolicy
from messaging.errors import MessagingError, PermissionDeniedError
from messaging.eventadmin import Event, EventAdmin, EventHandler
from messaging.services import LdapFilter, ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from messaging.typedevent import RangePolicy, TypedEventBus

ALLOWED, SECRET = "open/news", "secret/news"


class Pretending(str):
    """Has the characters of one name, and says that it equals another one."""

    __slots__ = ("other",)
    other: str

    def __new__(cls, text: str, other: str) -> Pretending:
        made = super().__new__(cls, text)
        made.other = other
        return made

    def __eq__(self, other: object) -> bool:
        return other == self.other

    def __hash__(self) -> int:
        return hash(self.other)

    def __str__(self) -> str:
        return self.other

    def casefold(self) -> str:
        return self.other

    def encode(self, *_: Any) -> bytes:
        return self.other.encode()


def pretending() -> Pretending:
    return Pretending(SECRET, ALLOWED)


def policy() -> TopicPolicy:
    return TopicPolicy({None: [TopicPermission("open/*", "publish"), TopicPermission("*", "subscribe")]})


@table("publish", ["deliver", "deliver_untyped", "publisher"])
def test_a_topic_of_the_bus_is_permitted_by_its_characters(publish: str) -> None:
    got: list[str] = []
    with TypedEventBus(permissions=policy()) as bus:
        bus.on("*", handler=lambda topic, data: got.append(topic))
        bus.deliver_untyped(ALLOWED, {})  # remembered: the routes and the answers of the policy
        calls: dict[str, Callable[[], object]] = {
            "deliver": lambda: bus.deliver({}, pretending()),
            "deliver_untyped": lambda: bus.deliver_untyped(pretending(), {}),
            "publisher": lambda: bus.create_publisher(pretending()),
        }
        with pytest.raises(PermissionDeniedError):
            calls[publish]()
        reverse = Pretending(ALLOWED, SECRET)
        bus.deliver_untyped(reverse, {})
        bus.create_publisher(reverse).deliver_untyped({})
        bus.flush().result(PATIENCE)
    assert got == [ALLOWED] * 3
    assert {type(topic) for topic in got} == {str}


def test_a_topic_of_an_event_is_permitted_by_its_characters() -> None:
    got: list[str] = []
    services = ServiceRegistry()
    with EventAdmin(services, permissions=policy()) as admin:
        services.register(EventHandler, lambda event: got.append(event.topic), {"event.topics": ["*"]})
        admin.send_event(Event(ALLOWED, {}))
        for publish in (admin.send_event, admin.post_event):
            with pytest.raises(PermissionDeniedError):
                publish(Event(pretending(), {}))
    assert got == [ALLOWED]


def test_a_principal_is_identified_by_its_characters() -> None:
    granted = TopicPolicy({"meter": [TopicPermission("*", "publish")]})
    guest = Pretending("guest", "meter")
    assert granted.permits("meter", TopicPermission("a", "publish"))
    assert not granted.permits(guest, TopicPermission("a", "publish"))
    with TypedEventBus(permissions=granted) as bus:
        bus.deliver_untyped("a", {}, principal="meter")
        with pytest.raises(PermissionDeniedError):
            bus.deliver_untyped("a", {}, principal=guest)
        with pytest.raises(PermissionDeniedError):
            bus.create_publisher("a", principal=guest)
    granted.revoke(guest)
    assert granted.permits("meter", TopicPermission("a", "publish"))
    granted.grant(guest, TopicPermission("b", "publish"))
    assert not granted.permits("meter", TopicPermission("b", "subscribe"))
    assert granted.permits("guest", TopicPermission("b", "publish"))


def test_topics_and_filters_are_their_characters() -> None:
    for grammar in (TYPED_EVENTS, EVENT_ADMIN, DISTRIBUTED_EVENTS):
        assert grammar.parse(ALLOWED).text == ALLOWED
        for text in (grammar.check_topic(pretending()), grammar.parse(pretending()).text):
            assert type(text) is str
            assert text == SECRET
        assert grammar.parse(Pretending(ALLOWED, SECRET)).text == ALLOWED
    assert TopicPermission(pretending(), "publish").name == SECRET
    with TypedEventBus(history={ALLOWED: RangePolicy.exact(3)}) as bus:
        assert bus.monitor.get_effective_history_storage(pretending()) == RangePolicy.none()


def test_keys_of_events_are_their_characters() -> None:
    got: list[dict[str, Any]] = []
    with TypedEventBus() as bus:
        bus.on("a", handler=lambda topic, data: got.append(data), filter="(level>=1)")
        bus.deliver_untyped("a", {Pretending("level", "other"): 1})
        bus.deliver_untyped("a", {Pretending("other", "level"): 1})
        bus.flush().result(PATIENCE)
    assert got == [{"level": 1}]
    event = Event("a", {Pretending("level", "other"): 1})
    assert event.matches("(level=1)")
    assert event.get_property("level") == 1


def test_names_of_interfaces_and_properties_are_their_characters() -> None:
    services = ServiceRegistry()
    services.register(Pretending("real", "fake"), object(), {Pretending("room", "floor"): "attic"})
    assert len(services.find("real")) == 1
    assert not services.find("fake")
    assert len(services.find("real", LdapFilter.parse("(room=attic)"))) == 1
    assert not services.find("real", LdapFilter.parse("(floor=attic)"))


def test_channels_are_their_characters() -> None:
    with messaging.connect("memory://exact-names") as m, m.subscribe("#") as stream:
        stream.ready.result(PATIENCE)
        m.publish("open/a", b"1").result(PATIENCE)
        m.publish(Pretending("secret/b", "open/a"), b"2").result(PATIENCE)
        m.publisher.publish(
            m.context_builder().content(b"3").build_message(),
            MessageContext(Pretending("secret/c", "open/a")),
        ).result(PATIENCE)
        channels = [stream.receive(PATIENCE).context.channel for _ in range(3)]
        assert channels == ["open/a", "secret/b", "secret/c"]
        with pytest.raises(MessagingError):
            m.publish(Pretending("a/#", "open/a"), b"").result(PATIENCE)
        with m.subscribe(Pretending("only/this", "#")) as only:
            only.ready.result(PATIENCE)
            m.publish("open/a", b"4").result(PATIENCE)
            m.publish("only/this", b"5").result(PATIENCE)
            assert only.receive(PATIENCE).payload == b"5"
