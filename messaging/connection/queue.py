"""The interface of the outbox that a connection uses."""

from __future__ import annotations

from typing import Any, Protocol


class PublishQueue(Protocol):
    """The messages that wait to be published on a connection. Called on the engine loop, but for :meth:`put`."""

    def put(self, entry: Any, *, queue: bool = True) -> None:
        """Accept a message; without ``queue`` it is not sent, but counted as pending. From any thread."""

    def adopt(self, entry: Any) -> None:
        """Fail a message at its deadline."""

    def withdraw(self, entry: Any) -> None:
        """Fail a message whose publisher was interrupted."""

    def start(self) -> None:
        """Start sending, as soon as there is a connection."""

    def connected(self) -> None:
        """Send on the new connection."""

    def disconnected(self) -> None:
        """Send nothing until :meth:`connected`."""

    def refuse(self) -> None:
        """Accept no more messages."""

    async def drain(self, deadline: float) -> None:
        """Return when every accepted message is settled, or at ``deadline`` (loop time)."""

    def close(self) -> None:
        """Fail the messages that are left."""

    async def finish(self) -> None:
        """Return when everything is on the disk that must be there; after :meth:`close`."""

    def abandon(self) -> None:
        """Accept no more messages in a forked child."""
