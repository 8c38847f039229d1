"""Sources: services, log records, configurations and connections as events (RFC 97 5.6).

============================  ===================================================================  =========  =======
source                        topics                                                               delivered  section
============================  ===================================================================  =========  =======
:class:`ServiceEvents`        ``org/osgi/framework/ServiceEvent/REGISTERED`` and so on             sent       5.6.2.3
:class:`LogEvents`            ``org/osgi/service/log/LogEntry``                                    posted     5.6.3
:class:`ConfigurationEvents`  ``org/osgi/service/cm/ConfigurationEvent/CM_UPDATED``, ``…/CM_DELETED``  posted     5.6.4
:class:`ConnectionEvents`     ``messaging/state/ConnectionState/CONNECTED`` and so on              posted     5.6.1
============================  ===================================================================  =========  =======

There are no bundles, users, wires or UPnP devices in a Python process, so there are no events of them. Each source
publishes until it is closed, and is a context manager that closes it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from messaging.connection import ConnectionState
from messaging.dispatch import Principal, check_principal
from messaging.errors import ArgumentError, ClosedError, PermissionDeniedError
from messaging.errors.checks import check_instance, check_optional
from messaging.errors.text import SafeLog
from messaging.eventadmin.admin import EventAdmin
from messaging.eventadmin.admin_handler import is_quiet
from messaging.eventadmin.event import LOG_TOPIC, Event
from messaging.eventadmin.event import EventConstants as Names
from messaging.execution import Closeable, clock
from messaging.instance import Messaging
from messaging.services import LdapFilter, ServiceEvent, ServiceReference, ServiceRegistry

SERVICE_TOPIC: Final = "org/osgi/framework/ServiceEvent"
CONFIGURATION_TOPIC: Final = "org/osgi/service/cm/ConfigurationEvent"
CONNECTION_TOPIC: Final = "messaging/state/ConnectionState"

logger = SafeLog(__name__)

#: whether this context posts a log event: records logged by posting (that a filter failed, say) are not posted
_posting: contextvars.ContextVar[bool] = contextvars.ContextVar("posting", default=False)


def exception_properties(error: BaseException | None) -> dict[str, Any]:
    """Return the conventional properties of an exception; none for ``None`` (5.6.1)."""
    if error is None:
        return {}
    found = {
        Names.EXCEPTION: error,
        Names.EXCEPTION_CLASS: f"{type(error).__module__}.{type(error).__qualname__}",
    }
    message = ""
    with contextlib.suppress(Exception):  # the text of an exception may raise anything
        message = str(error)
    return found | ({Names.EXCEPTION_MESSAGE: message} if message else {})


def service_properties(reference: ServiceReference | None) -> dict[str, Any]:
    """Return the conventional properties of a service; none for ``None`` (5.6.1)."""
    if reference is None:
        return {}
    found = {
        Names.SERVICE: reference,
        Names.SERVICE_ID: reference.id,
        Names.SERVICE_OBJECTCLASS: reference.interfaces,
    }
    pid = reference.properties.get(Names.SERVICE_PID)
    return found | ({Names.SERVICE_PID: pid} if pid is not None else {})


class EventSource(Closeable):
    """Publishes events of one kind with an EventAdmin until it is closed. Thread safe."""

    #: stops observing the source
    _stop: Callable[[], object] | None = None

    def __init__(self, admin: EventAdmin, principal: Principal) -> None:
        check_instance("admin", admin, EventAdmin)
        self._admin = admin
        self._principal = check_principal(principal)
        self._is_over = False
        self._is_denied = False

    def _publish(self, publish: Callable[..., None], topic: str, properties: Mapping[str, Any]) -> None:
        """Publish an event, unless the source is closed; close the source if the EventAdmin is closed."""
        if self._is_over:
            return
        try:
            publish(Event(topic, properties), principal=self._principal)
            self._is_denied = False
        except ClosedError:
            self._end()
        except PermissionDeniedError as error:
            self._deny(error)

    def _deny(self, error: PermissionDeniedError) -> None:
        """Log the first of several refusals: no caller could handle the exception."""
        if not self._is_denied:
            self._is_denied = True
            logger.warning("%s: events are not published: %s; grant the permission", type(self).__name__, error)

    def _end(self) -> None:
        """End the source, since the EventAdmin is closed."""
        self.close()

    def close(self) -> None:
        """Publish no more events; idempotent."""
        self._is_over = True
        if self._stop is not None:
            self._stop()


class ServiceEvents(EventSource):
    """Sends the service events of a registry, on the thread that changes the service (5.6.2.3).

    The event is posted where that thread runs an event loop and a handler is a coroutine function on it.

    Args:
        admin: publishes the events.
        services: the registry; by default the one of ``admin``.
        filter: only services that match.
        principal: the publisher.
    """

    def __init__(
        self,
        admin: EventAdmin,
        services: ServiceRegistry | None = None,
        filter: str | LdapFilter | None = None,  # noqa: A002
        *,
        principal: Principal = None,
    ) -> None:
        super().__init__(admin, principal)
        services = admin.services if services is None else services
        check_instance("services", services, ServiceRegistry)
        self._stop = services.add_listener(self._changed, filter=filter).remove

    def _changed(self, event: ServiceEvent) -> None:
        properties = {**service_properties(event.reference), Names.EVENT: event}
        self._publish(self._send, f"{SERVICE_TOPIC}/{event.kind.name}", properties)

    def _send(self, event: Event, *, principal: Principal) -> None:
        try:
            self._admin.send_event(event, principal=principal)
        except ArgumentError:  # no handler has received it
            self._admin.post_event(event, principal=principal)


class LogEvents(EventSource, logging.Handler):
    """A ``logging.Handler`` that posts log records (5.6.3); it is added to ``logger``, or to a logger of your choice.

    Records logged while a log event is delivered are not posted: neither those of a handler of log events, nor the
    record of its failure. The same holds for the events that such a handler posts or sends, and for the events of their
    handlers. Otherwise logging would go round for ever. It still can if a handler of log events has a thread log that
    does not belong to Event Admin: do not do that.

    Args:
        admin: publishes the events.
        logger: the logger it is added to until it is closed; ``None``: none.
        level: records below it are not posted.
        principal: the publisher.
    """

    #: Python's levels with OSGi's
    LEVELS: Final = ((logging.ERROR, 1), (logging.WARNING, 2), (logging.INFO, 3), (logging.NOTSET, 4))

    def __init__(
        self,
        admin: EventAdmin,
        logger: logging.Logger | None = None,
        level: int | str = logging.NOTSET,
        *,
        principal: Principal = None,
    ) -> None:
        EventSource.__init__(self, admin, principal)
        check_optional("logger", logger, logging.Logger)
        try:
            logging.Handler.__init__(self, level)
        except ValueError as error:
            raise ArgumentError(f"level must be an int or the name of a level of logging: {error}") from None
        if logger is not None:
            self._stop = functools.partial(logger.removeHandler, self)
            logger.addHandler(self)

    def handle(self, record: logging.LogRecord) -> bool:
        """Post a record, without the lock of ``logging.Handler``: posting may have to wait for room."""
        if self._is_over or _posting.get() or is_quiet():
            return False
        found: Any = self.filter(record)  # from Python 3.12 on, it may be another record
        if not found:
            return False
        self.emit(found if isinstance(found, logging.LogRecord) else record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Post a record."""
        token = _posting.set(True)
        try:
            error = record.exc_info[1] if record.exc_info else None
            properties = {
                **exception_properties(error),
                "log.level": next((osgi for level, osgi in self.LEVELS if record.levelno >= level), 4),
                "log.logger": record.name,
                Names.MESSAGE: record.getMessage(),
                Names.TIMESTAMP: int(record.created * 1000),
                "log.entry": record,
            }
            self._publish(self._admin.post_event, LOG_TOPIC, properties)
        except Exception:  # noqa: BLE001  # of a message with wrong arguments, say: handled as logging does
            self.handleError(record)
        finally:
            _posting.reset(token)

    def _end(self) -> None:
        # not removed: the logger is iterating its handlers and would skip the one after this
        self._is_over = True

    def close(self) -> None:
        """Publish no more events; idempotent."""
        EventSource.close(self)
        logging.Handler.close(self)


class ConfigurationEvents(EventSource):
    """Posts changes of configurations (5.6.4). Python has no Configuration Admin: the configuration manager calls this.

    Args:
        admin: publishes the events.
        manager: service of the configuration manager.
        principal: the publisher.
    """

    def __init__(
        self, admin: EventAdmin, manager: ServiceReference | None = None, *, principal: Principal = None
    ) -> None:
        super().__init__(admin, principal)
        self._manager = manager

    def updated(self, pid: str, factory_pid: str | None = None) -> None:
        """Post that a configuration was made or changed.

        Args:
            pid: PID of the configuration.
            factory_pid: PID of the factory it belongs to.

        Raises:
            ArgumentError: ``pid`` or ``factory_pid`` is no non-empty str.
            PermissionDeniedError: the principal may not publish the event.
        """
        self._post("CM_UPDATED", pid, factory_pid)

    def deleted(self, pid: str, factory_pid: str | None = None) -> None:
        """Post that a configuration was deleted; arguments and errors as for :meth:`updated`."""
        self._post("CM_DELETED", pid, factory_pid)

    def _post(self, kind: str, pid: str, factory_pid: str | None) -> None:
        for name, value in (("pid", pid), ("factory_pid", factory_pid)):
            if (value is not None or name == "pid") and (not isinstance(value, str) or not value):
                raise ArgumentError(f"{name} must be a non-empty str, not {value!r:.80}")
        properties = {"cm.pid": pid, **service_properties(self._manager)}
        if factory_pid is not None:
            properties["cm.factoryPid"] = factory_pid
        self._publish(self._admin.post_event, f"{CONFIGURATION_TOPIC}/{kind}", properties)

    def _deny(self, error: PermissionDeniedError) -> None:
        raise error


class ConnectionEvents(EventSource):
    """Posts the states of a messaging instance's connection, the present one first.

    Properties beside the conventional ones: ``osgi.messaging.name`` and ``connection.state``. The exception is the
    cause of the state.

    Args:
        admin: publishes the events.
        instance: the messaging instance.
        principal: the publisher.
    """

    def __init__(self, admin: EventAdmin, instance: Messaging, *, principal: Principal = None) -> None:
        super().__init__(admin, principal)
        if not callable(getattr(getattr(instance, "connection_state", None), "subscribe", None)):
            raise ArgumentError(f"instance must be a Messaging, not {type(instance).__name__}")
        self._name = instance.name
        self._stop = instance.connection_state.subscribe(self._changed).dispose
        if self._is_over:  # publishing the present state found the EventAdmin closed
            self._stop()

    def _changed(self, state: ConnectionState) -> None:
        properties = {
            **exception_properties(state.cause),
            "osgi.messaging.name": self._name,
            "connection.state": state.name,
            Names.EVENT: state,
            Names.MESSAGE: str(state),
            Names.TIMESTAMP: int((state.since or clock.wall()) * 1000),
        }
        self._publish(self._admin.post_event, f"{CONNECTION_TOPIC}/{state.name.upper()}", properties)
