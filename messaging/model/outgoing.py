"""Outgoing: a message on its way from the application to the adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from messaging.errors import MessagingError
    from messaging.model.plan import PublishPlan


class Outgoing(Protocol):
    """A message to publish. The core makes it; the adapter sends and settles it.

    An adapter that holds an ``Outgoing`` must call :meth:`confirm` or :meth:`fail` on the loop. A second call has no
    effect, because the core itself fails a message whose deadline has passed, and a confirm may come late. A
    ``settled`` message must not be sent any more: deadlines depend on it.
    """

    #: released when the message is settled, so that a kept promise does not keep it; a will keeps its payload
    payload: bytes
    #: channel, content type, options, ... to send, which messages share
    plan: PublishPlan
    #: of this message; the plan's own is not used
    correlation_id: str | None
    #: whether the message was confirmed or failed
    settled: bool

    @property
    def message_id(self) -> str:
        """Return the message id: stable across retries, unique across instances and processes, made on first use.

        It is ``plan.options.message_id`` if the application set one: two messages in flight may then have the same id,
        and the id must be sent with QoS 0, too.
        """
        ...

    def sent(self) -> None:
        """Note that the message was sent and awaits its confirm: a connection loss now leaves the outcome unknown."""

    def confirm(self) -> None:
        """Succeed. QoS 0: the bytes were handed to the socket. Otherwise: the broker has taken responsibility."""

    def fail(self, error: MessagingError) -> None:
        """Fail. After a ``ConnectionLostError`` the core sends the message again when it has reconnected."""
