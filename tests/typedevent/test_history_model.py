"""The bus and its history against a simple model: plain lists, gone through from end to end.

It holds what handlers, handlers of unhandled events, monitors and the history get of past and present events.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from messaging.errors import ArgumentError, HistoryFullError
from messaging.services import ServiceRegistration, ServiceRegistry
from messaging.testing.waiting import PATIENCE, eventually
from messaging.typedevent import (
    MonitorEvent,
    RangePolicy,
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
)
from messaging.typedevent.history import UNLIMITED
from tests.typedevent.conftest import Bus, matches, named
from tests.typedevent.test_history import recorded

#: filters as tokens; ``matches`` below knows no more of them than 157.4.3
FILTERS = ["a", "b", "a/x", "a/y", "a/x/1", "+", "a/+", "+/x", "a/+/1", "a/+/2", "a/*", "a/x/*", "+/+/*", "*"]
TOPICS = ["a", "b", "a/x", "a/y", "b/x", "a/x/1", "a/y/2", "b/y/1"]

topics = st.sampled_from(TOPICS)
filters = st.sampled_from(FILTERS)
bounds = st.sampled_from([0, 0, 1, 2, 3, 5, UNLIMITED])
policies = st.builds(lambda one, other: RangePolicy(min(one, other), max(one, other)), bounds, bounds)


class Model:
    """The kept events: a list of topics and numbers, the oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.policies: dict[str, RangePolicy] = {}
        self.kept: list[tuple[str, int]] = []
        #: by topic: how many of the newest events are guaranteed by now
        self.floor: dict[str, int] = defaultdict(int)

    def effective(self, topic: str) -> RangePolicy:
        def precedence(topic_filter: str) -> list[int]:
            return [{"+": 1, "*": 2}.get(token, 0) for token in topic_filter.split("/")]

        fitting = [each for each in self.policies if matches(each, topic)]
        return self.policies[min(fitting, key=precedence)] if fitting else RangePolicy(0, 0)

    def of(self, topic: str) -> list[tuple[str, int]]:
        return [each for each in self.kept if each[0] == topic]

    def room_beside(self, topic_filter: str) -> int:
        """What no other filter has reserved."""
        reserved = sum(
            policy.minimum
            for each, policy in self.policies.items()
            if each != topic_filter and not {"+", "*"} & set(each.split("/"))
        )
        return self.capacity - reserved

    def changed(self) -> None:
        for topic in TOPICS:
            policy = self.effective(topic)
            while len(self.of(topic)) > policy.maximum:
                self.kept.remove(self.of(topic)[0])
            self.floor[topic] = min(policy.minimum, len(self.of(topic)))

    def append(self, topic: str, number: int) -> None:
        policy = self.effective(topic)
        if policy.maximum == 0 or self.capacity == 0:
            return
        self.kept.append((topic, number))
        self.floor[topic] = min(policy.minimum, self.floor[topic] + 1)
        if len(self.of(topic)) > policy.maximum:
            self.kept.remove(self.of(topic)[0])
        if 0 <= self.capacity < len(self.kept):
            self.kept.remove(
                next(each for each in self.kept if len(self.of(each[0])) > self.effective(each[0]).minimum)
            )

    def configure(self, topic_filter: str, policy: RangePolicy) -> Exception | int:
        """Return how many events of such a topic are kept, or the error to be raised."""
        room = self.room_beside(topic_filter)
        if self.capacity >= 0:
            if {"+", "*"} & set(topic_filter.split("/")) and policy.minimum:
                return ArgumentError("has a wildcard")
            if policy.minimum > room:
                return HistoryFullError(f"{policy.minimum} events of '{topic_filter}' cannot be guaranteed")
        self.policies[topic_filter] = policy
        self.changed()
        return policy.maximum if self.capacity < 0 else min(room, policy.maximum)

    def remove(self, topic_filter: str) -> None:
        self.policies.pop(topic_filter, None)
        self.changed()


class Handler:
    """A registered handler: what it asks for, what it got, and what it should have got."""

    def __init__(self, interface: type[Any], topics: list[str], at_least: int | None) -> None:
        self.interface = interface
        self.topics = topics
        self.at_least = at_least
        self.is_unhandled = interface is UnhandledEventHandler
        self.got: list[tuple[str, int]] = []
        self.expected: list[tuple[str, int]] = []
        self.registration: ServiceRegistration

    def __call__(self, topic: str, event: dict[str, Any]) -> None:
        self.got.append((topic, event["n"]))

    def wants(self, event: tuple[str, int]) -> bool:
        return any(matches(each, event[0]) for each in self.topics) and (
            self.at_least is None or weight(event[1]) >= self.at_least
        )

    def properties(self, history: int | None = None) -> dict[str, Any]:
        return named(
            self.topics,
            **({} if self.at_least is None else {"filter": f"(weight>={self.at_least})"}),
            **({} if history is None else {"history": history}),
            **({"type": dict[str, int]} if self.interface is TypedEventHandler else {}),
        )


def weight(number: int) -> int:
    return number % 4


class Watcher:
    """An observer of the monitor."""

    def __init__(self, bus: Bus, expected: list[tuple[str, int]], history: int) -> None:
        self.got: list[tuple[str, int]] = []
        self.expected = expected
        self.subscription = bus.monitor.monitor_events(history).subscribe(self.on_next)

    def on_next(self, event: MonitorEvent) -> None:
        self.got.append((event.topic, event.event_data["n"]))


class BusMachine(RuleBasedStateMachine):
    """157.4.4, 157.4.5, 157.4.7, 157.6: who gets what of past and present, while everything comes and goes."""

    handlers: Bundle[Handler] = Bundle("handlers")
    watchers: Bundle[Watcher] = Bundle("watchers")

    def __init__(self) -> None:
        super().__init__()
        self.registry = ServiceRegistry()
        self.bus: Bus | None = None
        self.model = Model(-1)
        self.published: dict[str, list[int]] = defaultdict(list)
        self.there: list[Handler] = []
        self.watching: list[Watcher] = []
        self.count = 0

    @initialize(
        capacity=st.sampled_from([-1, 0, 1, 2, 4, 4, 7, 7, 12]),
        maximum=st.sampled_from([0, 1, 2, 3, UNLIMITED]),
        special=st.dictionaries(filters, policies, max_size=3),
    )
    def begin(self, capacity: int, maximum: int, special: dict[str, RangePolicy]) -> None:
        self.model = Model(capacity)
        self.bus = Bus(self.registry, history_capacity=capacity)
        for topic_filter, policy in {"*": RangePolicy.at_most(maximum), **special}.items():
            self.configure(topic_filter, policy)

    def teardown(self) -> None:
        if self.bus is not None:
            self.bus.close()
            assert self.registry.find("messaging.typedevent.bus.TypedEventBus") == []

    @rule(turns=st.lists(topics, min_size=1, max_size=12))
    def publish(self, turns: list[str]) -> None:
        """Scenarios 39, 42, 43, 47 to 49 and 57; 157.4.3, 157.4.4, 157.4.5, 157.4.5.2.

        Each handler gets the events that one of its topics and its filter match, once. An event that no handler got is
        unhandled, also if only filters kept it off.
        """
        assert self.bus is not None
        for topic in turns:
            self.count += 1
            self.published[topic].append(self.count)
            self.bus.deliver_untyped(topic, {"n": self.count, "weight": weight(self.count)})
            event = topic, self.count
            self.model.append(*event)
            fitting = [each for each in self.there if each.wants(event)]
            handled = [each for each in fitting if not each.is_unhandled]
            for each in handled or fitting:
                each.expected.append(event)
            for watcher in self.watching:
                watcher.expected.append(event)

    @rule(
        target=handlers,
        interface=st.sampled_from([TypedEventHandler, UntypedEventHandler]),
        topics=st.lists(filters, min_size=1, max_size=3),
        at_least=st.none() | st.integers(0, 4),
        history=st.sampled_from([None, 0, 1, 2, 4, 100, 2**70]),
    )
    def register(self, interface: type[Any], topics: list[str], at_least: int | None, history: int | None) -> Handler:
        """Scenarios 66 to 68, 70 to 72, 74 and 75; 157.4.7.

        Of the past events that match topics and filter, the newest precede new ones, in the order of time: as many as
        asked for, or all there are. They are handled or unhandled as they were.
        """
        handler = Handler(interface, topics, at_least)
        fitting = [each for each in self.model.kept if handler.wants(each)]
        handler.expected += fitting[len(fitting) - min(history or 0, len(fitting)) :]
        handler.registration = self.registry.register(interface, handler, handler.properties(history))
        self.there.append(handler)
        return handler

    @rule(target=handlers, topics=st.lists(filters, min_size=1, max_size=2), at_least=st.none() | st.integers(0, 4))
    def register_for_unhandled(self, topics: list[str], at_least: int | None) -> Handler:
        """Scenario 58; 157.4.8, 157.14: an unhandled event must match both topics and filter."""
        handler = Handler(UnhandledEventHandler, topics, at_least)
        handler.registration = self.registry.register(UnhandledEventHandler, handler, handler.properties())
        self.there.append(handler)
        return handler

    @rule(handler=handlers, topics=st.lists(filters, min_size=1, max_size=3), at_least=st.none() | st.integers(0, 4))
    def update(self, handler: Handler, topics: list[str], at_least: int | None) -> None:
        """Scenarios 45 and 76: new topics and filters count from the next event on, and nothing is replayed."""
        handler.topics, handler.at_least = topics, at_least
        handler.registration.update(handler.properties(None if handler.is_unhandled else 5))

    @rule(handler=consumes(handlers))
    def unregister(self, handler: Handler) -> None:
        handler.registration.unregister()
        self.there.remove(handler)

    @rule(topic_filter=filters, policy=policies)
    def configure(self, topic_filter: str, policy: RangePolicy) -> None:
        """157.6.2.2, 157.11.4.1: a minimum without room, or for a wildcard if there is a limit, changes nothing."""
        assert self.bus is not None
        expected = self.model.configure(topic_filter, policy)
        if isinstance(expected, int):
            assert self.bus.monitor.configure_history_storage(topic_filter, policy) == expected
            assert policy.minimum <= expected <= policy.maximum
        else:
            with pytest.raises(type(expected), match=re.escape(str(expected))):
                self.bus.monitor.configure_history_storage(topic_filter, policy)

    @rule(topic_filter=filters)
    def remove(self, topic_filter: str) -> None:
        """157.6.2.2, 157.11.4.11: events without a policy are removed from the history."""
        assert self.bus is not None
        self.bus.monitor.remove_history_storage(topic_filter)
        self.model.remove(topic_filter)

    @precondition(lambda self: len(self.watching) < 3)
    @rule(target=watchers, history=st.sampled_from([0, 1, 3, 100, 2**70]))
    def watch(self, history: int) -> Watcher:
        """Scenarios 77 and 78; 157.6.1, 157.11.4.6, 157.11.4.7: the newest of all topics first, or none."""
        assert self.bus is not None
        past = self.model.kept[len(self.model.kept) - min(history, len(self.model.kept)) :]
        watcher = Watcher(self.bus, past, history)
        self.watching.append(watcher)
        return watcher

    @rule(watcher=consumes(watchers))
    def stop_watching(self, watcher: Watcher) -> None:
        watcher.subscription.dispose()
        self.watching.remove(watcher)

    @invariant()
    def each_receiver_got_its_events_in_order_and_once(self) -> None:
        if self.bus is None:
            return
        self.bus.flush().result(PATIENCE)
        for each in self.there:
            assert each.got == each.expected
        for watcher in self.watching:
            eventually(lambda watcher=watcher: len(watcher.got) >= len(watcher.expected), "all was seen")  # type: ignore[misc]
            assert watcher.got == watcher.expected

    @invariant()
    def it_keeps_what_the_model_keeps_in_order(self) -> None:
        """157.6.2, 157.11.3.4, 157.11.3.5: of each topic the newest events, between its minimum and its maximum."""
        if self.bus is not None:
            assert recorded(self.bus) == [f"{topic} {number}" for topic, number in self.model.kept]
            assert self.model.capacity < 0 or len(self.model.kept) <= self.model.capacity
        for topic in TOPICS:
            kept = [number for _, number in self.model.of(topic)]
            assert kept == self.published[topic][len(self.published[topic]) - len(kept) :]
            assert self.model.floor[topic] <= len(kept) <= self.model.effective(topic).maximum

    @invariant()
    def the_most_specific_policy_counts_and_comes_first(self) -> None:
        """157.6.2.1, 157.11.4.2, 157.11.4.3, 157.11.4.4: also by exactly its filter; and there always is a policy."""
        if self.bus is None:
            return
        monitor = self.bus.monitor
        configured = monitor.get_configured_history_storage()
        assert configured == self.model.policies
        for topic in TOPICS:
            first = next((configured[each] for each in configured if matches(each, topic)), RangePolicy.none())
            assert monitor.get_effective_history_storage(topic) == self.model.effective(topic) == first
        for each in FILTERS:
            assert monitor.get_configured_history_storage(each) == self.model.policies.get(each)

    @invariant()
    def it_tells_what_there_is(self) -> None:
        if self.bus is not None:
            dto = self.bus.get_dto()
            assert (len(dto.handlers), dto.monitors) == (len(self.there), len(self.watching))
            assert (dto.recorded, dto.missed) == (len(self.model.kept), 0)
            assert not any(each.blocked or each.dropped or each.failures for each in dto.handlers)


TestBusAgainstModel = BusMachine.TestCase
TestBusAgainstModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
