"""What a connection serves: subscriptions (the core's ``adapter.Sink``), their verdicts and pauses, and the outbox."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias

from messaging.adapter import Adapter, FlowControl, KeepsSession
from messaging.connection.state import ConnectionStates
from messaging.environment.signals import WakeUp
from messaging.errors import MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Engine, Promise, of_library
from messaging.model import Incoming, SubscriptionSpec

logger = SafeLog(__name__)

#: channel, routing key and queue
Source: TypeAlias = tuple[str, str | None, str | None]


class Subscribed(abc.ABC):
    """One subscription at the broker. Every method is called on the engine's loop unless stated otherwise.

    Attributes:
        is_lasting: whether a broker that keeps the session keeps the subscription when the instance is closed.
        spec: channel and options.
        ready: resolves when the broker has confirmed the subscription.
        handle: of the adapter; ``None`` while not subscribed.
        paused: whether the broker is to send nothing; passed to the adapter when it has subscribed.
        leaving: whether the subscription accepts no more messages, because it is about to end.
        ended: whether the subscription has ended.
        is_kept: whether the broker also keeps the subscription when only its stream is closed.
        heir: the subscription to the same source that replaces this one; the observer made it when the stream failed,
            as ``ops.retry`` does.
    """

    is_lasting: ClassVar[bool] = True
    #: whether an application consumes it as a stream, or by a message handler
    is_stream = False

    def __init__(self, spec: SubscriptionSpec) -> None:
        self.spec = spec
        self.ready: Promise[None] = Promise(f"subscribing to {spec.channel!r}")
        self.handle: Any = None
        self.paused = False
        self.leaving = False
        self.ended = False
        self.is_kept = False
        self.heir: Subscribed | None = None

    @property
    def source(self) -> Source:
        """Return channel, routing key and queue, which are equal for subscriptions that can replace each other."""
        return self.spec.channel, self.spec.channel_extension, self.spec.options.queue

    def bequeather(self, adapter: Adapter) -> KeepsSession | None:
        """Return ``adapter`` if it passes unsettled messages to the heir; where it can reject, the broker does."""
        heir = self.heir
        if heir is None or heir.handle is None or adapter.capabilities.can_reject:
            return None
        return adapter if isinstance(adapter, KeepsSession) else None

    # --- at the broker

    async def subscribe_at(self, adapter: Adapter) -> Any:
        """Subscribe, and return the handle. Raises as ``Adapter.subscribe``."""
        return await of_library(adapter.subscribe(self.spec, self))

    async def unsubscribe_at(self, adapter: Adapter, handle: Any) -> None:
        """End the subscription ``handle``, as ``Adapter.unsubscribe``."""
        await of_library(adapter.unsubscribe(handle))

    # --- from the adapter

    @abc.abstractmethod
    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Accept messages, see ``adapter.Sink``."""

    @abc.abstractmethod
    def fail(self, error: MessagingError) -> None:
        """End with ``error``, see ``adapter.Sink``."""

    # --- from the connection

    @abc.abstractmethod
    def on_connection_lost(self) -> None:
        """Hand out no message that the broker will redeliver after the reconnect."""

    @abc.abstractmethod
    def reconnected(self, resumed: bool) -> None:
        """Prepare for a new connection, which subscribes again unless the session was ``resumed``."""

    @abc.abstractmethod
    def stop(self) -> Promise[None] | None:
        """Stop the consumer; the promise resolves after the message in progress. Thread safe."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Pass the verdicts gathered so far to the adapter."""

    async def release(self, timeout: float) -> None:  # noqa: ARG002  # there is nothing to release, unless overridden
        """Release the unsettled messages of the stopped consumer, before unsubscribing.

        A message that no other consumer will receive is dead-lettered, or counted as dropped. Returns when the dead
        letters have been published, after ``timeout`` seconds at the latest.
        """
        return

    def take_over(self, counts: Mapping[object, int]) -> None:  # noqa: B027  # nothing is counted, unless overridden
        """Continue the delivery counts of messages that another consumer of the same source rejected."""

    @abc.abstractmethod
    def complete(self) -> None:
        """End without error."""


class Verdicts:
    """Flushes the verdicts of subscriptions on the engine loop, with one wake-up for all subscriptions.

    Args:
        engine: runs :meth:`flush`.
        adapter: named in the log.
        states: of the connection; once it is closed, verdicts are dropped.
    """

    def __init__(self, engine: Engine, adapter: Adapter, states: ConnectionStates) -> None:
        self._adapter = adapter
        self._states = states
        #: subscriptions with verdicts that are not flushed yet
        self._pending: deque[Subscribed] = deque()
        self._flushing = WakeUp(partial(engine.call, self.flush))

    def request_flush(self, subscription: Subscribed) -> None:
        """Call ``subscription.flush`` on the loop soon. Thread safe."""
        self._pending.append(subscription)
        if not self._flushing.is_pending:
            self._flushing.request()

    def flush(self) -> None:
        """Flush the subscriptions that requested it. On the engine loop."""
        # cleared before the queue is read: a thread that appends after this line requests again
        self._flushing.is_pending = False
        pending = self._pending
        if self._states.is_closed:
            pending.clear()  # the adapter is closed too
        for _ in range(len(pending)):
            try:
                pending.popleft().flush()
            except Exception:  # the other subscriptions must be flushed nevertheless
                logger.exception("%s: failed to settle messages", self._adapter.url.label(self._adapter.name))


class ReadControl:
    """Passes pauses to the adapter, if it has flow control. On the engine loop.

    Nothing is read from the broker while at least one subscription asks for that.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._control = adapter if isinstance(adapter, FlowControl) else None
        self._behind: set[Subscribed] = set()

    def pause(self, handle: Any) -> None:
        """Ask the broker for no more messages of one subscription."""
        if self._control is not None:
            self._control.pause(handle)

    def unpause(self, handle: Any) -> None:
        """Undo :meth:`pause`."""
        if self._control is not None:
            self._control.resume(handle)

    def suspend(self, subscription: Subscribed) -> None:
        """Read nothing from the broker until the consumer of ``subscription`` has caught up."""
        if not self._behind and self._control is not None:
            self._control.pause(None)
        self._behind.add(subscription)

    def resume(self, subscription: Subscribed) -> None:
        """Read again, unless another consumer is behind. Idempotent."""
        if subscription in self._behind:
            self._behind.remove(subscription)
            if not self._behind and self._control is not None:
                self._control.resume(None)


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
