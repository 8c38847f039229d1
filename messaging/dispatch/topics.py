"""The grammars of chapter 157 and of RFC 97: topics and topic filters (157.3.1, 157.4.3; RFC 97 5.1.1.1, 5.1.2).

::

    topic        ::= token ( '/' token )*          token ::= ( letter | digit | '_' | '$' | '-' )+
    topic filter ::= '*' | level ( '/' level )* [ '/*' ]          level ::= token | '+'

``+`` stands for one token and ``/*`` for one or more of them; ``*`` alone matches every topic. Topics are
case-sensitive. A letter or digit is what Java calls one: of any script, with its combining marks, and currency signs.
Control and format characters, which Java allows too, are refused because they are invisible. RFC 97 has no ``+``.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import zip_longest
from typing import Any, Final

from messaging.dispatch.grammar import AbstractTopicFilter, TopicGrammar, exact_text
from messaging.dispatch.trie import MULTI_LEVEL as MULTI_LEVEL
from messaging.dispatch.trie import SINGLE_LEVEL, TopicTrie
from messaging.errors import InvalidTopicError

_ASCII: Final = re.compile(r"[\w$-]+(?:/[\w$-]+)*", re.ASCII)
#: Unicode categories of Java's letters and digits: letters, letter numbers, currency, connectors, digits, marks
_LETTER_OR_DIGIT: Final = frozenset({"Lu", "Ll", "Lt", "Lm", "Lo", "Nl", "Sc", "Pc", "Nd", "Mn", "Mc"})
#: characters of a filter that an error text shows
_SHOWN: Final = 80


def _is_token(text: str) -> bool:
    return bool(text) and all(char == "-" or unicodedata.category(char) in _LETTER_OR_DIGIT for char in text)


def _fault(text: str) -> str:
    """Return why ``text`` is no topic, in words."""
    before = "/"
    for position, char in enumerate(text):
        if char == before == "/":
            break
        if char != "/" and not _is_token(char):
            return f"{char!r} at position {position}"
        before = char
    else:
        position = len(text)
    return f"an empty token at position {position}"


class TopicFilter(AbstractTopicFilter):
    """A topic filter; an exact topic is one, too. Immutable; equal to filters of the same text.

    Attributes:
        text: the filter as it was written.
        tokens: the levels of the filter; a multi-level wildcard is the last one, ``*``.
        has_wildcard: whether it has a ``+`` or a ``*``.
    """

    __slots__ = ("_expression", "has_wildcard", "text", "tokens")

    tokens: tuple[str, ...]

    def __init__(self, text: str, *, single_level: bool = True) -> None:
        """Parse ``text``.

        Args:
            text: the filter.
            single_level: whether it may have a ``+``; RFC 97 has none.

        Raises:
            NullEventError: ``text`` is ``None``.
            InvalidTopicError: it breaks the grammar.
        """
        text = exact_text(text, "topic filter")
        tokens = text.split("/")
        levels = tokens[:-1] if tokens[-1] == MULTI_LEVEL else tokens
        for level, token in enumerate(levels, 1):
            if not (_is_token(token) or (token == SINGLE_LEVEL and single_level)):
                raise InvalidTopicError(text, f"not a topic filter: {_wrong(token, level, text, single_level)}")
        self.text = text
        self.tokens = tuple(tokens)
        self.has_wildcard = len(levels) != len(tokens) or SINGLE_LEVEL in levels
        self._expression = re.compile(_pattern(tokens)).fullmatch if self.has_wildcard else None

    def matches(self, topic: str) -> bool:
        """Return whether the filter matches ``topic``, which must be a topic."""
        return topic == self.text if self._expression is None else self._expression(topic) is not None

    @property
    def order(self) -> tuple[tuple[int, str], ...]:
        """Sort key: of the filters that match one topic, the most specific comes first (157.6.2.1)."""
        return tuple((_PRECEDENCE.get(token, 0), token) for token in self.tokens)

    def implies(self, other: AbstractTopicFilter) -> bool:
        """See ``AbstractTopicFilter``."""
        if not isinstance(other, TopicFilter):
            return False
        mine, theirs = self.tokens, other.tokens
        if mine[-1] == MULTI_LEVEL:
            if len(theirs) < len(mine):
                return False
            mine = mine[:-1]
            theirs = theirs[: len(mine)]
        elif theirs[-1] == MULTI_LEVEL or len(theirs) != len(mine):
            return False
        return all(own in (SINGLE_LEVEL, their) for own, their in zip(mine, theirs, strict=True))

    def intersection(self, other: TopicFilter) -> str | None:
        """Return the filter of the topics that both filters match, or ``None`` if there are none."""
        mine, its = self.tokens, other.tokens
        found: list[str] = []
        for level, (left, right) in enumerate(zip_longest(mine, its)):
            if left is None or right is None:
                return None
            if left == MULTI_LEVEL:
                return "/".join((*found, *its[level:]))
            if right == MULTI_LEVEL:
                return "/".join((*found, *mine[level:]))
            if left != right and SINGLE_LEVEL not in (left, right):
                return None
            found.append(right if left == SINGLE_LEVEL else left)
        return "/".join(found)


_PRECEDENCE: Final = {SINGLE_LEVEL: 1, MULTI_LEVEL: 2}
_EXPRESSIONS: Final = {SINGLE_LEVEL: "[^/]+", MULTI_LEVEL: "(?s:.+)"}


def _pattern(tokens: list[str]) -> str:
    return "/".join(_EXPRESSIONS.get(each) or re.escape(each) for each in tokens)


def _wrong(token: str, level: int, text: str, single_level: bool) -> str:
    """Return why a token of a filter is refused, in words."""
    where = f"level {level} of {text[:_SHOWN]!r}"
    if not token:
        return f"{where} is empty"
    where += f" is {token[:_SHOWN]!r}"
    if token == MULTI_LEVEL:
        return f"{where}, which may only be the last one"
    if token == SINGLE_LEVEL and not single_level:
        return f"{where}, which Event Admin does not have"
    if MULTI_LEVEL in token or SINGLE_LEVEL in token:
        return f"{where}: a wildcard stands alone between solidi"
    return f"{where}: only letters, digits, '_', '$' and '-' are allowed"


class TypedTopics(TopicGrammar[TopicFilter]):
    """The grammar of chapter 157, and that of RFC 97.

    Args:
        constant: name of the constant.
        single_level: whether filters may have a ``+``.
    """

    def __init__(self, constant: str, *, single_level: bool) -> None:
        super().__init__(constant)
        self._single_level = single_level

    def is_topic(self, text: str) -> bool:
        """Return whether ``text`` is the name of a topic."""
        return bool(_ASCII.fullmatch(text)) or (not text.isascii() and all(map(_is_token, text.split("/"))))

    def fault(self, text: str) -> str:
        """See ``TopicGrammar``."""
        hint = "; wildcards are for handlers" if MULTI_LEVEL in text or SINGLE_LEVEL in text else ""
        return _fault(text) + hint

    def make_filter(self, text: str) -> TopicFilter:
        """See ``TopicGrammar``."""
        return TopicFilter(text, single_level=self._single_level)

    def new_index(self) -> TopicTrie[Any]:
        """See ``TopicGrammar``."""
        return TopicTrie()


#: the grammar of OSGi Typed Event; the default wherever a grammar is a parameter
TYPED_EVENTS: Final = TypedTopics("TYPED_EVENTS", single_level=True)
#: the grammar of Event Admin: the same without ``+``
EVENT_ADMIN: Final = TypedTopics("EVENT_ADMIN", single_level=False)

#: the methods of ``TYPED_EVENTS``; see :class:`~messaging.dispatch.grammar.TopicGrammar`
is_topic: Final = TYPED_EVENTS.is_topic
check_topic: Final = TYPED_EVENTS.check_topic
parse_filter: Final = TYPED_EVENTS.parse
