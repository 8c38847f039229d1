"""The hand-out of buffered messages to the one consumer of a subscription."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from messaging.environment.signals import on_failure, taking
from messaging.errors import CodecError
from messaging.errors.text import SafeLog
from messaging.model import (
    AcknowledgeType,
    Incoming,
    Message,
    ReceivedMessage,
    context_of,
)
from messaging.receiving.buffer import MessageBuffer, OnInvalid, ReadThrottle, ReceivingSubscription
from messaging.receiving.settlement import DirectAcknowledger, Settlement, withdraw

logger = SafeLog(__name__)


_RECEIVED: Final = AcknowledgeType.RECEIVED
_ACKNOWLEDGED: Final = AcknowledgeType.ACKNOWLEDGED
_UNSUPPORTED: Final = AcknowledgeType.UNSUPPORTED


class HandOut:
    """Makes messages of what the buffer holds, checks them, and hands them out. By one consumer thread at a time.

    Args:
        owner, buffer, settlement, throttle, direct: the subscription, and parts of it.
        make: makes a message of payload, context and model.
        model: what the values of messages are validated against.
        on_invalid: what becomes of a message that does not fit the model.

    Attributes:
        fetched: the message that :meth:`fetch` returned, until its consumer has confirmed that it has it.
        on_empty: called when the buffer has no message that may be handed out.
    """

    def __init__(
        self,
        owner: ReceivingSubscription,
        buffer: MessageBuffer,
        settlement: Settlement,
        throttle: ReadThrottle,
        direct: DirectAcknowledger | None,
        make: Callable[[bytes, Incoming, Any], ReceivedMessage],
        model: Any,
        on_invalid: OnInvalid,
    ) -> None:
        self._owner = owner
        self._counters = owner.counters
        self._buffer = buffer
        self._credit = settlement.credit
        self._settlement = settlement
        self._throttle = throttle
        self._direct = direct
        self._make = make
        self._model = model
        self._on_invalid = on_invalid
        self._prefetch = owner.spec.options.prefetch
        self._auto = owner.spec.options.auto_acknowledge
        #: messages may be kept out of the stream
        self._is_checked = model is not None or direct is not None
        #: all enter it, and wait for the verdict of the consumer if they have a token
        self._deduplicator = deduplicator = settlement.deduplicator
        self._is_plain = not (self._is_checked or self._auto or deduplicator is not None)
        #: takes messages off the buffer
        self._moving = taking(buffer.messages)
        #: off the buffer, not a message yet
        self._moved: Incoming | None = None
        #: counted as handed out before it has entered the stream
        self._counted: Incoming | None = None
        self.fetched: ReceivedMessage | None = None
        self.on_empty: Callable[[], object] | None = None

    def __len__(self) -> int:
        """Return the number of messages that an interrupt of the consumer has kept here."""
        return (self._moved is not None) + (self.fetched is not None)

    @property
    def has_next(self) -> bool:
        """Return whether :meth:`fetch` would return a message, or the subscription has ended."""
        return self._owner.ended or (
            bool(self._buffer.messages)
            and not self._owner.paused
            and self._credit.handed_out - self._credit.settled < self._prefetch
        )

    def fetch(self) -> ReceivedMessage | None:
        """Return the next message that enters the stream, or ``None`` if no message is available.

        It stays :attr:`fetched`, and is what the next call returns, until the consumer sets that to ``None``. So an
        interrupt on the consumer's thread, anywhere up to there, costs no message.

        The consumer is woken when there may be one.

        Raises:
            CodecError: a message does not fit the model and ``on_invalid`` is ``raise``. It was rejected.
        """
        if self.fetched is not None and not self._is_fetched_void():
            return None if self._owner.paused else self.fetched
        buffer, credit = self._buffer, self._credit
        while True:
            if self._moved is None:
                if self._owner.paused or credit.handed_out - credit.settled >= self._prefetch:
                    break
                try:
                    for self._moved in self._moving:  # noqa: B020  # it assigns an attribute
                        break
                except IndexError:
                    break
            incoming: Incoming = self._moved  # type: ignore[assignment]  # the loop above has set it
            if self._throttle.is_throttled and len(buffer.messages) <= self._throttle.low:
                self._resume_reading()
            if buffer.withheld and not buffer.admitting.is_pending:
                buffer.admitting.request()
            if buffer.expects_stale and buffer.is_superseded(incoming):
                self._moved = None
            elif self._is_plain:
                incoming.settler = self._settlement
                takes_verdict = incoming.token is not None
                incoming.state = _RECEIVED if takes_verdict else _UNSUPPORTED
                message = self._make(incoming.payload, incoming, None)
                # in one step: Python assigns the values of a tuple without looking for signals
                self.fetched, self._moved, credit.handed_out, self._counters.delivered = (
                    message, None, credit.handed_out + takes_verdict, self._counters.delivered + 1
                )  # fmt: skip
                return message
            elif self._begins(incoming):
                message = self._make(incoming.payload, incoming, self._model)
                if not self._is_checked or self._enters(message, incoming):
                    self.fetched, self._moved, self._counted, self._counters.delivered = (
                        message, None, None, self._counters.delivered + 1
                    )  # fmt: skip
                    return message
        settlement = self._settlement
        if not settlement.flushing.is_pending and settlement.has_verdicts():
            settlement.flushing.request()
        if self.on_empty is not None:
            self.on_empty()
        return None

    def _begins(self, incoming: Incoming) -> bool:
        """Prepare a message for its consumer, and count it; an interrupt repeats this.

        Returns:
            Whether it is handed out: it is no duplicate of a settled message, or of one in the hands of the consumer.
        """
        takes_verdict = incoming.token is not None and not self._auto
        if incoming is not self._counted:
            deduplicator = self._deduplicator
            if deduplicator is not None and not deduplicator.begins(incoming, holds=takes_verdict):
                self._moved = None
                return False
            if takes_verdict:
                if self._credit.held is not None:
                    self._credit.held[id(incoming)] = incoming
                incoming.settler = self._settlement
                incoming.state = _RECEIVED
                self._counted, self._credit.handed_out = incoming, self._credit.handed_out + 1
        if not takes_verdict:
            incoming.settler = self._settlement
            incoming.state = _UNSUPPORTED if incoming.token is None else _ACKNOWLEDGED
        return True

    def _is_fetched_void(self) -> bool:
        """Drop the fetched message if its connection was lost meanwhile and the broker redelivers it."""
        if self.fetched is not None and self._buffer.is_void(self.fetched):
            self.fetched = None
            return True
        return False

    def _resume_reading(self) -> None:
        throttle = self._throttle
        with on_failure(setattr, throttle, "is_throttled", True):  # the next call resumes
            throttle.is_throttled = False
            self._owner.connection.engine.call(throttle.release)

    def _enters(self, message: Message, incoming: Incoming) -> bool:
        """Validate a message and acknowledge it directly; return whether it enters the stream."""
        try:
            if self._model is not None and not self._is_valid(message, incoming):
                self._moved = None
                return False
            # one that was settled already: the callbacks had it before an interrupt
            is_decided = incoming is self._counted and incoming.state is not _RECEIVED
            if self._direct is None or is_decided or self._direct.run(message, incoming):
                return True
            self._settlement.refuse_unsupported(incoming)
            self._moved = None
            return False
        except CodecError:
            self._moved = None
            raise

    def _is_valid(self, message: Message, incoming: Incoming) -> bool:
        try:
            message.value()
        except CodecError as error:
            if self._on_invalid == "raise":
                self._settlement.stop_accepting()
            else:
                logger.warning("message on %r is invalid: %s", incoming.channel, error)
            self._settlement.settle_invalid(incoming, self._on_invalid)
            if self._on_invalid == "raise":
                raise
            return False
        return True

    def reject_unfinished(self) -> None:
        """Reject the message in which :meth:`fetch` was interrupted: there will be no next call."""
        incoming = self._moved
        if incoming is not None:
            if not incoming.settle(False):
                self._settlement.refuse_unsupported(incoming)
            elif incoming is not self._counted:
                self._credit.handed_out += 1  # the verdict returns its credit
            self._moved = None

    def clear(self) -> list[Incoming]:
        """Withdraw the messages that were not handed out; return those without a verdict. On the loop.

        An interrupt of the consumer has kept them here, or the consumer was stopped while it took one.
        """
        unsettled: list[Incoming] = []
        # in one step: a stopped consumer may still be in fetch(), which moves the message from one to the other
        message, incoming, self.fetched, self._moved = self.fetched, self._moved, None, None
        if message is not None:
            fetched = context_of(message)
            if withdraw(fetched):
                unsettled.append(fetched)
            elif fetched.token is None or self._auto:
                self._counters.dropped += 1
        if incoming is None:
            return unsettled
        if incoming.token is None or self._auto:
            self._counters.dropped += 1
        elif incoming is not self._counted or withdraw(incoming):
            unsettled.append(incoming)
        return unsettled
