"""The compiled forms of a context: the plan of its messages, and the spec of a subscription."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
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
        correlation_id: of the context. A message may have another one, see :class:`~messaging.model.outgoing.Outgoing`.
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
