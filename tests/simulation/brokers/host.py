"""Interface between the simulated network and the simulated brokers.

A broker does no input or output, has no thread and knows no clock: the simulated world gives it bytes, time and chance,
and takes bytes from it. All calls come from one thread. None of them blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Drop the call. Idempotent; nothing happens if it was made already."""
        ...


class Host(Protocol):
    """What the world gives a broker: time and chance.

    Attributes:
        random: the only source of chance.
    """

    random: random.Random

    def now(self) -> float:
        """Return the virtual time in seconds."""
        ...

    def call_later(self, delay: float, function: Callable[[], object]) -> Timer:
        """Call ``function`` in ``delay`` virtual seconds. Calls that are due at the same time keep their order."""
        ...

    def note(self, text: str) -> None:
        """Add a line to the history: who did what. Short, and the same in every run of the same seed."""
        ...


class Peer(Protocol):
    """The broker's end of one TCP connection.

    Attributes:
        name: for notes, such as ``client-3``.
    """

    name: str

    def send(self, data: bytes) -> None:
        """Send ``data``, in order. The network delivers it later."""
        ...

    def close(self) -> None:
        """Send FIN after everything that was sent."""
        ...

    def abort(self) -> None:
        """Send RST: data that was sent and has not arrived is lost."""
        ...

    @property
    def unsent(self) -> int:
        """Return how many sent bytes the client has not taken yet; many of them mean a slow reader."""
        ...


class Connection(Protocol):
    """What a broker returns for an accepted connection. The network calls it."""

    def received(self, data: bytes) -> None:
        """Take bytes from the client, in any fragmentation."""
        ...

    def lost(self) -> None:
        """End the connection: the client closed or reset it, or the network cut it. Nothing is sent afterwards."""
        ...


class Broker(Protocol):
    """A simulated broker."""

    def accept(self, peer: Peer) -> Connection:
        """Return the connection that takes what ``peer`` sends."""
        ...

    def stop(self) -> None:
        """Stop in good order: persist everything, and end all connections."""
        ...

    def kill(self) -> None:
        """Stop as by SIGKILL: what was not persisted is lost, connections are reset."""
        ...

    def start(self) -> None:
        """Start after :meth:`stop` or :meth:`kill`, from what was persisted."""
        ...
