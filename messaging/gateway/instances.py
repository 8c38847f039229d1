"""The messaging instances of a gateway, and the targets that its routes share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import messaging
from messaging.connection.properties import announced
from messaging.errors import ConfigurationError
from messaging.gateway.drain import Target
from messaging.gateway.instance_checks import unconnected
from messaging.gateway.status import last_will
from messaging.model.settings import PARAMETERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from messaging import Messaging
    from messaging.connection import ConnectionState
    from messaging.gateway.settings import InstanceSettings, StatusSettings

#: how long closing an instance may take, seconds
_CLOSE_TIMEOUT: Final = 3.0


class GatewayInstances:
    """The instances of one gateway, by name. Under the lock of the gateway.

    Args:
        gateway: its name.
        arguments: further ones of :func:`messaging.connect`.
        changed: called with the name and the state of an instance when that changes. On a worker thread.

    Attributes:
        connected: the instances.
        targets: one for each instance.
    """

    def __init__(
        self, gateway: str, arguments: Mapping[str, Any], changed: Callable[[str, ConnectionState], object]
    ) -> None:
        self._gateway = gateway
        self._arguments = arguments
        self._changed = changed
        self.connected: dict[str, Messaging] = {}
        self.targets: dict[str, Target] = {}

    def connect(self, name: str, settings: InstanceSettings, status: StatusSettings | None) -> None:
        """Make an instance, which is not connected yet.

        Args:
            name: of the instance.
            settings: of the instance.
            status: of the gateway: its end is the last will of the instance that publishes it.

        Raises:
            ConfigurationError: an instance cannot be made of the settings.
        """
        settings.check_password_file()
        for _, text in settings.refusals():
            raise ConfigurationError(f"gateway '{self._gateway}': instances.{name}: {text}")
        arguments = settings.keywords(f"{self._gateway}-{name}") | dict(self._arguments)
        if status is not None and status.instance == name:
            given = {key: value for key, value in arguments.items() if key not in PARAMETERS}
            will = last_will(status, self._gateway, announced(unconnected(settings.url, given)))
            arguments = {"will": will} | arguments
        instance = messaging.connect(settings.url, **arguments)
        self.connected[name] = instance
        self.targets[name] = Target(instance, 1)
        instance.connection_state.subscribe(lambda state: self._changed(name, state))

    def close(self, name: str) -> None:
        """Close an instance, and forget it."""
        self.targets.pop(name)
        self.connected.pop(name).close(_CLOSE_TIMEOUT)

    def close_all(self) -> None:
        """Close all instances, which are known after that: their reports are asked for."""
        for instance in self.connected.values():
            instance.close(_CLOSE_TIMEOUT)

    def disconnected(self) -> list[str]:
        """Return the instances that are not connected, each with the cause. From any thread."""
        states = [(name, each.connection_state.value) for name, each in [*self.connected.items()]]
        return [f"instance '{name}': {state}" for name, state in states if not state.is_up]
