"""The whiteboards: interfaces of consumers and sources, and their properties (RFC 214 5.2, 5.3.1, 7.1).

The terms of a consumer are read from its properties.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from messaging.dispatch import DISTRIBUTED_EVENTS, Terms, check_principal, read_filter, read_timeout, read_topics
from messaging.dispatch.eventdata import Converter, converter_to, is_untyped, load_type
from messaging.distributedeventing.events import ABORT as _ABORT
from messaging.distributedeventing.events import CONTINUE as _CONTINUE
from messaging.distributedeventing.events import ConsumerLifecycle, DistributableEvent, PushEvent
from messaging.errors import ArgumentError
from messaging.services import ServiceReference

T = TypeVar("T")


class DistributedEventConstants:
    """Names that RFC 214 defines, and names that this project adds."""

    #: topic filters of a consumer: a str or several (5.2.1)
    EVENT_TOPICS: Final = "event.topics"
    #: type of the payloads that a consumer wants: a class or its qualified name (5.2.1)
    EVENT_TYPE: Final = "event.type"
    #: lifecycle of a consumer, in the spelling of the text (5.2.3): ``UNIFIED`` or ``SESSION``
    EVENT_LIFECYCLE: Final = "event.lifecycle"
    #: lifecycle of a consumer, in the spelling of the API (7.1): ``GLOBAL`` or ``PER_SESSION``
    CONSUMER_LIFECYCLE: Final = "consumer.lifecycle"
    #: topic of a whiteboard event source, exactly one (5.2.4)
    EVENT_TOPIC: Final = "event.topic"
    #: qualities of service that an admin keeps (5.3.1)
    EVENT_DELIVERY_QOS: Final = "event.delivery.qos"

    # --- of this project
    #: whether the topics of a consumer or source are listed (DE087): ``True`` by default
    EVENT_ADVERTISED: Final = "event.advertised"
    #: LDAP filter over the properties of the admins that a consumer or source is for
    EVENT_TARGET: Final = "event.target"
    #: LDAP filter over the top level of the payload of a consumer's events
    EVENT_FILTER: Final = "event.filter"
    #: principal whose permissions count for a consumer
    EVENT_PRINCIPAL: Final = "event.principal"
    #: time limit of a consumer for one event, seconds
    EVENT_TIMEOUT: Final = "event.timeout"
    #: name of an admin
    EVENT_ADMIN_NAME: Final = "event.admin.name"


class PushEventConsumer(abc.ABC, Generic[T]):
    """Receives the payloads of events. Register it in the service registry with these properties (5.2.1, 5.2.3).

    ====================  ========================================================================================
    ``event.topics``      topic filters: a str or several
    ``event.type``        the type that payloads are converted to; without it they are dicts, lists and simple
                          values if they come from another process, and else the objects that were published
    ``event.lifecycle``   ``UNIFIED`` or ``SESSION``; by default ``SESSION`` for a prototype, else ``UNIFIED``.
                          ``consumer.lifecycle`` with ``GLOBAL`` or ``PER_SESSION`` is the same
    ``event.advertised``  ``False`` to leave its topics out of lists
    ``event.filter``      LDAP filter over the top level of the payload
    ``event.principal``   principal whose permissions count
    ``event.timeout``     time limit for one event, seconds
    ====================  ========================================================================================

    The service object is fetched when the first event for it arrives. It is called on a delivery thread with one event
    at a time. A coroutine is awaited on the event loop that was running at registration, or else on a shared one. A
    function may be registered in place of an object with ``accept``.
    """

    ABORT: Final = _ABORT
    CONTINUE: Final = _CONTINUE

    @abc.abstractmethod
    def accept(self, event: PushEvent[T]) -> Any:
        """Take an event.

        Returns:
            Back-pressure: negative to be discarded and called no more; 0 or ``None`` for the next event at once; or the
            milliseconds to wait before the next event. An exception counts as negative, and is logged.
        """


class DistributableEventConsumer(PushEventConsumer[DistributableEvent[T]], Generic[T]):
    """Receives whole events, with topic, sender, reply topic and correlation id; see ``PushEventConsumer``."""

    CONSUMED_EVENT_TOPICS: Final = DistributedEventConstants.EVENT_TOPICS
    EVENT_TYPE: Final = DistributedEventConstants.EVENT_TYPE
    LIFECYCLE: Final = DistributedEventConstants.CONSUMER_LIFECYCLE


class PushEventSource(abc.ABC, Generic[T]):
    """Publishes events of one topic while it has consumers. Register it with the property ``event.topic`` (5.2.4).

    It is fetched and opened when the first consumer of its topic is there, in this process or another one, in a session
    of its own. It is closed when the last one leaves, and may be opened again.
    """

    @abc.abstractmethod
    def open(self, consumer: PushEventConsumer[T]) -> Any:
        """Begin to call ``consumer.accept`` with events, from any thread, and return.

        ``accept`` returns back-pressure: negative when there are no more consumers, and the source should stop.

        Returns:
            An object with ``close()``, which is called when the last consumer is gone; or ``None``.
        """


#: the names, as the functions below use them
Names: Final = DistributedEventConstants


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
    if isinstance(wanted, str) or not (isinstance(wanted, type) or is_untyped(wanted)):
        wanted = load_type(wanted)
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
            found = ConsumerLifecycle.__members__.get(value.upper()) if isinstance(value, str) else None
            if found is None:
                raise ArgumentError(f"{name} must be UNIFIED or SESSION (GLOBAL or PER_SESSION), not {value!r:.80}")
            return found
    return ConsumerLifecycle.SESSION if is_prototype else ConsumerLifecycle.UNIFIED


def is_prototype(reference: ServiceReference) -> bool:
    """Return whether a service has prototype scope."""
    return bool(reference.properties.get("service.scope") == "prototype")
