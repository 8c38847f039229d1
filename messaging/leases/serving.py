"""The leases of a landlord for other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from messaging.calls import CallServer
from messaging.leases.directory import LeaseDirectory
from messaging.leases.remote import lease_operations

if TYPE_CHECKING:
    from messaging.execution import Promise
    from messaging.instance import Messaging
    from messaging.leases.landlord import Landlord


class LeaseServer:
    """Makes the leases of a landlord available to other processes. Thread safe; a context manager, which closes it.

    Args:
        messaging: an instance with requests.
        channel: of the requests.
        landlord: grants the leases, by its own way.

    Raises:
        InvalidChannelError, UnsupportedFeatureError, SubscriptionRefusedError: as ``CallServer``.
    """

    def __init__(self, messaging: Messaging, channel: str, landlord: Landlord) -> None:
        self._server = CallServer(messaging, channel, lease_operations(landlord))
        try:
            self._directory = LeaseDirectory(messaging, channel, landlord)
        except BaseException:
            self._server.close()
            raise

    @property
    def ready(self) -> Promise[None]:
        """The promise that the broker has confirmed the subscription."""
        return self._server.ready

    def close(self) -> None:
        """Answer no further requests. Idempotent."""
        self._server.close()
        self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
