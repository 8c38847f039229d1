"""Topics and topic filters, against naive readings of 157.3.1, 157.4.3 and 157.6.2.1."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.dispatch.topics import EVENT_ADMIN, TYPED_EVENTS, TopicFilter, check_topic, is_topic, parse_filter
from messaging.dispatch.trie import TopicTrie
from messaging.errors import ArgumentError, InvalidTopicError, NullEventError
from tests.dispatch.helpers import FILTERS, NEITHER, TOPICS, look_while_it_changes

# --- grammar


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_a_filter_for_itself_only(topic: str) -> None:
    check_topic(topic)
    assert is_topic(topic)
    exact = TopicFilter(topic)
    assert not exact.has_wildcard
    assert exact.matches(topic)
    assert not any(exact.matches(other) for other in TOPICS if other != topic)


@pytest.mark.parametrize("text", NEITHER)
def test_a_text_outside_the_grammar_is_neither_topic_nor_filter(text: str) -> None:
    """Scenarios 2 and 5 of the bus, 1 of Event Admin; 157.3.1, 157.4.3."""
    assert not is_topic(text)
    with pytest.raises(InvalidTopicError) as caught:
        check_topic(text)
    assert type(caught.value) is InvalidTopicError
    assert isinstance(caught.value, ArgumentError)
    assert caught.value.topic == text
    for parse in (TopicFilter, TYPED_EVENTS.parse, EVENT_ADMIN.parse):
        with pytest.raises(InvalidTopicError):
            parse(text)


@pytest.mark.parametrize("text", FILTERS)
def test_wildcards_are_for_handlers(text: str) -> None:
    """Scenario 4."""
    assert TopicFilter(text).has_wildcard
    assert not is_topic(text)
    with pytest.raises(InvalidTopicError, match="wildcards are for handlers"):
        check_topic(text)


@pytest.mark.parametrize("text", [*FILTERS, *TOPICS])
def test_event_admin_has_no_single_level_wildcard(text: str) -> None:
    """RFC 97, 5.1.2."""
    if "+" in text:
        for parse in (EVENT_ADMIN.parse, EVENT_ADMIN.make_filter):
            with pytest.raises(InvalidTopicError, match="Event Admin"):
                parse(text)
    else:
        assert EVENT_ADMIN.parse(text) == TopicFilter(text)


@pytest.mark.parametrize("call", [check_topic, TopicFilter, parse_filter])
@pytest.mark.parametrize("value", [None, 5, b"a", ["a"], {}, object()])
def test_none_and_other_types_are_no_topics(call: Any, value: Any) -> None:
    """Scenario 1; 157.5.1. What has no hash is no ``TypeError``."""
    with pytest.raises(NullEventError if value is None else InvalidTopicError):
        call(value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "an empty token at position 0"),
        ("/a", "an empty token at position 0"),
        ("a//b", "an empty token at position 2"),
        ("a/b/", "an empty token at position 4"),
        ("a/b c", "' ' at position 3"),
        ("é/é\n", r"'\\n' at position 3"),
        ("a/*", r"'\*' at position 2; wildcards are for handlers"),
        ("+", r"'\+' at position 0; wildcards are for handlers"),
    ],
)
def test_the_error_of_a_topic_names_fault_and_position(text: str, told: str) -> None:
    with pytest.raises(InvalidTopicError, match=f"{told}$"):
        check_topic(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a//b", "level 2 of 'a//b' is empty"),
        ("", "level 1 of '' is empty"),
        ("*/a", r"level 1 of '\*/a' is '\*', which may only be the last one"),
        ("a/b*", r"level 2 of 'a/b\*' is 'b\*': a wildcard stands alone between solidi"),
        ("a.b/c", "level 1 of 'a.b/c' is 'a.b': only letters, digits, '_', '\\$' and '-' are allowed"),
    ],
)
def test_the_error_of_a_filter_names_fault_and_level(text: str, told: str) -> None:
    with pytest.raises(InvalidTopicError, match=told):
        TopicFilter(text)


def test_errors_of_long_texts_are_short() -> None:
    for call in (check_topic, TopicFilter):
        with pytest.raises(InvalidTopicError) as caught:
            call("x" * 100_000 + ".")
        assert len(str(caught.value)) < 400


@given(st.text(max_size=8) | st.text("ab/+*$ é\n", max_size=8))
def test_the_grammar_agrees_with_a_naive_reading(text: str) -> None:
    def is_token(token: str) -> bool:
        return token != "" and all(char in "-_$" or (char + "x").isidentifier() or char.isdecimal() for char in token)

    tokens = text.split("/")
    if text.isascii():
        assert is_topic(text) is all(map(is_token, tokens))
    levels = tokens[:-1] if tokens[-1] == "*" else tokens
    expected = all(level == "+" or is_topic(level) for level in levels)
    try:
        TopicFilter(text)
    except InvalidTopicError:
        assert not expected
    else:
        assert expected


# --- what matches what


TOKENS = st.sampled_from(["a", "b", "ab", "$", "-", "é", "A"])
PATHS = st.lists(TOKENS, min_size=1, max_size=5).map("/".join)
WILD = st.builds(
    lambda levels, tail: "/".join([*levels, *tail]),
    st.lists(TOKENS | st.just("+"), max_size=4),
    st.sampled_from([[], ["*"]]),
).filter(bool)


def naive(wanted: list[str], topic: list[str]) -> bool:
    """157.4.3, token by token."""
    if not wanted or not topic:
        return wanted == topic
    if wanted == ["*"]:
        return True
    return wanted[0] in ("+", topic[0]) and naive(wanted[1:], topic[1:])


@given(WILD, PATHS)
def test_matching_agrees_with_a_naive_reading(text: str, topic: str) -> None:
    """Scenario 44; 157.4.3.1, 157.4.3.2."""
    assert TopicFilter(text).matches(topic) is naive(text.split("/"), topic.split("/"))


def test_a_filter_is_its_text() -> None:
    wanted = TopicFilter("a/+/*")
    assert wanted == TopicFilter("a/+/*") == parse_filter("a/+/*")
    assert wanted != TopicFilter("a/*")
    assert wanted != "a/+/*"
    assert len({wanted, TopicFilter("a/+/*"), TopicFilter("a")}) == 2
    assert repr(wanted) == "TopicFilter('a/+/*')"
    assert (wanted.text, wanted.tokens) == ("a/+/*", ("a", "+", "*"))


def test_parsed_filters_are_remembered_and_errors_are_not() -> None:
    assert parse_filter("x/+/y") is TYPED_EVENTS.parse("x/+/y")
    for _ in range(2):
        with pytest.raises(InvalidTopicError):
            EVENT_ADMIN.parse("x/+/y")
    assert parse_filter("x/+/y").has_wildcard


def test_filters_of_a_thousand_levels_match_in_linear_time() -> None:
    tokens = ["x"] * 1_000
    wanted = TopicFilter("/".join(["+"] * 999) + "/*")
    started = time.perf_counter()
    assert wanted.matches("/".join(tokens))
    assert not wanted.matches("/".join(tokens[1:]))
    assert not wanted.matches("/".join(tokens[:-1]) + "/")
    assert time.perf_counter() - started < 1


# --- what implies what


#: every topic that there is of these tokens; filters are made of all but one of them, which stands for any other
ALL_TOPICS = ["/".join(tokens) for length in range(1, 5) for tokens in itertools.product("abc", repeat=length)]
ALL_FILTERS = [
    "/".join([*levels, *tail])
    for length in range(4)
    for levels in itertools.product("ab+", repeat=length)
    for tail in ([], ["*"])
    if levels or tail
]


def test_one_filter_implies_another_if_it_matches_all_that_the_other_does() -> None:
    """Scenarios 85 and 87; 157.8.1: every pair of up to three levels, with every topic that tells them apart."""
    matched = {
        text: {topic for topic in ALL_TOPICS if naive(text.split("/"), topic.split("/"))} for text in ALL_FILTERS
    }
    parsed = {text: TopicFilter(text) for text in ALL_FILTERS}
    for mine, theirs in itertools.product(ALL_FILTERS, repeat=2):
        assert parsed[mine].implies(parsed[theirs]) is (matched[mine] >= matched[theirs]), (mine, theirs)


# --- the trie


def most_specific(filters: list[str], topic: str) -> str | None:
    """The algorithm of 157.6.2.1, step by step."""
    retained = [(text.split("/"), text) for text in filters if naive(text.split("/"), topic.split("/"))]
    for token in topic.split("/"):
        for preferred in (token, "+", "*"):
            kept = [(tokens, text) for tokens, text in retained if tokens[:1] == [preferred]]
            if kept:
                break
        else:
            return None
        if preferred == "*":
            return kept[0][1]
        retained = [(tokens[1:], text) for tokens, text in kept]
    return retained[0][1] if retained else None


@given(st.lists(WILD, unique=True, max_size=12), PATHS)
def test_the_trie_agrees_with_a_naive_search(filters: list[str], topic: str) -> None:
    """Scenarios 42 and 43, 15 of Event Admin: overlapping filters, and filters with the same literal prefix."""
    trie: TopicTrie[str] = TopicTrie()
    for text in filters:
        trie.add(TopicFilter(text), text)
    expected = [text for text in filters if naive(text.split("/"), topic.split("/"))]
    assert sorted(trie.match(topic)) == sorted(expected)
    assert trie.preferred(topic) == most_specific(filters, topic)
    in_order = sorted(map(TopicFilter, filters), key=lambda each: each.order)
    assert next((each.text for each in in_order if each.matches(topic)), None) == trie.preferred(topic)


@given(st.lists(st.tuples(st.booleans(), WILD, st.integers(0, 2)), max_size=40), PATHS)
def test_the_trie_holds_the_added_values_that_were_not_removed(steps: list[tuple[bool, str, int]], topic: str) -> None:
    """Scenario 46: without any values, no nodes are left."""
    trie: TopicTrie[int] = TopicTrie()
    held: set[tuple[str, int]] = set()
    for is_added, text, value in steps:
        if is_added:
            trie.add(TopicFilter(text), value)
            held.add((text, value))
        else:
            trie.remove(TopicFilter(text), value)
            held.discard((text, value))
    expected = {value for text, value in held if naive(text.split("/"), topic.split("/"))}
    found = trie.match(topic)
    assert set(found) == expected
    assert len(found) == len(expected)
    for text, value in held:
        trie.remove(TopicFilter(text), value)
    assert len(trie) == 0


def test_values_of_one_filter_come_in_the_order_they_were_added() -> None:
    trie: TopicTrie[int] = TopicTrie()
    for text in ("a/b", "a/+", "a/*", "*"):
        for value in (3, 1, 2, 1):
            trie.add(TopicFilter(text), value)
        assert trie.match("a/b") == [3, 1, 2]
        for value in (1, 2, 3):
            trie.remove(TopicFilter(text), value)
        assert trie.match("a/b") == []
        assert len(trie) == 0


def test_removing_an_unknown_value_changes_nothing() -> None:
    trie: TopicTrie[int] = TopicTrie()
    trie.add(TopicFilter("a/b"), 1)
    for text, value in (("a/b", 2), ("a/b/c/d", 1), ("x/y/*", 1), ("a/*", 1), ("*", 1), ("a", 1)):
        trie.remove(TopicFilter(text), value)
    assert len(trie) == 2
    assert trie.match("a/b") == [1]


def test_the_filter_of_a_topic_is_preferred_to_wildcards() -> None:
    """157.6.2.1: from left to right, exact before ``+`` before ``*``."""
    trie: TopicTrie[str] = TopicTrie()
    order = ["a/b/c", "a/b/+", "a/b/*", "a/+/c", "a/+/+", "a/+/*", "a/*", "+/b/c", "+/b/*", "+/+/+", "+/*", "*"]
    for text in reversed(order):
        trie.add(TopicFilter(text), text)
    for number, text in enumerate(order):
        assert trie.preferred("a/b/c") == text
        assert sorted(map(TopicFilter, order[number:]), key=lambda each: each.order)[0].text == text
        trie.remove(TopicFilter(text), text)
    assert trie.preferred("a/b/c") is None


def test_finding_a_topic_does_not_take_longer_with_thousands_of_filters() -> None:
    few: TopicTrie[int] = TopicTrie()
    many: TopicTrie[int] = TopicTrie()
    for number in range(2_000):
        for trie in (few, many)[number >= 10 :]:
            trie.add(TopicFilter(f"shop/{number}/*"), number)
            trie.add(TopicFilter(f"+/{number}/sold"), -number)

    def seconds(trie: TopicTrie[int]) -> float:
        started = time.perf_counter()
        for _ in range(200):
            assert trie.match("shop/5/sold") == [5, -5]
        return time.perf_counter() - started

    # in turns; the best of many
    times = [(seconds(few), seconds(many)) for _ in range(20)]
    assert min(slow for _, slow in times) < 5 * min(quick for quick, _ in times)


def test_other_threads_may_look_while_it_changes() -> None:
    trie: TopicTrie[int] = TopicTrie()
    for text in ("a/b/c", "a/+/c", "*"):
        trie.add(TopicFilter(text), -1)
    filters = [TopicFilter(text) for text in ("a/b/c", "a/b/*", "a/*", "*", "+/b/c", "+/+/c", "a/b/+", "+/*")]
    look_while_it_changes(trie, filters, "a/b/c")
    assert len(trie) == 5
