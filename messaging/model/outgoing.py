"""Outgoing: a message on its way from the application to the adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from messaging.errors import MessagingError
    from messaging.model.context import MessageContext
    from messaging.model.extensions import PublishOptions


class Outgoing(Protocol):
    """A message on its way out. Made by the core; the adapter reads it and settles it exactly once.

    Whoever holds an ``Outgoing`` must call :meth:`confirm` or :meth:`fail`, on the loop. Settling again is
    ignored: the core itself fails one whose deadline has passed, and a late confirm must not hurt. One that is
    ``settled`` must not be sent any more: the core relies on it to honour deadlines.
    """

    #: gone once it is settled, so that whoever keeps the promise does not keep it; that of a will stays
    payload: bytes
    #: channel, content type, ... as they are to travel; ``context.channel`` passed ``check_name``. Messages with the
    #: same context have all of it in common, but for the correlation id: that of the context does not count.
    context: MessageContext
    correlation_id: str | None
    #: the checked extensions, defaults filled in
    options: PublishOptions
    #: confirmed or failed
    settled: bool

    @property
    def message_id(self) -> str:
        """Stable across retries; made on use, unique across instances and processes.

        With ``options.message_id`` it is that, the application's own: two messages with the same one may be on their
        way at once, and it is to travel with QoS 0, too.
        """
        ...

    def sent(self) -> None:
        """The bytes left for the broker and a confirm is awaited: from here on a loss leaves the outcome open."""

    def confirm(self) -> None:
        """QoS 0: the bytes were handed to the socket. Otherwise: the broker has taken responsibility."""

    def fail(self, error: MessagingError) -> None:
        """The message was not taken. A ``ConnectionLostError`` makes the core send it again after reconnecting."""
