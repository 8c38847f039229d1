"""What all grammars of topics have in common, and what takes a grammar: permissions, policies and dispatchers."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.dispatch import (
    DISTRIBUTED_EVENTS,
    EVENT_ADMIN,
    TYPED_EVENTS,
    Dispatcher,
    DispatchHandler,
    Terms,
    Tolerance,
    TopicFilter,
    TopicGrammar,
    TopicPermission,
    TopicPermissionCollection,
    TopicPolicy,
    check_topic,
    is_topic,
    parse_filter,
    read_topics,
)
from messaging.errors import ArgumentError, InvalidTopicError, MessagingError, PermissionDeniedError
from messaging.eventadmin import EventAdmin
from messaging.execution import Lane
from messaging.services import ServiceProperties, ServiceReference, ServiceRegistry
from messaging.testing.tables import table
from messaging.typedevent import TypedEventBus

GRAMMARS: Final = [TYPED_EVENTS, EVENT_ADMIN, DISTRIBUTED_EVENTS]
OF_ANY_GRAMMAR: Final = table("grammar", GRAMMARS, ids=repr)
BOTH: Final = "publish,subscribe"


# --- grammars


@OF_ANY_GRAMMAR
def test_a_grammar_is_one_object_however_it_is_copied(grammar: TopicGrammar[Any]) -> None:
    assert copy.copy(grammar) is grammar
    assert copy.deepcopy([grammar])[0] is grammar
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(grammar, protocol)) is grammar
    assert eval(repr(grammar), globals()) is grammar


@OF_ANY_GRAMMAR
def test_filters_are_remembered_up_to_a_limit(grammar: TopicGrammar[Any]) -> None:
    first = grammar.parse("a/b")
    assert grammar.parse("a/b") is first
    assert grammar.make_filter("a/b") is not first
    for number in range(5_000):
        grammar.parse(f"many/{number}")
    assert grammar.parse("a/b") is not first
    assert grammar.parse("a/b") == first


@OF_ANY_GRAMMAR
def test_a_filter_can_be_pickled(grammar: TopicGrammar[Any]) -> None:
    for text in ("a/b", "a/*", "*"):
        parsed = grammar.parse(text)
        for same in (copy.copy(parsed), copy.deepcopy(parsed), pickle.loads(pickle.dumps(parsed))):
            assert same == parsed
            assert [same.matches(topic) for topic in ("a", "a/b", "c")] == [
                parsed.matches(topic) for topic in ("a", "a/b", "c")
            ]


def test_the_functions_without_a_grammar_are_those_of_typed_events() -> None:
    assert parse_filter("a/+") is TYPED_EVENTS.parse("a/+")
    for topic in ("a_b", "é", "a-b"):
        assert check_topic(topic) == TYPED_EVENTS.check_topic(topic) == topic
        assert is_topic(topic)
        assert EVENT_ADMIN.is_topic(topic)
        assert not DISTRIBUTED_EVENTS.is_topic(topic)


def test_topics_are_read_by_the_grammar_of_their_service() -> None:
    assert read_topics(["a/+", "b"], "event.topics") == (TopicFilter("a/+"), TopicFilter("b"))
    assert read_topics("a/b**", "event.topics", DISTRIBUTED_EVENTS) == (DISTRIBUTED_EVENTS.parse("a/b**"),)
    assert read_topics(None, "event.topics", DISTRIBUTED_EVENTS) is None
    for value, grammar in (("a/b**", TYPED_EVENTS), ("a/+", EVENT_ADMIN), (["a", "a/+"], DISTRIBUTED_EVENTS)):
        with pytest.raises(InvalidTopicError):
            read_topics(value, "event.topics", grammar)
    with pytest.raises(ArgumentError, match=r"event\.topics is empty"):
        read_topics([], "event.topics", DISTRIBUTED_EVENTS)


# --- permissions


def test_a_permission_of_distributed_events_includes_by_prefix() -> None:
    permission = TopicPermission("foo/ba**", "publish", grammar=DISTRIBUTED_EVENTS)
    assert permission.name == "foo/ba**"
    assert permission.grammar is DISTRIBUTED_EVENTS

    def implied(name: str, actions: str = "publish") -> bool:
        return permission.implies(TopicPermission(name, actions, DISTRIBUTED_EVENTS))

    for name in ("foo/ba", "foo/bar", "foo/bar/x", "foo/ba*", "foo/ba/**", "foo/ba**"):
        assert implied(name)
        assert not implied(name, BOTH)
    for name in ("foo", "foo/b**", "foo/*", "**", ".foo"):
        assert not implied(name)


def test_a_permission_of_all_topics_includes_no_private_one() -> None:
    everything = TopicPermission("**", BOTH, grammar=DISTRIBUTED_EVENTS)
    private = TopicPermission(".a-1", "publish", grammar=DISTRIBUTED_EVENTS)
    assert not everything.implies(private)
    assert TopicPermission(".a-1", BOTH, grammar=DISTRIBUTED_EVENTS).implies(private)


@given(st.sampled_from(["a", "a/b", "a/*", "*"]), st.sampled_from(["publish", "subscribe", BOTH]))
def test_permissions_of_different_grammars_neither_are_equal_nor_imply_each_other(name: str, actions: str) -> None:
    for mine, theirs in itertools.product(GRAMMARS, repeat=2):
        one, other = TopicPermission(name, actions, mine), TopicPermission(name, actions, theirs)
        assert (one == other) is (mine is theirs)
        assert one.implies(other) is (mine is theirs)
        assert TopicPermissionCollection([one]).implies(other) is (mine is theirs)
        assert len(TopicPermissionCollection([one, other])) == len({mine, theirs}) == len({one, other})


@OF_ANY_GRAMMAR
def test_permissions_of_any_grammar_can_be_copied(grammar: TopicGrammar[Any]) -> None:
    permission = TopicPermission("a/*", "subscribe", grammar=grammar)
    for same in (copy.copy(permission), copy.deepcopy(permission), pickle.loads(pickle.dumps(permission))):
        assert same == permission
        assert hash(same) == hash(permission)
        assert same.grammar is grammar
        assert same.implies(permission)
    assert eval(repr(permission), globals()) == permission
    assert ("grammar" in repr(permission)) is (grammar is not TYPED_EVENTS)


@table("odd", [None, "DISTRIBUTED_EVENTS", 5, object(), TopicGrammar])
def test_a_grammar_that_is_none_is_refused(odd: Any) -> None:
    for make in (
        lambda: TopicPermission("a", "publish", grammar=odd),
        lambda: TopicPolicy(grammar=odd),
        lambda: dispatcher_of(ServiceRegistry(), grammar=odd),
    ):
        with pytest.raises(ArgumentError, match="grammar must be a TopicGrammar"):
            make()


def test_a_permission_is_checked_by_its_grammar() -> None:
    for name, grammar in (("a/b**", TYPED_EVENTS), ("a/+", EVENT_ADMIN), ("a_b", DISTRIBUTED_EVENTS)):
        with pytest.raises(InvalidTopicError):
            TopicPermission(name, "publish", grammar)


# --- policies


def test_a_policy_grants_permissions_of_its_grammar_only() -> None:
    granted = TopicPermission("foo/**", "publish", grammar=DISTRIBUTED_EVENTS)
    policy = TopicPolicy({"meter": [granted]}, grammar=DISTRIBUTED_EVENTS)
    assert policy.grammar is DISTRIBUTED_EVENTS
    policy.check("meter", TopicPermission("foo/a/b", "publish", grammar=DISTRIBUTED_EVENTS))
    typed = TopicPermission("foo/a", "publish")
    assert not policy.permits("meter", typed)
    with pytest.raises(PermissionDeniedError):
        policy.check("meter", typed)
    told: list[int] = []
    policy.on_change(lambda: told.append(1))
    with pytest.raises(ArgumentError, match=r"of the grammar DISTRIBUTED_EVENTS cannot grant TopicPermission\('foo/a'"):
        policy.grant("meter", TopicPermission("b", "publish", grammar=DISTRIBUTED_EVENTS), typed)
    assert not policy.permits("meter", TopicPermission("b", "publish", grammar=DISTRIBUTED_EVENTS))
    assert told == []
    with pytest.raises(ArgumentError, match="of the grammar TYPED_EVENTS cannot grant"):
        TopicPolicy({"meter": [granted]})


@table("service", [TypedEventBus, EventAdmin])
def test_a_service_refuses_a_policy_of_another_grammar(service: Callable[..., Any]) -> None:
    """It would deny everything."""
    with pytest.raises(ArgumentError, match="needs a TopicPolicy of the grammar TYPED_EVENTS, not of DISTRIBUTED_EVE"):
        service(ServiceRegistry(), permissions=TopicPolicy(grammar=DISTRIBUTED_EVENTS))


# --- dispatchers


class Consumer:
    """The interface of the handlers of these tests."""


def terms_of(properties: Mapping[str, Any], grammar: TopicGrammar[Any]) -> Terms:
    """Return the terms that properties set."""
    topics = read_topics(properties.get("event.topics"), "event.topics", grammar)
    return Terms(topics, None, properties.get("principal"), None)


class ConsumerHandler(DispatchHandler[str]):
    """A handler that is only found."""

    grammar: TopicGrammar[Any] = TYPED_EVENTS

    @property
    def name(self) -> str:
        return str(self.reference.properties["name"])

    @property
    def waiting(self) -> int:
        return 0

    @property
    def dropped(self) -> int:
        return 0

    def change(self, properties: Mapping[str, Any]) -> Callable[[], object]:
        terms = terms_of(properties, self.grammar)
        return lambda: setattr(self, "terms", terms)

    def removed(self) -> None:
        """Hold no events."""

    def unblock(self) -> None:
        """Never block."""

    def discard_waiting(self, lane: Lane) -> int:
        return 0

    def describe(self, event: str) -> str:
        return event


def dispatcher_of(services: ServiceRegistry, **options: Any) -> Dispatcher[ConsumerHandler, list[str]]:
    """Return a dispatcher whose routes are the names of the handlers."""
    grammar = options.get("grammar", TYPED_EVENTS)

    def make(reference: ServiceReference, _: str, properties: ServiceProperties) -> ConsumerHandler:
        made = ConsumerHandler(
            "consumers", reference, terms_of(properties, grammar), tolerance=Tolerance(), block=lambda *_: None
        )
        made.grammar = grammar
        return made

    return Dispatcher(
        "consumers",
        services,
        (Consumer,),
        announced={},
        make=make,
        route=lambda _, handlers: [each.name for each, _ in handlers],
        **options,
    )


def test_a_dispatcher_finds_handlers_by_its_grammar() -> None:
    """Scenarios 18 to 20: overlapping filters of one handler, wildcards, and private topics."""
    services = ServiceRegistry()
    dispatcher = dispatcher_of(services, grammar=DISTRIBUTED_EVENTS)
    wanted = {"all": "**", "bar": ["foo/bar*", "foo/ba**", "foo/bar"], "level": "foo/*", "private": [".p", "foo"]}
    registered = {
        name: services.register(Consumer, Consumer(), {"name": name, "event.topics": topics})
        for name, topics in wanted.items()
    }
    services.register(Consumer, Consumer(), {"name": "invalid", "event.topics": "foo/+"})
    dispatcher.open()
    assert dispatcher.route("foo/bark") == ["all", "bar", "level"]
    assert dispatcher.route("foo/bar/x") == ["all", "bar"]
    assert dispatcher.route("foo") == ["all", "private"]
    assert dispatcher.route(".p") == ["private"]
    registered["bar"].update({"name": "bar", "event.topics": "foo/bar"})
    registered["all"].unregister()
    assert dispatcher.route("foo/bark") == ["level"]
    assert dispatcher.route("foo/bar") == ["bar", "level"]
    for topic in ("foo/*", "foo_bar", ".p+q"):
        with pytest.raises(InvalidTopicError):
            dispatcher.route(topic)
    dispatcher.close()
    assert dispatcher.route("foo/bar") == []


def test_a_dispatcher_checks_permissions_of_its_grammar() -> None:
    services = ServiceRegistry()
    policy = TopicPolicy(
        {
            "reader": [TopicPermission("foo/**", "subscribe", grammar=DISTRIBUTED_EVENTS)],
            "writer": [TopicPermission("foo*", "publish", grammar=DISTRIBUTED_EVENTS)],
        },
        grammar=DISTRIBUTED_EVENTS,
    )
    dispatcher = dispatcher_of(services, grammar=DISTRIBUTED_EVENTS, policy=policy)
    for principal in ("reader", "writer"):
        properties = {"name": principal, "event.topics": ["**", ".p"], "principal": principal}
        services.register(Consumer, Consumer(), properties)
    dispatcher.open()
    assert dispatcher.route("foo/a/b") == ["reader"]
    assert dispatcher.route("foo") == []
    assert dispatcher.route(".p") == []
    dispatcher.check("writer", "publish", "food")
    for principal, topic in (("writer", "foo/a"), ("writer", ".p"), ("reader", "foo/a"), (None, "food")):
        with pytest.raises(PermissionDeniedError):
            dispatcher.check(principal, "publish", topic)
    policy.grant("reader", TopicPermission(".p", "subscribe", grammar=DISTRIBUTED_EVENTS))
    assert dispatcher.route(".p") == ["reader"]
    with pytest.raises(MessagingError):
        dispatcher.check("writer", "publish", "foo_a")
    dispatcher.close()
