"""The leases of a landlord for other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from messaging.dispatch.calls import CallServer, Function
from messaging.errors.checks import check_instance
from messaging.leases.directory import LeaseDirectory
from messaging.leases.landlord import Landlord
from messaging.leases.remote import lease_operations

if TYPE_CHECKING:
    from messaging.instance import Messaging


class LeasingServer(CallServer):
    """Makes an object that may grant leases available to other processes. Thread safe; a context manager.

    Args:
        messaging, channel, operations: see ``CallServer``.
        landlord: grants the leases of the object, by its own way; ``None``: there are none.
    """

    def __init__(
        self, messaging: Messaging, channel: str, operations: Mapping[str, Function], landlord: Landlord | None
    ) -> None:
        served = operations if landlord is None else {**operations, **lease_operations(landlord)}
        super().__init__(messaging, channel, served)  # requests may arrive from here on
        try:
            self._directory = None if landlord is None else LeaseDirectory(messaging, channel, landlord)
        except BaseException:  # an interrupt, too: the channel must be free again
            super().close()
            raise

    def close(self) -> None:
        """Answer no further requests. Idempotent."""
        super().close()
        if self._directory is not None:
            self._directory.close()


class LeaseServer(LeasingServer):
    """Makes the leases of a landlord available to other processes. Thread safe; a context manager, which closes it.

    Args:
        messaging: an instance with requests.
        channel: of the requests.
        landlord: grants the leases, by its own way.

    Raises:
        ArgumentError: ``landlord`` is no Landlord.
        InvalidChannelError, UnsupportedFeatureError, SubscriptionRefusedError: as ``CallServer``.
    """

    def __init__(self, messaging: Messaging, channel: str, landlord: Landlord) -> None:
        check_instance("landlord", landlord, Landlord)
        super().__init__(messaging, channel, {}, landlord)
