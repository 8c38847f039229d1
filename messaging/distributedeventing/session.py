"""EventPublisherSession: a series of events of one topic, with an end (RFC 214 5.1.2)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, Self, TypeVar

from messaging.dispatch import Principal
from messaging.dispatch.eventnetwork import DeliveryNotification
from messaging.distributedeventing.events import DispatchedEvent, DistributableEvent, PushEvent
from messaging.distributedeventing.publishing import Publishing, given_event
from messaging.errors import ArgumentError, ClosedError
from messaging.errors.checks import check_instance
from messaging.errors.text import tolerant
from messaging.execution import Closeable, Promise
from messaging.services import ServiceRegistration

T = TypeVar("T")


#: the end of a session, and its notification
_End = tuple[PushEvent[Any], "DeliveryNotification | None"]


class _SessionGate:
    """Has the end of a session follow its data: the last call that publishes data publishes the end. Thread safe.

    Its lock is not held while an event is published: that calls filters, payloads and logging handlers.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards the following; reentrant for signal handlers
        self.is_open = True
        #: number of calls that publish data now
        self._inside = 0
        self._due: _End | None = None
        #: notification of the end
        self.ended: DeliveryNotification | None = None

    def enter(self) -> bool:
        """Return whether data may be published; if so, :meth:`leave` must follow."""
        with self._lock:
            self._inside += self.is_open
            return self.is_open

    def leave(self) -> _End | None:
        """Return the end that the caller has to publish, if there is one."""
        with self._lock:
            self._inside -= 1
            if self._inside:
                return None
            due, self._due = self._due, None
            return due

    def end(self, event: PushEvent[Any], notification: DeliveryNotification | None) -> tuple[bool, bool]:
        """Return whether the gate was open, and whether the caller has to publish the end."""
        with self._lock:
            was_open, self.is_open = self.is_open, False
            if was_open:
                self.ended = notification
            if was_open and self._inside:
                self._due = event, notification
            return was_open, was_open and not self._inside


class EventPublisherSession(Closeable, Generic[T]):
    """Publishes events to one topic, and ends with a close or an error event. Thread safe; a context manager.

    ``DistributedEventAdmin.create_session`` makes it. Leaving its ``with`` block closes it, or ends it with the
    exception that left the block. It closes by itself with its admin (5.1.2).

    Consumers with lifecycle ``SESSION`` receive the close or error event; the others receive only the data.
    """

    def __init__(
        self,
        publishing: Publishing,
        topic: str,
        session: str,
        reply_to: str | None,
        ready: Promise[None],
        ended: Callable[[EventPublisherSession[Any]], object],
        principal: Principal = None,
    ) -> None:
        self._publishing = publishing
        self._topic = topic
        self._session = session
        self._reply_to = reply_to
        #: resolves when the broker has confirmed the subscription to replies; at once without a reply handler
        self.ready = ready
        self._ended = ended
        self._principal = principal
        self._gate = _SessionGate()

    @property
    def topic(self) -> str:
        """The topic of all its events; also after its end."""
        return self._topic

    @property
    def reply_to(self) -> str | None:
        """The private topic of replies, or ``None`` without a reply handler."""
        return self._reply_to

    @property
    def is_connected(self) -> bool:
        """Return whether the session is open, and a consumer of its topic is known, here or in another process."""
        return self._gate.is_open and self._publishing.has_consumer(self._topic)

    # --- data

    def publish_event(
        self, payload: T, correlation_id: str | None = None, *, qos: str | Iterable[str] | None = None
    ) -> Promise[None]:
        """Publish a payload; see ``DistributedEventAdmin.publish_event`` for qos, the promise and errors.

        Raises:
            ClosedError: the session has ended.
        """
        return self._publish(lambda: self._event(payload, correlation_id), qos)

    def publish(self, event: DistributableEvent[T], *, qos: str | Iterable[str] | None = None) -> Promise[None]:
        """Publish an event, with its sender as given; its topic must be that of the session. Return the same promise.

        Raises:
            ArgumentError: the topic is another one.
            ClosedError: the session has ended.
        """
        return self._publish(lambda: self._given(event), qos)

    def publish_event_with_notification(
        self,
        payload: T,
        correlation_id: str | None = None,
        *,
        timeout: float | None = None,
        qos: str | Iterable[str] | None = None,
    ) -> Promise[None]:
        """Publish a payload; see ``DistributedEventAdmin.publish_event_with_notification`` for the promise."""
        notification = self._publishing.notification(self._topic, timeout)
        self._publish(lambda: self._event(payload, correlation_id), qos, notification)
        return notification.promise

    def publish_with_notification(
        self,
        event: DistributableEvent[T] | T,
        correlation_id: str | None = None,
        *,
        timeout: float | None = None,
        qos: str | Iterable[str] | None = None,
    ) -> Promise[None]:
        """Publish an event, or a payload with its correlation id, with notification (7.1 has both)."""
        notification = self._publishing.notification(self._topic, timeout)
        if isinstance(event, DistributableEvent):
            self._publish(lambda: self._given(event), qos, notification)
        else:
            self._publish(lambda: self._event(event, correlation_id), qos, notification)
        return notification.promise

    def _event(self, payload: Any, correlation_id: str | None) -> DispatchedEvent:
        return self._publishing.own_event(
            self._topic, payload, correlation_id, session=self._session, reply_to=self._reply_to
        )

    def _given(self, event: DistributableEvent[Any]) -> DispatchedEvent:
        check_instance("event", event, DistributableEvent)
        if event.topic != self._topic:
            raise ArgumentError(f"the session publishes to {self._topic!r}, and the event is for {event.topic!r}")
        return given_event(event, session=self._session, reply_to=self._reply_to)

    def _publish(
        self, make: Callable[[], DispatchedEvent], qos: Any, notification: DeliveryNotification | None = None
    ) -> Promise[None]:
        """Publish the event that ``make`` returns, unless the session has ended."""
        _refuse_ended(self._gate.enter(), self._topic)
        try:
            return self._publishing.publish(make(), qos, notification, self._principal)
        finally:
            due = self._gate.leave()
            if due is not None:
                self._publish_end(*due)

    # --- the end

    def close(self) -> None:
        """End the session with a close event; idempotent.

        If another thread publishes to the session at this moment, that thread publishes the close event afterwards.
        """
        self._end(PushEvent.close())

    #: ends the session as :meth:`close` does
    end_of_stream = close

    def error(self, failure: Exception) -> None:
        """End the session with an error event; idempotent.

        Consumers in other processes receive a ``RemoteEventError`` with the name and the text of ``failure``.

        Raises:
            ArgumentError: ``failure`` is no exception.
        """
        self._end(PushEvent.error(failure))

    def close_with_notification(self, *, timeout: float | None = None) -> Promise[None]:
        """End the session with a close event; the promise resolves when every consumer was notified of it.

        After an end with notification, it resolves with that; after one without, at once.
        """
        notification = self._publishing.notification(self._topic, timeout)
        self._end(PushEvent.close(), notification)
        return notification.promise

    #: ends the session as :meth:`close_with_notification` does
    end_of_stream_with_notification = close_with_notification

    def error_with_notification(self, failure: Exception, *, timeout: float | None = None) -> Promise[None]:
        """End the session with an error event; the promise resolves when every consumer was notified of it."""
        event: PushEvent[Any] = PushEvent.error(failure)
        notification = self._publishing.notification(self._topic, timeout)
        self._end(event, notification)
        return notification.promise

    def _end(self, event: PushEvent[Any], notification: DeliveryNotification | None = None) -> None:
        was_open, is_due = self._gate.end(event, notification)
        if is_due:
            self._publish_end(event, notification)
        elif not was_open and notification is not None:
            notification.follow(self._gate.ended)

    def _publish_end(self, event: PushEvent[Any], notification: DeliveryNotification | None) -> None:
        try:
            end = self._publishing.end_of(self._topic, self._session, event)
            self._publishing.publish(end, None, notification, self._principal)
        finally:
            self._ended(self)

    def __enter__(self) -> Self:
        _refuse_ended(self._gate.is_open, self._topic)
        return self

    def __exit__(self, *raised: object) -> None:
        if isinstance(raised[1], Exception):
            self.error(raised[1])
        else:
            self.close()

    @tolerant
    def __repr__(self) -> str:
        return f"<EventPublisherSession on {self._topic!r}, {'open' if self._gate.is_open else 'ended'}>"


def _refuse_ended(is_open: bool, topic: str) -> None:
    if not is_open:
        raise ClosedError(f"the event session on {topic!r} has ended")


class OpenParts(Closeable):
    """The open sessions or subscriptions of one admin, with the registrations of their consumers. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards the following; reentrant for signal handlers
        self._parts: dict[Closeable, ServiceRegistration | None] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, part: Closeable, consumer: ServiceRegistration | None) -> None:
        """Add a session or subscription, and the registration that its end unregisters."""
        with self._lock:
            self._parts[part] = consumer

    def ended(self, part: Closeable) -> None:
        """Remove a session or subscription, and serve its consumer no more (5.1.2). Idempotent."""
        with self._lock:
            consumer = self._parts.pop(part, None)
        if consumer is not None:
            consumer.unregister()

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            parts = [*self._parts]
        for each in parts:
            each.close()
