"""The gateway: instances, routes, requests and states of devices of one configuration, run together.

**Threads.** ``start``, ``reload`` and ``close`` may be called from any thread; one lock has them run one after the
other. Messages are handled on worker threads, see :mod:`messaging.gateway.intake` and :mod:`messaging.gateway.drain`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self

from messaging.connection import ConnectionState
from messaging.environment.signals import on_failure
from messaging.errors import ClosedError, ConfigurationError, MessagingError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog, counted, did_you_mean, tolerant
from messaging.execution import Flag, Startable, Waiters, clock, seconds
from messaging.gateway.buffer import ROUTES_FOLDER
from messaging.gateway.control import Calls, ControlServer
from messaging.gateway.dead_letters import Selection
from messaging.gateway.instances import GatewayInstances
from messaging.gateway.reports import GatewayDTO
from messaging.gateway.route import STORE_TIMEOUT, Route
from messaging.gateway.services import GatewayServices
from messaging.gateway.settings import GatewaySettings
from messaging.journal.folders import LocalFolder
from messaging.services import ServiceRegistration, ServiceRegistry, default_registry
from messaging.services.reporting import register_reporter

logger = SafeLog(__name__)

#: pause between two looks at what is being drained, seconds
_LOOK: Final = 0.05


class Gateway(Startable):
    """Store-and-forward routes between messaging instances, as a configuration describes them. Thread safe.

    ::

        gateway = Gateway(load("gateway.toml"))
        gateway.run()                                  # until another thread calls stop()

        with Gateway(settings) as gateway:             # or beside the rest of a program
            ...

    A message is acknowledged to its source when it is on the disk, and removed from the disk when its target has
    confirmed it. Brokers may be away when the gateway starts.

    Args:
        settings: the configuration; :func:`messaging.gateway.load` reads it from a file.
        services: the registry of its instances, and of its reporter; by default the process's one.
        **connecting: further arguments of each :func:`messaging.connect`, such as ``interceptors``.

    Attributes:
        settings: the present configuration.
        kind, name: see :class:`~messaging.services.reporting.Reporter`.
    """

    kind = "gateway"

    def __init__(
        self, settings: GatewaySettings, *, services: ServiceRegistry | None = None, **connecting: Any
    ) -> None:
        check_instance("settings", settings, GatewaySettings)
        self.settings = settings
        self.name = settings.name
        self._services = default_registry() if services is None else services
        self._lock = threading.RLock()  # held while the gateway starts, changes or stops
        self._state = "stopped"
        self._started = 0.0
        self._reloads = 0
        self._routes: dict[str, Route] = {}
        self._instances = GatewayInstances(settings.name, {"services": self._services, **connecting}, self._note_state)
        self._beside = GatewayServices(settings.name, self._instances, self._services, self.report)
        self._registration: ServiceRegistration | None = None
        self._control: ControlServer | None = None
        self._stop = Flag()
        #: whether a close publishes nothing more
        self._is_hurried = False
        #: called for a reload that the control socket asks for; returns the settings to change to
        self.read_settings: Callable[[], GatewaySettings] | None = None

    # --- life cycle

    def start(self) -> Self:
        """Open the buffers and connect; return before the brokers are reached.

        Raises:
            ConfigurationError: the settings contradict each other, or an instance cannot be made of them.
            JournalError: a buffer cannot be opened: another gateway uses the folder, say.
            ClosedError: the gateway was started before.
        """
        with self._lock:
            if self._state != "stopped" or self._started:
                raise ClosedError(f"gateway '{self.name}': it was started before; make another one")
            self._started = clock.wall()
            self._state = "starting"
            with on_failure(self._close, 0.0):
                self._open()
            self._state = "running"
        logger.info("gateway '%s': running with %d routes", self.name, len(self._routes))
        return self

    def _open(self) -> None:
        """Make everything, in order. Under the lock."""
        try:
            folder = LocalFolder(str(self.settings.data), option="data", private=True)
            for each_folder in ("", ROUTES_FOLDER):
                folder.make(each_folder)  # waits for the disk: messages are acknowledged that are below it
            # first: an address that is taken is told before anything is connected, and probes see "starting"
            self._registration = register_reporter(self._services, self)
            self._beside.listen(self.settings)
            for name, each in self.settings.instances.items():
                self._instances.prepared(name, each, self.settings.status)()
            for route_name in self.settings.routes:
                self._routes[route_name] = self._new_route(route_name, self.settings)
            for route in self._routes.values():
                route.start()
            self._beside.start(self.settings)
            self._control = ControlServer(self.settings.data, self._calls())
        except OSError as error:
            raise ConfigurationError(f"gateway '{self.name}': data folder: {error}") from error

    def run(self) -> None:
        """Start, wait until :meth:`stop`, then close. Raises as :meth:`start`."""
        self.start()
        self.run_until_stopped()

    def run_until_stopped(self) -> None:
        """Wait until :meth:`stop`, then close: what :meth:`run` does after the start."""
        try:
            self._stop.wait()
        finally:
            self.close()

    def stop(self, *, drain: bool = True) -> None:
        """Have :meth:`run` end. From any thread, and from a signal handler.

        Args:
            drain: whether what is stored may be published first; ``False`` also ends a close that is under way.
        """
        if not drain:
            self._is_hurried = True
        self._stop.set()

    @property
    def is_stopping(self) -> bool:
        """Return whether the gateway was told to stop."""
        return self._stop.is_set()

    def close(self, timeout: float | None = None) -> None:
        """Stop taking messages, publish what is stored for at most ``timeout`` seconds, and close. Idempotent.

        What is not published stays on the disk, and the next run publishes it. Messages that are not stored stay with
        their brokers.

        Args:
            timeout: ``None``: the setting ``drain_timeout``.

        Raises:
            ArgumentError: ``timeout`` is no number.
        """
        limit = self.settings.drain_timeout if timeout is None else seconds(timeout)
        self._stop.set()
        with self._lock:
            if self._state in ("stopped", "closed"):
                self._state = "closed"
                return
            self._state = "stopping"
            self._close(limit)
        logger.info("gateway '%s': stopped", self.name)

    def _note_state(self, name: str, state: ConnectionState) -> None:
        """Have routes publish when their target is connected. On a worker thread."""
        if state.is_up:
            for route in [*self._routes.values()]:
                if route.settings.target.instance == name:
                    route.drain.note_target_back()
        self._beside.note_state(name, state)

    def _new_route(self, name: str, settings: GatewaySettings) -> Route:
        return Route(
            name, settings.routes[name], self.name, settings.data / ROUTES_FOLDER / name, settings.max_hops,
            self._instances.by_name, self._instances.targets,
        )  # fmt: skip

    def _close(self, limit: float) -> None:
        """Release everything, in order. Under the lock."""
        self._beside.stop_listening()
        if self._registration is not None:
            self._registration.unregister()
        if self._control is not None:
            self._control.close()
        for route in self._routes.values():
            route.intake.pause()
        for request in self._beside.requests.values():
            request.close()
        deadline = clock.monotonic() + limit
        waiting = Waiters()
        while not all(route.is_drained for route in self._routes.values()):
            left = deadline - clock.monotonic()
            if left <= 0 or self._is_hurried or not self._can_drain():
                break
            waiting.wait_for(lambda: self._is_hurried, min(left, _LOOK))
        for route in self._routes.values():
            route.drain.stop()
        # also without time to drain: what is stored and not acknowledged would be stored twice
        deadline = clock.monotonic() + STORE_TIMEOUT
        for route in self._routes.values():
            route.buffer.wait_stored(deadline - clock.monotonic())
        left_over = sum(route.buffer.queue.depth for route in self._routes.values())
        if left_over:
            logger.info("gateway '%s': on the disk for the next run: %s", self.name, counted(left_over, "message"))
        self._beside.stop()
        self._instances.close_all()
        for route in self._routes.values():
            route.close()
        self._state = "closed"

    def _can_drain(self) -> bool:
        """Return whether a route with stored messages has a target that is connected."""
        instances = self._instances.by_name
        return any(
            not route.is_drained
            and (route.buffer.storing or instances[route.settings.target.instance].connection_state.value.is_up)
            for route in self._routes.values()
        )

    # --- changing

    def reload(self, settings: GatewaySettings) -> None:
        """Change to another configuration while running; what is the same in both goes on without interruption.

        Buffers are kept: those of routes that are gone stay on the disk. Bounds and policies of a buffer, the name and
        the data folder take effect with the next start.

        Raises:
            ConfigurationError: the configuration cannot be run; the present one goes on.
            JournalError: the buffer of a new route cannot be opened; the present configuration goes on.
            ClosedError: the gateway does not run.
        """
        with self._lock:
            if self._state != "running":
                raise ClosedError(f"gateway '{self.name}': it is {self._state}, and cannot change its configuration")
            self._check_change(settings)
            self._change(settings)
            self._reloads += 1
        logger.info(
            "gateway '%s': runs by the changed configuration, with %s", self.name, counted(len(self._routes), "route")
        )

    def _check_change(self, settings: GatewaySettings) -> None:
        for what in ("name", "data"):
            if getattr(settings, what) != getattr(self.settings, what):
                raise ConfigurationError(f"gateway '{self.name}': {what} cannot change while it runs; restart it")
        for name, each in settings.routes.items():
            old = self.settings.routes.get(name)
            if old is not None and old.buffer != each.buffer:
                changed = {
                    key
                    for key in type(each.buffer).model_fields
                    if getattr(each.buffer, key) != getattr(old.buffer, key)
                }
                if changed - {"in_flight"}:
                    logger.warning(
                        "gateway '%s': routes.%s.buffer: %s take effect with the next start",
                        self.name, name, ", ".join(sorted(changed - {"in_flight"})),
                    )  # fmt: skip

    def _change(self, settings: GatewaySettings) -> None:
        """Change routes and instances. Under the lock."""
        old = self.settings
        wills = {(each.status.instance, each.status.channel) for each in (old, settings) if each.status is not None}
        # a connection has its last will from the beginning
        moved = {name for name, _ in wills if len(wills) > 1 or old.status is None or settings.status is None}
        replaced = {
            name for name, each in old.instances.items()
            if name in settings.instances and (settings.instances[name] != each or name in moved)
        }  # fmt: skip
        gone = (set(old.instances) - set(settings.instances)) | replaced
        connects = [
            self._instances.prepared(name, each, settings.status) for name, each in settings.instances.items()
            if name in gone or name not in self._instances.by_name
        ]  # fmt: skip
        self._beside.change(old, settings, gone)
        self._remove(self._routes.keys() - settings.routes.keys())
        affected = {
            name: route for name, route in self._routes.items()
            if {route.settings.source.instance, route.settings.target.instance} & gone
        }  # fmt: skip
        for route in affected.values():
            if route.settings.source.instance in gone:
                route.leave()
        for name in gone:
            self._instances.close(name)
        with on_failure(self._remove, affected):
            for connect in connects:
                connect()
        failure: MessagingError | None = None
        for name, each_route in settings.routes.items():
            try:
                if name in self._routes:
                    if name in affected or self._routes[name].settings != each_route:
                        self._routes[name].change(each_route)
                else:
                    route = self._routes[name] = self._new_route(name, settings)
                    route.start()
            except MessagingError as error:
                logger.error("gateway '%s': route '%s' is not changed: %s", self.name, name, error)
                failure = failure or error
                self._remove(affected.keys() & {name})  # its instance is closed
        self.settings = settings
        self._beside.start(settings)
        if settings.monitoring != old.monitoring:
            try:
                self._beside.listen(settings)
            except ConfigurationError as error:
                logger.error("%s", error)
                failure = failure or error
        if failure is not None:
            raise failure

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._routes.pop(name).remove()

    # --- routes, and requests of the control socket

    def route(self, name: str) -> Route:
        """Return a running route.

        Raises:
            ArgumentError: ``name`` is no text.
            ConfigurationError: there is none of that name.
        """
        check_instance("name", name, str)
        found = self._routes.get(name)
        if found is None:
            hint = did_you_mean(name, self._routes) or f"there are {', '.join(self._routes) or 'none'}"
            raise ConfigurationError(f"gateway '{self.name}': no route '{name}'; {hint}")
        return found

    def _calls(self) -> Calls:
        return {
            "status": lambda _: (
                dataclasses.asdict(self.report()) | {"problems": self.problems() + self._instances.disconnected()}
            ),
            "reload": self._reload_by_call,
            "replay": lambda given: self.route(given["route"]).replay(_selection(given), given.get("rate"))._asdict(),
            "drop": lambda given: self.route(given["route"]).drop(_selection(given)),
        }

    def _reload_by_call(self, _: Mapping[str, Any]) -> None:
        if self.read_settings is None:
            raise ConfigurationError(f"gateway '{self.name}': it was not started from a file")
        self.reload(self.read_settings())

    # --- state

    def report(self) -> GatewayDTO:
        """Return a snapshot of the state: routes, requests, devices, with their counters."""
        return GatewayDTO(
            name=self.name,
            state=self._state,
            started=self._started,
            reloads=self._reloads,
            routes=tuple(route.report() for route in [*self._routes.values()]),
            requests=tuple(each.report() for each in [*self._beside.requests.values()]),
            devices=tuple(each.report() for each in [*self._beside.devices.values()]),
        )

    def problems(self) -> list[str]:
        """Return what keeps the gateway from storing messages, or from answering requests."""
        found = [] if self._state == "running" else [f"the gateway is {self._state}"]
        for route in [*self._routes.values()]:
            found += route.problems()
        return found + self._beside.problems()

    @tolerant
    def __repr__(self) -> str:
        return f"<Gateway {self.name!r} {self._state}>"


def _selection(given: Mapping[str, Any]) -> Selection:
    return Selection(given.get("ids") or (), given.get("where"))
