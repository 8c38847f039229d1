"""The verdicts on the messages of a subscription: collected from any thread, passed on by the engine loop.

**Batches.** A consumer that is busy is not interrupted: verdicts are collected for a millisecond, or until the
consumer has no more messages to take, and are sent together.

**Direct acknowledgement** (RFC 5.8.1, 5.8.6, 5.8.7): filter and handler run in the consumer of the subscription, before
a message enters the stream. Post runs after them there, or on the thread that settles the message later.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from messaging.environment.signals import WakeUp, on_failure
from messaging.errors.checks import check_result
from messaging.errors.text import SafeLog
from messaging.execution import clock
from messaging.model import (
    AcknowledgeConsumer,
    AcknowledgeFilter,
    AcknowledgeHandler,
    AcknowledgeType,
    Message,
    context_of,
    state_lock,
)
from messaging.receiving.buffer import MessageBuffer, OnInvalid, ReceivingSubscription
from messaging.receiving.deduplication import Deduplicator
from messaging.receiving.redelivery import INVALID, REJECTED, Redelivery
from messaging.services import ServiceRegistry

if TYPE_CHECKING:
    from messaging.model import DirectAcknowledgement, Incoming

logger = SafeLog(__name__)

#: how long verdicts are collected before the loop looks for them by itself, seconds
_GATHER_SECONDS: Final = 0.001

#: values of ``on_invalid`` with which a message goes to the dead-letter channel, if there is one
_DEAD_LETTERED: Final = ("raise", "dead_letter")

_RECEIVED: Final = AcknowledgeType.RECEIVED
_ACKNOWLEDGED: Final = AcknowledgeType.ACKNOWLEDGED
_UNSUPPORTED: Final = AcknowledgeType.UNSUPPORTED


class DirectAcknowledger:
    """Runs the callbacks of one subscription; callbacks given by target are looked up for each message.

    Args:
        callbacks: filter, handler and post.
        services: the registry for their targets.
        channel: of the subscription, for the log.
        make: makes the message for post, of payload, context and ``model``.
    """

    def __init__(
        self,
        callbacks: DirectAcknowledgement,
        services: ServiceRegistry,
        channel: str,
        make: Callable[[bytes, Incoming, Any], Message],
        model: Any,
    ) -> None:
        self._callbacks = callbacks
        self._make = make
        self._model = model
        self._services = services
        self._channel = channel
        self._lock = threading.Lock()  # guards the two below: a verdict may come from any thread
        #: the message that the filter or the handler has now
        self._running: Incoming | None = None
        #: that message was settled meanwhile: post is called after the handler
        self._is_post_due = False

    def run(self, message: Message, incoming: Incoming) -> bool:
        """Call filter, handler and post, in this order (RFC 5.8.4). A callback that raises rejects the message.

        Returns:
            Whether the message enters the stream.
        """
        with self._lock:
            self._running, self._is_post_due = incoming, False
        try:
            enters = self._decide(message, incoming)
        finally:
            with self._lock:
                self._running, is_post_due = None, self._is_post_due
            if is_post_due:
                self._call_post(message)
        return enters and incoming.state is not AcknowledgeType.REJECTED

    def _decide(self, message: Message, incoming: Incoming) -> bool:
        """Call filter and handler; return whether the filter lets the message enter the stream."""
        callbacks = self._callbacks
        enters = True
        has_filter = callbacks.filter is not None
        if callbacks.filter is not None:
            try:
                accept = self._found(callbacks.filter, AcknowledgeFilter, "filter")
                has_filter = accept is not None
                if accept is not None:
                    enters = bool(check_result(accept(message), "an acknowledge filter"))
                    incoming.settle(enters)
            except Exception:
                logger.exception("acknowledge filter of %r raised; the message is rejected", incoming.channel)
                enters = False
                incoming.settle(False)
        # a callable handler yields to a filter, one given by target does not: RFC 5.8.4 says both
        if callbacks.handle is not None and (not has_filter or isinstance(callbacks.handle, str)):
            try:
                handle = self._found(callbacks.handle, AcknowledgeConsumer, "handler")
                if handle is not None:
                    arguments = (message, AcknowledgeHandler(incoming)) if _takes_two(handle) else (message,)
                    check_result(handle(*arguments), "an acknowledge handler")
            except Exception:
                logger.exception("acknowledge handler of %r raised; the message is rejected", incoming.channel)
                incoming.settle(False)
        return enters

    def settled(self, incoming: Incoming) -> None:
        """Call post for a message that was acknowledged or rejected; after its handler, if that is running."""
        if self._callbacks.post is None:
            return
        with self._lock:
            if incoming is self._running:
                self._is_post_due = True
                return
        self._call_post(self._make(incoming.payload, incoming, self._model))

    def _call_post(self, message: Message) -> None:
        """Call post, and log its exception."""
        post: Any = self._callbacks.post
        try:
            post = self._found(post, AcknowledgeConsumer, "post")
            if post is not None:
                check_result(post(message), "a post-acknowledge callback")
        except Exception:
            logger.exception("post-acknowledge callback of %r raised", self._channel)

    def _found(self, callback: str | Callable[..., Any], interface: type, what: str) -> Any:
        if not isinstance(callback, str):
            return callback
        service = self._services.service(interface, callback)
        if service is None:
            logger.warning("acknowledge %s %s of %r matches no service and is ignored", what, callback, self._channel)
        return service


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a handler takes the acknowledge handler beside the message (both forms: RFC 5.8.4 and 5.8.8)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len([p for p in positional if p.default is p.empty]) >= 2


class Credit:
    """Counts the unsettled messages in the hands of the consumer, which the prefetch bounds.

    Args:
        is_tracked: the consumer may hold messages for long, so that a lost connection has to return their credit.

    Attributes:
        handed_out: messages handed out so far; by the consumer.
        settled: verdicts that reached the loop.
        held: if tracked, the messages in the hands of the consumer, by identity; removed when they count as settled.
    """

    __slots__ = ("handed_out", "held", "settled")

    def __init__(self, *, is_tracked: bool) -> None:
        self.handed_out = self.settled = 0
        self.held: dict[int, Incoming] | None = {} if is_tracked else None

    @property
    def is_returned(self) -> bool:
        """Return whether every message that was handed out is settled."""
        return self.handed_out == self.settled

    def forget(self, incoming: Incoming) -> bool:
        """Forget a settled message; return ``False`` if its credit was returned when its connection was lost."""
        return self.held is None or self.held.pop(id(incoming), None) is not None

    def return_stale(self, is_stale: Callable[[Incoming], bool]) -> None:
        """Return the credit of the messages of a lost connection. The consumer goes on meanwhile."""
        if self.held is not None:
            for incoming in self.held.copy().values():
                if is_stale(incoming):
                    self.settled += self.forget(incoming)


def withdraw(incoming: Incoming) -> bool:
    """Return whether a message has no verdict; if so, it takes none from now on. From any thread."""
    with state_lock:
        if incoming.state is not _RECEIVED:
            return False
        incoming.state = AcknowledgeType.UNKNOWN
        incoming.settler = None
        return True


class Settlement:
    """Accepts the verdicts on the messages of one subscription, see ``acknowledge.Settler``.

    Args:
        owner, buffer, redelivery, credit: the subscription, and parts of it.
        direct: runs the post-acknowledge callback after a verdict, on its thread.
        deduplicator: recognises messages that were settled before, with ``deduplicate``.

    Attributes:
        flushing: has the loop call ``flush`` of the subscription.
        is_gathering: the loop looks for verdicts by itself: no flush needs to be requested.
        is_released: the unsettled messages were released: verdicts on them reach no broker.
        on_flushed: called after each flush, on the loop.
    """

    def __init__(
        self,
        owner: ReceivingSubscription,
        buffer: MessageBuffer,
        redelivery: Redelivery,
        credit: Credit,
        direct: DirectAcknowledger | None,
        deduplicator: Deduplicator | None,
    ) -> None:
        self._owner = owner
        #: is told every verdict, with ``deduplicate``
        self.deduplicator = deduplicator
        if deduplicator is not None:
            # not before: a consumer that dies may have handled ``prefetch`` messages whose ids are not stored
            deduplicator.on_stored = self._count_stored
        self._connection = owner.connection
        self._call_later = clock.timers_of(owner.connection.engine.loop)
        self._adapter = owner.adapter
        self._counters = owner.counters
        self._buffer = buffer
        self._redelivery = redelivery
        self.credit = credit
        self._direct = direct
        self._auto = owner.spec.options.auto_acknowledge
        #: messages with verdicts that are not flushed: acknowledged, rejected, and void (the broker redelivers them by
        #: itself). After an interrupt one may be there twice: see :meth:`_collect`.
        self._acknowledged: deque[Incoming] = deque()
        self._rejected: deque[Incoming] = deque()
        self._void: deque[Incoming] = deque()
        #: rejected after the subscription released them, or their connection was lost; no consumer will receive them
        self._rejected_late: deque[Incoming] = deque()
        self.flushing = WakeUp(partial(owner.connection.verdicts.request_flush, owner))
        self.is_gathering = False
        self._gather_timer: asyncio.TimerHandle | None = None
        self.is_released = False
        self.on_flushed: Callable[[], object] | None = None
        #: no other consumer receives the released messages
        self._is_lost = False

    # --- from any thread

    def settle(self, incoming: Incoming, acknowledged: bool) -> bool:
        """Settle a message, then run the post-acknowledge callback; see ``acknowledge.Settler``.

        A verdict on a message of a lost connection, or of a released subscription, does not reach the broker.
        """
        if self.is_released or self._adapter.is_stale(incoming.token):
            state = AcknowledgeType.UNKNOWN
            verdicts = self._rejected_late if not acknowledged and self._is_gone(incoming) else self._void
        elif acknowledged:
            verdicts, state = self._acknowledged, _ACKNOWLEDGED
        else:
            verdicts, state = self._rejected, AcknowledgeType.REJECTED
        try:
            with state_lock:
                if incoming.state is not _RECEIVED:
                    return False
                verdicts.append(incoming)  # first: an interrupt in between has it recorded twice, at worst
                incoming.state = state
            if not (self.flushing.is_pending or self.is_gathering):
                self.flushing.request()
        except BaseException:  # an interrupt: there need not be a further call
            self.flushing.request()
            raise
        if state is AcknowledgeType.UNKNOWN:
            if self.deduplicator is not None:  # the broker redelivers it, but its consumer is done with it
                self.deduplicator.finish(incoming, acknowledged=acknowledged)
            return False
        if self._direct is not None:
            self._direct.settled(incoming)
        return True

    def _is_gone(self, incoming: Incoming) -> bool:
        """Return whether no consumer will receive a message whose verdict cannot reach the broker."""
        if self.is_released:
            held = self.credit.held
            return self._is_lost and (held is None or id(incoming) in held)
        return not self._buffer.is_redelivered

    def accept(self, message: Message) -> None:
        """Acknowledge a message unless it is settled: the fast form of :meth:`settle`.

        Of a message of a lost connection the adapter drops the acknowledgement.
        """
        incoming: Incoming = context_of(message)
        with state_lock:
            if incoming.state is _RECEIVED:
                self._acknowledged.append(incoming)  # first, as in settle()
                incoming.state = _ACKNOWLEDGED
            elif not self._acknowledged:  # otherwise the consumer may repeat an interrupted call
                return
        if not (self.flushing.is_pending or self.is_gathering):
            self.flushing.request()

    def refuse(self, message: Message, *, is_invalid: bool = False) -> None:
        """Reject a message unless it is settled; with ``is_invalid``, as one whose content its consumer cannot read."""
        incoming: Incoming = context_of(message)
        if is_invalid:
            self.settle_invalid(incoming)
        elif not incoming.settle(False):
            self.refuse_unsupported(incoming)

    def settle_invalid(self, incoming: Incoming, on_invalid: OnInvalid = "dead_letter") -> bool:
        """Count and settle a message that does not fit, unless it is settled; see ``acknowledge.Settler``.

        Args:
            incoming: the message.
            on_invalid: ``skip`` acknowledges it, ``reject`` rejects it; the others dead-letter it if there is a
                channel, and reject it if there is none.
        """
        takes_verdict = not self._auto and incoming.state is not _UNSUPPORTED
        is_dead = on_invalid in _DEAD_LETTERED and self._owner.spec.options.dead_letter_channel is not None
        with state_lock:
            if incoming.settler is None or (takes_verdict and incoming.state is not _RECEIVED):
                return False
            self._counters.invalid += 1
            if not takes_verdict:
                incoming.settler = None
        if not takes_verdict:
            if is_dead:
                self._connection.engine.call(self._redelivery.dead_letter, incoming, INVALID)
            elif on_invalid != "skip":
                self._connection.engine.call(self._drop_rejected, incoming)
            return False
        if not is_dead or self.is_released or (self._adapter.is_stale(incoming.token) and not self._is_gone(incoming)):
            return self.settle(incoming, on_invalid == "skip")
        with state_lock:
            if incoming.state is not _RECEIVED:
                return False
            incoming.state = AcknowledgeType.REJECTED
        call = self._connection.engine.call
        with on_failure(call, self._dead_letter_invalid, incoming):  # called twice, it is dead-lettered once
            call(self._dead_letter_invalid, incoming)
        if self._direct is not None:
            self._direct.settled(incoming)
        return True

    def refuse_unsupported(self, incoming: Incoming) -> None:
        """Reject a message without acknowledgement, or acknowledged on arrival; others are left as they are."""
        if self._auto or incoming.state is _UNSUPPORTED:
            self._connection.engine.call(self._drop_rejected, incoming)

    def stop_accepting(self) -> None:
        """Stop accepting messages, so that a rejected message is not redelivered to a consumer that is about to end."""
        self._owner.leaving = True
        self._connection.engine.call(self._pause)

    def has_verdicts(self) -> bool:
        """Return whether verdicts wait to be flushed."""
        return bool(self._acknowledged or self._rejected or self._void or self._rejected_late)

    # --- on the loop

    def gather(self) -> None:
        """Look for verdicts soon, and again while there are any."""
        self.is_gathering = True
        self._gather_timer = self._call_later(_GATHER_SECONDS, self._flush_gathered)

    def _flush_gathered(self) -> None:
        if self._owner.ended or self._connection.states.is_closed:  # then the adapter is closed, too
            self.is_gathering = False
        elif self._acknowledged or self.has_verdicts():
            self.flush()
            self.gather()
        else:
            self.is_gathering = False
            if self.has_verdicts():  # settled between the two lines above, without a request
                self.flushing.request()

    def stop_gathering(self) -> None:
        """Look for no more verdicts: the subscription has ended."""
        if self._gather_timer is not None:
            self._gather_timer.cancel()
            self.is_gathering = False

    def flush(self) -> None:
        """Pass the verdicts collected so far to the adapter."""
        credit, redelivery = self.credit, self._redelivery
        # cleared before the queues are read: a thread that appends after this line requests again
        self.flushing.is_pending = False
        if self._acknowledged:
            accepted = self._collect(self._acknowledged)
            self._counters.acknowledged += len(accepted)
            if self.deduplicator is None:
                self._count_settled(accepted)
                self._adapter.acknowledge([incoming.token for incoming in accepted])
            else:
                self.deduplicator.acknowledge(accepted)
            if redelivery.rejections:
                for incoming in accepted:
                    redelivery.forget(incoming)
        if self._rejected:
            if self._owner.leaving:
                self._pause()  # this may be here before the call of stop_accepting()
            with state_lock:  # no verdict is being recorded: a message that is handed out again must not get it late
                rejected = self._collect(self._rejected)
            for incoming in rejected:
                requeued = self._return_credit if credit.forget(incoming) else self._owner.proceed
                is_dead = redelivery.reject(incoming, requeued, is_leaving=self._owner.leaving)
                if self.deduplicator is not None and not is_dead:  # a dead letter is settled when it is published
                    self.deduplicator.finish(incoming, acknowledged=False)
        if self._void:
            credit.settled += sum(map(credit.forget, self._collect(self._void)))
        if self._rejected_late:
            with state_lock:
                rejected = self._collect(self._rejected_late)
            for incoming in rejected:
                if self.is_released:
                    redelivery.reject(incoming, _nothing, is_leaving=True)
                else:
                    self._drop_rejected(incoming)
                credit.settled += credit.forget(incoming)
        if self._buffer.messages:
            self._owner.proceed()
        if self.on_flushed is not None:
            self.on_flushed()

    @staticmethod
    def _collect(verdicts: deque[Incoming]) -> list[Incoming]:
        """Take messages off a queue of verdicts: each once, however often it was recorded."""
        found = []
        for _ in range(len(verdicts)):
            incoming = verdicts.popleft()
            if incoming.settler is not None:
                incoming.settler = None
                found.append(incoming)
        return found

    def _count_settled(self, accepted: Sequence[Incoming]) -> None:
        credit = self.credit
        credit.settled += len(accepted) if credit.held is None else sum(map(credit.forget, accepted))

    def _count_stored(self, accepted: Sequence[Incoming]) -> None:
        self._count_settled(accepted)
        if self._buffer.messages:
            self._owner.proceed()

    def _return_credit(self) -> None:
        # only now may the next one be taken: the message that was put back goes first
        self.credit.settled += 1
        self._owner.proceed()

    def _pause(self) -> None:
        if self._owner.handle is not None:
            self._connection.reading.pause(self._owner.handle)

    def _drop_rejected(self, incoming: Incoming) -> None:
        """Count a rejection that the protocol cannot take; dead-letter the message if there is a channel for it."""
        self._counters.rejected += 1
        if self._owner.spec.options.dead_letter_channel is not None:
            self._redelivery.dead_letter(incoming, REJECTED, 1)

    def _dead_letter_invalid(self, incoming: Incoming) -> None:
        if incoming.settler is None:  # an interrupted call
            return
        incoming.settler = None
        self.credit.settled += self.credit.forget(incoming)
        self._redelivery.dead_letter(incoming, INVALID)
        self._owner.proceed()

    def close(self, *, is_lost: bool) -> list[Incoming]:
        """Withdraw the messages that the consumer holds, and return them: later verdicts do not reach the broker.

        Args:
            is_lost: no other consumer receives them.
        """
        self._is_lost = is_lost
        self.is_released = True
        held = self.credit.held
        if held is None:
            return []
        unsettled = [incoming for incoming in [*held.values()] if withdraw(incoming)]
        held.clear()
        return unsettled


def _nothing() -> None:
    """Do nothing: no buffer waits for the credit of this message."""
