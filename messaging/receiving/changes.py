"""The changes of a joint subscription: channels to be added and removed, in the order of the calls.

A task applies them while there is a connection: runs of equal changes at the same time, each run after the one before.
A change that the loss of the connection interrupted is applied again by the next one. Everything runs on the engine
loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from messaging.errors import ConnectionLostError, MessagingError, SubscriptionRefusedError
from messaging.errors.text import SafeLog
from messaging.execution import Promise, of_library

if TYPE_CHECKING:
    from messaging.model import SubscriptionSpec
    from messaging.receiving.joint_intake import Joined, JointIntake

logger = SafeLog(__name__)

#: channels that are joined or parted at the same time
_AT_ONCE: Final = 32


class JointChange(NamedTuple):
    """A channel that is to be joined, or with ``spec`` ``None`` parted."""

    channel: str
    spec: SubscriptionSpec | None
    #: of the caller
    promise: Promise[None]

    def refuse(self, error: MessagingError) -> None:
        """Fail the change: the application has closed the subscription itself."""
        self.promise.was_retrieved = True
        self.promise.reject(error)


class Changes:
    """The changes that are not applied yet.

    Args:
        owner: the subscription.
        intake: the sink of the channels.
        has_handle: called when the owner has a new handle, or its handle has a further channel.

    Attributes:
        is_joined: whether the channels are joined on the current connection, so that changes can be applied.
        working: pending while changes are being applied.
        lock: held by the task that joins and parts channels.
    """

    def __init__(self, owner: Joined, intake: JointIntake, has_handle: Callable[[], object]) -> None:
        self.is_joined = False
        self.working: Promise[None] | None = None
        self.lock = asyncio.Lock()
        self._owner = owner
        self._intake = intake
        self._has_handle = has_handle
        self._name = owner.connection.adapter.name
        self._queue: deque[JointChange] = deque()
        #: the changes that are being applied
        self._applying: list[JointChange] = []
        #: number of connections so far
        self._connections = 0

    def put(self, change: JointChange) -> None:
        """Append a change."""
        self._queue.append(change)
        self.proceed()

    def adds(self, channel: str) -> bool:
        """Return whether a channel is about to be joined."""
        return any(each.channel == channel and each.spec is not None for each in (*self._applying, *self._queue))

    def joined(self) -> None:
        """Note that the channels are joined on a new connection."""
        self.is_joined = True
        self._connections += 1
        self.proceed()

    def proceed(self) -> None:
        """Apply the changes, if there is a connection and no task that applies them."""
        if self.is_joined and self._queue and self.working is None and not self._owner.leaving:
            self.working = Promise("changing a joint subscription")
            self._owner.connection.engine.spawn(self._work(self.working))

    async def _work(self, working: Promise[None]) -> None:
        try:
            while self.is_joined and self._queue and not self._owner.leaving:
                number = self._connections
                try:
                    async with self.lock:
                        await self.apply()
                except ConnectionLostError:
                    if number == self._connections:
                        self.is_joined = False  # the next connection proceeds
        finally:
            self.working = None
            working.resolve(None)

    def refuse(self, error: MessagingError) -> None:
        """Fail all changes, also the ones in progress."""
        for change in (*self._applying, *self._queue):
            change.refuse(error)
        self._queue.clear()

    async def apply(self) -> None:
        """Apply the changes; the caller holds the lock. A lost connection leaves them in the queue, and is raised."""
        while self._queue and not self._owner.leaving:
            run = self._applying = self._next_run()
            try:
                if run[0].spec is None:
                    await self._part(run)
                else:
                    await self._join(run)
            except ConnectionLostError:
                if not self._owner.ended:
                    self._queue.extendleft(reversed(run))
                raise
            finally:
                self._applying = []

    def _next_run(self) -> list[JointChange]:
        """Take changes of one kind off the queue, each of another channel."""
        run: list[JointChange] = []
        known: set[str] = set()
        queue = self._queue
        while queue and len(run) < _AT_ONCE:
            change = queue[0]
            if change.channel in known or (run and (change.spec is None) is not (run[0].spec is None)):
                break
            known.add(change.channel)
            run.append(queue.popleft())
        return run

    async def _join(self, run: Sequence[JointChange]) -> None:
        specs = self._owner.specs
        wanted = {each.channel: each.spec for each in run if each.spec is not None and each.channel not in specs}
        specs |= wanted
        self._intake.changed()
        try:
            refused = await self.join([*wanted.values()])
        except ConnectionLostError:
            for channel in wanted:
                self.forget(channel)
            raise
        for change in run:
            error = refused.get(change.channel)
            if error is None:
                change.promise.resolve(None)
            else:
                self.forget(change.channel)
                change.promise.reject(error)

    async def _part(self, run: Sequence[JointChange]) -> None:
        owner, handle = self._owner, self._owner.handle
        is_abandoned = owner.is_abandoned
        parting = [
            each.channel
            for each in run
            if each.channel in owner.specs or (is_abandoned is not None and is_abandoned(each.channel))
        ]
        if handle is not None:
            await _together([owner.connection.adapter.part(handle, channel) for channel in parting])
        for channel in parting:
            self.forget(channel)
        for change in run:
            change.promise.resolve(None)

    def forget(self, channel: str) -> None:
        """Take no more messages of a channel."""
        self._owner.specs.pop(channel, None)
        self._intake.parted(channel)

    async def join(self, specs: Sequence[SubscriptionSpec]) -> dict[str, MessagingError]:
        """Join channels; return the errors of the refused ones.

        Raises:
            ConnectionLostError: the connection was lost; some may be joined.
        """
        refused: dict[str, MessagingError] = {}
        rest = deque(specs)
        while rest and self._owner.handle is None:  # the first one makes the handle
            await self._join_one(rest.popleft(), refused)
        while rest:
            chunk = [rest.popleft() for _ in range(min(len(rest), _AT_ONCE))]
            await _together([self._join_one(spec, refused) for spec in chunk])
        return refused

    async def _join_one(self, spec: SubscriptionSpec, refused: dict[str, MessagingError]) -> None:
        owner = self._owner
        known = owner.handle
        try:
            handle = await of_library(owner.connection.adapter.join(spec, self._intake, known))
        except ConnectionLostError:
            raise
        except MessagingError as error:
            refused[spec.channel] = error
            return
        except Exception as error:
            logger.exception("%s: the adapter failed to join %r", self._name, spec.channel)
            failure = refused[spec.channel] = SubscriptionRefusedError(f"subscribing to {spec.channel!r} failed")
            failure.__cause__ = error
            return
        if owner.ended:  # closing did not wait for the broker
            await owner.connection.endings.unsubscribe(owner, handle)
            return
        if known is None:
            owner.handle = handle
        self._has_handle()


async def _together(calls: Sequence[Any]) -> None:
    """Await calls of the adapter at the same time, all to their ends, and raise the first error."""
    outcomes = await asyncio.gather(*map(of_library, calls), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
