"""The inbox: recognises deliveries of messages that were settled before (extension ``deduplicate``).

A message is known by its channel and its message id. It counts as settled when its consumer acknowledged it, or when it
was dead-lettered. A delivery of a settled message is acknowledged and counted, and does not enter the stream. While the
consumer holds a message, another delivery of it waits for the verdict.

**Order.** The effect of the handler comes first, then the id is stored, then the broker gets the acknowledgement. A
process that dies before the id is stored gets the message again, and handles it again. Acknowledgements of duplicates
come after the ids that they were recognised by, too.

**Threads.** :meth:`Inbox.begins` is called by the consumer; verdicts come from any thread; everything else runs on the
engine's loop. With ``inbox_path`` the ids are stored by worker threads, those of many messages at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from messaging.execution import clock, workers
from messaging.receiving.settled_ids import key_of

if TYPE_CHECKING:
    from messaging.model import Incoming
    from messaging.receiving.buffer import MessageBuffer
    from messaging.receiving.receiver import Receiver
    from messaging.receiving.settled_ids import Inboxes, Key, SettledIds

#: pause before ids are stored where no thread could be started for it, seconds
_RETRY_SECONDS: Final = 0.1


class Inbox:
    """Keeps the messages of one subscription that were settled before from its consumer.

    Args:
        owner, buffer: the subscription and its buffer.
        inboxes, settled: the ids of settled messages, and where they are returned to.

    Attributes:
        settled: see above.
        on_stored: called on the loop with messages that were acknowledged, after their ids are stored.
    """

    on_stored: Callable[[Sequence[Incoming]], object]

    def __init__(self, owner: Receiver, buffer: MessageBuffer, inboxes: Inboxes, settled: SettledIds) -> None:
        self._owner = owner
        self._buffer = buffer
        self._engine = owner.connection.engine
        self._auto = owner.spec.options.auto_acknowledge
        self._inboxes = inboxes
        self.settled = settled
        #: guards the next three, and that a message is held until its id is among the settled ones
        self._lock = threading.Lock()
        #: messages in the hands of the consumer, and deliveries of the same messages that wait for its verdict
        self._held: dict[Key, Incoming] = {}
        self._parked: dict[Key, list[Incoming]] = {}
        #: settled ids that are to be stored
        self._unstored: deque[Key] = deque()
        #: a message without verdict that has entered the stream: the consumer asks again if it was interrupted
        self._entered: Incoming | None = None
        #: deliveries of settled messages, to be acknowledged
        self._duplicates: deque[Incoming] = deque()
        #: the loop will call ``_proceed``
        self._is_requested = False
        # --- the loop
        #: acknowledgements that wait for their ids to be stored, and the messages that the consumer has acknowledged
        self._tokens: list[Any] = []
        self._accepted: list[Incoming] = []
        self._is_storing = self._is_discarded = self._is_closed = False
        #: set when one of these may have changed
        self._changed = asyncio.Event()

    # --- the consumer

    def begins(self, incoming: Incoming, *, holds: bool) -> bool:
        """Return whether a message enters the stream. By the consumer; an interrupt repeats this.

        Args:
            incoming: the message.
            holds: whether its consumer gives a verdict; otherwise the message counts as settled now.
        """
        key = key_of(incoming)
        if key is None or incoming is self._entered:
            return True
        with self._lock:
            is_settled = key in self.settled
            held = self._held.get(key)
            if not is_settled and held is not None and held is not incoming:
                self._park(key, incoming)
                return False
            if not is_settled and holds:
                self._held[key] = incoming
            elif not is_settled:
                self._entered = incoming  # first: a message whose id is noted would be a duplicate of itself
                self._note(key)
        if is_settled:
            self._drop([incoming])
        elif not holds and self.settled.is_durable:
            self._request()
        return not is_settled

    def _park(self, key: Key, incoming: Incoming) -> None:
        """Keep a delivery until the verdict on another one; of deliveries that no broker bounds, only the last one."""
        parked = self._parked.get(key, ())
        live = [each for each in parked if each.token is not None and not self._buffer.is_stale(each)]
        self._parked[key] = [*(each for each in live if each is not incoming), incoming]

    def _note(self, key: Key) -> None:
        self.settled.add([key])
        if self.settled.is_durable:
            self._unstored.append(key)

    def _drop(self, duplicates: Iterable[Incoming]) -> None:
        self._duplicates.extend(duplicates)
        self._request()

    def _request(self) -> None:
        """Have the loop acknowledge duplicates, and have ids stored."""
        if not self._is_requested:
            try:
                self._is_requested = True
                self._engine.call(self._proceed)
            except BaseException:  # an interrupt: the next call requests again
                self._is_requested = False
                raise

    def finish(self, incoming: Incoming, *, acknowledged: bool) -> None:
        """Note the verdict on a message. From any thread."""
        key = key_of(incoming)
        if key is None:
            return
        with self._lock:
            if acknowledged:
                self._note(key)
            if self._held.get(key) is incoming:
                del self._held[key]
            parked = self._parked.pop(key, None)
        if parked and not acknowledged:
            self._engine.call(self._release_parked, parked)
        elif parked or (acknowledged and self.settled.is_durable):
            self._drop(parked or ())

    # --- the loop

    def _proceed(self) -> None:
        self._is_requested = False
        tokens = []
        for _ in range(len(self._duplicates)):
            incoming = self._duplicates.popleft()
            self._owner.counters.duplicates += 1
            if incoming.token is not None and not self._auto:
                tokens.append(incoming.token)
        self._acknowledge(tokens)

    def _release_parked(self, parked: list[Incoming]) -> None:
        """Hand out deliveries whose message was rejected."""
        for incoming in parked:
            if not self._buffer.is_stale(incoming):
                self._buffer.put_back(incoming)
        self._owner.proceed()

    def acknowledge(self, accepted: Sequence[Incoming]) -> None:
        """Note that messages are settled, and acknowledge them at the broker after their ids are stored."""
        for incoming in accepted:
            self.finish(incoming, acknowledged=True)
        self._accepted += accepted
        self._acknowledge([each.token for each in accepted if each.token is not None and not self._auto])

    def _acknowledge(self, tokens: list[Any]) -> None:
        """Acknowledge messages after all ids that were noted before are stored."""
        self._tokens += tokens
        if not self._is_storing:
            self._store()

    def _store(self) -> None:
        tokens, self._tokens = self._tokens, []
        accepted, self._accepted = self._accepted, []
        unstored = [self._unstored.popleft() for _ in range(len(self._unstored))]
        if unstored:
            self._is_storing = True
            self._submit(partial(self.settled.store, unstored), partial(self._stored, tokens, accepted))
        else:
            self._send(tokens, accepted)

    def _stored(self, tokens: list[Any], accepted: list[Incoming]) -> None:
        self._is_storing = False
        self._send(tokens, accepted)
        self._store()
        self._changed.set()

    def _send(self, tokens: list[Any], accepted: list[Incoming]) -> None:
        if accepted:
            self.on_stored(accepted)
        if tokens and not self._owner.connection.states.is_closed:
            self._owner.adapter.acknowledge(tokens)

    def _submit(self, job: Callable[[], object], done: Callable[[], object]) -> None:
        """Run ``job`` on a worker thread, then ``done`` on the loop."""

        def run() -> None:
            try:
                job()
            finally:
                self._engine.call(done)

        try:
            workers().submit(run)
        except RuntimeError:  # no thread can be started
            clock.call_later(self._engine.loop, _RETRY_SECONDS, self._submit, job, done)

    def release(self) -> list[Incoming]:
        """Return the deliveries that wait for a verdict: the subscription ends."""
        with self._lock:
            parked = [incoming for each in self._parked.values() for incoming in each]
            self._parked.clear()
            self._held.clear()
        return parked

    async def close(self, timeout: float) -> None:
        """Have all ids stored and all acknowledgements sent, then :meth:`discard`; for at most ``timeout`` seconds."""
        self._proceed()
        with suppress(TimeoutError):
            async with clock.timeout(timeout):
                while self._is_storing:
                    await self._change()
                self.discard()
                while not self._is_closed:
                    await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def discard(self) -> None:
        """Return the ids to where they came from, on a worker thread. Idempotent."""
        if not self._is_discarded:
            self._is_discarded = True
            self._submit(partial(self._inboxes.close, self.settled), self._closed)

    def _closed(self) -> None:
        self._is_closed = True
        self._changed.set()
