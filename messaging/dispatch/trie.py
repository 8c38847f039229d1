"""A trie of tokens: values by topic filter, found by topic level by level (157.4.3, 157.6.2.1; RFC 97 5.1.2)."""

from __future__ import annotations

from typing import Final, Generic, Protocol, TypeVar

from messaging.dispatch.grammar import TopicIndex

T = TypeVar("T")

#: the token of a filter that stands for any one token
SINGLE_LEVEL: Final = "+"
#: the last token of a filter that stands for any number of further tokens, at least one
MULTI_LEVEL: Final = "*"


class TokenFilter(Protocol):
    """A topic filter that consists of tokens."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Its tokens and wildcards."""


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


class TopicTrie(TopicIndex[TokenFilter, T]):
    """Values by topic filter, found by topic; see :class:`~messaging.dispatch.grammar.TopicIndex`."""

    def __init__(self) -> None:
        self._root: _TrieNode[T] = _TrieNode()

    def add(self, topic_filter: TokenFilter, value: T) -> None:
        """Add a value; adding it again does nothing."""
        self._place(self._path(topic_filter)[-1], topic_filter)[value] = None

    def remove(self, topic_filter: TokenFilter, value: T) -> None:
        """Remove a value added with that filter, and the nodes that become empty; do nothing if there is none."""
        path = self._path(topic_filter)
        self._place(path[-1], topic_filter).pop(value, None)
        steps = zip(topic_filter.tokens, path, path[1:], strict=False)  # a multi-level wildcard has no node of its own
        for token, parent, node in reversed([*steps]):
            if not node.is_empty:
                return
            del parent.children[token]

    @staticmethod
    def _place(node: _TrieNode[T], topic_filter: TokenFilter) -> dict[T, None]:
        return node.below if topic_filter.tokens[-1] == MULTI_LEVEL else node.here

    def _path(self, topic_filter: TokenFilter) -> list[_TrieNode[T]]:
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
