"""Routing of events: topics, filters, and changes of both (RFC 97 5.1.2, 5.1.3, 6.5)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from messaging.eventadmin import Event, EventAdmin, EventHandler
from messaging.eventadmin.event import Event as SameEvent
from messaging.services import LdapFilter, ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.eventadmin.conftest import Evil, Hub, Hubs, RaisingFilter, Recorder, own_hub, record

# --- topics and filters


@table(
    "properties, sent, received",
    {
        # scenario 12
        "topics and a branch": (
            {"event.topics": ["org/a", "com/b/*"]},
            "org/a org/a/b org org/A com/b com/b/c com/b/c/d com/bc com x/org/a",
            "org/a com/b/c com/b/c/d",
        ),
        # scenario 3; a single one need not be in a list
        **{name: ({name: "a/*"}, "a/b b/a", "a/b") for name in ("event.topics", "event.topic", "topic", "EVENT.TOPIC")},
        "several kinds of events": (
            {"event.topics": ["sim/INSERTED", "sim/data/CHANGED", "tree/settings/*"]},
            "sim/INSERTED sim/REMOVED sim/data/CHANGED tree/settings/gui/colour tree/other",
            "sim/INSERTED sim/data/CHANGED tree/settings/gui/colour",
        ),
        "an asterisk alone is every topic": ({"event.topics": "*"}, "a a/b ä/日本/c", "a a/b ä/日本/c"),
        # scenario 15
        "overlapping topics are one call": (
            {"event.topics": ["*", "a/*", "a/b/*", "a/b/c", "a/b/c", "a/b/c/*"]},
            "a/b/c a/b/c",
            "a/b/c a/b/c",
        ),
        "the topic may be in the filter": (
            {"event.topics": "*", "event.filter": "(&(|(event.topics=a/*)(topic=b))(!(x=*))(event.topic=*))"},
            "a/b b c",
            "a/b b",
        ),
    },
)
@own_hub
def test_exactly_the_topics_asked_for_are_received(
    hub: Hub, properties: dict[str, Any], sent: str, received: str
) -> None:
    """Scenarios 3, 12 and 15; RFC 97 4.1.2 [13], 4.2.1, 5.1.1, 5.1.2, 6.5.1."""
    recorder = Recorder()
    hub.services.register(EventHandler, recorder, properties)
    hub.send(*sent.split())
    assert recorder.topics == received.split()
    assert not hub.logged()


def test_handlers_must_only_receive_their_registered_topics(hub: Hub) -> None:
    """Scenario 18; RFC 97 4.1.2 [13]: the table of the test kit."""
    first = hub.record(["org/osgi/test/*", "org/osgi/newtest1/*", "org/osgi1/*", "org/Event1"])
    second = hub.record(["org/osgi/test/*", "org/osgi/newtest1/newtest2/*", "org/osgi2/*"])
    table = {
        "org/osgi/test/Event0": (True, True),
        "org/Event1": (True, False),
        "org/osgi1/Event2": (True, False),
        "org/osgi1/test/Event3": (True, False),
        "org/osgi/newtest1/Event4": (True, False),
        "org/osgi/newtest2/Event5": (False, False),
        "org/osgi2/test/Event6": (False, True),
    }
    for publish in (hub.admin.send_event, hub.admin.post_event):
        for topic in table:
            publish(Event(topic))
        hub.flush()
    assert first.topics == [topic for topic, (it_is, _) in table.items() if it_is] * 2
    assert second.topics == [topic for topic, (_, it_is) in table.items() if it_is] * 2


@table("options, says", [({}, "all"), ({"without_topics": "none"}, "no")])
def test_handlers_without_topics_are_treated_as_though_they_had_all_unless_the_admin_is_told_so(
    hubs: Hubs, options: dict[str, Any], says: str
) -> None:
    """Scenario 13; RFC 97 5.1.2, 6.5.1, 6.6. None of them, as later versions have it."""
    hub = hubs(ServiceRegistry(), **options)
    recorder = hub.record(None)
    everything = [] if options else ["a", "b/c"]
    hub.send("a", "b/c")
    assert recorder.topics == everything
    assert len(hub.logged(f"has no event.topics: it gets {says} events")) == 1
    recorder.registration.update({"event.topics": "a"})
    hub.send("a", "b/c")
    assert recorder.topics == [*everything, "a"]
    recorder.registration.update({})
    hub.send("a", "b/c")
    assert recorder.topics == [*everything, "a", *everything]
    assert len(hub.logged(f"has no event.topics: it gets {says} events")) == 2


@table("topics", [[], (), set(), frozenset()])
@own_hub
def test_an_empty_list_of_topics_gets_no_events_and_is_logged(hub: Hub, topics: Any) -> None:
    """Scenario 14."""
    recorder = hub.record(topics)
    hub.send("a", "b/c")
    assert recorder.topics == []
    assert hub.logged("event.topics is empty")


@table(
    "name, values, says",
    [
        (
            "topics",
            ["", "a/+", "+", "a*", "*/a", "a/*/b", "a//b", "a/", ["a/b", "b c"], ["a", None], 5, b"a", {"a": 1}, [5]],
            "topic",
        ),
        ("topics", ["a.b/*"], "topic"),
        # it MUST be a string with a filter; no filter is something else
        ("filter", ["(x=1", "x=1", "(&)", "  ", 5, ["(x=1)"], b"(x=1)"], ""),
        ("target", ["one"], ""),
        ("delivery", ["ordered", 5, ["async.unordered", "fast"], [None], {"async.unordered": 1}], "delivery must be"),
        ("timeout", [-1, "1", float("nan"), float("inf"), True, [1]], "timeout must be"),
        ("principal", [5], "principal must be a str"),
    ],
)
@own_hub
def test_a_handler_with_an_invalid_property_is_ignored(hub: Hub, name: str, values: list[Any], says: str) -> None:
    """Scenario 17; RFC 97 5.1.2, 6.5.1: as a whole; and it gets another chance."""
    for value in values:
        recorder = Recorder()
        with hub.handle(recorder, **{"topics": "*", name: value}) as registration:
            hub.send("a", "a/b", "a/c/b", x=1)
            assert recorder.topics == []
            assert hub.ignores(registration)
            assert hub.logged(repr(registration.reference), "is ignored", says, level=logging.ERROR)
            registration.update({"event.topics": "a/b"})
            hub.send("a", "a/b")
            assert recorder.topics == ["a/b"]


@table("name", ["event.filter", "filter"])
@own_hub
def test_topic_and_filter_must_both_agree(hub: Hub, name: str) -> None:
    """Scenario 16; RFC 97 5.1.2, 6.5.2. Values that cannot be compared do not match."""
    recorder, other = Recorder(), hub.record()
    hub.services.register(EventHandler, recorder, {"event.topics": "a/*", name: "(x>=2)"})
    for topic, value in (("a/b", 1), ("a/b", 2), ("b/a", 3), ("a/c", 5), ("a/d", Evil())):
        hub.send(topic, x=value)
    hub.send("a/b", X=4)
    assert recorder.of("x") == [2, 5]
    assert len(other.events) == 6


@table("case_sensitive", [False, True])
@own_hub
def test_a_filter_may_be_given_parsed_and_case_still_counts(hub: Hub, case_sensitive: bool) -> None:
    """RFC 97 5.7.1."""
    exact = hub.record(filter=LdapFilter("(Colour=red)", case_sensitive=case_sensitive))
    other = hub.record(filter=LdapFilter("(colour=red)", case_sensitive=case_sensitive))
    hub.send("a", Colour="red")
    assert (exact.topics, other.topics) == (["a"], [])


def test_a_filter_that_raises_keeps_the_event_from_its_handler_only(hub: Hub) -> None:
    broken, other = hub.record(filter=RaisingFilter("(x=1)", case_sensitive=True)), hub.record()
    for publish in (hub.admin.send_event, hub.admin.post_event):
        publish(Event("a"))
    hub.flush()
    assert (broken.topics, other.topics) == ([], ["a", "a"])
    assert len(hub.logged("its filter failed on the event 'a'")) == 2


# --- changes


def test_the_next_event_goes_by_the_new_topics_and_filter(hub: Hub) -> None:
    """Scenarios 17 and 19: as long as its update is wrong, a handler is ignored."""
    recorder = hub.record("a")
    for number, properties in enumerate(
        (
            {"event.topics": "a"},
            {"event.topics": "b"},
            {"event.topics": ["a", "b"], "event.filter": "(n>=3)"},
            {"event.topics": ["a", "b"], "event.filter": "(n>=1)"},
            {"event.topics": "*", "event.filter": "(n="},
            {"event.topics": "a"},
        )
    ):
        recorder.registration.update(properties)
        hub.send("a", "b", n=number)
    received = [*zip(recorder.topics, recorder.numbers, strict=True)]
    assert received == [("a", 0), ("b", 1), ("a", 3), ("b", 3), ("a", 5)]


def test_events_posted_during_an_update_reach_the_handler(hub: Hub) -> None:
    """Scenario 19: a topic that it has before and after the update, it has all the time."""
    recorder = Recorder()
    registration = hub.handle(recorder, ["a/b", "c/*"])
    for number in range(300):
        registration.update({"event.topics": ["a/b", "d"] if number % 2 else ["a/b", "c/*"]})
        hub.send("a/b")
    assert len(recorder.topics) == 300


def test_a_filter_counts_for_the_topics_that_it_was_registered_with(hub: Hub) -> None:
    """The event meets the registration before an update or the one after it, never the topics of one with the other."""
    recorder = Recorder()
    registration = hub.handle(recorder, "a", filter="(n=2)")
    route = hub.admin.dispatcher.route("a")
    registration.update({"event.topics": "b"})  # by another thread, while this one publishes
    assert route.handlers_for(Event("a", {"n": 0})) == []
    assert len(route.handlers_for(Event("a", {"n": 2}))) == 1


def test_handlers_come_and_go(services: ServiceRegistry, hubs: Hubs) -> None:
    """RFC 97 5.1.3: the admin tracks them, and finds those that were there first."""
    first, recorder = record(services), Recorder()
    hub = hubs()
    hub.send("a", n=0)
    registration = hub.handle(recorder)
    hub.send("a", n=1)
    registration.unregister()
    hub.send("a", n=2)
    hub.handle(recorder)
    hub.send("a", n=3)
    assert first.numbers == [0, 1, 2, 3]
    assert recorder.numbers == [1, 3]


def test_handlers_are_called_in_the_order_of_their_ranking(hub: Hub) -> None:
    order: list[str] = []
    hub.handle(lambda event: order.append("first of 0"))
    hub.handle(lambda event: order.append("second of 0"))
    last = hub.handle(lambda event: order.append("last"), ranking=-1)
    hub.handle(lambda event: order.append("highest"), ranking=5)
    hub.send("a")
    assert order == ["highest", "first of 0", "second of 0", "last"]
    order.clear()
    last.update({"event.topics": "*", "service.ranking": 7})
    hub.admin.post_event(Event("a"))
    hub.flush()
    assert order == ["last", "highest", "first of 0", "second of 0"]


def test_a_service_with_two_interfaces_is_one_handler(hub: Hub) -> None:
    recorder = Recorder()
    registration = hub.services.register(
        [EventHandler, "another", EventHandler, Recorder], recorder, {"event.topics": "*"}
    )
    for publish in (hub.admin.send_event, hub.admin.post_event):
        publish(Event("a"))
    hub.flush()
    assert recorder.topics == ["a", "a"]
    assert len(hub.admin.get_dto().handlers) == 1
    registration.unregister()
    hub.send("a")
    assert recorder.topics == ["a", "a"]


def test_one_object_registered_twice_is_two_handlers(hub: Hub) -> None:
    recorder = Recorder()
    hub.handle(recorder, "a")
    hub.handle(recorder, "*")
    hub.send("a", "b")
    assert recorder.topics == ["a", "a", "b"]


# --- several admins


def test_clients_should_use_the_admin_of_the_highest_ranking(services: ServiceRegistry, hubs: Hubs) -> None:
    """Scenario 20; RFC 97 5.1.3: on a tie the oldest."""
    assert services.service(EventAdmin) is None
    first = hubs()
    assert services.service(EventAdmin) is first.admin
    second, best = hubs(), hubs(ranking=3)
    assert services.service(EventAdmin) is best.admin
    best.admin.close()
    assert services.service(EventAdmin) is first.admin
    first.admin.close()
    assert services.service(EventAdmin) is second.admin


def test_handlers_get_the_events_of_all_admins_they_do_not_exclude(hubs: Hubs) -> None:
    """Two in one registry do not get in each other's way."""
    one, other = hubs(name="one"), hubs(name="other")
    both, only = one.record(), Recorder()
    registration = one.handle(only, target="(event.admin.name=one)")
    for hub in (one, other):
        hub.admin.post_event(Event(f"from/{hub.admin.name}"))
        hub.flush()
    assert both.topics == ["from/one", "from/other"]
    assert only.topics == ["from/one"]
    registration.update({"event.topics": "*", "event.target": "(event.admin.name=other)"})
    for hub in (one, other):
        hub.send(f"later/from/{hub.admin.name}")
    assert only.topics == ["from/one", "later/from/other"]
    one.admin.close()
    other.send("still")
    assert both.topics[-1] == only.topics[-1] == "still"


def test_two_admins_may_deliver_to_one_handler_at_the_same_time(hubs: Hubs) -> None:
    """They have nothing in common but the registry: order is that of each."""
    one, other = hubs(), hubs()
    gate = one.gate()
    one.admin.post_event(Event("a"))
    other.admin.post_event(Event("b"))
    gate.wait()
    gate.wait()
    gate.opened.set()
    assert sorted(gate.topics) == ["a", "b"]


# --- what events are


@table("publish", ["post_event", "send_event"])
@own_hub
def test_objects_that_are_no_events_are_refused(hub: Hub, publish: str) -> None:
    for wrong, problem in (("a/b", "of type str"), ({"event.topics": "a"}, "of type dict"), (None, "not None")):
        with pytest.raises(ValueError, match=problem):
            getattr(hub.admin, publish)(wrong)


def test_handlers_get_the_event_itself(hub: Hub) -> None:
    """RFC 97 7.2: of whatever class it is."""

    class Question(SameEvent):
        answer = 0

    def answer(event: Event) -> None:
        assert isinstance(event, Question)
        event.answer = 42

    hub.handle(answer)
    question = Question("a")
    hub.admin.send_event(question)
    assert question.answer == 42


def test_the_dto_tells_about_handlers(hub: Hub) -> None:
    gate = hub.gate(topics=["a/*", "b"], filter="( x =1)", ranking=1)
    second, third = hub.record(delivery="async.unordered"), hub.record(["a/b"])
    for _ in range(3):
        hub.admin.post_event(Event("a/b", {"x": "1"}))
    gate.wait()
    eventually(lambda: hub.dto(second).waiting == 0, "the unordered one does not wait")
    mine, other = hub.dto(gate), hub.dto(third)
    assert (mine.kind, mine.topics, mine.filter) == ("EventHandler", ("a/*", "b"), "(x=1)")
    assert mine.name == f"{gate.registration.reference!r} (Gate.handle_event)"
    assert (mine.waiting, other.waiting, hub.admin.get_dto().waiting) == (2, 3, 5)
    assert (mine.blocked, mine.failures, mine.dropped, mine.principal) == (None, 0, 0, None)
    assert hub.admin.get_dto().name == hub.admin.name
    eventually(lambda: 1 <= hub.admin.get_dto().threads <= 2, "one that found nothing to do has left")
    gate.opened.set()
    hub.admin.flush().result(PATIENCE)
    assert hub.admin.get_dto().waiting == 0
