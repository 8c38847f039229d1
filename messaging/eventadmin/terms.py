"""The terms of an event handler: topics, filter, principal, timeout and order (RFC 97 5.1.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from messaging.dispatch import Terms, read_filter, read_principal, read_timeout, read_topics
from messaging.errors import ArgumentError
from messaging.eventadmin.constants import EventConstants as Names


@dataclass(frozen=True, slots=True)
class AdminTerms(Terms):
    """The terms of an event handler.

    Attributes:
        is_ordered: whether it needs its events in order.
    """

    is_ordered: bool = True


def read_terms(properties: Mapping[str, Any]) -> AdminTerms:
    """Read the terms from the properties of an event handler; ``topics`` is ``None`` if they name none.

    Raises:
        ArgumentError: a property is invalid.
    """
    return AdminTerms(
        read_topics(_first(properties, Names.EVENT_TOPIC_NAMES), Names.EVENT_TOPIC, single_level=False),
        read_filter(_first(properties, Names.EVENT_FILTER_NAMES)),
        read_principal(properties.get(Names.EVENT_PRINCIPAL), Names.EVENT_PRINCIPAL),
        read_timeout(properties.get(Names.EVENT_TIMEOUT), Names.EVENT_TIMEOUT),
        _read_delivery(properties.get(Names.EVENT_DELIVERY)),
    )


def _first(properties: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((properties[name] for name in names if properties.get(name) is not None), None)


def _read_delivery(value: Any) -> bool:
    """Return whether order is needed: unless there is ``async.unordered`` and no ``async.ordered``."""
    if value is None:
        return True
    several = (value,) if isinstance(value, str) else value
    known = (Names.DELIVERY_ASYNC_ORDERED, Names.DELIVERY_ASYNC_UNORDERED)
    if not isinstance(several, (list, tuple, set, frozenset)) or any(each not in known for each in several):
        raise ArgumentError(f"{Names.EVENT_DELIVERY} must be one or both of {', '.join(known)}, not {value!r:.80}")
    return Names.DELIVERY_ASYNC_ORDERED in several or Names.DELIVERY_ASYNC_UNORDERED not in several
