"""Joint subscriptions: several channels, one order of arrival, one consumer. For the modules of this project.

::

    joint = instance.subscription.open_joint(take)
    joint.add("topics/a/b").result()
    joint.add("topics/c/#").result()
    ...
    joint.settle(batch)  # what `take` was given, once it is processed

**Order.** Messages arrive in the order in which one publisher published them, whatever their channels: see
``messaging.adapter.Adapter.join``.

**Threads.** ``take``, ``on_lost``, ``on_restored`` and ``on_failed`` are called on the engine loop; they must neither
block nor raise. Every method may be called from any thread, also from these callbacks. Nothing here is called under a
lock.

**Guarantee.** With acknowledgement each message arrives at least once: one that was not settled when the connection
was lost arrives again if the broker keeps it, and one that several channels match may arrive twice if one of them is
removed while it is on its way. Without (QoS 0) it arrives at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from messaging.connection import Connection
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Promise
from messaging.model import AcknowledgeType, Incoming, SubscriptionSpec, state_lock
from messaging.receiving.joined_channels import JoinedChannels, JointCallbacks, JointChange, Take

logger = SafeLog(__name__)


class JointSubscription(JointCallbacks):
    """A changing set of channels with one consumer; see the module. Made by ``MessageSubscription.open_joint``.

    Args:
        connection: of the instance.
        spec: the options of all channels; its channel means nothing.
        check: returns the spec of a channel, or raises an ``ArgumentError``.
        take: called with the messages of one turn of the loop, in arrival order.
    """

    def __init__(
        self, connection: Connection, spec: SubscriptionSpec, check: Callable[[str], SubscriptionSpec], take: Take
    ) -> None:
        super().__init__(connection.adapter.name, take)
        self._connection = connection
        self._check = check
        self._joined = JoinedChannels(connection, spec, self)

    @property
    def is_open(self) -> bool:
        """Return whether neither the subscription nor its instance was closed."""
        return not (self._joined.leaving or self._joined.ended)

    @property
    def channels(self) -> tuple[str, ...]:
        """Return the channels that are subscribed to, or about to be, in the order in which they were added."""
        return tuple(self._joined.specs.copy())

    def start(self) -> None:
        """Begin; by the service, once."""
        self._connection.engine.call(self._connection.subscriptions.start, self._joined)

    def add(self, channel: str) -> Promise[None]:
        """Subscribe to a channel or pattern; idempotent.

        Returns:
            Resolves when the broker has confirmed, with the next connection if there is none now. Fails with
            ``SubscriptionRefusedError``, which removes this channel only, or with ``ClosedError``.

        Raises:
            InvalidChannelError: a malformed pattern, or one that the adapter cannot subscribe to.
            UnsupportedFeatureError: a pattern with wildcards, and the instance has none.
        """
        return self._change(channel, self._check(channel))

    def remove(self, channel: str) -> Promise[None]:
        """Unsubscribe from a channel that was added; idempotent.

        Returns:
            Resolves when the broker has confirmed: no message of this channel is taken from then on, unless another
            pattern matches. Fails with ``ClosedError``.
        """
        return self._change(channel, None)

    def abandon(self, is_abandoned: Callable[[str], bool]) -> None:
        """Give up channels that only an earlier process has subscribed to; to be called once, after the first ``add``.

        A session or queue keeps such channels when its process dies. Their messages are acknowledged and dropped, and
        each channel is unsubscribed from with its first message.

        Args:
            is_abandoned: returns whether a channel that no channel of this subscription matches is given up; called
                on the engine loop.
        """
        self._connection.engine.call(self._joined.abandon, is_abandoned)

    def _change(self, channel: str, spec: SubscriptionSpec | None) -> Promise[None]:
        doing = "leaving" if spec is None else "joining"
        change = JointChange(channel, spec, Promise(f"{doing} {channel!r}"))
        if self.is_open:
            self._connection.engine.call(self._joined.change, change)
        else:  # also in a forked child, which has no engine of this instance
            change.refuse(self._joined.closed_error())
        return change.promise

    def settle(self, incomings: Iterable[Incoming]) -> None:
        """Acknowledge messages. Those without acknowledgement, settled before, or of a lost connection are ignored."""
        received, acknowledged = AcknowledgeType.RECEIVED, AcknowledgeType.ACKNOWLEDGED
        tokens = []
        with state_lock:
            for incoming in incomings:
                if incoming.state is received:
                    incoming.state = acknowledged
                    tokens.append(incoming.token)
        if tokens:
            self._joined.acknowledged.extend(tokens)
            self._connection.verdicts.request_flush(self._joined)

    def pause(self) -> None:
        """Ask for no more messages, some of which may still arrive; idempotent.

        With acknowledgement unsettled messages are bounded by ``prefetch`` anyway. At QoS 0 nothing is read from the
        broker: other subscriptions of the instance wait as well, so this should not last for long.
        """
        self._connection.engine.call(self._joined.pause, True)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._connection.engine.call(self._joined.pause, False)

    def close(self) -> Promise[None]:
        """Unsubscribe from all channels; unsettled messages are released. Idempotent.

        Returns:
            Resolves when the broker has confirmed, or after ``close_timeout``. Promises of ``add`` and ``remove``
            that are pending fail with ``ClosedError``.
        """
        joined = self._joined
        joined.stop()
        if not joined.closed.done():
            self._connection.engine.call(self._connection.subscriptions.end, joined)
        return joined.closed

    @tolerant
    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<JointSubscription of {self._connection.adapter.name!r}: {len(self._joined.specs)} channels, {state}>"
