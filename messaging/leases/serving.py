"""The leases of a landlord for other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from messaging.calls import CallServer, Function
from messaging.leases.directory import LeaseDirectory
from messaging.leases.remote import lease_operations

if TYPE_CHECKING:
    from messaging.instance import Messaging
    from messaging.leases.landlord import Landlord


class LeaseServer(CallServer):
    """Makes the leases of a landlord available to other processes. Thread safe; a context manager, which closes it.

    Args:
        messaging: an instance with requests.
        channel: of the requests.
        landlord: grants the leases, by its own way; ``None``: there are none.
        operations: others of the same object.

    Raises:
        InvalidChannelError, UnsupportedFeatureError, SubscriptionRefusedError: as ``CallServer``.
    """

    def __init__(
        self,
        messaging: Messaging,
        channel: str,
        landlord: Landlord | None,
        operations: Mapping[str, Function] | None = None,
    ) -> None:
        served = {**(operations or {}), **({} if landlord is None else lease_operations(landlord))}
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
