"""Topic filters, and the channel patterns with which a broker selects the events of their topics.

An event on the topic ``orders/placed`` goes to the channel ``events/orders/placed``. Every topic is the end of a valid
channel: tokens of topics have no character that channels lack, and a leading ``$``, which brokers treat specially, is
no longer at the beginning. Wildcards differ: see :func:`pattern_of` for Typed Event and Event Admin, and
:func:`pattern_below` for other grammars.

A pattern may match more than its filter: a subscriber to the pattern has to apply the filter again. Every function is
thread safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from messaging.dispatch import MULTI_LEVEL, TopicFilter, parse_filter
from messaging.errors import ArgumentError
from messaging.model import overlap


def filters_of(topics: str | Iterable[str]) -> tuple[TopicFilter, ...]:
    """Return the parsed topic filters, at least one (``ArgumentError``)."""
    found = tuple(parse_filter(each) for each in ([topics] if isinstance(topics, str) or topics is None else topics))
    if not found:
        raise ArgumentError("at least one topic filter is needed")
    return found


def pattern_of(channel: str, topic_filter: TopicFilter) -> str:
    """Return the channel pattern that matches the events of all topics that a filter matches.

    ``+`` is the same in both. ``org/*`` becomes ``events/org/#``, which also matches the channel ``events/org``, while
    the filter needs at least one more token: a subscriber to the pattern has to apply the filter again.
    """
    tokens = topic_filter.tokens
    return "/".join((channel, *tokens[:-1], "#" if tokens[-1] == MULTI_LEVEL else tokens[-1]))


def pattern_below(channel: str, levels: Sequence[str], *, is_deep: bool) -> str:
    """Return the channel pattern of a filter of any grammar that ends in a wildcard.

    ==============================  ===========  ===========  =============
    filter (RFC 214 5.2.2)          ``levels``   ``is_deep``  pattern
    ==============================  ===========  ===========  =============
    ``foo/bar*``                    ``["foo"]``  no           ``x/foo/+``
    ``foo/*``                       ``["foo"]``  no           ``x/foo/+``
    ``foo/bar**``                   ``["foo"]``  yes          ``x/foo/#``
    ``*``                           ``[]``       no           ``x/+``
    ``**``                          ``[]``       yes          ``x/#``
    ==============================  ===========  ===========  =============

    Args:
        channel: the channel that the channels of all topics begin with, ``x`` above.
        levels: the leading levels of the filter that are complete and literal, without the level with the wildcard;
            ``+`` stands for any level.
        is_deep: whether the filter matches topics of more levels, below the one with the wildcard.
    """
    return "/".join((channel, *levels, "#" if is_deep else "+"))


def patterns_of(channel: str, filters: Iterable[TopicFilter]) -> list[str]:
    """Return channel patterns, without overlap, that match all topics that any of the filters matches.

    Filters that overlap become one pattern that covers both, and maybe more.
    """
    return merged(pattern_of(channel, each) for each in filters)


def merged(patterns: Iterable[str]) -> list[str]:
    """Return channel patterns, without overlap, that together match all that the given ones match, and maybe more."""
    found: list[str] = []
    for pattern in patterns:
        cover = pattern
        while (other := next((other for other in found if overlap(cover, other)), None)) is not None:
            found.remove(other)
            cover = _cover(cover, other)
        found.append(cover)
    return found


def _cover(one: str, other: str) -> str:
    """Return a pattern that covers two patterns that overlap."""
    levels: list[str] = []
    for mine, its in zip_longest(one.split("/"), other.split("/")):
        if mine is None or its is None or "#" in (mine, its):
            levels.append("#")
            break
        levels.append(mine if mine == its else "+")
    return "/".join(levels)
