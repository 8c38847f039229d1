"""What a gateway runs beside its routes: requests, states of devices, its status, snapshots, and monitoring."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from messaging.connection import ConnectionState
from messaging.errors import ConfigurationError
from messaging.gateway.devices import DeviceStates
from messaging.gateway.instances import GatewayInstances
from messaging.gateway.reports import GatewayDTO
from messaging.gateway.requests import RequestForwarder
from messaging.gateway.settings import DeviceStateSettings, GatewaySettings, RequestSettings, listening_address
from messaging.gateway.status import Status
from messaging.observability.monitor import SnapshotPublisher
from messaging.services import ServiceRegistry

if TYPE_CHECKING:
    from messaging.observability.endpoint import MonitoringEndpoint


class GatewayServices:
    """The parts of one gateway beside its routes. Under the lock of the gateway, but for :meth:`note_state`.

    Args:
        name: of the gateway.
        instances: of the gateway.
        registry: holds the reporters of the process.
        report: returns the state of the gateway.

    Attributes:
        requests, devices: by name.
    """

    def __init__(
        self, name: str, instances: GatewayInstances, registry: ServiceRegistry, report: Callable[[], GatewayDTO]
    ) -> None:
        self._name = name
        self._instances = instances
        self._registry = registry
        self._report = report
        self.requests: dict[str, RequestForwarder] = {}
        self.devices: dict[str, DeviceStates] = {}
        self._status: Status | None = None
        self._snapshots: SnapshotPublisher | None = None
        self._monitoring: MonitoringEndpoint | None = None

    def start(self, settings: GatewaySettings) -> None:
        """Start the requests, states of devices, the status and the snapshots of ``settings`` that are not running."""
        instances = self._instances.by_name
        for name, request in settings.requests.items():
            if request.enabled and name not in self.requests:
                self.requests[name] = RequestForwarder(name, request, self._name, settings.max_hops, instances)
                self.requests[name].subscribing.start()
        for name, devices in settings.devices.items():
            if name not in self.devices:
                self.devices[name] = DeviceStates(name, devices, self._name, settings.max_hops, instances)
                self.devices[name].start()
        if settings.status is not None and self._status is None:
            self._status = Status(settings.status, instances[settings.status.instance], self._report)
            self._status.start()
        monitor = settings.monitor
        if monitor is not None and self._snapshots is None:
            self._snapshots = SnapshotPublisher(
                instances[monitor.instance], interval=monitor.interval, services=self._registry, process=self._name,
                channel=monitor.channel,
            ).__enter__()  # fmt: skip

    def listen(self, settings: GatewaySettings) -> None:
        """Serve metrics and health checks at the address of ``settings``.

        Raises:
            ConfigurationError: it listens nowhere then.
        """
        self.stop_listening()
        if settings.monitoring is None:
            return
        try:
            host, port = listening_address(settings.monitoring)
        except ValueError as error:
            raise ConfigurationError(f"gateway '{self._name}': monitoring: {error}") from None
        from messaging.observability.endpoint import MonitoringEndpoint  # not at import: few gateways need it

        self._monitoring = MonitoringEndpoint(host, port, self._registry).start()

    def stop_listening(self) -> None:
        """Serve no metrics and health checks any more."""
        before, self._monitoring = self._monitoring, None
        if before is not None:
            before.close()

    def change(self, old: GatewaySettings, settings: GatewaySettings, gone: Collection[str]) -> None:
        """Stop parts that are not the same in ``settings``, or use an instance that is ``gone``; not monitoring."""

        def is_kept(each: RequestForwarder | DeviceStates, found: RequestSettings | DeviceStateSettings | None) -> bool:
            used = {each.settings.source.instance, each.settings.target.instance}
            return each.settings == found and each.max_hops == settings.max_hops and used.isdisjoint(gone)

        for name, request in [*self.requests.items()]:
            if not is_kept(request, settings.requests.get(name)):
                self.requests.pop(name).close()
        for name, devices in [*self.devices.items()]:
            if not is_kept(devices, settings.devices.get(name)):
                self.devices.pop(name).close()
        status = self._status
        if status is not None and (status.settings != settings.status or status.settings.instance in gone):
            status.close()
            self._status = None
        monitor = old.monitor
        if self._snapshots is not None and (
            monitor != settings.monitor or (monitor is not None and monitor.instance in gone)
        ):
            self._snapshots.close()
            self._snapshots = None

    def stop(self) -> None:
        """Stop everything but monitoring."""
        for each in (*self.requests.values(), *self.devices.values(), self._status, self._snapshots):
            if each is not None:
                each.close()
        self.requests.clear()
        self.devices.clear()
        self._status = self._snapshots = None

    def note_state(self, name: str, state: ConnectionState) -> None:
        """Tell the states of devices that an instance is connected, or not. On a worker thread."""
        for devices in [*self.devices.values()]:
            devices.note_state(name, is_up=state.is_up)

    def problems(self) -> list[str]:
        """Return what keeps requests and states of devices from working. From any thread."""
        return [
            f"{kind} '{each.name}': {each.subscribing.problem}"
            for kind, parts in (("requests", self.requests), ("devices", self.devices))
            for each in [*parts.values()]
            if each.subscribing.problem is not None
        ]
