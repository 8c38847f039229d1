"""Which handler answers (RFC 5.7.3): the whiteboard against a simple model; and markers, written and read."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

import messaging
from messaging import MessageContextBuilder, OutcomeUnknownError, UnroutableError
from messaging.model import Incoming
from messaging.model.channels import matches
from messaging.replyto import (
    CHANNEL,
    CONCURRENCY,
    EXTENSIONS,
    REPLY_CHANNEL,
    TARGET,
    ReplyToSingleSubscriptionHandler,
    markers,
)
from messaging.services import SERVICE_RANKING, ServiceRegistration, ServiceRegistry
from messaging.testing.waiting import PATIENCE, eventually
from tests.replyto.conftest import in_hand, routes

#: properties of a handler; the extensions make another subscription of the same channel
PROPERTIES = st.fixed_dictionaries(
    {
        CHANNEL: st.sets(st.sampled_from(["x/a", "x/b", "x/c/d", "x/+", "x/c/+", "x/#"]), min_size=1, max_size=3).map(
            sorted
        ),
        SERVICE_RANKING: st.integers(-1, 1),
        CONCURRENCY: st.integers(1, 2),
        EXTENSIONS: st.sampled_from([{}, {}, {"prefetch": 3}, {"qos": "0"}, {"autoAcknowledge": True}]),
    }
)


class Registered:
    """A handler as the model knows it."""

    def __init__(self, registration: ServiceRegistration, properties: dict[str, Any]) -> None:
        self.registration = registration
        self.properties = properties

    @property
    def order(self) -> tuple[int, int]:
        return -self.properties[SERVICE_RANKING], self.registration.reference.id

    def takes(self, channel: str, reply_to: str | None) -> bool:
        named = self.properties.get(REPLY_CHANNEL)
        return self.hears(channel) and named in (None, reply_to)

    def hears(self, channel: str) -> bool:
        return any(matches(pattern, channel) for pattern in self.properties[CHANNEL])

    @property
    def subscriptions(self) -> set[tuple[str, str]]:
        return {(pattern, repr(self.properties[EXTENSIONS])) for pattern in self.properties[CHANNEL]}


class WhiteboardMachine(RuleBasedStateMachine):
    """Handlers come, change and go; every request is handled once, by the preferred one of those that are meant."""

    handlers = Bundle("handlers")

    def __init__(self) -> None:
        super().__init__()
        registry = ServiceRegistry()
        self.m = messaging.connect("memory://whiteboard-model", services=registry, timeout=PATIENCE)
        self.requester = messaging.connect("memory://whiteboard-model", services=registry, timeout=PATIENCE)
        self.there: list[Registered] = []
        self.asked = 0
        #: the payloads of requests, as they were handled
        self.handled: list[bytes] = []

    def teardown(self) -> None:
        self.requester.close()
        self.m.close()

    @rule(
        target=handlers,
        properties=PROPERTIES,
        reply_to=st.sampled_from([None, None, "r"]),
        is_async=st.booleans(),
    )
    def register(self, properties: dict[str, Any], reply_to: str | None, is_async: bool) -> Registered:
        properties = {TARGET: f"(osgi.messaging.name={self.m.name})", **properties}
        if reply_to is not None:
            properties[REPLY_CHANNEL] = reply_to

        def say_who(request: Any, builder: MessageContextBuilder) -> Any:
            self.handled.append(request.payload)
            return builder.content(str(registration.reference.id)).build_message()

        async def say_who_later(request: Any, builder: MessageContextBuilder) -> Any:
            return say_who(request, builder)

        handler = say_who_later if is_async else say_who
        registration = self.m.services.register(ReplyToSingleSubscriptionHandler, handler, properties)
        registered = Registered(registration, properties)
        self.there.append(registered)
        self.m.whiteboard.ready().result(PATIENCE)
        return registered

    @rule(handler=consumes(handlers))
    def unregister(self, handler: Registered) -> None:
        handler.registration.unregister()
        self.there.remove(handler)

    @rule(handler=handlers, properties=PROPERTIES)
    def update(self, handler: Registered, properties: dict[str, Any]) -> None:
        handler.properties = {**handler.properties, **properties}
        handler.registration.update(handler.properties)
        self.m.whiteboard.ready().result(PATIENCE)

    @rule(channel=st.sampled_from(["x/a", "x/b", "x/c/d"]), reply_to=st.sampled_from([None, "r"]))
    def request(self, channel: str, reply_to: str | None) -> None:
        eventually(self.is_settled, "all channels are subscribed to")
        meant = sorted((each for each in self.there if each.takes(channel, reply_to)), key=lambda each: each.order)
        heard = any(each.hears(channel) for each in self.there)
        timeout = PATIENCE if meant or not heard else 0.02
        self.asked += 1
        promise = self.requester.request(channel, b"%d" % self.asked, reply_to=reply_to, qos=1, timeout=timeout)
        if meant:
            assert promise.result(PATIENCE).payload == str(meant[0].registration.reference.id).encode()
        else:
            with pytest.raises(OutcomeUnknownError if heard else UnroutableError):
                promise.result(PATIENCE)

    def is_settled(self) -> bool:
        """Return whether exactly the channels of the model are subscribed to."""
        wanted = {subscription for each in self.there for subscription in each.subscriptions}
        connection = self.m._connection
        return (
            sorted(route.channel for route in routes(self.m)) == sorted(channel for channel, _ in wanted)
            and all(route.subscription.handle is not None for route in routes(self.m))
            and not connection.endings.tasks
            and len(connection.subscriptions) - (self.m._requests.own is not None) == len(wanted)
        )

    @invariant()
    def all_handlers_are_listed_and_no_request_is_left(self) -> None:
        eventually(lambda: in_hand(self.m) == 0, "nothing is in hand")
        assert len(self.handled) == len({*self.handled}), "a request was handled twice"
        expected = sorted(
            (each.registration.reference.id, name) for each in self.there for name in each.properties[CHANNEL]
        )
        eventually(
            lambda: (
                expected
                == sorted(
                    (each.handler_service.id, each.request_channel.name)
                    for each in self.m.runtime.get_runtime_dto().reply_to_subscriptions
                )
            ),
            "the runtime lists each handler and channel",
        )


TestWhiteboardAgainstModel = WhiteboardMachine.TestCase
TestWhiteboardAgainstModel.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


@given(
    st.sampled_from([markers.MANY, markers.START, markers.ITEM, markers.END, markers.CANCEL, markers.FAULT]),
    st.none() | st.integers(0, 10**18 - 1),
    st.text(max_size=20),
    st.dictionaries(st.text(min_size=1, max_size=10), st.text(max_size=10), max_size=4),
)
def test_markers_are_read_as_written_and_leave_other_headers_alone(
    kind: str, number: int | None, error: str, others: dict[str, str]
) -> None:
    mark = markers.Marker(kind, number, error)
    headers = {**others, **mark.headers()}
    incoming = Incoming(b"", "c", extensions=MappingProxyType({"headers": headers, "qos": "1"}))
    assert markers.read(incoming) == mark
    rest = {name: value for name, value in others.items() if name not in {markers.REPLY, markers.NUMBER, markers.ERROR}}
    assert incoming.extensions == ({"headers": rest, "qos": "1"} if rest else {"qos": "1"})
    assert markers.read(incoming) is None


@given(st.dictionaries(st.sampled_from([markers.REPLY, markers.NUMBER, markers.ERROR, "k"]), st.text(max_size=30)))
def test_any_headers_can_be_read(headers: dict[str, str]) -> None:
    """Scenario 43 [I]: whatever another program sends."""
    incoming = Incoming(b"", "c", extensions=MappingProxyType({"headers": headers}))
    mark = markers.read(incoming)
    assert (mark is None) == (markers.REPLY not in headers)
    assert mark is None or mark.number is None or mark.number >= 0
