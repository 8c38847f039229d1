"""The grammar of RFC 214 Distributed Eventing: topics, private topics and filters by prefix (5.1.1, 5.1.3, 5.2.2).

::

    topic         ::= alphanum+ ( '/' alphanum+ )*            alphanum ::= ASCII letter | ASCII digit
    private topic ::= '.' printable+                          up to 200 characters, no '+', '#', or '*' at the end
    topic filter  ::= topic | private topic | prefix '*' | prefix '**'

A prefix is the beginning of a topic: it may be empty, end within a token, or end with ``/``. ``foo/ba*`` matches the
topics that begin with ``foo/ba`` and have no ``/`` after it; ``foo/ba**`` those with any continuation. No wildcard
matches a private topic; its full name does. Topics are case-sensitive.

The RFC leaves the names of private topics open, except for their first character (7.1): those of other members may have
any form that a channel has. None ends with ``*``: it would look like a filter.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, TypeVar

from messaging.dispatch.topics import AbstractTopicFilter, TopicGrammar, TopicIndex, exact_text
from messaging.errors import InvalidTopicError

T = TypeVar("T")

#: first character of private topics
PRIVATE: Final = "."
#: maximum number of characters of a private topic
PRIVATE_LENGTH: Final = 200
#: bytes of one in UTF-8: its channel is the routing key of AMQP, which has at most 255
PRIVATE_BYTES: Final = 240
_WILDCARD: Final = "*"
#: wildcards of channels
_CHANNEL_WILDCARDS: Final = frozenset("+#")
#: characters of a topic or filter that an error text shows
_SHOWN: Final = 80

# Possessive quantifiers: no text makes these expressions take more than linear time.
_PUBLIC: Final = r"[A-Za-z0-9]++(?:/[A-Za-z0-9]++)*+"
_TOPIC: Final = re.compile(_PUBLIC)
_FILTER: Final = re.compile(rf"{_PUBLIC}|(?:[A-Za-z0-9]++/)*+[A-Za-z0-9]*+\*{{1,2}}")


def is_private_topic(topic: str) -> bool:
    """Return whether ``topic``, a topic or topic filter, is a private one (RFC 214 5.1.3)."""
    return topic.startswith(PRIVATE)


def _is_private_name(text: str) -> bool:
    """Return whether a text that begins with ``.`` is the name of a private topic."""
    return (
        1 < len(text) <= PRIVATE_LENGTH
        and text.isprintable()
        and len(text.encode()) <= PRIVATE_BYTES
        and not text.endswith(_WILDCARD)
        and _CHANNEL_WILDCARDS.isdisjoint(text)
    )


def _is(text: str, public: re.Pattern[str]) -> bool:
    """Return whether ``text`` is a private topic, or has the form ``public``."""
    return _is_private_name(text) if text.startswith(PRIVATE) else public.fullmatch(text) is not None


class PrefixFilter(AbstractTopicFilter):
    """A topic filter of RFC 214; an exact topic is one, too. Immutable; equal to filters of the same text.

    Attributes:
        text: the filter as it was written.
        prefix: ``text`` without its wildcards: what topics that match begin with.
        wildcards: the number of ``*`` at its end: 0, 1, or 2 for topics of any number of further levels.
        has_wildcard: whether it ends with a ``*``.

    Raises:
        NullEventError: ``text`` is ``None``.
        InvalidTopicError: ``text`` breaks the grammar.
    """

    __slots__ = ("has_wildcard", "prefix", "text", "wildcards")

    prefix: str
    wildcards: int

    def __init__(self, text: str) -> None:
        text = exact_text(text, "topic filter")
        if not _is(text, _FILTER):
            raise InvalidTopicError(text, f"not a topic filter: {_fault_of_filter(text)}")
        self.text = text
        self.prefix = text.rstrip(_WILDCARD)
        self.wildcards = len(text) - len(self.prefix)
        self.has_wildcard = self.wildcards > 0

    def matches(self, topic: str) -> bool:
        """See ``AbstractTopicFilter`` (5.2.2)."""
        if not self.has_wildcard:
            return topic == self.text
        return topic.startswith(self.prefix) and not topic.startswith(PRIVATE) and self._spans(topic)

    def _spans(self, text: str) -> bool:
        """Return whether the wildcard stands for what ``text`` has after the prefix."""
        return self.wildcards == 2 or text.find("/", len(self.prefix)) < 0

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sort key: an exact topic comes first, then the longest prefix, then ``*`` before ``**``."""
        return (1 if self.has_wildcard else 0), -len(self.prefix), self.wildcards, self.text

    def implies(self, other: AbstractTopicFilter) -> bool:
        """See ``AbstractTopicFilter``."""
        if not isinstance(other, PrefixFilter):
            return False
        if not (self.has_wildcard and other.has_wildcard):
            return self.matches(other.text)  # false if the other one has a wildcard: no text of a topic has one
        # The topics of the other filter continue its prefix with any character, so this prefix must not be longer.
        return other.prefix.startswith(self.prefix) and self._spans(other.prefix) and self.wildcards >= other.wildcards


class PrefixIndex(TopicIndex[PrefixFilter, T]):
    """Values by topic filter, found by topic; see :class:`~messaging.dispatch.topics.TopicIndex`.

    Exact topics and prefixes are keys of dicts. A search looks up the beginnings of the topic that are as long as a
    prefix of some filter: at most one look-up for each character of the topic, whatever the number of filters.
    """

    def __init__(self) -> None:
        self._topics: dict[str, dict[T, None]] = {}
        #: by prefix: the values of filters that end with ``*``, and of filters that end with ``**``
        self._prefixes: dict[str, tuple[dict[T, None], dict[T, None]]] = {}
        #: number of prefixes by length; only for changes
        self._counts: dict[int, int] = {}
        #: the lengths of prefixes, ascending; replaced as a whole, since searches have no lock
        self._lengths: tuple[int, ...] = ()

    def add(self, topic_filter: PrefixFilter, value: T) -> None:
        """See ``TopicIndex``."""
        prefix = topic_filter.prefix
        if not topic_filter.has_wildcard:
            self._topics.setdefault(prefix, {})[value] = None
            return
        if prefix not in self._prefixes:
            self._count(len(prefix), 1)  # first: if an interrupt ends this here, a length too many does no harm
        node = self._prefixes.setdefault(prefix, ({}, {}))
        node[topic_filter.wildcards - 1][value] = None

    def remove(self, topic_filter: PrefixFilter, value: T) -> None:
        """See ``TopicIndex``."""
        prefix = topic_filter.prefix
        if not topic_filter.has_wildcard:
            values = self._topics.get(prefix)
            if values is not None:
                values.pop(value, None)
                if not values:
                    del self._topics[prefix]
            return
        node = self._prefixes.get(prefix)
        if node is not None:
            node[topic_filter.wildcards - 1].pop(value, None)
            if not any(node):
                del self._prefixes[prefix]
                self._count(len(prefix), -1)

    def _count(self, length: int, change: int) -> None:
        """Note that the number of prefixes of one length changed."""
        count = self._counts[length] = self._counts.get(length, 0) + change
        if not count:
            del self._counts[length]
        if len(self._counts) != len(self._lengths):
            self._lengths = tuple(sorted(self._counts))

    def match(self, topic: str) -> list[T]:
        """Return the values whose filters match, each once; the most specific filters first."""
        found: dict[T, None] = {}
        for values in self._matching(topic):
            found.update(dict.fromkeys(list(values)))
        return list(found)

    def preferred(self, topic: str) -> T | None:
        """See ``TopicIndex``."""
        for values in self._matching(topic):
            for value in list(values):
                return value
        return None

    def _matching(self, topic: str) -> Iterator[dict[T, None]]:
        """Yield the values of each filter that matches, the most specific first."""
        exact = self._topics.get(topic)
        if exact is not None:
            yield exact
        if is_private_topic(topic):
            return
        last_level = topic.rfind("/") + 1
        lengths = self._lengths
        for position in reversed(range(bisect_right(lengths, len(topic)))):
            length = lengths[position]
            node = self._prefixes.get(topic[:length])
            if node is not None:
                if length >= last_level:
                    yield node[0]
                yield node[1]

    def __len__(self) -> int:
        """See ``TopicIndex``: the number of exact topics and of prefixes."""
        return len(self._topics) + len(self._prefixes)


class DistributedTopics(TopicGrammar[PrefixFilter]):
    """The grammar of RFC 214; see :mod:`messaging.dispatch.distributed_topics`."""

    new_index = PrefixIndex

    def is_topic(self, text: str) -> bool:
        """Return whether ``text`` is the name of a topic, public or private."""
        return _is(text, _TOPIC)

    def fault(self, text: str) -> str:
        """See ``TopicGrammar``."""
        wildcards = "a topic has no wildcards, they are for the filters of consumers"
        if text.startswith(PRIVATE):
            return _fault_of_private(text, wildcards)
        return _fault_of_public(text, text, wildcards)

    def make_filter(self, text: str) -> PrefixFilter:
        """See ``TopicGrammar``."""
        return PrefixFilter(text)


#: the grammar of Distributed Eventing (RFC 214)
DISTRIBUTED_EVENTS: Final = DistributedTopics("DISTRIBUTED_EVENTS")


# --- faults, in words


def _fault_of_filter(text: str) -> str:
    """Return why ``text`` is no topic filter."""
    if text.startswith(PRIVATE):
        return _fault_of_private(text, "no wildcard matches a private topic, name it in full")
    prefix = text.rstrip(_WILDCARD)
    # a prefix can be continued by a letter: it becomes a topic, or has a fault
    fault = _fault_of_public(f"{prefix}x" if prefix != text else text, text, "a wildcard may only end a topic filter")
    return fault or f"{len(text) - len(prefix)} '*' {_where(len(prefix), text)}: a topic filter ends with one or two"


def _fault_of_public(topic: str, text: str, wildcards: str) -> str:
    """Return why ``topic`` is no public topic, or an empty text if it is one.

    Args:
        topic: the topic, or the beginning of a filter.
        text: the text that the error shows.
        wildcards: the rule that a ``*`` breaks.
    """
    if not topic:
        return f"{_where(0, text, 'an empty token')}: a topic has at least one letter or digit"
    before = "/"
    for position, char in enumerate(topic):
        if char == before == "/":
            if not position:
                return f"'/' {_where(0, text)}: a topic does not begin with '/'"
            return f"{_where(position, text, 'an empty token')}: a topic has letters or digits between two '/'"
        if char != "/" and not (char.isascii() and char.isalnum()):
            return f"{char!r} {_where(position, text)}: {_rule_broken_by(char, wildcards)}"
        before = char
    return f"'/' {_where(len(topic) - 1, text)}: a topic does not end with '/'" if before == "/" else ""


def _fault_of_private(text: str, wildcards: str) -> str:
    """Return why a text that begins like a private topic is no topic; ``wildcards``: the rule that a ``*`` breaks."""
    if len(text) > PRIVATE_LENGTH:
        return f"a private topic has at most {PRIVATE_LENGTH} characters, {text[:_SHOWN]!r}... has {len(text)}"
    size = len(text.encode(errors="replace"))
    if size > PRIVATE_BYTES:
        return f"a private topic has at most {PRIVATE_BYTES} bytes in UTF-8, {text[:_SHOWN]!r}... has {size}"
    for position, char in enumerate(text):
        if char in _CHANNEL_WILDCARDS:
            return f"{char!r} {_where(position, text)}: a private topic has no wildcard of channels"
        if not char.isprintable():
            return f"{char!r} {_where(position, text)}: a private topic has printable characters only"
    if text.endswith(_WILDCARD):
        return f"'*' {_where(len(text.rstrip(_WILDCARD)), text)}: {wildcards}"
    return "'.' alone: a private topic has at least one character after '.'"


def _where(position: int, text: str, what: str = "") -> str:
    return f"{what}{' ' if what else ''}at position {position} of {text[:_SHOWN]!r}"


def _rule_broken_by(char: str, wildcards: str) -> str:
    """Return the rule by which ``char`` is no part of a public topic."""
    if char == _WILDCARD:
        return wildcards
    if char == "+":
        return "the only wildcards are '*' and '**', at the end of a topic filter"
    if char == "-":
        return "only private topics may have '-', a topic has ASCII letters, digits and '/'"
    if char == PRIVATE:
        return "'.' may only begin a private topic, levels are separated by '/'"
    if char.isalnum():
        return "its letters and digits must be ASCII"
    return "a topic has only ASCII letters, digits and '/'"
