"""The terms of a handler, read from its service properties (157.4.8, RFC 97 5.1.2)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from messaging.dispatch.topics import TYPED_EVENTS
from messaging.errors import ArgumentError
from messaging.services import LdapFilter

if TYPE_CHECKING:
    from messaging.dispatch.grammar import AbstractTopicFilter, TopicGrammar
    from messaging.dispatch.permission import Principal


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much failure a bus accepts before it blocks a handler. An update of its registration unblocks a handler.

    Attributes:
        failures: consecutive events that a handler may fail on; 0: unlimited.
        timeout: how long a handler may take for one event, seconds; 0: unlimited. The handler's own property
            ``event.timeout`` takes precedence.
    """

    failures: int = 10
    timeout: float = 30.0

    def __post_init__(self) -> None:
        check_count("failures", self.failures)
        _check_seconds("timeout", self.timeout)


def check_count(name: str, value: Any, at_least: int = 0) -> int:
    """Return a whole number. Raise ``ArgumentError`` for a value that is no int of at least ``at_least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ArgumentError(f"{name} must be an int of at least {at_least}, not {value!r:.80}")
    return value


def _check_seconds(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise ArgumentError(f"{name} must be seconds, 0 or more, not {value!r:.80}")
    return value


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a handler.

    Attributes:
        topics: filters of its topics; ``None`` if its properties name none.
        filter: the event data must match it; case-sensitive.
        principal: whose permissions count; see :mod:`messaging.dispatch.permission`.
        timeout: how long the handler may take for one event, seconds; 0: unlimited; ``None``: as the bus tolerates.
    """

    topics: tuple[AbstractTopicFilter, ...] | None
    filter: LdapFilter | None
    principal: Principal
    timeout: float | None


def read_topics(
    value: Any, name: str, grammar: TopicGrammar[Any] = TYPED_EVENTS
) -> tuple[AbstractTopicFilter, ...] | None:
    """Parse one topic filter or several (``String+``). One invalid filter makes all of them invalid (157.4.9).

    Args:
        value: the value of a service property; ``None`` if there is none.
        name: of the property, for errors.
        grammar: of the filters.

    Raises:
        ArgumentError, InvalidTopicError: ``value`` is no topic filter, or is empty.
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        raise ArgumentError(f"{name} must be a str or several, not {type(value).__name__}")
    topics = tuple(dict.fromkeys(grammar.parse(each) for each in value))
    if not topics:
        raise ArgumentError(f"{name} is empty: name at least one topic")
    return topics


def read_filter(value: Any) -> LdapFilter | None:
    """Parse a case-sensitive filter over event data, or raise ``InvalidFilterError``; an empty text means no filter."""
    if value is None or value == "":
        return None
    if isinstance(value, LdapFilter):
        return value if value.case_sensitive else LdapFilter(str(value), case_sensitive=True)
    return LdapFilter(value, case_sensitive=True)


def read_timeout(value: Any, name: str) -> float | None:
    """Return a number of seconds, or ``None``. Raise ``ArgumentError`` for a value that is no number of at least 0."""
    return None if value is None else _check_seconds(name, value)
