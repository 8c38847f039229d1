"""The inbox: recognises deliveries of messages that were settled before (extension ``deduplicate``).

A message is known by its channel and its message id. It counts as settled when its consumer acknowledged it, or when it
was dead-lettered. A delivery of a settled message is acknowledged and counted, and does not enter the stream. While the
consumer holds a message, another delivery of it waits for the verdict.

**Order.** The effect of the handler comes first, then the id is stored, then the broker gets the acknowledgement. A
process that dies before the id is stored gets the message again, and handles it again.

**Threads.** :meth:`Inbox.begins` is called by the consumer; verdicts come from any thread; everything else runs on the
engine's loop. With ``inbox_path`` the ids are stored by worker threads, those of many messages at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ArgumentError, JournalUnreadableError, MessagingError
from messaging.execution import workers
from messaging.journal import State
from messaging.journal.folders import LocalFolder, journal_errors
from messaging.model import Features

if TYPE_CHECKING:
    from messaging.model import Incoming, SubscriptionSpec
    from messaging.receiving.buffer import MessageBuffer
    from messaging.receiving.receiver import Receiver

logger = logging.getLogger(__name__)

_LOCKED: Final = "another subscription to the same channel uses this inbox; give it a queue or an inbox_path of its own"
_OPTION: Final = "inbox_path"
#: ids are forgotten on the disk each time that this part of their number was added
_FORGET_STEPS: Final = 20

Key = tuple[str, str]


def key_of(incoming: Incoming) -> Key | None:
    """Return channel and message id of a message; ``None`` if it has no id."""
    message_id = incoming.extensions.get(Features.EXTENSION_MESSAGE_ID)
    return None if message_id is None or incoming.channel is None else (incoming.channel, message_id)


class SettledIds:
    """The ids of settled messages, for a window of time and up to a number. Thread safe.

    Args:
        window: how long an id is kept, seconds.
        most: number of ids that are kept.
        folder: of the inbox on the disk; ``None``: in memory.
        name: of the subscription, for the folder.

    Raises:
        JournalError: the folder cannot be used, or another subscription uses it.
    """

    def __init__(self, window: float, most: int, folder: Path | None = None, name: str = "") -> None:
        self._window = window
        self._most = most
        #: key -> time of the wall clock, oldest first
        self._ids: OrderedDict[Key, float] = OrderedDict()
        #: guards ``_ids``
        self._lock = threading.Lock()
        self._state: State | None = None
        #: ids that were stored since the last time that old ones were forgotten; by one worker at a time
        self._stored = 0
        self._files = ExitStack()
        if folder is not None:
            self._open(folder / hashlib.sha256(name.encode()).hexdigest()[:16], name)

    def _open(self, path: Path, name: str) -> None:
        files = LocalFolder(str(path), option=_OPTION, locked=_LOCKED, private=True)
        with ExitStack() as stack, journal_errors(files, "cannot open", JournalUnreadableError):
            files.make()
            stack.enter_context(files.lock())
            files.write("inbox.json", [json.dumps({"subscription": name}).encode()])
            self._state = State(path, option=_OPTION)
            stack.callback(self._state.close)
            self._state.forget_seen(oldest=time.time() - self._window, most=self._most)
            for channel, message_id, at in self._state.seen(oldest=time.time() - self._window):
                self._ids[channel, message_id] = at
            self._files = stack.pop_all()

    @property
    def is_durable(self) -> bool:
        """Return whether the ids are stored on the disk."""
        return self._state is not None

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            at = self._ids.get(key)
        return at is not None and at > time.time() - self._window

    def add(self, keys: Iterable[Key]) -> None:
        """Add the ids of settled messages; forget the oldest ones."""
        now = time.time()
        oldest = now - self._window
        with self._lock:
            ids = self._ids
            for key in keys:
                ids[key] = now
                ids.move_to_end(key)
            while ids and (len(ids) > self._most or next(iter(ids.values())) <= oldest):
                ids.popitem(last=False)

    def store(self, keys: Sequence[Key]) -> None:
        """Store ids on the disk; there when this returns. Raises ``JournalError``."""
        if self._state is not None:
            self._state.add_seen(keys)
            self._stored += len(keys)
            if self._stored >= max(1, self._most // _FORGET_STEPS):
                self._stored = 0
                self._state.forget_seen(oldest=time.time() - self._window, most=self._most)

    def close(self) -> None:
        """Release the folder. Idempotent."""
        self._files.close()


class Inbox:
    """Keeps the messages of one subscription that were settled before from its consumer.

    Args:
        owner, buffer: the subscription and its buffer.
        settled: the ids of settled messages.
    """

    def __init__(self, owner: Receiver, buffer: MessageBuffer, settled: SettledIds) -> None:
        self._owner = owner
        self._buffer = buffer
        self._settled = settled
        #: guards ``_held`` and ``_parked``, and that a message is held until its id is among the settled ones
        self._lock = threading.Lock()
        #: messages in the hands of the consumer, and deliveries of the same messages that wait for its verdict
        self._held: dict[Key, Incoming] = {}
        self._parked: dict[Key, list[Incoming]] = {}
        #: deliveries of settled messages, to be acknowledged
        self._duplicates: deque[Incoming] = deque()
        self._is_requested = False
        # --- the loop
        #: settled messages whose ids are not stored, with their tokens
        self._unstored: list[tuple[Key, Any]] = []
        self._is_storing = False
        #: set when no acknowledgement waits for its id to be stored
        self._idle = asyncio.Event()

    # --- the consumer

    def begins(self, incoming: Incoming, *, holds: bool) -> bool:
        """Return whether a message enters the stream. By the consumer.

        Args:
            incoming: the message.
            holds: whether its consumer gives a verdict; otherwise the message counts as settled now.
        """
        key = key_of(incoming)
        if key is None:
            return True
        with self._lock:
            is_settled = key in self._settled
            held = self._held.get(key)
            if not is_settled and held is not None and held is not incoming:
                self._parked.setdefault(key, []).append(incoming)
                return False
            if not is_settled and holds:
                self._held[key] = incoming
        if is_settled:
            self._drop([incoming])
            return False
        if not holds:
            self._settled.add([key])
        return True

    def _drop(self, duplicates: Iterable[Incoming]) -> None:
        self._duplicates.extend(duplicates)
        if not self._is_requested:
            self._is_requested = True
            self._owner.connection.engine.call(self._acknowledge_duplicates)

    def finish(self, incoming: Incoming, *, acknowledged: bool) -> Key | None:
        """Note the verdict on a message; return its key if it is settled now. From any thread."""
        key = key_of(incoming)
        if key is None:
            return None
        with self._lock:
            if acknowledged:
                self._settled.add([key])
            if self._held.get(key) is incoming:
                del self._held[key]
            parked = self._parked.pop(key, None)
        if parked and acknowledged:
            self._drop(parked)
        elif parked:
            self._owner.connection.engine.call(self._release_parked, parked)
        return key if acknowledged else None

    # --- the loop

    def _acknowledge_duplicates(self) -> None:
        self._is_requested = False
        tokens = []
        for _ in range(len(self._duplicates)):
            incoming = self._duplicates.popleft()
            self._owner.counters.duplicates += 1
            if incoming.token is not None and not self._owner.spec.options.auto_acknowledge:
                tokens.append(incoming.token)
        if tokens and not self._owner.connection.states.is_closed:
            self._owner.adapter.acknowledge(tokens)

    def _release_parked(self, parked: list[Incoming]) -> None:
        """Hand out deliveries whose message was rejected."""
        for incoming in parked:
            if not self._buffer.is_stale(incoming):
                self._buffer.put_back(incoming)
        self._owner.proceed()

    def acknowledge(self, accepted: Sequence[Incoming]) -> None:
        """Acknowledge messages at the broker, after their ids are stored."""
        keys = [self.finish(incoming, acknowledged=True) for incoming in accepted]
        if not self._settled.is_durable:
            self._owner.adapter.acknowledge([incoming.token for incoming in accepted])
            return
        without_id = [incoming.token for incoming, key in zip(accepted, keys, strict=True) if key is None]
        if without_id:
            self._owner.adapter.acknowledge(without_id)
        self._unstored += [
            (key, incoming.token) for incoming, key in zip(accepted, keys, strict=True) if key is not None
        ]
        if not self._is_storing:
            self._store()

    def _store(self) -> None:
        unstored, self._unstored = self._unstored, []
        if not unstored:
            self._idle.set()
            return
        self._is_storing = True
        workers().submit(lambda: self._store_ids(unstored))

    def _store_ids(self, unstored: list[tuple[Key, Any]]) -> None:
        """Store ids on a worker thread."""
        try:
            self._settled.store([key for key, _ in unstored])
        except MessagingError as error:
            # the messages are handled: without an acknowledgement they would come again for certain
            logger.warning(
                "%s: %s; after a crash %d messages may not be recognised",
                self._owner.adapter.name, error, len(unstored),
            )  # fmt: skip
        self._owner.connection.engine.call(self._stored, [token for _, token in unstored])

    def _stored(self, tokens: list[Any]) -> None:
        self._is_storing = False
        if not self._owner.connection.states.is_closed:
            self._owner.adapter.acknowledge(tokens)
        self._store()

    async def drain(self, timeout: float) -> None:
        """Wait until no acknowledgement waits for its id to be stored, for at most ``timeout`` seconds."""
        deadline = self._owner.connection.engine.loop.time() + timeout
        while self._is_storing and (left := deadline - self._owner.connection.engine.loop.time()) > 0:
            self._idle.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), left)

    def release(self) -> list[Incoming]:
        """Return the deliveries that wait for a verdict: the subscription ends."""
        with self._lock:
            parked = [incoming for each in self._parked.values() for incoming in each]
            self._parked.clear()
            self._held.clear()
        return parked


class Inboxes:
    """The ids of settled messages of all subscriptions of one instance. Thread safe.

    Args:
        path: folder of the ids on the disk; ``None``: in memory.
        size: number of ids that are kept, for each subscription.
    """

    def __init__(self, path: Path | None, size: int) -> None:
        self._path = path
        self._size = size
        #: guards ``_shared``
        self._lock = threading.Lock()
        #: ids that several subscriptions may use, and how many do, by the name of the subscription
        self._shared: dict[str, tuple[SettledIds, int]] = {}

    def open(self, spec: SubscriptionSpec) -> SettledIds | None:
        """Return the ids for a subscription, which calls :meth:`close`; ``None`` if it does not deduplicate.

        Subscriptions of one ``queue`` share them, since each message goes to one of them.

        Raises:
            ArgumentError: another subscription of this instance uses the same inbox on the disk.
            JournalError: the folder cannot be used, or another process uses it.
        """
        window, queue = spec.options.deduplicate, spec.options.queue
        if window is None:
            return None
        if queue is None and self._path is None:
            return SettledIds(window, self._size)
        name = inbox_name(spec)
        with self._lock:
            ids, users = self._shared.get(name, (None, 0))
            if ids is not None and queue is None:
                raise ArgumentError(f"option {_OPTION!r}: {_LOCKED}")
            if ids is None:
                ids = SettledIds(window, self._size, self._path, name)
            self._shared[name] = ids, users + 1
        return ids

    def close(self, spec: SubscriptionSpec, ids: SettledIds) -> None:
        """Note that a subscription does not use its ids any more."""
        name = inbox_name(spec)
        with self._lock:
            known, users = self._shared.get(name, (None, 0))
            if known is ids and users > 1:
                self._shared[name] = ids, users - 1
                return
            if known is ids:
                del self._shared[name]
        ids.close()


def inbox_name(spec: SubscriptionSpec) -> str:
    """Return the name of a subscription, under which its ids are stored."""
    return json.dumps([spec.channel, spec.channel_extension, spec.options.queue])
