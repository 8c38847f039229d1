"""Sender: one task that hands accepted messages to the adapter in batches, also again after a connection loss."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import MessagingError
from messaging.execution import clock, of_library
from messaging.text import SafeLog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from messaging.adapter import Adapter
    from messaging.execution import Deadlines, Engine
    from messaging.publishing.admission import Admission
    from messaging.publishing.publication import Publication

logger = SafeLog(__name__)

#: pause of the sender after the adapter raised, seconds
_AFTER_FAILURE: Final = 0.02


class Sender:
    """Sends the messages of one instance in the order of their sequence. On the loop.

    Args:
        engine: runs the task.
        adapter: publishes the messages.
        admission: accepts the messages.
        deadlines: of all messages that are not settled.

    Attributes:
        in_flight: unsettled messages that the adapter has, by sequence.
        is_connected: whether the adapter can publish.
        is_stopped: whether nothing more is sent.
    """

    def __init__(self, engine: Engine, adapter: Adapter, admission: Admission, deadlines: Deadlines) -> None:
        self._engine = engine
        self._adapter = adapter
        self._admission = admission
        self._deadlines = deadlines
        self.in_flight: dict[int, Publication] = {}
        self.is_connected = False
        self.is_stopped = False
        self._batch: list[Publication] = []
        #: messages that a lost connection left behind
        self._returned: list[Publication] = []
        self._wakeup = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        """Start the task. Nothing is sent before :meth:`connected`."""
        self._task = self._engine.spawn(self._run())

    def stop(self) -> None:
        """Send nothing more."""
        self.is_stopped = True
        if self._task is not None:
            self._task.cancel()

    def connected(self) -> None:
        """Send from now on: first the messages that a lost connection left behind, in their order."""
        self.is_connected = True
        self._requeue()
        self._wakeup.set()

    def disconnected(self) -> None:
        """Hold everything back until :meth:`connected`."""
        self.is_connected = False

    def wake(self) -> None:
        """Send the messages that were accepted."""
        self._wakeup.set()
        if not self._deadlines.is_watching:
            self._deadlines.start()

    def outstanding(self) -> Iterable[Publication]:
        """Return the accepted messages; some may be settled."""
        return (*self._admission.waiting, *self._batch, *self.in_flight.values(), *self._returned)

    def drop_settled(self) -> None:
        """Remove the settled messages from the messages to send again."""
        self._returned = [entry for entry in self._returned if not entry.settled]

    def retry(self, entry: Publication) -> bool:
        """Send ``entry`` again after reconnecting; return ``False`` if nothing more is sent."""
        if self.is_stopped:
            return False
        if entry.is_waiting:
            return True  # returned before
        if entry.plan.options.last_will:
            return True  # the connection hands it over again: it must never be sent as a message
        self.in_flight.pop(entry.sequence, None)
        entry.is_waiting = True
        self._returned.append(entry)
        if self.is_connected:
            # the adapter lost a message but not, or not yet, the connection
            self._engine.loop.call_soon(self._requeue)
        return True

    def _requeue(self) -> None:
        if not self._returned:
            return
        returned, waiting = self._returned, self._admission.waiting
        latest = max(entry.sequence for entry in returned)
        # some may have been returned before
        while waiting and waiting[0].sequence < latest:
            returned.append(waiting.popleft())
        returned.sort(key=lambda entry: entry.sequence)
        waiting.extendleft(reversed(returned))
        returned.clear()
        self._wakeup.set()

    async def _run(self) -> None:
        admission = self._admission
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            await self._send_waiting()
            # cleared before the last look: a thread that appends after this line signals again
            admission.is_signalled = False
            if admission.waiting and self.is_connected:
                admission.is_signalled = True
                self._wakeup.set()

    async def _send_waiting(self) -> None:
        while self._admission.waiting and self.is_connected:
            self._batch = self._take()
            # nothing of a batch may stay in this frame: it would keep its payloads until the next one
            await self._send_batch()
            self._batch = []
            if self._admission.blocked.flags:
                self._admission.offer_room()
            # an adapter that never has to wait must not keep the loop from other tasks
            await asyncio.sleep(0)

    def _take(self) -> list[Publication]:
        waiting = self._admission.waiting
        batch = []
        for _ in range(min(len(waiting), self._adapter.capabilities.publish_window)):
            entry = waiting.popleft()
            if entry.settled:
                entry.outbox.count_late(entry)
            elif not entry.may_expire or entry.prepare():
                entry.is_waiting = False
                batch.append(entry)
        return batch

    async def _send_batch(self) -> None:
        batch = self._batch
        if not batch:
            return
        if not self._deadlines.is_watching:
            self._deadlines.start()
        try:
            await of_library(self._adapter.publish(batch))
        except MessagingError as error:
            self._fail_unsettled(error)
            # the connection loss that caused this is reported in a moment; until then, do not spin
            await clock.sleep(_AFTER_FAILURE)
        except Exception as error:
            logger.exception("adapter of %r failed to publish", self._adapter.name)
            failure = MessagingError(f"the adapter failed to publish: {type(error).__name__}")
            failure.__cause__ = error
            self._fail_unsettled(failure)
        for entry in batch:
            if not entry.settled and not entry.is_waiting:
                self.in_flight[entry.sequence] = entry

    def _fail_unsettled(self, error: MessagingError) -> None:
        for entry in self._batch:
            if not entry.is_waiting:
                entry.fail(error)
