"""What a connection keeps subscribed at its broker: the core's ``adapter.Sink``."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from messaging.execution import Promise

if TYPE_CHECKING:
    from messaging.adapter import SubscriptionSpec
    from messaging.errors import MessagingError
    from messaging.model import Incoming


#: channel, routing key and queue
Source: TypeAlias = tuple[str, str | None, str | None]


class Subscribed(abc.ABC):
    """One subscription at the broker. Everything is called on the engine's loop, unless it says otherwise.

    Attributes:
        is_lasting: whether it stays at a broker that keeps the session when the instance is closed.
        spec: what is subscribed to.
        ready: resolves when the broker has confirmed it.
        handle: the adapter's, while it is subscribed.
        paused: whether the adapter is asked to send nothing, once it is subscribed.
        leaving: nothing is taken in any more; then, the end.
        ended: that.
        is_kept: whether it also stays there when it is closed alone.
        heir: a subscription to the same source that its observer made, as ``ops.retry`` does when the stream fails.
    """

    is_lasting: ClassVar[bool] = True
    #: whether an application consumes it as a stream, or by a message handler
    is_stream: ClassVar[bool] = False

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
        """What it receives from: equal for subscriptions that can replace each other."""
        return self.spec.channel, self.spec.channel_extension, self.spec.options.queue

    # --- from the adapter

    @abc.abstractmethod
    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Take messages in; see ``adapter.Sink``."""

    @abc.abstractmethod
    def fail(self, error: MessagingError) -> None:
        """End with ``error``; see ``adapter.Sink``."""

    # --- from the connection

    @abc.abstractmethod
    def on_connection_lost(self) -> None:
        """The connection is gone."""

    @abc.abstractmethod
    def reconnected(self, resumed: bool) -> None:
        """There is another one; before subscribing again, unless the session was ``resumed``."""

    @abc.abstractmethod
    def stop(self) -> Promise[None] | None:
        """Take no more; the promise resolves when what is in progress is done. From any thread."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Pass the verdicts gathered so far to the adapter."""

    async def release(self, timeout: float) -> None:  # noqa: ARG002  # there is nothing to release, unless overridden
        """Before unsubscribing: release the messages that are unsettled now that the consumer has stopped.

        A message that no other consumer will receive is dead-lettered, or counted as dropped. Returns when the dead
        letters have been published, after ``timeout`` seconds at the latest.
        """
        return

    def take_over(self, counts: Mapping[object, int]) -> None:  # noqa: B027  # nothing is counted, unless overridden
        """Go on counting the deliveries of messages that another consumer of the same channel rejected."""

    @abc.abstractmethod
    def complete(self) -> None:
        """End without error."""
