"""The disk of a broker: what survives a kill, and when.

Changes are written in batches, each synced a short virtual time after its first change. Messages are confirmed after
that. A kill in between loses the batch: new messages are lost, and messages that were removed are back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.brokers.amqp.channel import Channel
    from tests.simulation.brokers.amqp.messages import Entry
    from tests.simulation.brokers.amqp.queues import Queue
    from tests.simulation.brokers.host import Host, Timer


class Storage:
    """See the module.

    Args:
        shortest, longest: time that a sync takes, seconds.
    """

    def __init__(self, host: Host, shortest: float, longest: float) -> None:
        self._host = host
        self._shortest = shortest
        self._longest = longest
        self._entries: list[Entry] = []
        self._removed: list[tuple[Queue, Entry]] = []
        self._confirms: list[tuple[Channel, int]] = []
        self._timer: Timer | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether everything is on disk."""
        return self._timer is None

    def add(self, entry: Entry) -> None:
        """Write a new message."""
        self._entries.append(entry)
        if self._timer is None:
            self._arm()

    def remove(self, queue: Queue, entry: Entry) -> None:
        """Write that a message has left its queue."""
        self._removed.append((queue, entry))
        if self._timer is None:
            self._arm()

    def confirm_after(self, channel: Channel, number: int) -> None:
        """Confirm a message once what was written so far is synced."""
        self._confirms.append((channel, number))

    def _arm(self) -> None:
        self._timer = self._host.call_later(self._host.random.uniform(self._shortest, self._longest), self.sync)

    def sync(self) -> None:
        """Bring everything to disk, and confirm what waited for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for entry in self._entries:
            entry.is_synced = True
        self._entries.clear()
        self._removed.clear()
        confirms, self._confirms = self._confirms, []
        for channel, number in confirms:
            channel.confirms.stored(number)
        for channel in dict.fromkeys(channel for channel, _ in confirms):
            channel.confirms.flush()

    def lose(self) -> list[tuple[Queue, Entry]]:
        """Lose what was not synced, and return the messages whose removal was lost, in the order of removal."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        removed, self._removed = self._removed, []
        self._entries.clear()
        self._confirms.clear()
        return removed
