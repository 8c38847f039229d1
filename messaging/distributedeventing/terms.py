"""The terms of a consumer, read from its service properties (RFC 214 5.2.1, 5.2.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch import DISTRIBUTED_EVENTS, Terms, check_principal, read_filter, read_timeout, read_topics
from messaging.dispatch.eventdata import converter_to, is_untyped, load_type
from messaging.distributedeventing.events import ConsumerLifecycle
from messaging.distributedeventing.whiteboard import DistributedEventConstants as Names
from messaging.errors import ArgumentError

if TYPE_CHECKING:
    from messaging.dispatch.eventdata import Converter
    from messaging.services import ServiceReference

_LIFECYCLES: Final = {
    "UNIFIED": ConsumerLifecycle.UNIFIED,
    "GLOBAL": ConsumerLifecycle.GLOBAL,
    "SESSION": ConsumerLifecycle.SESSION,
    "PER_SESSION": ConsumerLifecycle.PER_SESSION,
}


@dataclass(frozen=True, slots=True)
class ConsumerTerms(Terms):
    """The terms of a consumer.

    Attributes:
        convert: converts payloads to the type that it wants; ``None`` for payloads as they are.
        is_session_aware: whether it receives close and error events.
        is_hidden: whether its topics are left out of lists.
    """

    convert: Converter | None = None
    is_session_aware: bool = False
    is_hidden: bool = False


def read_terms(properties: Mapping[str, Any], *, is_prototype: bool) -> ConsumerTerms:
    """Read the terms of a consumer from its service properties.

    Raises:
        ArgumentError, InvalidTopicError, InvalidFilterError: a property is invalid.
    """
    topics = read_topics(properties.get(Names.EVENT_TOPICS), Names.EVENT_TOPICS, grammar=DISTRIBUTED_EVENTS)
    if topics is None:
        raise ArgumentError(f"a consumer needs the property {Names.EVENT_TOPICS}: a topic filter, or several")
    return ConsumerTerms(
        topics,
        read_filter(properties.get(Names.EVENT_FILTER)),
        check_principal(properties.get(Names.EVENT_PRINCIPAL), Names.EVENT_PRINCIPAL),
        read_timeout(properties.get(Names.EVENT_TIMEOUT), Names.EVENT_TIMEOUT),
        read_converter(properties.get(Names.EVENT_TYPE)),
        _read_lifecycle(properties, is_prototype) is ConsumerLifecycle.SESSION,
        is_hidden(properties),
    )


def read_converter(wanted: Any) -> Converter | None:
    """Return the conversion to a type, given as a class or by its name; ``None`` for payloads as they are.

    Raises:
        ArgumentError: it is no type, or cannot be loaded.
    """
    if wanted is None or wanted is object or wanted is Any:
        return None
    if isinstance(wanted, str):
        wanted = load_type(wanted)
    elif not isinstance(wanted, type):
        wanted = load_type(wanted) if not is_untyped(wanted) else wanted
    return converter_to(wanted)


def is_hidden(properties: Mapping[str, Any]) -> bool:
    """Return whether topics are left out of lists (DE087)."""
    advertised = properties.get(Names.EVENT_ADVERTISED, True)
    if not isinstance(advertised, bool):
        raise ArgumentError(f"{Names.EVENT_ADVERTISED} must be True or False, not {advertised!r:.80}")
    return not advertised


def _read_lifecycle(properties: Mapping[str, Any], is_prototype: bool) -> ConsumerLifecycle:
    for name in (Names.EVENT_LIFECYCLE, Names.CONSUMER_LIFECYCLE):  # the text takes precedence over the API
        value = properties.get(name)
        if isinstance(value, ConsumerLifecycle):
            return value
        if value is not None:
            found = _LIFECYCLES.get(value.upper()) if isinstance(value, str) else None
            if found is None:
                raise ArgumentError(f"{name} must be UNIFIED or SESSION (GLOBAL or PER_SESSION), not {value!r:.80}")
            return found
    return ConsumerLifecycle.SESSION if is_prototype else ConsumerLifecycle.UNIFIED


def is_prototype(reference: ServiceReference) -> bool:
    """Return whether a service has prototype scope."""
    return bool(reference.properties.get("service.scope") == "prototype")
