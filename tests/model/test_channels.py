"""The channel grammar and the matcher, against naive ones."""

from __future__ import annotations

import unicodedata
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from messaging.errors import InvalidChannelError
from messaging.model import check_name, check_pattern, matcher, overlap
from messaging.model.channels import MAX_BYTES, has_wildcard, matches
from messaging.testing.tables import table

LEVEL = st.text(st.sampled_from(["a", "b", "$", ".", "*", "é", "(", "\\", " "]), max_size=3)
NAMES = st.lists(LEVEL, min_size=1, max_size=5).map("/".join).filter(bool)
PATTERNS = st.builds(
    lambda levels, tail: "/".join([*levels, *tail]),
    st.lists(st.one_of(LEVEL, st.just("+")), max_size=4),
    st.sampled_from([[], ["#"]]),
).filter(bool)


def naive(pattern: list[str], name: list[str], first: bool = True) -> bool:
    """MQTT 5, 4.7, word by word."""
    if first and name[0].startswith("$") and pattern[0] in ("+", "#"):
        return False
    if not pattern:
        return not name
    if pattern[0] == "#":
        return True
    if not name:
        return False
    return pattern[0] in ("+", name[0]) and (
        naive(pattern[1:], name[1:], False) if name[1:] or pattern[1:] != ["#"] else True
    )


@given(PATTERNS, NAMES)
def test_the_matcher_agrees_with_a_naive_one(pattern: str, name: str) -> None:
    check_pattern(pattern)
    check_name(name)
    expected = naive(pattern.split("/"), name.split("/"))
    assert matches(pattern, name) is expected
    assert matcher(pattern)(name) is expected


@given(NAMES)
def test_a_name_matches_itself_and_everything_unless_it_is_internal(name: str) -> None:
    assert matches(name, name)
    assert matches("#", name) is not name.startswith("$")
    assert matches(name + "/#", name)
    assert matches(name + "/#", name + "/x/y")
    assert not matches(name + "/+", name)


@table(
    "pattern, matching, others",
    [
        ("a/#", ["a", "a/", "a/b/c"], ["ab"]),
        ("+", ["a"], ["a/b", "/a", "$SYS"]),
        ("+/+", ["/a"], []),
        ("/+", ["/a"], []),
        ("+/#", ["a", "a/b/c"], []),
        ("#", [], ["$SYS/x"]),
        ("+/x", [], ["$SYS/x"]),
        ("$SYS/#", ["$SYS/x"], []),
        ("$SYS/+", ["$SYS/x"], []),
        ("a/+/c", ["a//c", "a/$b/c"], []),
        ("a.c", [], ["abc"]),
        ("(a", ["(a"], []),
        ("a/+/#", ["a/b"], ["a"]),
        ("/#", ["/"], ["a"]),
        ("//#", ["/", "//x"], ["/x"]),
    ],
)
def test_a_pattern_matches_the_channels_of_the_grammar(pattern: str, matching: list[str], others: list[str]) -> None:
    assert [name for name in (*matching, *others) if matches(pattern, name)] == matching


@given(PATTERNS, PATTERNS, NAMES)
def test_patterns_with_a_channel_in_common_overlap(first: str, second: str, name: str) -> None:
    if matches(first, name) and matches(second, name):
        assert overlap(first, second)
    assert overlap(first, second) is overlap(second, first)


@given(PATTERNS, PATTERNS)
def test_patterns_that_overlap_have_a_channel_in_common(first: str, second: str) -> None:
    assume(overlap(first, second))
    levels = [
        next((level for level in pair if level not in ("+", "#")), "x")
        for one, other in zip_longest(first.split("/"), second.split("/"))
        if (pair := [level for level in (one, other) if level is not None]) != ["#"]
    ]
    assert matches(first, "/".join(levels))
    assert matches(second, "/".join(levels))


def test_a_long_pattern_matches_in_linear_time() -> None:
    pattern = "/".join(["+"] * 5000) + "/#"
    assert matches(pattern, "/".join(["x"] * 5000))
    assert not matches(pattern, "/".join(["x"] * 4999))


@table("name", ["a", "a/b", "/", "//", "a//b", " a ", "é/日本", "$SYS/x", "a" * MAX_BYTES, "*", "a.b"])
def test_valid_names(name: str) -> None:
    assert check_name(name) == name
    assert check_pattern(name) == name
    assert not has_wildcard(name)


@table("pattern", ["+", "#", "a/+", "+/a", "+/+/#", "a/+/b/#", "/#", "/+"])
def test_valid_patterns_are_no_names(pattern: str) -> None:
    assert check_pattern(pattern) == pattern
    assert has_wildcard(pattern)
    with pytest.raises(InvalidChannelError, match="wildcards are for subscriptions only"):
        check_name(pattern)


@table(
    "pattern, message",
    [
        ("a+", r"'\+' must be a whole level \(level 1\)"),
        ("x/+a/y", r"'\+' must be a whole level \(level 2\)"),
        ("++", r"'\+' must be a whole level"),
        ("#/a", r"'#' must be the whole of the last level \(level 1\)"),
        ("a/b#", r"'#' must be the whole of the last level \(level 2\)"),
        ("a/#/", r"'#' must be the whole of the last level \(level 2\)"),
        ("$share/g/a", r"queue=\.\.\."),
    ],
)
def test_malformed_patterns_are_refused_with_the_fault_and_its_level(pattern: str, message: str) -> None:
    with pytest.raises(InvalidChannelError, match=message):
        check_pattern(pattern)


@table(
    "channel, message",
    [
        ("", "is empty"),
        ("a\x00b", r"U\+0000 at index 1"),
        ("a\nb", r"U\+000A at index 1"),
        ("\x7f", r"U\+007F at index 0"),
        ("ab\x9f", r"U\+009F at index 2"),
        ("\ud800", r"U\+D800"),
        ("\ufdd0", r"U\+FDD0"),
        ("\ufffe", r"U\+FFFE"),
        ("\U0010ffff", r"U\+10FFFF"),
        ("a" * (MAX_BYTES + 1), "65536 bytes long in UTF-8; at most 65535"),
        ("é" * 32768, "65536 bytes long"),
    ],
)
@table("check", [check_name, check_pattern])
def test_bad_text_is_refused_with_the_fault_and_its_place_in_a_short_error(
    check: Any, channel: str, message: str
) -> None:
    with pytest.raises(InvalidChannelError, match=message) as caught:
        check(channel)
    text = str(caught.value)
    assert len(text) < 400
    text.encode()  # it can be logged


@table("channel", [None, 7, b"a", ["a"], {"a": 1}, object(), 1.5, True])
@table("check", [check_name, check_pattern])
def test_channels_that_are_no_text_are_refused(check: Any, channel: object) -> None:
    with pytest.raises(InvalidChannelError, match=f"must be a str, not {type(channel).__name__}"):
        check(channel)


def allowed(character: str) -> bool:
    point = ord(character)
    return unicodedata.category(character) not in ("Cc", "Cs") and not (
        0xFDD0 <= point <= 0xFDEF or point & 0xFFFE == 0xFFFE
    )


@given(st.text(max_size=20))
def test_any_text_is_taken_or_refused_as_the_grammar_says(text: str) -> None:
    clean = bool(text) and all(map(allowed, text))
    is_name = clean and "+" not in text and "#" not in text
    levels = text.split("/")
    is_pattern = (
        clean
        and not text.startswith("$share/")
        and all(level in ("+", "#") or not {"+", "#"} & set(level) for level in levels)
        and "#" not in levels[:-1]
    )
    for check, valid in ((check_name, is_name), (check_pattern, is_pattern)):
        if valid:
            assert check(text) == text
        else:
            with pytest.raises(InvalidChannelError):
                check(text)


@given(st.characters(codec="utf-8", categories=["Cc", "Cs", "Cn", "Co", "Lo", "So", "Mn", "Zs"]))
def test_every_character_is_judged_by_its_kind(character: str) -> None:
    text = f"a{character}b"
    try:
        check_name(text)
    except InvalidChannelError:
        assert not allowed(character)
    else:
        assert allowed(character)
