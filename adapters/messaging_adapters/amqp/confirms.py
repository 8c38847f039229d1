"""A channel to publish on, and its unconfirmed messages: confirms, refusals, returned messages.

A mandatory message that reaches no queue is returned with ``basic.return`` and its content, and is then confirmed like
any other. Its message id identifies it, and it fails at once. The confirm that follows has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from messaging.errors import PublishRefusedError
from messaging_adapters.amqp import frames, properties

if TYPE_CHECKING:
    from collections.abc import Iterable

    from messaging.errors import MessagingError


class Confirmable(Protocol):
    """A message that is published: an ``adapter.Outgoing``, or a delayed message."""

    def confirm(self) -> None:
        """Report that the broker has taken the message."""

    def fail(self, error: MessagingError, /) -> None:
        """Report that the broker has not taken the message."""


M = TypeVar("M", bound=Confirmable)


class ConfirmChannel(Generic[M]):
    """See the module. A ``protocol.FrameLane``."""

    def __init__(self, number: int, *, confirms: bool = True) -> None:
        self.number = number
        self.confirms = confirms
        self.pending: dict[int, M] = {}
        #: why the broker closed the channel: reply code and text
        self.refusal: tuple[int, str] | None = None
        self._next_tag = 1
        #: no smaller tag is pending
        self._lowest = 1
        #: reply code, reply text and routing key of the returned message whose content is arriving
        self._returning: tuple[int, str, str] | None = None
        self._returning_id: str | None = None
        self._missing = 0

    @property
    def last_tag(self) -> int:
        """Return the tag of the message that was published last; 0 before the first."""
        return self._next_tag - 1

    def expect(self, message: M) -> int:
        """Add ``message``, the next one that is published on this channel, and return its tag."""
        tag = self._next_tag
        self.pending[tag] = message
        self._next_tag = tag + 1
        return tag

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        """Take confirms and returned messages; see ``protocol.FrameLane``."""
        if kind != frames.METHOD:
            return self._returning is not None and self._take_content(kind, data, at, end)
        method = data[at : at + 4]
        if method not in (frames.BASIC_ACK, frames.BASIC_NACK):
            if method != frames.BASIC_RETURN:
                return False
            self._returning, self._missing = frames.read_return(data, at, end), 0
            return True
        tag, multiple = frames.read_settlement(data, at)
        pending = self.pending
        if multiple:
            last = min(tag or self._next_tag, self._next_tag - 1)  # 0 stands for all (basic.ack, 1.8.3.13)
            tags: Iterable[int] = range(self._lowest, last + 1)
            self._lowest = max(self._lowest, last + 1)
        else:
            tags = (tag,)
        for each in tags:
            message = pending.pop(each, None)
            if message is not None:
                if method == frames.BASIC_ACK:
                    message.confirm()
                else:
                    self.nacked(each, message)
        while self._lowest < self._next_tag and self._lowest not in pending:
            self._lowest += 1
        self.progressed()
        return True

    def _take_content(self, kind: int, data: bytes, at: int, end: int) -> bool:
        if kind == frames.HEADER:
            self._missing = frames.read_body_size(data, at)
            self._returning_id = properties.read(data, at + 12, end, False).extensions.get("messageId")
        elif self._missing > 0:
            self._missing -= end - at
        else:
            return False
        if self._missing <= 0 and self._returning is not None:
            (code, text, key), self._returning = self._returning, None
            self.returned(code, text, key, self._returning_id)
            self.progressed()
        return True

    def closed(self, code: int, text: str) -> None:
        """Handle the close of the channel by the broker; see ``protocol.FrameLane``."""
        self.refusal = code, text
        self.refused()

    # --- outcomes

    def nacked(self, tag: int, message: M) -> None:
        """Handle a message that the broker refused. Tags rise in the order of publishing."""
        del tag
        message.fail(PublishRefusedError("the broker did not take the message (basic.nack)"))

    def progressed(self) -> None:
        """Handle an answer of the broker."""

    def refused(self) -> None:
        """Handle the close of the channel by the broker."""

    def returned(self, code: int, text: str, key: str, message_id: str | None, /) -> None:
        """Handle a returned message: reply code and text, its routing key, its message id."""
