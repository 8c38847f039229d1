"""The indexes that find the filters of a topic, of each grammar, against naive searches (157.6.2.1; RFC 214)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from hypothesis import given
from hypothesis import strategies as st

from messaging.dispatch import PrefixFilter, PrefixIndex, TopicFilter, TopicIndex
from messaging.dispatch.topics import TopicTrie
from messaging.testing.tables import table
from tests.dispatch import test_distributed_topics, test_topics
from tests.dispatch.helpers import look_while_it_changes


@dataclass(frozen=True)
class Kind:
    """A kind of index with its filters, and a naive reading of both."""

    make: Callable[[], TopicIndex[Any, Any]]
    parse: Callable[[str], Any]
    naive: Callable[[str, str], bool]
    most_specific: Callable[[list[str], str], str | None]
    filters: st.SearchStrategy[str]
    topics: st.SearchStrategy[str]
    #: filters of the first of them, the preferred one first
    preferred: list[str]
    #: filters of ``a/b``
    filters_of_one: list[str]
    #: with one value for ``a/b``: filters and values that it does not have
    unknown: list[tuple[str, int]]
    #: filters of the shop of a number
    many: list[str]
    #: filters that match ``a/b/c`` all the time, and that come and go
    stay: list[str]
    change: list[str]


TRIE: Final = Kind(
    TopicTrie,
    TopicFilter,
    lambda text, topic: test_topics.naive(text.split("/"), topic.split("/")),
    test_topics.most_specific,
    test_topics.WILD,
    test_topics.PATHS,
    ["a/b/c", "a/b/+", "a/b/*", "a/+/c", "a/+/+", "a/+/*", "a/*", "+/b/c", "+/b/*", "+/+/+", "+/*", "*"],
    ["a/b", "a/+", "a/*", "*"],
    [("a/b", 2), ("a/b/c/d", 1), ("x/y/*", 1), ("a/*", 1), ("*", 1), ("a", 1)],
    ["shop/{}/*", "+/{}/sold"],
    ["a/b/c", "a/+/c", "*"],
    ["a/b/c", "a/b/*", "a/*", "*", "+/b/c", "+/+/c", "a/b/+", "+/*"],
)
PREFIXES: Final = Kind(
    PrefixIndex,
    PrefixFilter,
    test_distributed_topics.naive,
    test_distributed_topics.most_specific,
    test_distributed_topics.FILTERS,
    test_distributed_topics.TOPICS | test_distributed_topics.PRIVATES,
    ["a/bc", "a/bc*", "a/bc**", "a/b*", "a/b**", "a/*", "a/**", "a**", "**"],
    ["a/b", "a/b*", "a/**", "**"],
    [("a/b", 2), ("a/*", 1), ("a/**", 1), ("x/y*", 1), ("a/b*", 1), ("**", 1), ("a", 1), (".a", 1)],
    ["shop/{}/*", "shop/{}/so**", "shop/{}/sold/{}*", "shop/{}/sold"],
    ["a/b/c", "a/b/*", "**"],
    ["a/b/c", "a/b/c*", "a/b**", "a/b/**", "a**", "**", "a/b/*", "a/**"],
)
EACH_KIND: Final = table("kind", {"trie": TRIE, "prefixes": PREFIXES})


@EACH_KIND
@given(st.data())
def test_scenario_18_the_index_agrees_with_a_naive_search(kind: Kind, data: st.DataObject) -> None:
    """Scenarios 42 and 43, 15 of Event Admin, 18 of distributed events; 157.6.2.1.

    Overlapping filters, filters with the same literal prefix, and one consumer with several filters: each value once.
    """
    filters = data.draw(st.lists(kind.filters, unique=True, max_size=12))
    topic = data.draw(kind.topics)
    index = kind.make()
    for text in filters:
        index.add(kind.parse(text), text)
        index.add(kind.parse(text), "consumer of all")
    expected = [text for text in filters if kind.naive(text, topic)]
    assert sorted(index.match(topic)) == sorted([*expected, *(["consumer of all"] if expected else [])])
    for text in filters:
        index.remove(kind.parse(text), "consumer of all")
    assert index.preferred(topic) == kind.most_specific(filters, topic)
    in_order = sorted(map(kind.parse, filters), key=lambda each: each.order)
    assert next((each.text for each in in_order if each.matches(topic)), None) == index.preferred(topic)


@EACH_KIND
@given(st.data())
def test_the_index_holds_the_added_values_that_were_not_removed(kind: Kind, data: st.DataObject) -> None:
    """Scenario 46: without any values, no nodes are left."""
    steps = data.draw(st.lists(st.tuples(st.booleans(), kind.filters, st.integers(0, 2)), max_size=40))
    topics = data.draw(st.lists(kind.topics, min_size=1, max_size=5))
    index = kind.make()
    held: set[tuple[str, int]] = set()
    for is_added, text, value in steps:
        (index.add if is_added else index.remove)(kind.parse(text), value)
        (held.add if is_added else held.discard)((text, value))
        for topic in topics:
            found = index.match(topic)
            assert len(found) == len(set(found))
            assert set(found) == {value for text, value in held if kind.naive(text, topic)}
            assert (index.preferred(topic) is not None) is bool(found)
        if kind is PREFIXES:
            assert len(index) == len({(text.rstrip("*"), text.endswith("*")) for text, _ in held})
    for text, value in held:
        index.remove(kind.parse(text), value)
    assert len(index) == 0


@EACH_KIND
def test_values_of_one_filter_come_in_the_order_they_were_added(kind: Kind) -> None:
    index = kind.make()
    for text in kind.filters_of_one:
        for value in (3, 1, 2, 1):
            index.add(kind.parse(text), value)
        assert index.match("a/b") == [3, 1, 2]
        for value in (1, 2, 3):
            index.remove(kind.parse(text), value)
        assert index.match("a/b") == []
        assert len(index) == 0


@EACH_KIND
def test_removing_an_unknown_value_changes_nothing(kind: Kind) -> None:
    index = kind.make()
    index.add(kind.parse("a/b"), 1)
    size = len(index)
    for text, value in kind.unknown:
        index.remove(kind.parse(text), value)
    assert len(index) == size
    assert index.match("a/b") == [1]
    index.add(kind.parse("a/*"), 1)
    size = len(index)
    index.remove(kind.parse("a/*"), 2)
    assert len(index) == size
    assert index.match("a/x") == [1]


@EACH_KIND
def test_the_filter_of_a_topic_is_preferred_to_wildcards(kind: Kind) -> None:
    """157.6.2.1: from left to right, exact before ``+`` before ``*``. Of prefixes, the longest one."""
    index = kind.make()
    topic, order = kind.preferred[0], kind.preferred
    for text in reversed(order):
        index.add(kind.parse(text), text)
    for number, text in enumerate(order):
        assert index.preferred(topic) == text
        assert sorted(index.match(topic)) == sorted(order[number:])
        assert kind is TRIE or index.match(topic) == order[number:]
        assert sorted(map(kind.parse, order[number:]), key=lambda each: each.order)[0].text == text
        index.remove(kind.parse(text), text)
    assert index.preferred(topic) is None


@EACH_KIND
def test_finding_a_topic_does_not_take_longer_with_thousands_of_filters(kind: Kind) -> None:
    few, many = kind.make(), kind.make()
    for number in range(1_000, 3_000):
        for index in (few, many)[number >= 1_010 :]:
            for value, text in enumerate(kind.many):
                index.add(kind.parse(text.format(number, number)), (number, value))

    def seconds(index: TopicIndex[Any, Any]) -> float:
        started = time.perf_counter()
        for _ in range(200):
            assert {number for number, _ in index.match("shop/1005/sold")} == {1005}
        return time.perf_counter() - started

    # in turns; the best of many
    times = [(seconds(few), seconds(many)) for _ in range(20)]
    assert min(slow for _, slow in times) < 5 * min(quick for quick, _ in times)


@EACH_KIND
def test_other_threads_may_look_while_it_changes(kind: Kind) -> None:
    index = kind.make()
    for text in kind.stay:
        index.add(kind.parse(text), -1)
    size = len(index)
    look_while_it_changes(index, [kind.parse(text) for text in kind.change], "a/b/c")
    assert len(index) == size
