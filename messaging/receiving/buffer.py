"""What a subscription receives: its counters, its bounded buffer, and the suspension of reading while it is full.

**Reading.** Two threads that both have work take the interpreter from each other all the time. So while the buffer of a
consumer is at least half full, nothing more is read from the broker, as long as the consumer takes messages at a good
rate. Without it a burst of QoS 0 messages is lost only because it comes faster than threads can switch: see
``test_a_burst_without_acknowledgement_loses_nothing_as_reading_waits`` in ``tests/receiving/test_batches.py``, which
fails without it. Of bursts of 20,000 messages from mosquitto to an observer, on two busy cores, 9 % were dropped
without it, 2 % with it.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from messaging.connection import Connection, Subscribed
from messaging.environment.signals import WakeUp
from messaging.errors import StreamOverflowError
from messaging.errors.text import SafeLog
from messaging.execution import clock
from messaging.model import Incoming, Message, SubscriptionSpec, context_of
from messaging.services.reporting import counter

logger = SafeLog(__name__)

#: how a message that does not fit the model of its stream is settled
OnInvalid = Literal["raise", "reject", "skip", "dead_letter"]


@dataclass(slots=True)
class StreamCounters:
    """Counts the messages of a subscription by their fate. Each counter is written by one thread at a time."""

    received: int = field(
        default=0, metadata=counter("messages that arrived from the broker, redeliveries included", "messages")
    )
    delivered: int = field(default=0, metadata=counter("messages that were handed to the consumer", "messages"))
    acknowledged: int = field(default=0, metadata=counter("messages that were acknowledged", "messages"))
    rejected: int = field(
        default=0,
        metadata=counter("messages rejected by a verdict, or by a filter where the protocol takes none", "messages"),
    )
    redelivered: int = field(
        default=0,
        metadata=counter("rejected messages redelivered by this process, because the protocol cannot", "messages"),
    )
    dead_lettered: int = field(default=0, metadata=counter("messages that went to the dead-letter channel", "messages"))
    unrouted: int = field(
        default=0,
        metadata=counter("dead letters that nothing received, so that their messages were kept", "messages"),
    )
    dropped: int = field(
        default=0,
        metadata=counter(
            "messages discarded by the overflow policy, or not handled when the stream ended and not delivered to "
            "another consumer",
            "messages",
        ),
    )
    invalid: int = field(
        default=0, metadata=counter("messages that did not fit the model, or could not be decoded", "messages")
    )
    duplicates: int = field(
        default=0,
        metadata=counter(
            "deliveries of messages that were settled before, see deduplicate", "messages", name="duplicate"
        ),
    )


class ReceivingSubscription(Subscribed):
    """A subscription as its parts know it."""

    def __init__(self, connection: Connection, spec: SubscriptionSpec) -> None:
        super().__init__(spec)
        self.connection = connection
        self.adapter = connection.adapter
        self.counters = StreamCounters()

    @abc.abstractmethod
    def proceed(self) -> None:
        """Wake the consumer if there are messages: it may have waited for a verdict. On the loop."""


#: a buffer with so many messages, or half full, suspends reading; a quarter of that resumes it
FULL: Final = 512
#: how long a consumer is given to catch up, seconds; again only if it takes ``FULL`` messages in that time
CATCH_UP_SECONDS: Final = 0.05


class ReadThrottle:
    """Suspends reading while one consumer is behind. On the engine's loop, unless an attribute says otherwise.

    Attributes:
        is_throttled: reading is suspended. Any thread may read it, and clear it when at most :attr:`low` messages are
            buffered.
        high: number of buffered messages from which on to call :meth:`suspend`.
        low: see ``is_throttled``.
        catches_up: the consumer caught up when it was last given time, or has emptied its buffer since.
    """

    def __init__(self, owner: ReceivingSubscription) -> None:
        self._owner = owner
        self._reading = owner.connection.reading
        self._timer: asyncio.TimerHandle | None = None
        self.high = min(max(1, owner.spec.options.buffer_size // 2), FULL)
        self.low = self.high // 4
        self.is_throttled = False
        self.catches_up = True

    def suspend(self) -> None:
        """Suspend reading if the consumer catches up."""
        if self.catches_up and not self.is_throttled:
            self._give_time()
            self.is_throttled = True
            self._reading.suspend(self._owner)

    def release(self) -> None:
        """Resume reading. Idempotent."""
        self.is_throttled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._reading.resume(self._owner)

    def _give_time(self) -> None:
        loop, delivered = self._owner.connection.engine.loop, self._owner.counters.delivered
        self._timer = clock.call_later(loop, CATCH_UP_SECONDS, self._check_progress, delivered)

    def _check_progress(self, delivered: int) -> None:
        """Give the consumer more time if it made progress; otherwise resume reading."""
        if self.is_throttled and self._owner.counters.delivered - delivered >= FULL:
            self._give_time()
            return
        self.catches_up = not self.is_throttled
        self.release()


class MessageBuffer:
    """Holds the messages that arrived and were not handed out. On the engine loop, unless a docstring says otherwise.

    The consumer takes from the left end of :attr:`messages` on its own thread; the ends of a deque need no lock.

    Attributes:
        messages: in the order in which they are handed out.
        withheld: with autoAcknowledge, messages that arrived while the buffer was full; they are acknowledged when
            they move up.
        expects_stale: a connection was lost: ``messages`` may have arrived on it.
        is_redelivered: the broker redelivers the unsettled messages of that connection, which may be lost before the
            loop knows.
        admitting: has withheld messages move up. By the consumer, when there is room.
    """

    def __init__(self, owner: ReceivingSubscription) -> None:
        self._owner = owner
        self._adapter = owner.adapter
        self._counters = owner.counters
        self._capacity = owner.spec.options.buffer_size
        self._auto = owner.spec.options.auto_acknowledge
        self.messages: deque[Incoming] = deque()
        self.withheld: deque[Incoming] = deque()
        self.expects_stale = False
        self.admitting = WakeUp(partial(owner.connection.engine.call, self._admit_withheld))
        self.is_redelivered = self._outlives_connection()

    def __len__(self) -> int:
        return len(self.messages) + len(self.withheld)

    # --- arrivals

    def add(self, batch: Sequence[Incoming]) -> None:
        """Add messages; apply the overflow policy to the ones that do not fit."""
        messages = self.messages
        if self._auto:
            self._admit(batch)
        elif len(messages) + len(batch) <= self._capacity:
            messages.extend(batch)
        else:
            dropped: list[Any] = []
            for position, incoming in enumerate(batch):
                if len(messages) >= self._capacity and self._owner.spec.options.overflow == "fail":
                    messages.extend(batch[position:])  # released with the others
                    self._fail()
                    break
                if len(messages) < self._capacity or self._makes_room(incoming, dropped):
                    messages.append(incoming)
            if dropped:
                self._adapter.acknowledge(dropped)

    def _admit(self, arrived: Sequence[Incoming]) -> None:
        """Acknowledge the messages that find room; withhold the others, which holds the broker back."""
        withheld, messages = self.withheld, self.messages
        withheld.extend(arrived)
        done: list[Any] = []
        while withheld:
            incoming = withheld[0]
            is_full = len(messages) >= self._capacity
            if is_full and incoming.token is not None and self._owner.spec.options.overflow == "block":
                break
            withheld.popleft()
            if incoming.token is not None:
                done.append(incoming.token)
            if is_full and self._owner.spec.options.overflow == "fail":
                self._counters.dropped += 1
                self._fail()
            elif not is_full or self._makes_room(incoming, []):
                messages.append(incoming)
        if any(incoming.token is None for incoming in withheld):
            # no broker holds those back: they must not pile up behind the others
            self.withheld = deque(incoming for incoming in withheld if incoming.token is not None)
            self._counters.dropped += len(withheld) - len(self.withheld)
        if done:
            self._counters.acknowledged += len(done)
            self._adapter.acknowledge(done)

    def _admit_withheld(self) -> None:
        self.admitting.is_pending = False
        if not self._owner.ended:
            self._admit(())
            self._owner.proceed()

    def _fail(self) -> None:
        """End the subscription: its buffer is full, and its overflow policy is ``fail``."""
        channel = self._owner.spec.channel
        self._owner.fail(
            StreamOverflowError(f"stream of {channel!r} overflowed: its buffer holds {self._capacity} messages")
        )

    def _makes_room(self, incoming: Incoming, dropped: list[Any]) -> bool:
        """Apply the overflow policy to a full buffer; return whether to append ``incoming``.

        Args:
            incoming: the message that arrived.
            dropped: gets the tokens of dropped messages, to be acknowledged.
        """
        policy = self._owner.spec.options.overflow
        channel = self._owner.spec.channel
        if policy == "block":
            if incoming.token is not None:
                return True  # bounded by the protocol's credit
            # unacknowledged deliveries cannot be held back: the newest counts most, but the order is kept
            policy = "drop_oldest" if self.messages and self._may_drop(self.messages[0]) else "drop_latest"
        victim = incoming
        if policy == "drop_oldest":
            try:
                victim = self.messages.popleft()
            except IndexError:  # the consumer was faster
                return True
        if self._counters.dropped == 0:
            logger.warning(
                "stream of %r on %s overflows: dropping messages (%s); raise bufferSize or consume faster",
                channel, self._adapter.name, policy,
            )  # fmt: skip
        self._counters.dropped += 1
        if victim.token is not None:
            dropped.append(victim.token)
        return victim is not incoming

    def _may_drop(self, incoming: Incoming) -> bool:
        """Return whether a buffered message has no acknowledgement, or lost it with its connection."""
        return incoming.token is None or (not self._auto and self.expects_stale and self.is_stale(incoming))

    def put_back(self, incoming: Incoming) -> None:
        """Deliver a rejected message again, next if the order is guaranteed."""
        if self._owner.spec.options.guaranteed_ordering:
            self.messages.appendleft(incoming)
        else:
            self.messages.append(incoming)

    def clear(self) -> list[Incoming]:
        """Empty the buffer; return the messages that are to be released, and count the others as dropped.

        The consumer may take meanwhile.
        """
        unsettled = []
        for queue, settles in ((self.messages, not self._auto), (self.withheld, True)):
            with contextlib.suppress(IndexError):
                while queue:
                    incoming = queue.popleft()
                    if settles and incoming.token is not None:
                        unsettled.append(incoming)
                    else:
                        self._counters.dropped += 1
        return unsettled

    # --- lost connections

    def on_connection_lost(self) -> None:
        """Note that the messages may be stale. :meth:`is_superseded` drops those that the broker will redeliver."""
        self._expect_stale(is_redelivered=self._outlives_connection())

    def reconnected(self, resumed: bool) -> None:
        """Bound the messages of the lost connection. :meth:`is_superseded` drops what the broker redelivers."""
        self._expect_stale(is_redelivered=resumed or self._outlives_connection())
        for queue in (self.messages, self.withheld):
            # the consumer takes from this end concurrently: keep the order
            with contextlib.suppress(IndexError):
                while len(queue) > self._capacity and self._may_drop(queue[0]):
                    gone = queue.popleft()
                    self._counters.dropped += gone.token is None or not self.is_redelivered

    def _expect_stale(self, *, is_redelivered: bool) -> None:
        self.is_redelivered = is_redelivered
        self.expects_stale = True
        if is_redelivered and self.withheld:
            self.withheld = deque(incoming for incoming in self.withheld if not self.is_stale(incoming))

    def _outlives_connection(self) -> bool:
        """Return whether the queue outlives its connection and redelivers unsettled messages."""
        return self._adapter.redelivers(self._owner.spec)

    def is_stale(self, incoming: Incoming) -> bool:
        """Return whether a message arrived on a lost connection. From any thread."""
        return incoming.token is not None and self._adapter.is_stale(incoming.token)

    def is_superseded(self, incoming: Incoming) -> bool:
        """Return whether to drop the next message: it arrived on a lost connection, and the broker redelivers it.

        A message of a lost connection loses its token: if it is handed out nevertheless, it takes no verdict. By the
        consumer.
        """
        if incoming.token is None or self._auto:  # acknowledged on arrival: there is no other copy
            return False
        if not self._adapter.is_stale(incoming.token):
            self.expects_stale = False  # all that follow are newer
            return False
        incoming.token = None
        return self.is_redelivered

    def is_void(self, message: Message) -> bool:
        """Return whether the broker redelivers a message that was handed out. From any thread."""
        token = context_of(message).token
        return token is not None and self.is_redelivered and not self._auto and self._adapter.is_stale(token)
