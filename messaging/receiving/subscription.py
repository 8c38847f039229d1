"""One subscription at the broker, its bounded buffer, and its one consumer.

::

    adapter --deliver()--> buffer --take()--> consumer --settle()--> verdicts --flush()--> adapter
    (loop)                 (deque)            (worker, iterating     (deques)    (loop)
                                               thread or event loop)

**Threads.** ``deliver``, ``fail``, ``complete``, ``rejected``, ``proceed`` run on the engine's loop. The consumer
takes from the other end of the buffer on a thread of its own choosing; a deque's ends need no lock. ``settle`` may be
called from any thread. Everything a user wrote (direct acknowledgement callbacks, model validators) runs in the
consumer.

**Bounds.** What the protocol holds back until it is settled is bounded by its credit. Everything else is bounded by
``bufferSize`` and the overflow policy, and dropped messages are counted.

**Batches.** A consumer that is busy is left alone: verdicts are gathered for a millisecond, or until it has nothing
more to take; and while it has many messages to go nothing more is read from the broker, see
:mod:`messaging.receiving.throttle`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from messaging.connection import Subscribed
from messaging.errors import ClosedError, CodecError, MessagingError, StreamOverflowError
from messaging.model import AcknowledgeType, Message, ReceivedMessage, context_of, maker, state_lock
from messaging.receiving import redelivery
from messaging.receiving.counters import StreamCounters
from messaging.receiving.direct import DirectAcknowledger
from messaging.receiving.throttle import ReadThrottle
from messaging.text import SafeLog

if TYPE_CHECKING:
    import asyncio

    from messaging.connection import Connection
    from messaging.execution import Promise
    from messaging.model import DirectAcknowledgement, Incoming, SubscriptionSpec
    from messaging.receiving.redelivery import Publish
    from messaging.services import ServiceRegistry

logger = SafeLog(__name__)

OnInvalid = Literal["raise", "skip", "dead_letter"]

#: how long verdicts are gathered before the loop looks for them by itself, seconds
_GATHER_SECONDS: Final = 0.001

_RECEIVED: Final = AcknowledgeType.RECEIVED
_ACKNOWLEDGED: Final = AcknowledgeType.ACKNOWLEDGED
_UNSUPPORTED: Final = AcknowledgeType.UNSUPPORTED


@dataclass(frozen=True, slots=True)
class Consumption:
    """How the messages of a subscription are consumed."""

    model: Any = None
    on_invalid: OnInvalid = "raise"
    direct: DirectAcknowledgement | None = None
    is_kept: bool = False


class Consumer(Protocol):
    """Who takes messages from a subscription."""

    def wake(self) -> None:
        """There may be something to take, or the subscription has ended. On the loop; must not block."""
        ...

    def stop(self) -> Promise[None] | None:
        """Take no more; the promise resolves when the message in progress is done. From any thread."""
        ...


class _Nobody:
    """Stands for a consumer that has not come yet: the buffer fills, and the protocol's credit with it."""

    def wake(self) -> None:
        pass

    def stop(self) -> None:
        pass


_NOBODY: Final = _Nobody()


class Subscription(Subscribed):
    """A subscription and its buffer. One consumer at a time."""

    #: whether the runtime DTO shows subscriptions of this kind
    is_listed = True
    is_stream = True

    #: what each message needs: an object of more than 30 attributes keeps the others in a dict, which takes longer
    __slots__ = (
        "_acknowledged",
        "_auto",
        "_buffer",
        "_counted",
        "_direct",
        "_expect_stale",
        "_flush_requested",
        "_gathering",
        "_handed_out",
        "_held",
        "_is_checked",
        "_is_plain",
        "_make",
        "_model",
        "_moved",
        "_moving",
        "_prefetch",
        "_throttle",
        "_withheld",
        "counters",
        "fetched",
        "settled_count",
    )

    def __init__(
        self,
        connection: Connection,
        services: ServiceRegistry,
        publish: Publish,
        spec: SubscriptionSpec,
        consumption: Consumption,
    ) -> None:
        super().__init__(spec)
        self.is_kept = consumption.is_kept
        self.counters = StreamCounters()
        #: verdicts that reached the loop; ``counters.delivered`` minus this is what the consumer holds
        self.settled_count = 0
        #: its consumer wants no more of it: to others it is gone
        self.dismissed = False
        self.error: MessagingError | None = None
        self._connection = connection
        self._adapter = connection.adapter
        self._model = consumption.model
        self._make = maker(connection.adapter.settings.default_content_type)
        self._on_invalid = consumption.on_invalid
        direct = consumption.direct
        self._direct = DirectAcknowledger(direct, services, spec.channel) if direct is not None else None
        #: messages may be kept out of the stream
        self._is_checked = consumption.model is not None or direct is not None
        options = spec.options
        #: all enter it, and wait for the verdict of the consumer if they have a token
        self._is_plain = not (self._is_checked or options.auto_acknowledge)
        self._capacity = options.buffer_size
        self._prefetch = options.prefetch
        self._auto = options.auto_acknowledge
        self._ordered = options.guaranteed_ordering
        self._buffer: deque[Incoming] = deque()
        #: with autoAcknowledge, what arrived while the buffer was full: acknowledged once it moves up. Loop only.
        self._withheld: deque[Incoming] = deque()
        #: a connection was lost: buffered messages may have arrived on it, and may be redelivered
        self._expect_stale = self._delivers_again = False
        #: takes messages off the buffer: in one step with assigning them, so that no interrupt comes in between
        self._moving = map(deque.popleft, repeat(self._buffer))
        #: off the buffer, not a message yet; by the consumer
        self._moved: Incoming | None = None
        #: whose credit is counted in ``_handed_out`` before it has entered the stream
        self._counted: Incoming | None = None
        #: the message that :meth:`fetch` returned, until its consumer has confirmed that it has it; by the consumer
        self.fetched: ReceivedMessage | None = None
        self._handed_out = 0
        #: what the consumer holds, if it may hold it for long: by identity, popped when it is counted as settled
        self._held: dict[int, Incoming] | None = {} if self._direct is not None else None
        #: messages with verdicts that are not flushed: acknowledged, rejected, and void (the broker redelivers them by
        #: itself). An interrupt may record a message twice: see :meth:`_collect`.
        self._acknowledged: deque[Incoming] = deque()
        self._rejected: deque[Incoming] = deque()
        self._void: deque[Incoming] = deque()
        #: rejected after the subscription released them, or their connection was lost; no consumer will receive them
        self._rejected_late: deque[Incoming] = deque()
        self._flush_requested = False
        #: the loop looks for verdicts by itself: it need not be told
        self._gathering = False
        self._gather_timer: asyncio.TimerHandle | None = None
        self._throttle = ReadThrottle(
            connection.engine.loop,
            options.buffer_size,
            lambda: self.counters.delivered,
            lambda: connection.reading.suspend(self),
            lambda: connection.reading.resume(self),
        )
        self._admitting = False
        #: taken in advance, and not begun when the consumer stopped
        self._untaken: list[Incoming] = []
        #: its unsettled messages were released: verdicts on them reach nothing
        self._is_released = False
        #: and no other consumer receives them
        self._is_lost = False
        self._redelivery = redelivery.Redelivery(
            connection.engine,
            connection.adapter,
            publish,
            options,
            self.counters,
            self._put_back,
            self._has_ended,
            self._is_requeued,
            lambda counts: connection.subscriptions.hand_on(self, counts),
        )
        self.consumer: Consumer = _NOBODY
        #: no default acknowledgement: what the direct callbacks leave undecided is the consumer's to decide
        self.manual = self._direct is not None

    # --- from the adapter, on the loop

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Take messages in; see ``adapter.Sink``."""
        if self.ended or self.leaving:
            if not self._is_released:  # unsubscribing: to be released with those in the buffer
                self._untaken += [incoming for incoming in batch if incoming.token is not None]
            return
        self.counters.received += len(batch)
        buffer = self._buffer
        if not buffer:
            self._throttle.on_empty()
        if self._auto:
            self._admit(batch)
        elif len(buffer) + len(batch) <= self._capacity:
            buffer.extend(batch)
        else:
            dropped: list[Any] = []
            for incoming in batch:
                if len(buffer) < self._capacity or self._makes_room(incoming, dropped):
                    buffer.append(incoming)
                if self._has_ended():
                    return
            if dropped:
                self._adapter.acknowledge(dropped)
        if not self._gathering:
            self._gathering = True
            self._gather_soon()
        if self.consumer is not _NOBODY:
            self._throttle.on_buffered(len(buffer))
        self.consumer.wake()

    def _gather_soon(self) -> None:
        self._gather_timer = self._connection.engine.loop.call_later(_GATHER_SECONDS, self._gather)

    def _gather(self) -> None:
        if self.ended or self._connection.state == "closed":  # then the adapter is closed, too
            self._gathering = False
            return
        if self._has_verdicts():
            self.flush()
            self._gather_soon()
            return
        self._gathering = False
        # settled between the two lines above, without telling
        if self._has_verdicts():
            self._request_flush()

    def _admit(self, arrived: Sequence[Incoming]) -> None:
        """Acknowledge on arrival what finds room; what does not is held back, and holds the broker back."""
        withheld, buffer = self._withheld, self._buffer
        withheld.extend(arrived)
        done: list[Any] = []
        while withheld:
            incoming = withheld[0]
            if len(buffer) >= self._capacity and incoming.token is not None and self.spec.options.overflow == "block":
                break
            withheld.popleft()
            if incoming.token is not None:
                done.append(incoming.token)
            if len(buffer) < self._capacity or self._makes_room(incoming, []):
                buffer.append(incoming)
        if any(incoming.token is None for incoming in withheld):
            # no broker holds those back: they must not pile up behind the others
            self._withheld = deque(incoming for incoming in withheld if incoming.token is not None)
            self.counters.dropped += len(withheld) - len(self._withheld)
        if done:
            self.counters.acknowledged += len(done)
            self._adapter.acknowledge(done)

    def _has_ended(self) -> bool:
        return self.ended

    def _may_go(self, incoming: Incoming) -> bool:
        """Whether no broker waits for a verdict on a message in the buffer, nor had one."""
        return incoming.token is None or (not self._auto and self._expect_stale and self._is_stale(incoming))

    def _makes_room(self, incoming: Incoming, dropped: list[Any]) -> bool:
        """Apply the overflow policy to a full buffer.

        Args:
            incoming: what arrived.
            dropped: gets the tokens of dropped messages, to be acknowledged.

        Returns:
            Whether ``incoming`` is to be appended.
        """
        policy = self.spec.options.overflow
        if policy == "block":
            if incoming.token is not None:
                return True  # bounded by the protocol's credit
            # unacknowledged deliveries cannot be held back: the newest counts most, but the order is kept
            policy = "drop_oldest" if self._buffer and self._may_go(self._buffer[0]) else "drop_latest"
        if policy == "fail":
            self.fail(
                StreamOverflowError(
                    f"stream of {self.spec.channel!r} overflowed: its buffer holds {self._capacity} messages"
                )
            )
            return False
        victim = incoming
        if policy == "drop_oldest":
            try:
                victim = self._buffer.popleft()
            except IndexError:  # the consumer was faster
                return True
        if self.counters.dropped == 0:
            logger.warning(
                "stream of %r on %s overflows: dropping messages (%s); raise bufferSize or consume faster",
                self.spec.channel, self._adapter.name, policy,
            )  # fmt: skip
        self.counters.dropped += 1
        if victim.token is not None:
            dropped.append(victim.token)
        return victim is not incoming

    def fail(self, error: MessagingError) -> None:
        """End with ``error``; see ``adapter.Sink``."""
        if not self.ended and self._connection.state != "closed":
            self.flush()  # the verdicts gathered so far
        self._connection.subscriptions.discard(self)
        self.leaving = True
        self._end(error)
        if self.handle is not None:
            self._connection.endings.end(self)

    def stop(self) -> Promise[None] | None:
        """Have the consumer take no more; see ``Consumer.stop``. From any thread."""
        return self.consumer.stop()

    def complete(self) -> None:
        """End without error."""
        self._end(None)
        self._is_released = True

    def _end(self, error: MessagingError | None) -> None:
        if self.ended:
            return
        self.error = error
        self.ended = True
        self._throttle.release()
        if self._gather_timer is not None:
            self._gather_timer.cancel()
            self._gathering = False
        if self.handle is None:
            self._is_released = True
        self._stop_handing_out()
        self.ready.reject(
            error or ClosedError(f"the stream of {self.spec.channel!r} was closed, or forgotten, before it was ready")
        )
        self.ready.exception()  # the consumer of the stream is told; the promise need not be
        self.consumer.wake()

    def on_connection_lost(self) -> None:
        """The connection is gone: what a named queue will deliver again is not handed out any more. On the loop."""
        self._delivers_again = self._has_broker_redelivery()
        self._expect_stale = True
        self._forget_withheld()

    def _forget_withheld(self) -> None:
        """Drop withheld messages that the broker redelivers."""
        if self._delivers_again and self._withheld:
            self._withheld = deque(incoming for incoming in self._withheld if not self._is_stale(incoming))

    def reconnected(self, resumed: bool) -> None:
        """Prepare for a new connection: on the loop, before subscribing again.

        Of the deliveries of the lost one, :meth:`take` forgets what the broker delivers again, and keeps the others;
        here only their number is bounded. The credit of what the consumer holds is given back.
        """
        self._delivers_again = resumed or self._has_broker_redelivery()
        self._expect_stale = True
        self._forget_withheld()
        for queue in (self._buffer, self._withheld):
            # from the end where the consumer takes: their order must not change under its hands
            with contextlib.suppress(IndexError):
                while len(queue) > self._capacity and self._may_go(queue[0]):
                    gone = queue.popleft()
                    self.counters.dropped += gone.token is None or not self._delivers_again
        for key, incoming in (self._held or {}).copy().items():  # the consumer goes on meanwhile
            if self._is_stale(incoming) and self._held and self._held.pop(key, None) is not None:
                self.settled_count += 1
        self.proceed()

    def _has_broker_redelivery(self) -> bool:
        """Return whether the queue outlives its connection and redelivers unsettled messages."""
        return self._adapter.redelivers(self.spec)

    def _is_stale(self, incoming: Incoming) -> bool:
        return incoming.token is not None and self._adapter.is_stale(incoming.token)

    def _is_forgotten(self, incoming: Incoming) -> bool:
        """Whether a message was delivered by a lost connection, and will be again by this one."""
        if incoming.token is None or self._auto:  # acknowledged on arrival: there is no other copy
            return False
        if not self._adapter.is_stale(incoming.token):
            self._expect_stale = False  # all that follow are newer
            return False
        incoming.token = None
        return self._delivers_again

    # --- the consumer's side

    def take(self) -> ReceivedMessage | None:
        """:meth:`fetch` and confirm: for consumers on threads that no signal handler interrupts."""
        message = self.fetch()
        self.fetched = None
        return message

    def fetch(self) -> ReceivedMessage | None:
        """The next message that enters the stream, or ``None`` if there is none to be had now.

        It stays :attr:`fetched`, and is what the next call returns, until the consumer sets that to ``None``. So an
        interrupt on the consumer's thread, anywhere up to there, costs no message.

        The consumer is woken when there may be one. By one thread at a time.

        Raises:
            CodecError: a message does not fit the model and ``on_invalid`` is ``raise``. It was rejected.
        """
        if self.fetched is not None and not self._is_fetched_void():
            return None if self.paused else self.fetched
        throttle, moving = self._throttle, self._moving
        while True:
            if self._moved is None:
                if self.paused or self._handed_out - self.settled_count >= self._prefetch:
                    break
                try:
                    for self._moved in moving:
                        break
                except IndexError:
                    break
            incoming: Incoming = self._moved  # type: ignore[assignment]  # the loop above has set it
            if throttle.is_throttled and len(self._buffer) <= throttle.low:
                self._resume_reading()
            if self._withheld and not self._admitting:
                self._request_more()
            if self._expect_stale and self._is_forgotten(incoming):
                self._moved = None
                continue
            # each assignment is one step, as far as interrupts go: it does not look for signals
            if self._is_plain and incoming.token is not None:
                incoming.settler = self
                incoming.state = _RECEIVED
                message, counters = self._make(incoming.payload, incoming, None), self.counters
                self.fetched, self._moved, self._handed_out, counters.delivered = (
                    message, None, self._handed_out + 1, counters.delivered + 1
                )  # fmt: skip
                return message
            if incoming.token is None:
                incoming.state = _UNSUPPORTED
            elif self._auto:
                incoming.state = _ACKNOWLEDGED
            elif incoming is not self._counted:
                if self._held is not None:
                    self._held[id(incoming)] = incoming
                incoming.settler = self
                incoming.state = _RECEIVED
                self._counted, self._handed_out = incoming, self._handed_out + 1
            message, counters = self._make(incoming.payload, incoming, self._model), self.counters
            if not self._is_checked or self._enters(message, incoming):
                self.fetched, self._moved, self._counted, counters.delivered = (
                    message, None, None, counters.delivered + 1
                )  # fmt: skip
                return message
        if not self._flush_requested and self._has_verdicts():
            self._request_flush()
        return None

    def _is_fetched_void(self) -> bool:
        """Drop the fetched message if the broker delivers it again: its connection was lost meanwhile."""
        if self.fetched is not None and self.is_void(self.fetched):
            self.fetched = None
            return True
        return False

    def _resume_reading(self) -> None:
        throttle = self._throttle
        try:
            throttle.is_throttled = False
            self._connection.engine.call(throttle.release)
        except BaseException:  # an interrupt: the next call sees to it
            throttle.is_throttled = True
            raise

    def _request_more(self) -> None:
        try:
            self._admitting = True
            self._connection.engine.call(self._readmit)
        except BaseException:  # an interrupt: the next call requests again
            self._admitting = False
            raise

    def _has_verdicts(self) -> bool:
        return bool(self._acknowledged or self._rejected or self._void or self._rejected_late)

    @property
    def buffered(self) -> int:
        """Messages that arrived and were not taken yet."""
        held = (self._moved is not None) + (self.fetched is not None)  # by an interrupt of the consumer
        return len(self._buffer) + len(self._withheld) + held

    @property
    def has_next(self) -> bool:
        """Whether :meth:`take` would return something, or the stream has ended."""
        return self.ended or (
            bool(self._buffer) and not self.paused and self._handed_out - self.settled_count < self._prefetch
        )

    def _readmit(self) -> None:
        self._admitting = False
        if not self.ended:
            self._admit(())
            self.consumer.wake()

    def _enters(self, message: Message, incoming: Incoming) -> bool:
        """Validate, and acknowledge directly."""
        try:
            if self._model is not None and not self._valid(message, incoming):
                self._moved = None
                return False
            # one that was settled already: the callbacks had it before an interrupt
            if self._direct is None or self._is_decided(incoming) or self._direct.run(message, incoming):
                return True
            if self._auto or incoming.state is _UNSUPPORTED:
                self._connection.engine.call(self._kept_out, incoming)
            self._moved = None
            return False
        except CodecError:
            self._moved = None
            raise

    def reject_unfinished(self) -> None:
        """Reject the message in which :meth:`fetch` was interrupted, for there will be no next call."""
        incoming = self._moved
        if incoming is not None:
            if incoming.settle(False) and incoming is not self._counted:
                self._handed_out += 1  # the verdict returns its credit
            self._moved = None

    def _is_decided(self, incoming: Incoming) -> bool:
        return incoming is self._counted and incoming.state is not _RECEIVED

    def _kept_out(self, incoming: Incoming) -> None:
        """A message was refused that cannot be rejected: no longer, or not by its protocol. On the loop."""
        self.counters.rejected += 1
        if self.spec.options.dead_letter_channel is not None:
            self._redelivery.bury(incoming, redelivery.REJECTED)

    def _valid(self, message: Message, incoming: Incoming) -> bool:
        try:
            message.value()
        except CodecError as error:
            self.counters.invalid += 1
            if self._on_invalid == "raise":
                self.leave()
                incoming.settle(False)
                raise
            logger.warning("message on %r is invalid: %s", incoming.channel, error)
            if self._on_invalid == "skip":
                incoming.settle(True)
            else:
                self._connection.engine.call(self._bury_invalid, incoming)
            return False
        return True

    def settle(self, incoming: Incoming, acknowledged: bool) -> bool:
        """Decide, then run the post-acknowledge callback; see ``acknowledge.Settler``. From any thread."""
        if self._is_released or self._adapter.is_stale(incoming.token):
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
                incoming.state = state
                verdicts.append(incoming)
            if not (self._flush_requested or self._gathering):
                self._request_flush()
        except BaseException:  # an interrupt: the verdict is recorded, twice at worst
            if incoming.state is state:
                verdicts.append(incoming)
            self._request_flush()
            raise
        if state is AcknowledgeType.UNKNOWN:
            return False
        if self._direct is not None:
            self._direct.settled(self._make(incoming.payload, incoming, self._model))
        return True

    def _is_gone(self, incoming: Incoming) -> bool:
        """Whether no consumer will receive a message for which a verdict cannot reach the broker."""
        if self._is_released:
            return self._is_lost and (self._held is None or id(incoming) in self._held)
        return not (self._delivers_again or self._has_broker_redelivery())

    def is_void(self, message: Message) -> bool:
        """Whether a message that was taken came by a lost connection, and will come again by this one."""
        token = context_of(message).token
        return token is not None and self._delivers_again and not self._auto and self._adapter.is_stale(token)

    def accept(self, message: Message) -> None:
        """Acknowledge a message its consumer is done with, unless it was settled: the short way of ``settle``."""
        incoming: Incoming = context_of(message)
        try:
            with state_lock:
                if incoming.state is not _RECEIVED:
                    return
                incoming.state = _ACKNOWLEDGED
                self._acknowledged.append(incoming)
            if not (self._flush_requested or self._gathering):
                self._request_flush()
        except BaseException:  # an interrupt, as in settle()
            if incoming.state is _ACKNOWLEDGED and not self._auto:
                self._acknowledged.append(incoming)
            self._request_flush()
            raise

    def refuse(self, message: Message) -> None:
        """Reject a message its consumer failed on, unless it was settled."""
        incoming: Incoming = context_of(message)
        if not incoming.settle(False) and (self._auto or incoming.state is _UNSUPPORTED):
            self._connection.engine.call(self._kept_out, incoming)

    def untake(self, message: Message) -> None:
        """Give back a message that was taken, and not begun when its consumer stopped. From any thread."""
        incoming: Incoming = context_of(message)
        if self._is_unsettled(incoming):
            self._untaken.append(incoming)

    @staticmethod
    def _is_unsettled(incoming: Incoming) -> bool:
        """Whether a message has no verdict; if so it takes none from now on."""
        with state_lock:
            if incoming.state is not _RECEIVED:
                return False
            incoming.state = AcknowledgeType.UNKNOWN
            incoming.settler = None
            return True

    def _untake_interrupted(self) -> None:
        """Give back the message that an interrupt kept from being handed out."""
        message, self.fetched = self.fetched, None
        if message is not None:
            self.untake(message)
        incoming, self._moved = self._moved, None
        if incoming is None or incoming.token is None or self._auto:
            return
        if incoming is not self._counted or self._is_unsettled(incoming):
            self._untaken.append(incoming)

    def leave(self) -> None:
        """Take in nothing more: the consumer is about to go, and a rejected message must not come back to it."""
        self.leaving = True
        self._connection.engine.call(self._hold_back)

    def _hold_back(self) -> None:
        if self.handle is not None:
            self._connection.reading.pause(self.handle)

    def _request_flush(self) -> None:
        try:
            self._flush_requested = True
            self._connection.verdicts.request_flush(self)
        except BaseException:
            # an interrupt, and whether it was requested is not known: it is, at the latest with the next verdict
            self._flush_requested = False
            self._connection.verdicts.request_flush(self)
            raise

    # --- verdicts, on the loop

    def flush(self) -> None:
        """Pass the verdicts gathered so far to the adapter."""
        # cleared before the queues are read: a thread that appends after this line requests again
        self._flush_requested = False
        if self._acknowledged:
            accepted = self._collect(self._acknowledged)
            self.settled_count += len(accepted) if self._held is None else sum(map(self._returns_credit, accepted))
            self.counters.acknowledged += len(accepted)
            tokens = [incoming.token for incoming in accepted]
            self._adapter.acknowledge(tokens)
            if self._redelivery.rejections:
                for incoming in accepted:
                    self._redelivery.forget(incoming)
        if self._rejected:
            if self.leaving:
                self._hold_back()  # this may be here before what leave() asked for
            for incoming in self._collect(self._rejected):
                given_back = self._given_back if self._returns_credit(incoming) else self.proceed
                self._redelivery.reject(incoming, given_back, is_leaving=self.leaving)
        if self._void:
            self.settled_count += sum(map(self._returns_credit, self._collect(self._void)))
        if self._rejected_late:  # no consumer will receive them
            for incoming in self._collect(self._rejected_late):
                if self._is_released:
                    self._redelivery.reject(incoming, _nothing, is_leaving=True)
                else:
                    self._kept_out(incoming)
                self.settled_count += self._returns_credit(incoming)
        self.proceed()

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

    def _returns_credit(self, incoming: Incoming) -> bool:
        """Whether a settled message has its credit yet: a new connection gives back that of the lost one."""
        return self._held is None or self._held.pop(id(incoming), None) is not None

    async def release(self, timeout: float) -> None:
        """Release the unsettled messages of a consumer that has stopped. On the loop; see ``Subscribed.release``."""
        self._stop_handing_out()
        self._untake_interrupted()
        self._redelivery.hand_on(self._untaken)
        requeued = self._is_requeued()
        self._is_lost = not requeued
        self._is_released = True
        unsettled = self._untaken
        self._untaken = []
        if self._held is not None:
            for incoming in [*self._held.values()]:
                if self._is_unsettled(incoming):
                    unsettled.append(incoming)
            self._held.clear()
        if not self.is_lasting:  # replies: no other consumer wants them
            self._adapter.acknowledge([each.token for each in unsettled])
            return
        lost = [each for each in unsettled if not self._comes_again(each, requeued)]
        left = await self._redelivery.abandon(lost, timeout)
        if left:
            self.counters.dropped += left
            logger.info(
                "%s: %d unsettled messages of %r are lost with their stream; set deadLetterChannel to keep them",
                self._adapter.name, left, self.spec.channel,
            )  # fmt: skip
        await self._redelivery.finish(timeout)

    def _stop_handing_out(self) -> None:
        """Empty the buffers: their unsettled messages are to be released."""
        for queue, settles in ((self._buffer, not self._auto), (self._withheld, True)):
            with contextlib.suppress(IndexError):  # the consumer may take meanwhile
                while queue:
                    incoming = queue.popleft()
                    if settles and incoming.token is not None:
                        self._untaken.append(incoming)

    def _is_requeued(self) -> bool:
        """Whether messages unsettled when this subscription ends are delivered to another one. On the loop."""
        if self.handle is None:
            return False
        heir = self.heir
        if heir is not None and heir.handle is not None and not self._adapter.capabilities.can_reject:
            return True
        return self._adapter.redelivers(self.spec, self.handle)

    def _comes_again(self, incoming: Incoming, requeued: bool) -> bool:
        return self._delivers_again if self._adapter.is_stale(incoming.token) else requeued

    def take_over(self, counts: Mapping[object, int]) -> None:
        """Go on counting the deliveries of messages that another consumer rejected. On the loop."""
        self._redelivery.rejections.update(counts)

    def _given_back(self) -> None:
        # only now may the next one be taken: the message that was put back goes first
        self.settled_count += 1
        self.proceed()

    def proceed(self) -> None:
        """A verdict arrived: the consumer may have waited for it."""
        if self._buffer:
            self.consumer.wake()

    def _put_back(self, incoming: Incoming) -> None:
        if self._ordered:
            self._buffer.appendleft(incoming)
        else:
            self._buffer.append(incoming)

    def drop_invalid(self, message: Message, dead_letter: bool) -> None:
        """Dead-letter or skip a message that its consumer found invalid. On the loop."""
        self.counters.invalid += 1
        if dead_letter:
            self._bury_invalid(context_of(message))
        else:
            self.accept(message)

    def _bury_invalid(self, incoming: Incoming) -> None:
        """Bury a message that was handed out and not settled yet."""
        with state_lock:
            if incoming.state is _RECEIVED:
                incoming.state = _ACKNOWLEDGED
                incoming.settler = None
                # unless its connection was lost, and its credit given back
                if self._held is None or self._held.pop(id(incoming), None) is not None:
                    self.settled_count += 1
        self._redelivery.bury(incoming, redelivery.INVALID)
        self.proceed()


def _nothing() -> None:
    """Do nothing: there is no buffer that waits for this message."""
