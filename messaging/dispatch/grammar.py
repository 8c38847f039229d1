"""The contract of a grammar of topics: its topics, its topic filters, and the index that finds values by topic.

Event services differ in what a topic is and in what a wildcard stands for. A service works with one
:class:`TopicGrammar`. The grammars are ``TYPED_EVENTS`` and ``EVENT_ADMIN`` in :mod:`messaging.dispatch.topics`, and
``DISTRIBUTED_EVENTS`` in :mod:`messaging.dispatch.distributed_topics`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import lru_cache
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
