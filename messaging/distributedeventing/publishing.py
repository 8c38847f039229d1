"""The way of an event from a sender: to the consumers of this process, and to those of others that want it.

**Threads.** Everything runs on the publishing thread: consumers are found, their filters applied, the event is queued
for each, encoded and put into the outbox of the instance. A full outbox makes plain threads wait, up to the deadline of
a message; threads that run an event loop get ``OutboxFullError``.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, Final

from messaging.dispatch import Dispatcher, EventService, Principal, TopicPermission
from messaging.dispatch.eventdata import WireError, WireEvent
from messaging.dispatch.eventnetwork import DISPATCH, DeliveryNotification, EventNode, framework_uuid
from messaging.distributedeventing.admin_network import NetworkPolicy
from messaging.distributedeventing.event_consumer import EventConsumer, Route
from messaging.distributedeventing.events import DispatchedEvent, DistributableEvent, PushEvent
from messaging.distributedeventing.qos import DeliveryQos, QosReader
from messaging.errors import ArgumentError, InvalidEventError, MessagingError, NullEventError, PermissionDeniedError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog
from messaging.execution import Promise, clock, seconds

logger = SafeLog(__name__)

_MICROSECONDS: Final = 1_000_000
#: this process, as the origin of events
_OWN: Final = framework_uuid()
_FRAMEWORK: Final = str(_OWN)


class RefusedEvent(Promise[None]):
    """The promise of an event that is not sent to other processes, which was reported already: it has failed."""

    __slots__ = ()

    def __init__(self, topic: str, error: MessagingError) -> None:
        super().__init__(f"sending an event on {topic!r} to other processes")
        self.was_retrieved = True
        self.reject(error)

    @property
    def stored(self) -> Promise[None]:
        """See ``Promise``."""
        return self


#: the promise of every event that has no message
_NOT_SENT: Final[Promise[None]] = Promise.resolved(None, "sending an event that no other process wants")


class Publishing:
    """Publishes the events of one admin. Thread safe.

    Args:
        admin: whether it is open, and its consumers.
        qos: reads qualities of service.
        bundle: the number that stands for the originating bundle.
        timeout: default deadline of notifications, seconds.
        on_published: called with the topic of each event that is published.
        outbound: decides which events go out to other processes.
    """

    def __init__(
        self,
        admin: EventService,
        qos: QosReader,
        bundle: int,
        timeout: float,
        on_published: Callable[[str], object],
        outbound: NetworkPolicy,
    ) -> None:
        self._admin = admin
        self._dispatcher: Dispatcher[EventConsumer, Route] = admin.dispatcher
        self._qos = qos
        self._bundle = bundle
        self._timeout = timeout
        self._on_published = on_published
        self._outbound = outbound
        #: the member of the network; ``None`` for an admin of this process only
        self.node: EventNode | None = None

    def has_consumer(self, topic: str) -> bool:
        """Return whether a consumer of ``topic`` is known, here or in another process."""
        route = self._dispatcher.routes.get(topic)
        if route is None:
            route = self._dispatcher.route(topic)
        return bool(route) or (self.node is not None and self.node.sender.has_consumer(topic))

    def notification(self, topic: str, timeout: float | None) -> DeliveryNotification:
        """Return the notification of an event that is about to be published."""
        limit = self._timeout if timeout is None else seconds(timeout)
        return DeliveryNotification(f"publishing to {topic!r} with notification", limit)

    # --- events

    def own_event(
        self,
        topic: str,
        payload: Any,
        correlation_id: str | None = None,
        *,
        session: str | None = None,
        reply_to: str | None = None,
    ) -> DispatchedEvent:
        """Return a data event of this process; see ``DistributedEventAdmin.publish_event`` for errors."""
        payload = _data_of(payload)
        if correlation_id is not None:
            check_instance("correlation_id", correlation_id, str)
        return DispatchedEvent(
            topic,
            "data",
            payload,
            session=None if session is None else ("", session),
            bundle=self._bundle,
            framework=_OWN,
            reply_to=reply_to,
            correlation_id=correlation_id,
        )

    def end_of(self, topic: str, session: str, end: PushEvent[Any]) -> DispatchedEvent:
        """Return the end of a session."""
        return DispatchedEvent(
            topic,
            end.kind,
            None,
            session=("", session),
            bundle=self._bundle,
            framework=_OWN,
            failure=end.failure,
        )

    def publish(
        self,
        event: DispatchedEvent,
        qos: Any,
        notification: DeliveryNotification | None = None,
        principal: Principal = None,
    ) -> Promise[None]:
        """Publish an event; return the promise of its message. The end of a session is published when all is closed."""
        is_end, delivery = event.kind != "data", self._qos.read(qos)
        topic = event.topic
        dispatcher, admin = self._dispatcher, self._admin
        route = dispatcher.routes.get(topic) if topic.__class__ is str else None
        if route is None:
            route = dispatcher.route(topic)
        if not is_end and (principal is not None or dispatcher.policy is not None):
            dispatcher.check(principal, TopicPermission.PUBLISH, topic)
        thread = get_ident()
        publishing = admin.publishing
        is_outer = thread not in publishing  # user code that publishing calls may publish, too
        publishing.add(thread)
        try:
            if not is_end:  # checked after add(): from there on, close() waits for this thread
                admin.refuse_closed()
            for consumer, terms in route:
                consumer.offer(event, terms, notification)
            self._on_published(topic)
            node, sent = self.node, None
            if node is not None and (delivery.is_persistent or node.sender.may_send(topic)):
                sent = self._send(node, event, delivery, notification, principal)
        finally:
            if is_outer:
                publishing.discard(thread)
        if notification is not None:
            notification.release(DISPATCH)
            if not notification.promise.done():  # the node watches only notifications of events that were sent
                notification.watch()
        return _NOT_SENT if sent is None else sent

    def _send(
        self,
        node: EventNode,
        event: DispatchedEvent,
        qos: DeliveryQos,
        notification: DeliveryNotification | None,
        principal: Principal,
    ) -> Promise[None] | None:
        """Send an event to other processes; return the promise of its message, ``None`` if it is not sent.

        Consumers of this process have it already: a refusal is no exception, but fails the promise.
        """
        try:
            self._outbound.check(principal, event.topic)
            sent = node.sender.send(
                wire_event(event, principal),
                event.as_map,
                qos=qos.message_qos,
                is_stored=qos.is_persistent,
                notification=notification,
            )
        except MessagingError as error:
            if isinstance(error, PermissionDeniedError):
                self._outbound.withhold(principal, event.topic, error)
            refused = RefusedEvent(event.topic, error)
            if notification is not None:
                notification.promise.message = refused
                notification.fail(error)
            elif isinstance(error, InvalidEventError):
                logger.error(
                    "%s: an event on %r is not sent to other processes: %s", self._admin.title, event.topic, error
                )
            elif not isinstance(error, PermissionDeniedError):
                raise
            return refused
        if sent is not None and notification is not None:
            notification.promise.message = sent
            sent.listen(lambda: _check_sent(sent, notification))
        return sent


def given_event(
    given: DistributableEvent[Any], *, session: str | None = None, reply_to: str | None = None
) -> DispatchedEvent:
    """Return an event that the caller prepared: topic, sender and data as given. ``reply_to`` is its default."""
    check_instance("event", given, DistributableEvent)
    return DispatchedEvent(
        given.topic,
        "data",
        _data_of(given.data),
        session=None if session is None else ("", session),
        bundle=given.originating_bundle,
        framework=given.originating_framework,
        reply_to=reply_to if given.reply_to is None else given.reply_to,
        correlation_id=given.correlation_id,
    )


def _data_of(payload: Any) -> Any:
    """Return the data of a payload, which may be a data event.

    Raises:
        ArgumentError: it is a close or error event (5.1.1).
        NullEventError: it is ``None``.
    """
    while isinstance(payload, PushEvent):
        if payload.is_terminal:
            raise ArgumentError(
                f"a {payload.kind} event ends a session: publish data here, and end a session with close() or "
                "error() (RFC 214 5.1.1)"
            )
        payload = payload.value
    if payload is None:
        raise NullEventError("the payload is None")
    return payload


def _check_sent(sent: Promise[None], notification: DeliveryNotification) -> None:
    error = sent.exception()
    if error is not None:
        notification.fail(error)


def wire_event(event: DispatchedEvent, principal: Principal = None) -> WireEvent:
    """Return an event as it is sent; the node adds its own number."""
    found = WireEvent.of(event.topic, event.data) if event.kind == "data" else WireEvent(event.topic)
    found.time = int(clock.wall() * _MICROSECONDS)
    if event.kind != "data":
        found.kind = event.kind
        failure = event.failure
        if failure is not None:
            found.error = WireError(type(failure).__name__, str(failure))
    if event.session is not None:
        found.session = event.session[1]
    framework = event.framework
    found.origin = _FRAMEWORK if framework is _OWN else None if framework is None else str(framework)
    found.bundle = event.bundle
    found.reply_to = event.reply_to
    found.correlation_id = event.correlation_id
    found.principal = principal
    return found


def payload_of(arguments: tuple[Any, ...], correlation_id: str | None) -> tuple[str | None, Any]:
    """Return correlation id and payload of the two forms of publishing."""
    if len(arguments) == 1:
        return correlation_id, arguments[0]
    if len(arguments) == 2 and correlation_id is None:  # the form of RFC 214
        return arguments[0], arguments[1]
    raise ArgumentError("publish takes topic and payload, or topic, correlation id and payload")
