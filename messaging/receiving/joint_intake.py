"""The sink of a joint subscription: it collects the messages of all channels. Everything runs on the engine loop."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from messaging.codecs.cache import BoundedCache
from messaging.connection import Subscribed
from messaging.errors.text import SafeLog
from messaging.execution import clock
from messaging.model import AcknowledgeType, channels

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.errors import MessagingError
    from messaging.model import Incoming, SubscriptionSpec

logger = SafeLog(__name__)

#: takes the messages of one turn of the loop
Take = Callable[[list["Incoming"]], object]

#: channels of messages for which it is cached whether they are joined, or which member takes them
_CACHED: Final = 4096
#: how long messages of a named queue wait for their channels to be joined, seconds
CLAIM_TIMEOUT: Final = 30.0
#: while reading is suspended it goes on for ``_SLIT`` every ``_SUSPENDED`` seconds: keepalive answers must get through
_SUSPENDED: Final = 1.0
_SLIT: Final = 0.01

_UNSUPPORTED: Final = AcknowledgeType.UNSUPPORTED
_RECEIVED: Final = AcknowledgeType.RECEIVED


class Joined(Subscribed):
    """A joint subscription as its parts know it.

    Args:
        connection: of the instance.
        spec: the options of all channels; its channel means nothing.

    Attributes:
        specs: the channels that are joined or being joined, by pattern.
        is_abandoned: returns whether only an earlier process can have subscribed to a channel that is not joined.
    """

    def __init__(self, connection: Connection, spec: SubscriptionSpec) -> None:
        super().__init__(spec)
        self.connection = connection
        self.specs: dict[str, SubscriptionSpec] = {}
        self.is_abandoned: Callable[[str], bool] | None = None

    @abc.abstractmethod
    def leave(self, channel: str) -> None:
        """Part an abandoned channel, on which a message has arrived."""


class JointCallbacks:
    """The callbacks of the consumer of a joint subscription.

    They are called on the engine loop, and must neither block nor raise.

    Args:
        name: of the instance, for the log.
        take: see below.

    Attributes:
        take: takes the messages of one turn of the loop, in arrival order.
        on_lost: the connection was lost.
        on_restored: after a reconnect, all channels are subscribed again, or the broker has kept the session.
        on_failed: the broker ended the subscription to a channel, or refused it after a reconnect. The channel is
            removed; it may be added again.
    """

    def __init__(self, name: str, take: Take) -> None:
        self._name = name
        self.take = take
        self.on_lost: Callable[[], object] | None = None
        self.on_restored: Callable[[], object] | None = None
        self.on_failed: Callable[[str, MessagingError], object] | None = None

    def tell(self, callback: Callable[..., object] | None, *args: Any) -> None:
        """Call a callback, if it is set. One that raises is logged, and ends nothing."""
        try:
            if callback is not None:
                callback(*args)
        except Exception:
            logger.exception("%s: the consumer of a joint subscription failed", self._name)


class JointIntake:
    """The sink of the adapter: collects the messages of one turn of the loop.

    Messages of channels that are not joined any more are acknowledged and dropped. Abandoned channels are parted then.

    A named queue has messages of an earlier process, whose channels may still be joined: for ``CLAIM_TIMEOUT`` seconds
    they are kept, at most ``prefetch`` of them.

    Args:
        owner: knows the channels.
        callbacks: of the consumer.
        failed: called with a channel and the error when the broker ended its subscription.
    """

    def __init__(
        self, owner: Joined, callbacks: JointCallbacks, failed: Callable[[str, MessagingError], object]
    ) -> None:
        self._owner = owner
        self._callbacks = callbacks
        self._failed = failed
        self._loop = owner.connection.engine.loop
        self._batch: list[Incoming] = []
        self._wanted: BoundedCache[str, bool] = BoundedCache(_CACHED)
        #: messages of channels that may still be joined; ``None`` when none are kept any more
        self._unclaimed: list[Incoming] | None = None if owner.spec.options.queue is None else []
        self._is_timed = False
        #: patterns of channels that were parted while messages are kept
        self._parted: list[str] = []
        #: abandoned channels that are being parted
        self._left: BoundedCache[str, None] = BoundedCache(_CACHED)

    def changed(self) -> None:
        """Note that the channels have changed, or that some are abandoned."""
        self._wanted.clear()
        if self._unclaimed:
            kept, self._unclaimed = self._unclaimed, []
            self.deliver(kept)

    def parted(self, channel: str) -> None:
        """Note that a channel is no longer joined."""
        if self._unclaimed is not None:
            self._parted.append(channel)
        self.changed()

    def connected(self) -> None:
        """Note that messages may arrive."""
        if self._unclaimed is not None and not self._is_timed:
            self._is_timed = True
            clock.call_later(self._loop, CLAIM_TIMEOUT, self._drop_unclaimed)

    def disconnected(self) -> None:
        """Forget the messages that are kept: the queue delivers them again."""
        if self._unclaimed:
            self._unclaimed = []

    def _drop_unclaimed(self) -> None:
        kept, self._unclaimed = self._unclaimed, None
        self._parted.clear()
        if kept and not self._owner.leaving:
            logger.warning(
                "%s: %d messages of queue %r match no channel and are dropped, the first on %r",
                self._owner.connection.adapter.name, len(kept), self._owner.spec.options.queue, kept[0].channel,
            )  # fmt: skip
            self.deliver(kept)

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """See ``Sink``."""
        if self._owner.leaving:
            return  # released when it unsubscribes
        if not self._batch:
            self._loop.call_soon(self._hand_over)
        unwanted: list[Any] = []
        for incoming in batch:
            incoming.settler = None
            if self._is_wanted(incoming):
                incoming.state = _UNSUPPORTED if incoming.token is None else _RECEIVED
                self._batch.append(incoming)
            elif incoming.token is not None:
                is_abandoned = self._leave(incoming.channel)
                if self._unclaimed is None or is_abandoned or self._was_joined(incoming.channel):
                    unwanted.append(incoming.token)
                else:
                    self._unclaimed.append(incoming)
        if unwanted:
            self._owner.connection.adapter.acknowledge(unwanted)

    def _was_joined(self, channel: str) -> bool:
        return any(channels.matches(pattern, channel) for pattern in self._parted)

    def _leave(self, channel: str) -> bool:
        """Have a channel parted if it is abandoned; return whether it is."""
        owner = self._owner
        if owner.is_abandoned is None or not (channel in self._left or owner.is_abandoned(channel)):
            return False
        if channel not in self._left:
            self._left[channel] = None
            owner.leave(channel)
        return True

    def fail(self, error: MessagingError) -> None:
        """Report that the broker ended the subscriptions to all channels; the handle is void. See ``Sink``."""
        self._owner.handle = None
        for channel in [*self._owner.specs]:
            self._failed(channel, error)

    def _is_wanted(self, incoming: Incoming) -> bool:
        if incoming.channel_extension is not None:
            return False
        channel = incoming.channel
        wanted = self._wanted.get(channel)
        if wanted is None:
            specs = self._owner.specs
            wanted = channel in specs or any(channels.matches(pattern, channel) for pattern in specs)
            self._wanted[channel] = wanted
        return wanted

    def _hand_over(self) -> None:
        batch, self._batch = self._batch, []
        if batch and not self._owner.leaving:
            self._callbacks.tell(self._callbacks.take, batch)


class Pauses:
    """Keeps the broker from sending: by the subscription, and at QoS 0 by not reading at all.

    Args:
        owner: the subscription.

    Attributes:
        is_wanted: whether the consumer asks for no more messages.
    """

    def __init__(self, owner: Joined) -> None:
        self.is_wanted = False
        self._owner = owner
        self._reading = owner.connection.reading
        #: the handle that is paused
        self._paused: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def apply(self) -> None:
        """Pause or resume, as is wanted, on the current connection."""
        handle = self._owner.handle
        if handle is not None:
            if self.is_wanted:
                self._paused = handle
                self._reading.pause(handle)
            elif self._paused is handle:
                self._reading.unpause(handle)
        if not self.is_wanted:
            self._paused = None
        if self._owner.spec.options.qos == "0":
            self._suspend()

    def renew(self) -> None:
        """Pause a new handle, if that is wanted."""
        if self.is_wanted:
            self.apply()

    def _suspend(self) -> None:
        self._resume()
        if self.is_wanted:
            self._reading.suspend(self._owner)
            self._timer = clock.call_later(self._owner.connection.engine.loop, _SUSPENDED, self._let_through)

    def _resume(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._reading.resume(self._owner)

    def _let_through(self) -> None:
        self._resume()
        self._timer = clock.call_later(self._owner.connection.engine.loop, _SLIT, self._suspend)
