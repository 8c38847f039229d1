"""The topics, filters and index of RFC 214, against naive readings of 5.1.1, 5.1.3 and 5.2.2."""

from __future__ import annotations

import itertools
import re
import string
import time
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from messaging.dispatch import (
    DISTRIBUTED_EVENTS,
    PrefixFilter,
    PrefixIndex,
    TopicFilter,
    is_private_topic,
)
from messaging.errors import ArgumentError, InvalidTopicError, NullEventError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE

ALPHANUM: Final = frozenset(string.ascii_letters + string.digits)
PUBLIC: Final = ["a", "Z", "0", "foo", "foo/bar", "foo/bark", "foo/bar/foobar", "A/a/0", "a/" * 5_000 + "a"]
#: 7.1: the format of a private topic is unspecified, aside from its first character
PRIVATE: Final = [
    ".a", ".-", ".0", ".A-z-9", ".foo", "." + "x" * 199, ".a/b", ".a.b", ".é", "./", "..", ". a//b ", "._GUID=1", ".$x",
    ".a*b", ".😀", "." + "ü" * 119 + "x",
]  # fmt: skip
WILDCARDS: Final = ["*", "**", "foo*", "foo**", "foo/*", "foo/**", "foo/b*", "foo/bar**", "a/b/c/d*", "0**"]


# --- models: 5.1.1, 5.1.3 and 5.2.2, read without regard to speed


def is_public(text: str) -> bool:
    return all(token and set(token) <= ALPHANUM for token in text.split("/"))


def is_private(text: str) -> bool:
    return (
        text.startswith(".")
        and 2 <= len(text) <= 200
        and text.isprintable()
        and len(text.encode()) <= 240
        and not (text.endswith("*") or {"+", "#"} & {*text})
    )


def is_filter(text: str) -> bool:
    if is_public(text) or is_private(text):
        return True
    stars = len(text) - len(text.rstrip("*"))
    return stars in (1, 2) and is_public(text[: len(text) - stars] + "x")


def naive(wanted: str, topic: str) -> bool:
    """5.2.2: "the same name up to the * character", "no '/' characters after that"."""
    if not wanted.endswith("*"):
        return wanted == topic
    prefix = wanted.rstrip("*")
    if topic.startswith(".") or not topic.startswith(prefix):
        return False
    return wanted.endswith("**") or "/" not in topic[len(prefix) :]


# --- the grammar


@table("topic", [*PUBLIC, *PRIVATE])
def test_a_topic_is_a_filter_for_itself_only(topic: str) -> None:
    """Scenarios 20 and 22: private topics, too."""
    assert DISTRIBUTED_EVENTS.check_topic(topic) == topic
    assert DISTRIBUTED_EVENTS.is_topic(topic)
    assert is_private_topic(topic) is (topic in PRIVATE)
    exact = DISTRIBUTED_EVENTS.parse(topic)
    assert not exact.has_wildcard
    assert exact.matches(topic)
    assert not any(exact.matches(other) for other in [*PUBLIC, *PRIVATE] if other != topic)


@table("text", WILDCARDS)
def test_a_wildcard_is_no_topic(text: str) -> None:
    """Scenario 3."""
    assert DISTRIBUTED_EVENTS.parse(text).has_wildcard
    assert not DISTRIBUTED_EVENTS.is_topic(text)
    with pytest.raises(InvalidTopicError, match=r"'\*' at position .*they are for the filters of consumers"):
        DISTRIBUTED_EVENTS.check_topic(text)


#: text, and the fault as a topic and as a filter
FAULTS: Final = [
    ("", "an empty token at position 0 of '': a topic has at least one letter or digit"),
    ("/", "'/' at position 0 of '/': a topic does not begin with '/'"),
    ("/a", "'/' at position 0 of '/a': a topic does not begin with '/'"),
    ("a/", "'/' at position 1 of 'a/': a topic does not end with '/'"),
    ("a//b", "an empty token at position 2 of 'a//b': a topic has letters or digits between two '/'"),
    ("a/b_c", "'_' at position 3 of 'a/b_c': a topic has only ASCII letters, digits and '/'"),
    ("a b", "' ' at position 1 of 'a b': a topic has only ASCII letters, digits and '/'"),
    ("a\n", r"'\n' at position 1 of 'a\n': a topic has only ASCII letters, digits and '/'"),
    ("a/\ud800", r"'\ud800' at position 2 of 'a/\ud800': a topic has only ASCII letters, digits and '/'"),
    ("foo-bar", "'-' at position 3 of 'foo-bar': only private topics may have '-', a topic has ASCII letters, digits"),
    ("über/x", "'ü' at position 0 of 'über/x': its letters and digits must be ASCII"),
    ("a/٣", "'٣' at position 2 of 'a/٣': its letters and digits must be ASCII"),
    ("a.b", "'.' at position 1 of 'a.b': '.' may only begin a private topic, levels are separated by '/'"),
    ("a/.b", "'.' at position 2 of 'a/.b': '.' may only begin a private topic, levels are separated by '/'"),
    ("a/+", "'+' at position 2 of 'a/+': the only wildcards are '*' and '**', at the end of a topic filter"),
    (".", "'.' alone: a private topic has at least one character after '.'"),
    (".a+b", "'+' at position 2 of '.a+b': a private topic has no wildcard of channels"),
    (".#", "'#' at position 1 of '.#': a private topic has no wildcard of channels"),
    (".a\n", r"'\n' at position 2 of '.a\n': a private topic has printable characters only"),
    ("." + "ü" * 120, "a private topic has at most 240 bytes in UTF-8, '." + "ü" * 79 + "'... has 241"),
    ("." + "x" * 200, "a private topic has at most 200 characters, '." + "x" * 79 + "'... has 201"),
]
#: text, and the fault as a filter
FAULTS_OF_FILTERS: Final = [
    ("***", "3 '*' at position 0 of '***': a topic filter ends with one or two"),
    ("a/****", "4 '*' at position 2 of 'a/****': a topic filter ends with one or two"),
    ("a*b", "'*' at position 1 of 'a*b': a wildcard may only end a topic filter"),
    ("*/b", "'*' at position 0 of '*/b': a wildcard may only end a topic filter"),
    ("a/*/**", "'*' at position 2 of 'a/*/**': a wildcard may only end a topic filter"),
    ("/*", "'/' at position 0 of '/*': a topic does not begin with '/'"),
    ("a//**", "an empty token at position 2 of 'a//**': a topic has letters or digits between two '/'"),
    ("a_*", "'_' at position 1 of 'a_*': a topic has only ASCII letters, digits and '/'"),
    (".*", "'*' at position 1 of '.*': no wildcard matches a private topic, name it in full"),
    (".a**", "'*' at position 2 of '.a**': no wildcard matches a private topic, name it in full"),
]


@table(("text", "told"), FAULTS)
def test_the_error_of_a_topic_names_fault_position_and_rule(text: str, told: str) -> None:
    """Scenario 3."""
    assert not DISTRIBUTED_EVENTS.is_topic(text)
    with pytest.raises(InvalidTopicError, match=f"^not a topic: {re.escape(told)}") as caught:
        DISTRIBUTED_EVENTS.check_topic(text)
    assert isinstance(caught.value, ArgumentError)
    assert caught.value.topic == text


@table(("text", "told"), [*FAULTS, *FAULTS_OF_FILTERS])
def test_the_error_of_a_filter_names_fault_position_and_rule(text: str, told: str) -> None:
    for parse in (DISTRIBUTED_EVENTS.parse, PrefixFilter):
        with pytest.raises(InvalidTopicError, match=f"^not a topic filter: {re.escape(told)}") as caught:
            parse(text)
        assert caught.value.topic == text


@table("call", [DISTRIBUTED_EVENTS.check_topic, DISTRIBUTED_EVENTS.parse, PrefixFilter])
@table("value", [None, 5, b"a", ["a"], {}, object()])
def test_none_and_other_types_are_no_topics(call: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(NullEventError if value is None else InvalidTopicError):
        call(value)


@table("text", ["x" * 100_000 + "_", "*" * 100_000, "x/" * 100_000, "." + "x" * 100_000, "x" * 9 + "*" * 100_000 + "x"])
def test_errors_of_long_texts_are_short_and_quick(text: str) -> None:
    started = time.perf_counter()
    for call in (DISTRIBUTED_EVENTS.check_topic, DISTRIBUTED_EVENTS.parse):
        with pytest.raises(InvalidTopicError) as caught:
            call(text)
        assert len(str(caught.value)) < 300
    assert time.perf_counter() - started < PATIENCE


@given(st.text(max_size=8) | st.text("ab/+*.-_é\n", max_size=8) | st.text("a/*.-", max_size=8))
def test_the_grammar_agrees_with_a_naive_reading(text: str) -> None:
    assert DISTRIBUTED_EVENTS.is_topic(text) is (is_public(text) or is_private(text))
    for call, expected in (
        (DISTRIBUTED_EVENTS.check_topic, is_public(text) or is_private(text)),
        (DISTRIBUTED_EVENTS.parse, is_filter(text)),
    ):
        try:
            call(text)
        except InvalidTopicError as error:
            assert not expected
            reason = str(error).partition(": ")[2]
            assert re.match(r".* at position \d+ of |'\.' alone: ", reason)  # none of these is too long
        else:
            assert expected


# --- what matches what

TOPICS = st.lists(st.text("ab0", min_size=1, max_size=3), min_size=1, max_size=4).map("/".join)
PRIVATES = st.text("ab0-", min_size=1, max_size=3).map(".".__add__)
PREFIXES = st.builds(lambda topic, length: topic[:length], TOPICS, st.integers(0, 8))
FILTERS = TOPICS | PRIVATES | st.builds(str.__add__, PREFIXES, st.sampled_from(["*", "**"]))


@table(
    ("wanted", "matching", "other"),
    [
        ("foo/bar*", ["foo/bar", "foo/bark"], ["foo/baa", "foo/bar/foobar"]),
        ("foo/bar**", ["foo/bar", "foo/bark", "foo/bar/foobar"], ["foo/baa"]),
    ],
)
def test_scenario_19_the_examples_of_the_rfc(wanted: str, matching: list[str], other: list[str]) -> None:
    """5.2.2, the table."""
    parsed = DISTRIBUTED_EVENTS.parse(wanted)
    index: PrefixIndex[str] = PrefixIndex()
    index.add(parsed, wanted)
    for topic in matching:
        assert parsed.matches(topic)
        assert index.match(topic) == [wanted]
    for topic in other:
        assert not parsed.matches(topic)
        assert index.match(topic) == []


@table(
    ("wanted", "matching", "other"),
    [
        ("*", ["a", "foo"], ["a/b", ".a"]),
        ("**", ["a", "foo", "a/b", "foo/bar/foobar"], [".a", ".foo"]),
        ("foo/*", ["foo/x", "foo/bar"], ["foo", "foo/x/y", "food/x"]),
        ("foo/**", ["foo/x", "foo/x/y"], ["foo", "food", "food/x"]),
        ("foo*", ["foo", "food"], ["foo/x", "Foo", "fo", ".foo"]),
        (".foo", [".foo"], ["foo", ".foo-1", ".fo"]),
    ],
)
def test_wildcards_stop_at_a_solidus_or_do_not(wanted: str, matching: list[str], other: list[str]) -> None:
    parsed = DISTRIBUTED_EVENTS.parse(wanted)
    assert [topic for topic in [*matching, *other] if parsed.matches(topic)] == matching


@given(FILTERS, TOPICS | PRIVATES)
def test_matching_agrees_with_a_naive_reading(text: str, topic: str) -> None:
    """Scenario 19."""
    assert DISTRIBUTED_EVENTS.parse(text).matches(topic) is naive(text, topic)


@given(PREFIXES, PRIVATES)
def test_scenario_20_no_wildcard_matches_a_private_topic_and_its_name_does(prefix: str, topic: str) -> None:
    index: PrefixIndex[str] = PrefixIndex()
    for text in (f"{prefix}*", f"{prefix}**", "*", "**", topic):
        parsed = DISTRIBUTED_EVENTS.parse(text)
        assert parsed.matches(topic) is (text == topic)
        index.add(parsed, text)
    assert index.match(topic) == [topic]
    assert index.preferred(topic) == topic


def test_a_filter_is_its_text() -> None:
    wanted = PrefixFilter("foo/ba**")
    assert wanted == PrefixFilter("foo/ba**") == DISTRIBUTED_EVENTS.parse("foo/ba**")
    assert wanted not in (PrefixFilter("foo/ba*"), "foo/ba**")
    assert PrefixFilter("a/*") != TopicFilter("a/*")
    assert len({wanted, PrefixFilter("foo/ba**"), PrefixFilter("a"), TopicFilter("a")}) == 3
    assert repr(wanted) == "PrefixFilter('foo/ba**')"
    assert (wanted.text, wanted.prefix, wanted.wildcards) == ("foo/ba**", "foo/ba", 2)
    assert DISTRIBUTED_EVENTS.parse("foo/ba**") is DISTRIBUTED_EVENTS.parse("foo/ba**")


# --- what implies what

#: prefixes of filters have at most two levels of at most two of the letters a and b; ``x`` stands for any other one
SHORT_TOKENS: Final = ["".join(chars) for length in (1, 2) for chars in itertools.product("ab", repeat=length)]
TOKENS: Final = ["".join(chars) for length in (1, 2, 3) for chars in itertools.product("abx", repeat=length)]
ALL_TOPICS: Final = [
    *TOKENS,
    *(f"{one}/{two}{rest}" for one, two in itertools.product(TOKENS, repeat=2) for rest in ("", "/a", "/x")),
    *(".a", ".b", ".ab", ".x"),
]
_PATHS: Final = ["/".join(tokens) for levels in (1, 2) for tokens in itertools.product(SHORT_TOKENS, repeat=levels)]
_TEXTS: Final = {f"{path[:end]}{stars}" for path in _PATHS for end in range(len(path) + 1) for stars in ("", "*", "**")}
ALL_FILTERS: Final = [*sorted(filter(is_filter, _TEXTS)), "a/b/a", ".a", ".ab"]


def test_one_filter_implies_another_if_it_matches_all_that_the_other_does() -> None:
    """Brute force: every pair of filters of up to two levels, with topics that tell them apart."""
    matched = {text: {topic for topic in ALL_TOPICS if naive(text, topic)} for text in ALL_FILTERS}
    assert all(matched.values())
    parsed = {text: DISTRIBUTED_EVENTS.parse(text) for text in ALL_FILTERS}
    for mine, theirs in itertools.product(ALL_FILTERS, repeat=2):
        assert parsed[mine].implies(parsed[theirs]) is (matched[mine] >= matched[theirs]), (mine, theirs)


@given(FILTERS, FILTERS, TOPICS | PRIVATES)
@example("foo/*", "foo/**", "foo/a/b")
def test_what_a_filter_implies_it_matches(mine: str, theirs: str, topic: str) -> None:
    wide, narrow = DISTRIBUTED_EVENTS.parse(mine), DISTRIBUTED_EVENTS.parse(theirs)
    assert wide.implies(wide)
    if wide.implies(narrow) and naive(theirs, topic):
        assert naive(mine, topic)


def test_filters_of_different_grammars_never_imply_each_other() -> None:
    for text in ("a", "a/*", "*"):
        assert not DISTRIBUTED_EVENTS.parse(text).implies(TopicFilter(text))
        assert not TopicFilter(text).implies(DISTRIBUTED_EVENTS.parse(text))


# --- the index


def most_specific(filters: list[str], topic: str) -> str | None:
    """An exact topic, else the longest prefix, ``*`` before ``**``."""
    found = [text for text in filters if naive(text, topic)]
    return min(found, key=lambda text: (text != topic, -len(text.rstrip("*")), text.endswith("**")), default=None)


class Counting(str):
    """Counts how often a beginning of it is taken."""

    __slots__ = ("taken",)
    taken: int

    def __getitem__(self, key: Any) -> str:
        self.taken += 1
        return super().__getitem__(key)


def test_a_search_looks_up_each_length_of_the_prefixes_that_are_there() -> None:
    """Not longer ones than the topic, nor those of filters that were removed."""
    index: PrefixIndex[int] = PrefixIndex()

    def lookups() -> int:
        topic = Counting("a" * 100)
        topic.taken = 0
        index.match(topic)
        return topic.taken

    assert lookups() == 0
    for length in range(1_000):
        for letter in "abc":
            for value in range(2):
                index.add(PrefixFilter(letter * length + "*"), value)
                index.add(PrefixFilter(letter * length + "**"), value)
                index.add(PrefixFilter(letter * (length + 1)), value)
        assert lookups() == min(length + 1, 101)
    for length in range(1_000):
        for letter in "abc":
            for value in range(2):
                index.remove(PrefixFilter(letter * length + "**"), value)
                index.remove(PrefixFilter(letter * length + "*"), value)
        assert lookups() == max(100 - length, 0)
