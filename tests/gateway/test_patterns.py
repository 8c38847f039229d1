"""Channel patterns with captures, against a matcher of a few lines; channel templates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import InvalidChannelError
from messaging.gateway.patterns import ChannelPattern, ChannelTemplate
from messaging.testing.tables import table


def reference(pattern: list[str], levels: list[str]) -> dict[str, str] | None:
    """Match level by level; a pattern of plain texts, ``+``, ``#`` and captures."""
    if not pattern:
        return {} if not levels else None
    first, *rest = pattern
    if first == "#" or first.endswith("#}"):
        return {} if first == "#" else {first[1:-2]: "/".join(levels)}
    if not levels:
        return None
    found = reference(rest, levels[1:])
    if found is None and rest in (["#"], ["{rest#}"]) and len(levels) == 1:
        found = {} if rest == ["#"] else {"rest": ""}
    if first == "+":
        return found
    if first.startswith("{"):
        return None if found is None else {first[1:-1]: levels[0], **found}
    return found if first == levels[0] else None


LEVEL = st.sampled_from(["a", "b", "", "a b", "ä", "$x", "a.b", "("])
CHANNELS = st.lists(LEVEL, min_size=1, max_size=4).filter(lambda levels: levels != [""])


@st.composite
def patterns(draw: st.DrawFn) -> list[str]:
    names = iter(["x", "y", "z", "w"])
    levels = [
        f"{{{next(names)}}}" if each == "{" else each
        for each in draw(st.lists(LEVEL | st.sampled_from(["+", "{"]), min_size=1, max_size=4))
    ]
    levels += draw(st.sampled_from([[], [], ["#"], ["{rest#}"]]))
    return levels if levels != [""] else ["a"]


@given(patterns(), CHANNELS)
def test_patterns_match_as_the_reference_does(pattern: list[str], levels: list[str]) -> None:
    found = ChannelPattern("/".join(pattern)).match("/".join(levels))
    expected = reference(pattern, levels)
    is_wild = pattern[0] in ("+", "#") or pattern[0].startswith("{")
    if levels[0].startswith("$") and is_wild:  # MQTT 5, 4.7.2
        expected = None
    assert found == expected


@given(patterns(), CHANNELS)
def test_the_plain_pattern_matches_the_same_channels(pattern: list[str], levels: list[str]) -> None:
    made = ChannelPattern("/".join(pattern))
    channel = "/".join(levels)
    assert (made.match(channel) is None) == (ChannelPattern(made.pattern).match(channel) is None)


@table(
    "text, channel, captures",
    [
        ("site/{site}/+/telemetry", "site/9/x/telemetry", {"site": "9"}),
        ("site/{site}/+/telemetry", "site/9/telemetry", None),
        ("a/{rest#}", "a/b/c", {"rest": "b/c"}),
        ("a/{rest#}", "a", {"rest": ""}),
        ("a/{rest#}", "ab", None),
        ("{rest#}", "a/b", {"rest": "a/b"}),
        ("#", "$SYS/x", None),
        ("$SYS/{x}", "$SYS/x", {"x": "x"}),
        ("a.b/{x}", "axb/1", None),
    ],
)
def test_captures_of_a_channel(text: str, channel: str, captures: dict[str, str] | None) -> None:
    assert ChannelPattern(text).match(channel) == captures


def test_a_pattern_tells_what_to_subscribe_to() -> None:
    made = ChannelPattern("site/{site}/+/{rest#}")
    assert (made.pattern, made.names) == ("site/+/+/#", {"site", "rest"})
    assert repr(made) == "ChannelPattern('site/{site}/+/{rest#}')"


@table(
    "text, part",
    [
        ("a/{b", "level 2 has a brace"),
        ("a/x{b}", "level 2 has a brace"),
        ("a/{}", "level 2 has a brace"),
        ("a/{1}", "a capture is named by letters"),
        ("a/{b c}", "a capture is named by letters"),
        ("{a}/{a}", "{a} is there twice"),
        ("{channel}", "has a meaning of its own"),
        ("{gateway}/b", "has a meaning of its own"),
        ("{a#}/b", "must be the last one"),
        ("a/#/b", "#"),
        ("a+/b", "+"),
        ("", "empty"),
    ],
)
def test_a_malformed_pattern_is_refused(text: str, part: str) -> None:
    with pytest.raises(InvalidChannelError) as raised:
        ChannelPattern(text)
    assert part in str(raised.value)


@table("junk", [None, 5, b"a", ["a"]])
def test_what_is_no_text_is_refused(junk: Any) -> None:
    for kind in (ChannelPattern, ChannelTemplate):
        with pytest.raises(InvalidChannelError):
            kind(junk)


# --- templates


@table(
    "text, channel",
    [
        ("uplink/{site}", "uplink/9"),
        ("uplink-{site}/x{rest}", "uplink-9/xb/c"),
        ("{channel}", "a/b"),
        ("{{{site}}}", "{9}"),
        ("fixed", "fixed"),
        ("{{x}}", "{x}"),
    ],
)
def test_a_template_puts_values_in(text: str, channel: str) -> None:
    assert ChannelTemplate(text).render({"site": "9", "rest": "b/c", "channel": "a/b"}) == channel


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text("xyz{}/", min_size=1, max_size=5)), st.text("xy/{}"))
def test_every_text_can_be_a_template_with_doubled_braces(captured: dict[str, str], text: str) -> None:
    escaped = text.replace("{", "{{").replace("}", "}}")
    made = ChannelTemplate("x" + escaped + "".join(f"{{{name}}}" for name in captured))
    assert made.render(captured) == "x" + text + "".join(captured.values())
    assert made.names == set(captured)


@table("text", ["a/{b", "a/b}", "a/{}", "a/{b c}", "a/{b}}", "{b}/+", "{b}/#", "a/#", "+", ""])
def test_a_malformed_template_is_refused(text: str) -> None:
    with pytest.raises(InvalidChannelError):
        ChannelTemplate(text)


def test_a_value_that_is_missing_or_no_channel_is_refused() -> None:
    made = ChannelTemplate("a/{b}")
    with pytest.raises(InvalidChannelError, match=r"there is no value \{b\}; there are c"):
        made.render({"c": "1"})
    for wrong in ("+", "#", "\0"):
        with pytest.raises(InvalidChannelError):
            made.render({"b": wrong})


@table(
    "text, pattern",
    [
        ("a/b", "a/b"),
        ("a/{b}/c", "a/+/c"),
        ("a/x{b}y/c", "a/+/c"),
        ("a/{channel}/x", "a/#"),
        ("{channel}", "#"),
    ],
)
def test_a_template_tells_the_channels_that_can_come_out(text: str, pattern: str) -> None:
    assert ChannelTemplate(text).as_pattern() == pattern


def test_a_template_is_shown_with_its_text() -> None:
    assert repr(ChannelTemplate("a/{b}")) == "ChannelTemplate('a/{b}')"
