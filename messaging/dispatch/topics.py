"""The contract of a grammar of topics, and the grammars of chapter 157 and of RFC 97.

Event services differ in what a topic is and in what a wildcard stands for. A service works with one
:class:`TopicGrammar`: its topics, its topic filters, and the index that finds values by topic. ``TYPED_EVENTS`` and
``EVENT_ADMIN`` are here (157.3.1, 157.4.3; RFC 97 5.1.1.1, 5.1.2), ``DISTRIBUTED_EVENTS`` is in
:mod:`messaging.dispatch.distributed_topics`.

::

    topic        ::= token ( '/' token )*          token ::= ( letter | digit | '_' | '$' | '-' )+
    topic filter ::= '*' | level ( '/' level )* [ '/*' ]          level ::= token | '+'

``+`` stands for one token and ``/*`` for one or more of them; ``*`` alone matches every topic. Topics are
case-sensitive. A letter or digit is what Java calls one: of any script, with its combining marks, and currency signs.
Control and format characters, which Java allows too, are refused because they are invisible. RFC 97 has no ``+``.
"""

from __future__ import annotations

import abc
import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Final, Generic, TypeVar

from messaging.errors import InvalidTopicError, NullEventError
from messaging.errors.text import exact, tolerant

F = TypeVar("F", bound="AbstractTopicFilter")
F_contra = TypeVar("F_contra", contravariant=True)
T = TypeVar("T")

#: maximum number of filters that a grammar remembers
_PARSED: Final = 1024


class AbstractTopicFilter(abc.ABC):
    """A topic filter of any grammar; an exact topic is one, too. Immutable.

    A filter is equal to filters of the same class and text.

    Attributes:
        text: the filter as it was written.
        has_wildcard: whether it may match other topics than ``text``.
    """

    __slots__ = ()

    text: str
    has_wildcard: bool

    @abc.abstractmethod
    def matches(self, topic: str) -> bool:
        """Return whether the filter matches ``topic``, which must be a topic of the same grammar."""

    @property
    @abc.abstractmethod
    def order(self) -> tuple[Any, ...]:
        """Sort key among filters of one grammar: of the filters that match one topic, the most specific comes first."""

    @abc.abstractmethod
    def implies(self, other: AbstractTopicFilter) -> bool:
        """Return whether this filter matches every topic that ``other`` matches; never for one of another class."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    @tolerant
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r})"


class TopicIndex(abc.ABC, Generic[F_contra, T]):
    """Values by topic filter, found by topic; the cost of a search does not depend on the number of filters.

    One thread at a time may make changes. Any thread may search meanwhile, without a lock; the search sees each change
    or does not. Of several changes, it may see a later one and miss an earlier one.
    """

    @abc.abstractmethod
    def add(self, topic_filter: F_contra, value: T) -> None:
        """Add a value; adding it again does nothing."""

    @abc.abstractmethod
    def remove(self, topic_filter: F_contra, value: T) -> None:
        """Remove a value added with that filter, and the nodes that become empty; do nothing if there is none."""

    @abc.abstractmethod
    def match(self, topic: str) -> list[T]:
        """Return the values whose filters match, each once; those of one filter in the order they were added."""

    @abc.abstractmethod
    def preferred(self, topic: str) -> T | None:
        """Return a value of the most specific filter that matches, by the ``order`` of the filters."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of nodes; it is 0 when all values are removed."""


class TopicGrammar(abc.ABC, Generic[F]):
    """What topics and topic filters of an event service look like, and how they match. Immutable, thread safe.

    The grammars are constants: they are compared by identity, and copying or unpickling one returns the constant.

    Args:
        constant: name of the constant, in the module of the class.
    """

    #: makes an empty index for the filters of this grammar
    new_index: Callable[[], TopicIndex[F, Any]]

    def __init__(self, constant: str) -> None:
        self.name = constant
        self._remembered = lru_cache(_PARSED)(self.make_filter)

    @abc.abstractmethod
    def is_topic(self, text: str) -> bool:
        """Return whether ``text`` is the name of a topic."""

    @abc.abstractmethod
    def fault(self, text: str) -> str:
        """Return why ``text`` is no topic: the fault, its position, and the rule."""

    @abc.abstractmethod
    def make_filter(self, text: str) -> F:
        """Return a new topic filter; raise the errors of :meth:`parse`."""

    def check_topic(self, topic: str) -> str:
        """Return the name of a topic as an exact ``str``.

        Raises:
            NullEventError: ``topic`` is ``None``.
            InvalidTopicError: ``topic`` breaks the grammar, or has wildcards.
        """
        topic = exact_text(topic, "topic")
        if not self.is_topic(topic):
            raise InvalidTopicError(topic, f"not a topic: {self.fault(topic)}")
        return topic

    def parse(self, text: str) -> F:
        """Return the topic filter with this text; the last 1024 filters are remembered.

        Raises:
            NullEventError: ``text`` is ``None``.
            InvalidTopicError: ``text`` breaks the grammar.
        """
        return self._remembered(exact_text(text, "topic filter"))

    @tolerant
    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name


def exact_text(text: Any, what: str) -> str:
    """Return ``text`` as an exact ``str``; ``what`` names it in errors.

    Raises:
        NullEventError: ``text`` is ``None``.
        InvalidTopicError: ``text`` is of another type.
    """
    if text is None:
        raise NullEventError(f"a {what} is needed, not None")
    if not isinstance(text, str):
        raise InvalidTopicError(text, f"a {what} must be a str, not {type(text).__name__}")
    return exact(text)


#: the token of a filter that stands for any one token
SINGLE_LEVEL: Final = "+"
#: the last token of a filter that stands for any number of further tokens, at least one
MULTI_LEVEL: Final = "*"
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


class _TrieNode(Generic[T]):
    __slots__ = ("below", "children", "here")

    def __init__(self) -> None:
        self.children: dict[str, _TrieNode[T]] = {}
        #: values of filters that end here, and of filters that continue with ``/*``; in the order they were added
        self.here: dict[T, None] = {}
        self.below: dict[T, None] = {}

    @property
    def is_empty(self) -> bool:
        return not (self.children or self.here or self.below)


class TopicTrie(TopicIndex[TopicFilter, T]):
    """A trie of tokens: values by topic filter, found by topic level by level; see ``TopicIndex`` (157.6.2.1)."""

    def __init__(self) -> None:
        self._root: _TrieNode[T] = _TrieNode()

    def add(self, topic_filter: TopicFilter, value: T) -> None:
        """Add a value; adding it again does nothing."""
        self._place(self._path(topic_filter)[-1], topic_filter)[value] = None

    def remove(self, topic_filter: TopicFilter, value: T) -> None:
        """Remove a value added with that filter, and the nodes that become empty; do nothing if there is none."""
        path = self._path(topic_filter)
        self._place(path[-1], topic_filter).pop(value, None)
        steps = zip(topic_filter.tokens, path, path[1:], strict=False)  # a multi-level wildcard has no node of its own
        for token, parent, node in reversed([*steps]):
            if not node.is_empty:
                return
            del parent.children[token]

    @staticmethod
    def _place(node: _TrieNode[T], topic_filter: TopicFilter) -> dict[T, None]:
        return node.below if topic_filter.tokens[-1] == MULTI_LEVEL else node.here

    def _path(self, topic_filter: TopicFilter) -> list[_TrieNode[T]]:
        tokens = topic_filter.tokens
        path = [self._root]
        for token in tokens[:-1] if tokens[-1] == MULTI_LEVEL else tokens:
            path.append(path[-1].children.setdefault(token, _TrieNode()))
        return path

    def match(self, topic: str) -> list[T]:
        """Return the values whose filters match, each once."""
        found: dict[T, None] = dict.fromkeys(list(self._root.below))
        nodes = [self._root]
        tokens = topic.split("/")
        last = len(tokens) - 1
        for level, token in enumerate(tokens):
            nodes = [
                child
                for node in nodes
                for each in (token, SINGLE_LEVEL)
                if (child := node.children.get(each)) is not None
            ]
            if not nodes:
                break
            for node in nodes:
                values = node.here if level == last else node.below
                if values:
                    found.update(dict.fromkeys(list(values)))
        return list(found)

    def preferred(self, topic: str) -> T | None:
        """Return a value of the most specific filter that matches, by the precedence of 157.6.2.1."""
        tokens = topic.split("/")
        # a stack: the last choice is pushed first; True stands for the ``/*`` filters of a node, its last choice
        waiting: list[tuple[_TrieNode[T], int, bool]] = [(self._root, 0, False)]
        while waiting:
            node, level, is_last_choice = waiting.pop()
            if is_last_choice or level == len(tokens):
                for value in list(node.below if is_last_choice else node.here):
                    return value
                continue
            waiting.append((node, level, True))
            for token in (SINGLE_LEVEL, tokens[level]):
                child = node.children.get(token)
                if child is not None:
                    waiting.append((child, level + 1, False))
        return None

    def __len__(self) -> int:
        """Return the number of nodes beside the root; it is 0 when all values are removed."""
        count, nodes = -1, [self._root]
        while nodes:
            node = nodes.pop()
            count += 1
            nodes.extend(node.children.values())
        return count


class TypedTopics(TopicGrammar[TopicFilter]):
    """The grammar of chapter 157, and that of RFC 97.

    Args:
        constant: name of the constant.
        single_level: whether filters may have a ``+``.
    """

    new_index = TopicTrie

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


#: the grammar of OSGi Typed Event; the default wherever a grammar is a parameter
TYPED_EVENTS: Final = TypedTopics("TYPED_EVENTS", single_level=True)
#: the grammar of Event Admin: the same without ``+``
EVENT_ADMIN: Final = TypedTopics("EVENT_ADMIN", single_level=False)

#: the methods of ``TYPED_EVENTS``; see :class:`~messaging.dispatch.topics.TopicGrammar`
is_topic: Final = TYPED_EVENTS.is_topic
check_topic: Final = TYPED_EVENTS.check_topic
parse_filter: Final = TYPED_EVENTS.parse
