"""Which messages ``messaging sub`` writes: by channel, and by whether the broker had retained them."""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from messaging.errors import ArgumentError, MessagingError, UnsupportedFeatureError
from messaging.model import Features, check_pattern, matcher

if TYPE_CHECKING:
    from messaging import Message, Messaging, Promise

logger = logging.getLogger(__name__)

#: retained messages whose removal may be unconfirmed at a time
_UNCONFIRMED: Final = 500
#: channels whose removal is recognised when it comes back
_REMEMBERED: Final = 10_000


class Verdict(enum.Enum):
    """The decision on a message."""

    WRITE = enum.auto()
    SKIP = enum.auto()
    #: not written, and neither is any message after it
    END = enum.auto()


class Filter:
    """Decides on each message.

    Args:
        out: patterns of channels that are not written.
        live_only: messages that the broker had retained are not written.
        retained_only: only they are; the first other one is the end.

    Raises:
        ArgumentError: a pattern is malformed, or nothing could ever be written.
    """

    def __init__(self, out: Iterable[str], *, live_only: bool, retained_only: bool) -> None:
        if live_only and retained_only:
            raise ArgumentError("--no-retained and --retained-only: give one of them")
        self._out: list[Callable[[str], bool]] = [matcher(check_pattern(pattern)) for pattern in out]
        self._live_only = live_only
        self._retained_only = retained_only

    def verdict(self, message: Message) -> Verdict:
        """Return the decision on ``message``."""
        retained = is_retained(message)
        if self._retained_only and not retained:
            return Verdict.END
        if (self._live_only and retained) or self.excludes(message):
            return Verdict.SKIP
        return Verdict.WRITE

    def excludes(self, message: Message) -> bool:
        """Return whether the channel of ``message`` is filtered out."""
        channel = message.context.channel
        return channel is not None and any(matches(channel) for matches in self._out)


class Removal:
    """Removes messages that the broker has retained, and counts the outcomes. For one thread at a time."""

    def __init__(self, m: Messaging) -> None:
        self._m = m
        self._open: deque[Promise[None]] = deque()
        #: channels of removals, the latest ones
        self._channels: dict[str | None, None] = {}
        self.removed = 0
        self.error: MessagingError | None = None

    def remove(self, message: Message) -> None:
        """Have the broker forget the retained message of this one's channel."""
        context = message.context
        self._channels[context.channel] = None
        if len(self._channels) > _REMEMBERED:
            del self._channels[next(iter(self._channels))]
        builder = self._m.context_builder().channel(str(context.channel), context.channel_extension)
        builder.extensions({Features.EXTENSION_RETAIN: True, Features.EXTENSION_GUARANTEED_DELIVERY: True})
        try:
            self._open.append(self._m.publisher.publish(builder.content(b"").build_message()))
        except MessagingError as error:
            self.error = self.error or error
        self.settle(_UNCONFIRMED)

    def is_echo(self, message: Message) -> bool:
        """Return whether ``message`` is a removal of this instance, which the broker sends to its subscribers, too."""
        return not message.payload and message.context.channel in self._channels and not is_retained(message)

    def settle(self, allowed: int = 0) -> None:
        """Wait until the broker has confirmed all but ``allowed`` removals; each has its deadline."""
        while self._open and (len(self._open) > allowed or self._open[0].done()):
            error = self._open[0].exception()
            self._open.popleft()  # not before: the wait can be interrupted
            if error is None:
                self.removed += 1
            else:
                self.error = self.error or error


def is_retained(message: Message) -> bool:
    """Return whether the broker had retained ``message``."""
    return bool(message.context.extensions.get(Features.EXTENSION_RETAIN))


def require_retain(m: Messaging, option: str, *, queue: bool) -> None:
    """Refuse an option that is about retained messages where none can arrive.

    Raises:
        UnsupportedFeatureError: the instance has no retained messages.
        ArgumentError: subscribers that share a queue get none.
    """
    if Features.EXTENSION_RETAIN not in m.features:
        raise UnsupportedFeatureError(Features.EXTENSION_RETAIN, m.name, f"{option} needs it")
    if queue:
        raise ArgumentError(f"{option} does not go with --queue: retained messages go to no queue")
