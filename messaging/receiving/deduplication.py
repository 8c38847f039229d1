"""Deduplication: recognises deliveries of messages that were settled before (extension ``deduplicate``).

A message is known by its channel and its message id. It counts as settled when its consumer acknowledged it, or when it
was dead-lettered. A delivery of a settled message is acknowledged and counted, and does not enter the stream. While the
consumer holds a message, another delivery of it waits for the verdict.

**Order.** The effect of the handler comes first, then the id is stored, then the broker gets the acknowledgement. A
process that dies before the id is stored gets the message again, and handles it again. Acknowledgements of duplicates
come after the ids that they were recognised by, too.

**Time.** The age of an id is monotonic time while the process runs, so a clock that is set does not change the window.
The disk has the time of the wall clock, which never goes back there: see ``State.open_seen``.

**Threads.** :meth:`Deduplicator.begins` is called by the consumer; verdicts come from any thread; everything else runs
on the engine's loop. With ``inbox_path`` the ids are stored by worker threads, those of many messages at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.environment.forks import LiveObjects
from messaging.environment.signals import WakeUp
from messaging.errors import ArgumentError, JournalUnreadableError, MessagingError
from messaging.execution import clock, workers
from messaging.model import Features, Incoming, SubscriptionSpec
from messaging.receiving.buffer import MessageBuffer, ReceivingSubscription

if TYPE_CHECKING:
    from messaging.journal import State
    from messaging.journal.folders import HeldLock

logger = logging.getLogger(__name__)

_LOCKED: Final = "another subscription to the same channel uses this inbox; give it a queue or an inbox_path of its own"
_OPTION: Final = "inbox_path"
#: names the subscription of a folder, for people
_META: Final = "inbox.json"
#: ids are forgotten on the disk each time that this part of their number was added
_FORGET_STEPS: Final = 20
#: after ids could not be stored, how long the next attempt waits, seconds
_RETRY_SECONDS: Final = 1.0
#: characters of a channel or an id that are kept as they are; a digest stands for longer ones
_LONGEST: Final = 512

Key = tuple[str, str]


def key_of(incoming: Incoming) -> Key | None:
    """Return channel and message id of a message; ``None`` if it has no id."""
    message_id = incoming.extensions.get(Features.EXTENSION_MESSAGE_ID)
    return None if message_id is None or incoming.channel is None else (_short(incoming.channel), _short(message_id))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"sha256:{hashlib.sha256(text.encode(errors='replace')).hexdigest()}"


class SettledIds:
    """The ids of settled messages, for a window of time and up to a number. Thread safe.

    Args:
        window: how long an id is kept, seconds.
        most: number of ids that are kept.
        folder: of the inbox on the disk; ``None``: in memory.
        name: of the subscription, for the folder.

    Attributes:
        window: see above.
        users: number of subscriptions that use them; for :class:`SettledIdStores`.

    Raises:
        JournalError: the folder cannot be used, or another subscription uses it.
    """

    def __init__(self, window: float, most: int, folder: Path | None = None, name: str = "") -> None:
        self.window: Final = window
        self.users = 0
        self._most = most
        #: key -> monotonic time, oldest first
        self._ids: OrderedDict[Key, float] = OrderedDict()
        #: guards ``_ids``
        self._lock = threading.Lock()
        #: guards the fields below; held while ids are written
        self._writing = threading.Lock()
        self._state: State | None = None
        self._folder_lock: HeldLock | None = None
        #: ids that are not stored, because of a failure
        self._missing: deque[Key] = deque(maxlen=most)
        self._retry_at: float | None = None
        #: ids that were stored since the last time that old ones were forgotten
        self._stored = 0
        self.is_durable: Final = folder is not None
        if folder is not None:
            self._open(folder / hashlib.sha256(name.encode()).hexdigest()[:16], name)
            _open_ids.add(self)

    def _open(self, path: Path, name: str) -> None:
        from messaging.journal import State  # not at import: few instances have a journal
        from messaging.journal.folders import LocalFolder, journal_errors

        files = LocalFolder(str(path), option=_OPTION, locked=_LOCKED, private=True)
        with ExitStack() as stack, journal_errors(files, "cannot open", JournalUnreadableError):
            files.make()
            lock = stack.enter_context(files.lock())
            if _META not in files.list():
                files.write(_META, [json.dumps({"subscription": name}).encode()])
            state = State(path, option=_OPTION)
            stack.callback(state.close)
            state.open_seen()
            now, monotonic = state.seen_time(), clock.monotonic()
            self._forget(state)
            for channel, message_id, at in state.seen(oldest=now - self.window)[-self._most :]:
                self._ids[channel, message_id] = monotonic - max(0.0, now - at)
            stack.pop_all()
            self._state, self._folder_lock = state, lock

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            at = self._ids.get(key)
        return at is not None and at > clock.monotonic() - self.window

    def add(self, keys: Iterable[Key]) -> None:
        """Add the ids of settled messages; forget the oldest ones."""
        now = clock.monotonic()
        oldest = now - self.window
        with self._lock:
            ids = self._ids
            for key in keys:
                ids[key] = now
                ids.move_to_end(key)
            while ids and (len(ids) > self._most or next(iter(ids.values())) <= oldest):
                ids.popitem(last=False)

    def store(self, keys: Sequence[Key]) -> None:
        """Store ids on the disk; there when this returns, unless the disk fails.

        A failure is logged once. The ids are stored with later ones when the disk works again: without their
        acknowledgements the messages would be handled again for certain.
        """
        with self._writing:
            if self._state is None:
                return
            self._missing.extend(keys)
            if self._retry_at is None or clock.monotonic() >= self._retry_at:
                self._store_missing(self._state)

    def _store_missing(self, state: State) -> None:
        if not self._missing:
            return
        try:
            state.add_seen([*self._missing])
        except MessagingError as error:
            if self._retry_at is None:
                logger.warning(
                    "%s; after a crash, messages settled from now on may be handled again; trying again", error
                )
            self._retry_at = clock.monotonic() + _RETRY_SECONDS
            return
        if self._retry_at is not None:
            logger.warning("inbox_path: stored the ids of %d messages, after a failure", len(self._missing))
        self._stored += len(self._missing)
        self._missing.clear()
        self._retry_at = None
        if self._stored >= max(1, self._most // _FORGET_STEPS):
            self._stored = 0
            self._forget(state)

    def _forget(self, state: State) -> None:
        try:
            state.forget_seen(oldest=state.seen_time() - self.window, most=self._most)
        except MessagingError as error:
            logger.warning("%s; old ids are forgotten later", error)

    def close(self) -> None:
        """Store the ids that are not, and release the folder. Idempotent."""
        with self._writing:
            if self._state is not None:
                self._store_missing(self._state)
                self._state.close()
            if self._folder_lock is not None:
                self._folder_lock.close()
            self._state = self._folder_lock = None

    def after_fork(self) -> None:
        """See ``Forkable``: the folder stays the parent's, which may release it while the child lives."""
        self._lock, self._writing = threading.Lock(), threading.Lock()
        if self._state is not None:
            self._state.after_fork()
        self._state = self._folder_lock = None  # the lock has left the folder to the parent by itself


_open_ids: Final[LiveObjects[SettledIds]] = LiveObjects()


class SettledIdStores:
    """The ids of settled messages of all subscriptions of one instance. Thread safe.

    Args:
        path: folder of the ids on the disk; ``None``: in memory.
        size: number of ids that are kept, for each subscription; at least as many as its prefetch.
    """

    def __init__(self, path: Path | None, size: int) -> None:
        self._path = path
        self._size = size
        #: guards ``_shared``, and the users of each
        self._lock = threading.Lock()
        #: ids that several subscriptions may use, by the name of the subscription
        self._shared: dict[str, SettledIds] = {}

    def open(self, spec: SubscriptionSpec, replaced: SettledIds | None = None) -> SettledIds | None:
        """Return the ids for a subscription, which calls :meth:`close`; ``None`` if it does not deduplicate.

        Subscriptions of one ``queue`` share them, since each message goes to one of them.

        Args:
            spec: of the subscription.
            replaced: ids of an ending subscription to the same source, which this one replaces and shares them with.

        Raises:
            ArgumentError: another subscription of this instance uses the same inbox on the disk.
            JournalError: the folder cannot be used, or another process uses it.
        """
        window, queue = spec.options.deduplicate, spec.options.queue
        if window is None:
            return None
        name = inbox_name(spec)
        with self._lock:
            if replaced is not None and replaced.users and replaced.window == window:
                ids: SettledIds | None = replaced
            else:
                ids = self._shared.get(name)
                if ids is not None and queue is None:
                    raise ArgumentError(f"option {_OPTION!r}: {_LOCKED}")
            if ids is None:
                # an id that is forgotten before its acknowledgement has gone out would be of no use
                ids = SettledIds(window, max(self._size, spec.options.prefetch), self._path, name)
                if queue is not None or ids.is_durable:
                    self._shared[name] = ids
            ids.users += 1
        return ids

    def close(self, ids: SettledIds) -> None:
        """Note that a subscription does not use its ids any more. Writes to the disk: not on an event loop."""
        with self._lock:
            ids.users -= 1
            if ids.users == 0:
                for name in [name for name, each in self._shared.items() if each is ids]:
                    del self._shared[name]
                ids.close()


def inbox_name(spec: SubscriptionSpec) -> str:
    """Return the name of a subscription, under which its ids are stored."""
    return json.dumps([spec.channel, spec.channel_extension, spec.options.queue])


#: pause before ids are stored where no thread could be started for it, seconds
_NO_THREAD_SECONDS: Final = 0.1


class Deduplicator:
    """Keeps the messages of one subscription that were settled before from its consumer.

    Args:
        owner, buffer: the subscription and its buffer.
        stores, settled: the ids of settled messages, and where they are returned to.

    Attributes:
        settled: see above.
        on_stored: called on the loop with messages that were acknowledged, after their ids are stored.
    """

    on_stored: Callable[[Sequence[Incoming]], object]

    def __init__(
        self, owner: ReceivingSubscription, buffer: MessageBuffer, stores: SettledIdStores, settled: SettledIds
    ) -> None:
        self._owner = owner
        self._buffer = buffer
        self._engine = owner.connection.engine
        self._auto = owner.spec.options.auto_acknowledge
        self._stores = stores
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
        self._proceeding = WakeUp(partial(self._engine.call, self._proceed))
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
        if not self._proceeding.is_pending:
            self._proceeding.request()

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
        self._proceeding.is_pending = False
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

    def acknowledge(self, settled: Sequence[Incoming], *, by_consumer: bool = True) -> None:
        """Note that messages are settled, and acknowledge them at the broker after their ids are stored.

        Args:
            settled: the messages.
            by_consumer: it has acknowledged them; :attr:`on_stored` is called with them. Otherwise they are dead
                letters: their consumer has rejected them before.
        """
        for incoming in settled:
            self.finish(incoming, acknowledged=True)
        if by_consumer:
            self._accepted += settled
        self._acknowledge([each.token for each in settled if each.token is not None and not self._auto])

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
            clock.call_later(self._engine.loop, _NO_THREAD_SECONDS, self._submit, job, done)

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
            self._submit(partial(self._stores.close, self.settled), self._closed)

    def _closed(self) -> None:
        self._is_closed = True
        self._changed.set()
