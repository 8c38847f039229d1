"""Whiteboard event sources: opened while their topic has a consumer anywhere (RFC 214 5.2.4).

**Threads.** Sources are fetched, opened and closed on a worker thread, on one at a time for each admin. They call the
consumer on threads of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch import DISTRIBUTED_EVENTS, contained
from messaging.distributedeventing.events import ABORT, CONTINUE, PushEvent
from messaging.distributedeventing.session import EventPublisherSession
from messaging.distributedeventing.whiteboard import DistributedEventConstants as Names
from messaging.distributedeventing.whiteboard import PushEventConsumer, PushEventSource, is_hidden
from messaging.errors import ArgumentError, ClosedError, MessagingError
from messaging.errors.checks import check_instance, check_result
from messaging.errors.text import SafeLog
from messaging.execution import Serial
from messaging.services import ServiceEventKind, as_filter, interface_name

if TYPE_CHECKING:
    from messaging.services import ServiceEvent, ServiceReference, ServiceRegistry

logger = SafeLog(__name__)

SOURCE: Final = interface_name(PushEventSource)


@dataclass(slots=True, eq=False)
class _SourceOutlet(PushEventConsumer[Any]):
    """What an opened source is given: it publishes its events in a session of their own."""

    _session: EventPublisherSession[Any]
    _ended: Callable[[], object]
    _has_consumer: Callable[[], bool]

    def accept(self, event: PushEvent[Any]) -> int:
        """Publish an event of the source. From any thread.

        Raises:
            ArgumentError: ``event`` is no ``PushEvent``.
        """
        check_instance("event", event, PushEvent)
        if not self._has_consumer():
            return ABORT
        try:
            if event.kind == "data":
                self._session.publish_event(event.value)
                return CONTINUE
            if event.failure is not None:
                self._session.error(event.failure)
            else:
                self._session.close()
        except ClosedError:
            return ABORT
        self._ended()
        return ABORT


@dataclass(slots=True, eq=False)
class _RegisteredSource:
    """A registered source. Used by one thread at a time."""

    reference: ServiceReference
    topic: str
    is_hidden: bool
    is_registered: bool = True
    #: the session of the opened source, and what its ``open`` returned
    session: EventPublisherSession[Any] | None = None
    handle: Any = None
    #: whether the source ended its session itself: it is opened again after a time without consumers
    has_ended: bool = False


class EventSources:
    """The sources of one admin. Thread safe.

    Args:
        title: of the admin, for the log.
        services: the registry that has them.
        announced: properties of the admin, by which sources select it.
        has_consumer: returns whether a topic has a consumer anywhere.
        create_session: makes the session of a topic.
        changed: called when the topics of the sources change.
    """

    def __init__(
        self,
        title: str,
        services: ServiceRegistry,
        announced: Mapping[str, Any],
        *,
        has_consumer: Callable[[str], bool],
        create_session: Callable[[str], EventPublisherSession[Any]],
        changed: Callable[[], object],
    ) -> None:
        self._title = title
        self._services = services
        self._announced = announced
        self._has_consumer = has_consumer
        self._create_session = create_session
        self._changed = changed
        self._sources: dict[ServiceReference, _RegisteredSource] = {}
        #: sources that are no longer registered, or have another topic now, and are still to be closed
        self._retired: deque[_RegisteredSource] = deque()
        self._is_closed = False
        self._is_due = False
        self._serial = Serial(self._review_all, lambda: self._is_due)
        self._watch: Any = None

    def open(self) -> None:
        """Serve the registered sources, and those registered from now on."""
        self._watch = self._services.add_listener(self._event, SOURCE)
        for reference in self._services.find(SOURCE):
            self._add(reference)
        self.review()

    def topics(self) -> list[tuple[str, bool]]:
        """Return the topics of the sources, each with whether it is hidden."""
        return [(each.topic, each.is_hidden) for each in [*self._sources.values()]]

    def close(self) -> None:
        """Close all sources."""
        self._is_closed = True
        if self._watch is not None:
            self._watch.remove()
        self.review()

    def review(self) -> None:
        """Open and close sources as their topics have consumers. From any thread; does not wait."""
        self._is_due = True
        self._serial.wake()

    # --- registrations

    def _event(self, event: ServiceEvent) -> None:
        if event.kind is ServiceEventKind.UNREGISTERING:
            self._remove(event.reference)
        elif event.kind is ServiceEventKind.REGISTERED:
            self._add(event.reference)
        else:
            known = self._sources.get(event.reference)
            if known is None or known.topic != event.reference.properties.get(Names.EVENT_TOPIC):
                self._remove(event.reference)
                self._add(event.reference)
        self.review()
        self._changed()

    def _add(self, reference: ServiceReference) -> None:
        properties = reference.properties
        try:
            target = as_filter(properties.get(Names.EVENT_TARGET))
            if target is not None and not target.matches(self._announced):
                return
            topic = properties.get(Names.EVENT_TOPIC)
            if topic is None:
                raise ArgumentError(f"a source needs the property {Names.EVENT_TOPIC}: its topic")
            source = _RegisteredSource(reference, DISTRIBUTED_EVENTS.check_topic(topic), is_hidden(properties))
        except MessagingError as error:
            logger.error("%s: the source %r is ignored: %s", self._title, reference, error)
            return
        self._sources.setdefault(reference, source)

    def _remove(self, reference: ServiceReference) -> None:
        found = self._sources.pop(reference, None)
        if found is not None:
            found.is_registered = False
            self._retired.append(found)

    # --- on the worker thread

    def _review_all(self) -> None:
        self._is_due = False
        retired = [self._retired.popleft() for _ in range(len(self._retired))]
        for source in [*retired, *self._sources.values()]:
            with contained(self._failed, source):
                self._review(source)

    def _failed(self, source: _RegisteredSource, error: BaseException) -> None:
        """Log the exception of a source, and end the session of one that could not be opened."""
        logger.error(
            "%s: the source %r on %r failed; it stays registered",
            self._title, source.reference, source.topic, exc_info=error,
        )  # fmt: skip
        session, source.session = source.session, None
        if session is not None:
            source.has_ended = True  # not opened again at once
            with contained(self._failed, source):
                session.error(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))

    def _review(self, source: _RegisteredSource) -> None:
        is_served = source.is_registered and not self._is_closed
        is_wanted = is_served and self._has_consumer(source.topic)
        if not is_wanted:
            source.has_ended = False
            self._end(source)
        elif source.has_ended:
            self._end(source)
        elif source.session is None:
            self._start(source)

    def _start(self, source: _RegisteredSource) -> None:
        service = self._services.get(source.reference)
        if service is None:
            return
        try:
            session = source.session = self._create_session(source.topic)
        except ClosedError:
            return  # the admin is closing, and delivers its last events: it opens no source any more

        def ended() -> None:
            if source.session is session:
                source.has_ended = True
                self.review()

        channel = _SourceOutlet(session, ended, lambda: self._has_consumer(source.topic))
        source.handle = check_result(getattr(service, "open", service)(channel), "an event source")

    @staticmethod
    def _end(source: _RegisteredSource) -> None:
        session, source.session = source.session, None
        handle, source.handle = source.handle, None
        try:
            close = getattr(handle, "close", None)
            if callable(close):
                check_result(close(), "close() of an event source")
        finally:
            if session is not None:
                session.close()
