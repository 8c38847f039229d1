"""Base class of subscriptions at the broker: the core's ``adapter.Sink``."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from messaging.adapter import KeepsSession
from messaging.execution import Promise, of_library

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.errors import MessagingError
    from messaging.model import Incoming, SubscriptionSpec


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
        """Drop the messages that the broker will redeliver after the reconnect."""

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
