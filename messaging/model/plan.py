"""The forms of contexts and messages that adapters are given: plan, outgoing message, spec of a subscription."""

from __future__ import annotations

from typing import Any, Final, Protocol

from messaging.errors import MessagingError
from messaging.model.extensions import PublishOptions, SubscribeOptions

#: what a copy of a plan does not take over
_OWN: Final = frozenset({"is_special", "record", "request", "slot"})


class PublishPlan:
    """The values that all messages of one context share, compiled for one instance.

    Made by the :class:`~messaging.publishing.MessagePublisher`, kept in the context, and shared by contexts that are
    alike. Nothing changes but ``record``, ``request`` and ``slot``.

    Attributes:
        channel: passed ``check_name``.
        channel_extension, content_type, content_encoding, reply_to_channel: as in the context, checked.
        correlation_id: of the context. A message may have another one, see :class:`Outgoing`.
        options: the checked extensions, defaults filled in.
        stamp: identifies the publisher, and what its adapter announced, at the time of the check.
        request: what the publisher of requests makes of the plan; ``None`` at first.
        record: what the durable outbox stores of the plan; ``None`` at first.
        is_special: whether it has a last will, a time to live or a deadline of its own.
        slot: of the adapter, ``None`` at first: anything it wants to make once for all messages of the plan, in
            ``check_publish`` or later on the engine's loop.
    """

    __slots__ = (
        "channel", "channel_extension", "content_encoding", "content_type", "correlation_id", "is_special", "options",
        "record", "reply_to_channel", "request", "slot", "stamp",
    )  # fmt: skip

    def __init__(
        self,
        stamp: object,
        options: PublishOptions,
        channel: str,
        channel_extension: str | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        correlation_id: str | None = None,
        reply_to_channel: str | None = None,
    ) -> None:
        self.stamp = stamp
        self.options = options
        self.channel = channel
        self.channel_extension = channel_extension
        self.content_type = content_type
        self.content_encoding = content_encoding
        self.correlation_id = correlation_id
        self.reply_to_channel = reply_to_channel
        self.record: Any = None
        self.request: Any = None
        self.slot: Any = None
        self.is_special = options.last_will or options.time_to_live is not None or options.timeout is not None

    def replace(self, **changes: Any) -> PublishPlan:
        """Return a copy with some values changed, which are not checked, and with nothing hung on it."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in _OWN}
        return PublishPlan(**{**values, **changes})


class Outgoing(Protocol):
    """A message to publish. The core makes it; the adapter sends and settles it.

    An adapter that holds an ``Outgoing`` must call :meth:`confirm` or :meth:`fail` on the loop. A second call has no
    effect, because the core itself fails a message whose deadline has passed, and a confirm may come late. A
    ``settled`` message must not be sent any more: deadlines depend on it.
    """

    #: released when the message is settled, so that a kept promise does not keep it; a will keeps its payload
    payload: bytes
    #: channel, content type, options, ... to send, which messages share
    plan: PublishPlan
    #: of this message; the plan's own is not used
    correlation_id: str | None
    #: whether the message was confirmed or failed
    settled: bool

    def prepare(self) -> bool:
        """Have the plan tell the time to live that is left; if it is over, fail the message, and return ``False``.

        An adapter calls it before it sends the message another time.
        """
        ...

    @property
    def message_id(self) -> str:
        """Return the message id: stable across retries, unique across instances and processes, made on first use.

        It is ``plan.options.message_id`` if the application set one: two messages in flight may then have the same id,
        and the id must be sent with QoS 0, too.
        """
        ...

    def sent(self) -> None:
        """Note that the message was sent and awaits its confirm: a connection loss now leaves the outcome unknown."""

    def confirm(self) -> None:
        """Succeed. QoS 0: the bytes were handed to the socket. Otherwise: the broker has taken responsibility."""

    def fail(self, error: MessagingError) -> None:
        """Fail. After a ``ConnectionLostError`` the core sends the message again when it has reconnected."""


class SubscriptionSpec:
    """Channel and options of a subscription. Made by the core.

    Attributes:
        channel: passed ``check_pattern``.
        channel_extension: routing key pattern, as given; only with feature ``routingKey``.
        options: the checked extensions, defaults filled in. ``options.prefetch`` is how many unsettled
            deliveries the core can take; an adapter whose protocol has credit per consumer must not exceed it.
    """

    __slots__ = ("channel", "channel_extension", "options")

    def __init__(self, channel: str, channel_extension: str | None, options: SubscribeOptions) -> None:
        self.channel = channel
        self.channel_extension = channel_extension
        self.options = options
