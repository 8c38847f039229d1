"""The registration that ``Messaging.reply`` returns: it can be awaited, and ended."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Self

from messaging.receiving import AsyncBlock
from messaging.services import ServiceReference, ServiceRegistration
from messaging.text import tolerant

if TYPE_CHECKING:
    from messaging.execution import Promise


class ReplyRegistration(ServiceRegistration, AsyncBlock):
    """A registered request handler. Thread safe.

    ``async with m.reply(channel, function)`` and ``await m.reply(channel, function)`` wait until the broker has
    confirmed its subscriptions; the former unregisters it at the end, as ``with`` does.

    Attributes:
        ready: a promise that resolves when the broker has confirmed the subscriptions of the handler; it fails with
            ``SubscriptionRefusedError`` if the broker refuses one.
    """

    __slots__ = ("_registration", "ready")

    def __init__(self, registration: ServiceRegistration, ready: Promise[None]) -> None:
        # the base is not initialized: the registry knows ``registration``, which answers everything
        self._registration = registration
        self.ready = ready
        ready.was_retrieved = True  # the whiteboard logs a subscription that fails, and tries again

    @property
    def reference(self) -> ServiceReference:
        """See ``ServiceRegistration``."""
        return self._registration.reference

    def update(self, properties: Mapping[str, Any] | None = None) -> None:
        """See ``ServiceRegistration``."""
        self._registration.update(properties)

    def unregister(self) -> bool:
        """See ``ServiceRegistration``."""
        return self._registration.unregister()

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self.ready.__await__()
        return self

    def end_block(self, _: bool, /) -> None:
        """Unregister the handler."""
        self.unregister()

    @tolerant
    def __repr__(self) -> str:
        return repr(self._registration)
