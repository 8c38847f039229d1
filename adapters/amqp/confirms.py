"""A channel to publish on, and what the broker has not answered for yet: confirms, refusals, returned messages.

A mandatory message that reaches no queue comes back as ``basic.return``, with its content, and is then confirmed like
any other. It is told by its message id, and failed at once; the confirm that follows finds nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from adapters.amqp import frames, properties
from messaging.errors import PublishRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from messaging.errors import MessagingError


class Confirmable(Protocol):
    """What is published: an ``adapter.Outgoing``, or what stands in for one."""

    def confirm(self) -> None:
        """The broker has it."""

    def fail(self, error: MessagingError, /) -> None:
        """The broker has not."""


M = TypeVar("M", bound=Confirmable)


class ConfirmChannel(Generic[M]):
    """See the module. Takes the frames of its channel as a ``connection.Lane``."""

    def __init__(self, number: int, *, confirms: bool = True) -> None:
        self.number = number
        self.confirms = confirms
        self.pending: dict[int, M] = {}
        #: why the broker closed it: reply code and text
        self.refusal: tuple[int, str] | None = None
        self._next_tag = 1
        #: no smaller tag is pending
        self._lowest = 1
        #: the message whose content is coming back: reply code, reply text, routing key
        self._returning: tuple[int, str, str] | None = None
        self._returning_id: str | None = None
        self._missing = 0

    @property
    def last_tag(self) -> int:
        """Tag of the message that was published last; 0 before the first."""
        return self._next_tag - 1

    def expect(self, message: M) -> int:
        """The next message on this channel is ``message``; returns its tag."""
        tag = self._next_tag
        self.pending[tag] = message
        self._next_tag = tag + 1
        return tag

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        """Take confirms and returns; see ``connection.Lane``."""
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
        if self._missing <= 0:
            assert self._returning is not None  # noqa: S101  # its caller saw it
            (code, text, key), self._returning = self._returning, None
            self.returned(code, text, key, self._returning_id)
            self.progressed()
        return True

    def closed(self, code: int, text: str) -> None:
        """The broker closed the channel; see ``connection.Lane``."""
        self.refusal = code, text
        self.refused()

    # --- what becomes of it

    def nacked(self, tag: int, message: M) -> None:  # noqa: ARG002  # subclasses keep the order of publishing
        """The broker did not take a message."""
        message.fail(PublishRefusedError("the broker did not take the message (basic.nack)"))

    def progressed(self) -> None:
        """Something was answered for."""

    def refused(self) -> None:
        """The broker closed the channel."""

    def returned(self, code: int, text: str, key: str, message_id: str | None, /) -> None:
        """A message came back: reply code and text, its routing key, its message id."""
