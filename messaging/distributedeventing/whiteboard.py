"""The interfaces of the whiteboards: consumers and sources of events (RFC 214 5.2, 7.1; RFC 216)."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from messaging.distributedeventing.constants import DistributedEventConstants as Names
from messaging.distributedeventing.events import ABORT as _ABORT
from messaging.distributedeventing.events import CONTINUE as _CONTINUE
from messaging.distributedeventing.events import DistributableEvent

if TYPE_CHECKING:
    from messaging.distributedeventing.events import PushEvent

T = TypeVar("T")


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

    CONSUMED_EVENT_TOPICS: Final = Names.EVENT_TOPICS
    EVENT_TYPE: Final = Names.EVENT_TYPE
    LIFECYCLE: Final = Names.CONSUMER_LIFECYCLE


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
