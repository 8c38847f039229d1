"""Select the messages that ``messaging sub`` writes: by channel, and by whether the broker had retained them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import messaging
from messaging.cli.payload import Outcomes
from messaging.errors import ArgumentError, MessagingError, UnsupportedFeatureError

if TYPE_CHECKING:
    from messaging.instance import Messaging
    from messaging.model import Message

#: removals of retained messages that may be unconfirmed
_UNCONFIRMED: Final = 500
#: channels whose removal is recognised when the broker sends it back
_REMEMBERED: Final = 10_000


class FilterVerdict(enum.Enum):
    """The decision on a message."""

    WRITE = enum.auto()
    SKIP = enum.auto()
    #: write neither this message nor any later one
    END = enum.auto()


class Filter:
    """Decides on each message.

    Args:
        out: patterns of channels that are not written.
        live_only: skip messages that the broker had retained.
        retained_only: write only messages that the broker had retained; end at the first other one.

    Raises:
        ArgumentError: a pattern is malformed, or no message could pass.
    """

    def __init__(self, out: Iterable[str], *, live_only: bool, retained_only: bool) -> None:
        if live_only and retained_only:
            raise ArgumentError("--no-retained and --retained-only: give one of them")
        from messaging.model import check_pattern, matcher  # not at import: help and completion must be fast

        self._out: list[Callable[[str], bool]] = [matcher(check_pattern(pattern)) for pattern in out]
        self._live_only = live_only
        self._retained_only = retained_only

    def verdict(self, message: Message) -> FilterVerdict:
        """Return the decision on ``message``."""
        retained = is_retained(message)
        if self._retained_only and not retained:
            return FilterVerdict.END
        if (self._live_only and retained) or self.excludes(message):
            return FilterVerdict.SKIP
        return FilterVerdict.WRITE

    def excludes(self, message: Message) -> bool:
        """Return whether the channel of ``message`` is filtered out."""
        channel = message.context.channel
        return channel is not None and any(matches(channel) for matches in self._out)


class Removal:
    """Removes retained messages from the broker. For one thread at a time.

    Attributes:
        outcomes: counts the confirmed and the failed removals.
    """

    def __init__(self, m: Messaging) -> None:
        self._m = m
        #: channels of the latest removals
        self._channels: dict[str | None, None] = {}
        self.outcomes = Outcomes()

    def remove(self, message: Message) -> None:
        """Remove the retained message of the channel of ``message``."""
        context = message.context
        self._channels[context.channel] = None
        if len(self._channels) > _REMEMBERED:
            del self._channels[next(iter(self._channels))]
        builder = self._m.context_builder().channel(str(context.channel), context.channel_extension)
        builder.extensions(
            {messaging.Features.EXTENSION_RETAIN: True, messaging.Features.EXTENSION_GUARANTEED_DELIVERY: True}
        )
        try:
            promise = self._m.publisher.publish(builder.content(b"").build_message())
        except MessagingError as error:
            self.outcomes.fail(error)
        else:
            self.outcomes.add(promise, _UNCONFIRMED)

    def is_echo(self, message: Message) -> bool:
        """Return whether ``message`` is a removal of this instance that the broker sends to its subscribers."""
        return not message.payload and message.context.channel in self._channels and not is_retained(message)


def is_retained(message: Message) -> bool:
    """Return whether the broker had retained ``message``."""
    return bool(message.context.extensions.get(messaging.Features.EXTENSION_RETAIN))


def require_retain(m: Messaging, option: str, *, queue: bool) -> None:
    """Refuse an option for retained messages where none can arrive.

    Raises:
        UnsupportedFeatureError: the instance has no retained messages.
        ArgumentError: subscribers that share a queue get none.
    """
    if messaging.Features.EXTENSION_RETAIN not in m.features:
        raise UnsupportedFeatureError(messaging.Features.EXTENSION_RETAIN, m.name, f"{option} needs it")
    if queue:
        raise ArgumentError(f"{option} does not go with --queue: retained messages go to no queue")
