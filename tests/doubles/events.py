"""The events of a connection, recorded."""

from __future__ import annotations

from messaging.errors import MessagingError


class Recorded:
    """An ``adapter.Events`` that keeps what it is told."""

    def __init__(self) -> None:
        self.losses: list[MessagingError] = []
        self.impairments: list[MessagingError | None] = []

    def lost(self, cause: MessagingError) -> None:
        self.losses.append(cause)

    def impaired(self, cause: MessagingError | None) -> None:
        self.impairments.append(cause)
