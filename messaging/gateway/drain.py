"""Drains and targets: publish the messages of buffers in order, and remove those that the target has taken.

Routes to the same target share its places in flight. Routes of higher priority publish first: a route of lower priority
gets no place while one of higher priority waits for a place.

At most ``in_flight`` messages are published whose confirmation is not recorded on the disk: after a crash that many may
arrive twice, with the same message ids.

**Failures.** A message whose outcome is unknown, or that the target refused for now, is published again, before the
messages behind it: publishing stops until those in flight are settled, then goes on with the first failed one. A
message that the target cannot carry, or has refused ``ATTEMPTS`` times, becomes a dead letter.

**Threads.** Everything runs on worker threads, one at a time for each drain. The outcome of a message is noted on the
engine's loop.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Self

from messaging import Messaging, Promise
from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    ClosedError,
    CodecError,
    MessagingError,
    PublishRefusedError,
    UnsupportedFeatureError,
)
from messaging.errors.text import SafeLog, counted
from messaging.execution import Backoff, Serial, clock, engine
from messaging.gateway.buffer import Buffer
from messaging.gateway.settings import RateSettings, RouteSettings
from messaging.gateway.stored import StoredMessage
from messaging.model import Features, Message
from messaging.services.reporting import Histogram

logger = SafeLog(__name__)

#: refusals of one message until it is a dead letter
ATTEMPTS: Final = 5
#: bounds of the pause after a failure, seconds
_SHORTEST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 30.0
#: longest pause after the broker has refused a message, seconds
_REFUSED_PAUSE: Final = 2.0
#: pause when the target's instance has no room, seconds
_NO_ROOM: Final = 0.05
#: upper bounds of the buckets of the latency, seconds
LATENCIES: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0, 3600.0, 86_400.0)
#: messages that are published before outcomes are looked at
_BURST: Final = 256
#: the protocol whose messages carry an id in an envelope
_ENVELOPED: Final = "mqtt3.1.1"
#: errors of a message that no repetition can mend
_PERMANENT: Final = (ArgumentError, UnsupportedFeatureError, CodecError)


#: part of a token that may be missing: a wait for less may be too short for the clock to move
_ROUNDING: Final = 0.001


class Target:
    """An instance that routes publish to. Thread safe.

    Args:
        messaging: the instance.
        places: messages in flight of all routes together.
    """

    def __init__(self, messaging: Messaging, places: int) -> None:
        self.messaging = messaging
        self._publisher = messaging.publisher
        self._carries_ids = Features.EXTENSION_MESSAGE_ID in messaging.features
        self._has_envelope = self._carries_ids and _ENVELOPED in messaging.runtime.get_runtime_dto().protocols
        self._lock = threading.Lock()  # guards the following three
        self._places = places
        self._free = places
        self._waiting: list[Drain] = []

    # --- places in flight

    def widen(self, places: int) -> None:
        """Have at least so many places: those of the route that has most."""
        with self._lock:
            if places > self._places:
                self._free += places - self._places
                self._places = places

    def take(self, drain: Drain, wanted: int) -> int:
        """Return how many messages a drain may publish now; if fewer than it wants, it is woken when there are more."""
        with self._lock:
            is_behind = any(each.priority > drain.priority for each in self._waiting)
            granted = 0 if is_behind else min(wanted, self._free)
            self._free -= granted
            if granted < wanted:
                if drain not in self._waiting:
                    self._wait(drain)
            elif drain in self._waiting:
                self._waiting.remove(drain)
        return granted

    def _wait(self, drain: Drain) -> None:
        self._waiting.append(drain)
        self._waiting.sort(key=lambda each: -each.priority)

    def give_back(self, drain: Drain, places: int, *, is_idle: bool) -> None:
        """Return places: messages are settled, or were not published.

        Args:
            drain: the drain that had them.
            places: their number.
            is_idle: whether the drain wants no more now.
        """
        with self._lock:
            self._free += places
            if is_idle:
                if drain in self._waiting:
                    self._waiting.remove(drain)
            elif drain not in self._waiting:  # routes of lower priority must not take what it is about to take again
                self._wait(drain)
            first = self._waiting[0] if self._waiting and self._free > 0 else None
        if first is not None and first is not drain:  # it is at work, and looks for itself
            first.wake()

    # --- publishing

    def publish(self, stored: StoredMessage) -> Promise[None]:
        """Publish a message; the promise resolves when the target has taken it.

        Raises:
            ArgumentError, UnsupportedFeatureError: the target cannot carry it.
            OutboxFullError: the instance has no room. ClosedError: it is closed.
        """
        context, publisher = stored.destination.publishing, self._publisher
        if self._has_envelope or publisher.chain is not None:
            if self._carries_ids:  # as a part of the context: it is in the envelope, and interceptors see it
                context = context.replace(
                    extensions={**context.extensions, Features.EXTENSION_MESSAGE_ID: stored.message_id}
                )
            return publisher.publish(Message(stored.payload, context))
        plan = publisher.compile(context)
        message_id = stored.message_id if self._carries_ids else None
        return publisher.publish_checked(stored.payload, plan, plan.correlation_id, message_id=message_id)


class TokenBucket:
    """Limits a rate. For one thread.

    Args:
        rate: tokens per second.
        burst: tokens at once, at most.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = clock.monotonic()

    @classmethod
    def of(cls, rate: RateSettings | None) -> Self | None:
        """Return the bucket of settings, if there are any."""
        return None if rate is None else cls(rate.messages, rate.burst or max(1.0, rate.messages))

    def available(self) -> int:
        """Return the whole tokens that are there."""
        now = clock.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        return int(self._tokens + _ROUNDING)

    def take(self, count: int) -> None:
        """Remove tokens."""
        self._tokens -= count

    def wait(self) -> float:
        """Return the seconds until there is a token."""
        return max(0.0, (1 - self._tokens) / self._rate)


class Drain:
    """Publishes the messages of one buffer. Thread safe.

    Args:
        name: of the route, for the log.
        buffer: the messages.
        target: where they are published.
        priority: of the route among those of the target.
        in_flight: bound of the messages that are published and not recorded as confirmed.
        rate: limits the rate; ``None``: unlimited.
        dead_letter: keeps a message that cannot be published, with the reason; returns whether it is kept.

    Attributes:
        published: messages that the target has taken, since the start.
        retried: publications that were repeated.
        in_flight: messages that are published and not settled.
        latency: seconds from the disk to the confirmation of the target, of one message of each burst.
    """

    def __init__(
        self,
        name: str,
        buffer: Buffer,
        target: Target,
        *,
        priority: int,
        in_flight: int,
        rate: RateSettings | None,
        dead_letter: Callable[[StoredMessage, MessagingError], bool],
    ) -> None:
        self.name = name
        self.priority = priority
        self._buffer = buffer
        self._queue = buffer.queue
        self._target = target
        self._window = in_flight
        self._dead_letter = dead_letter
        self._bucket = TokenBucket.of(rate)
        #: targets and settings that are to be used when nothing is in flight
        self._changes: deque[tuple[Target, RouteSettings]] = deque()
        self.published = self.retried = self.in_flight = 0
        self.latency = Histogram(LATENCIES)
        #: outcomes that the loop has noted
        self._outcomes: deque[tuple[StoredMessage, Promise[None]]] = deque()
        self._failed: list[tuple[StoredMessage, MessagingError]] = []
        self._delays: Iterator[float] | None = None
        #: monotonic time of the next timer
        self._timer_due = math.inf
        #: monotonic time before which nothing is published
        self._not_before = 0.0
        #: whether something may have changed that the worker has not seen
        self._is_pending = False
        #: whether the target can be reached again
        self._is_target_back = False
        self._is_stopped = False
        #: whether the target's instance is closed, and publishing waits for another target
        self._is_held = False
        self._serial = Serial(self._work, self._has_work)

    # --- any thread

    def wake(self) -> None:
        """Look for messages, outcomes and room. From any thread."""
        if not self._is_pending:
            self._is_pending = True
            self._serial.wake()

    def note_target_back(self) -> None:
        """Publish: the target is connected. Messages that are stored from now on may overtake those that wait."""
        self._is_target_back = True
        self.wake()

    def stop(self) -> None:
        """Publish nothing more. Messages in flight are settled as their outcomes arrive."""
        self._is_stopped = True
        self.wake()  # it must not wait for places any more: routes of lower priority would wait for it

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is in flight and nothing waits to be published."""
        return not self.in_flight and not self._failed and not self._queue.has_next

    def change(self, target: Target, settings: RouteSettings) -> None:
        """Publish to a target, and by bounds, that may be other ones than before."""
        target.widen(settings.buffer.in_flight)
        self._changes.append((target, settings))
        self.wake()

    # --- the engine's loop

    def _note(self, stored: StoredMessage, promise: Promise[None]) -> None:
        self._outcomes.append((stored, promise))
        self.wake()

    def _wake_in(self, seconds: float) -> None:
        """Look again after a time, unless a timer does so earlier. On the worker."""
        due = clock.monotonic() + seconds
        if due < self._timer_due:
            self._timer_due = due
            running = engine()
            running.call(clock.call_later, running.loop, seconds, self._note_time, due)

    def _note_time(self, due: float) -> None:
        if due == self._timer_due:  # else an earlier timer has taken its place
            self._timer_due = math.inf
        self.wake()

    # --- the worker

    def _has_work(self) -> bool:
        return self._is_pending

    def _work(self) -> None:
        try:
            while True:
                # cleared first: what changes from here on is looked at again
                self._is_pending = False
                if self._is_target_back:
                    self._is_target_back = False
                    self._queue.begin_range()
                self._settle()
                if self._failed and not self.in_flight:
                    self._retry()
                if self._changes and not self.in_flight:
                    self._adopt()
                if not self._publish():
                    return
        except MessagingError as error:  # the disk cannot be read
            if not isinstance(error, ClosedError):
                logger.error("route '%s': %s; trying again in %g s", self.name, error, _LONGEST_PAUSE / 30)
                self._wake_in(_LONGEST_PAUSE / 30)
        except Exception:  # a defect: it must not end the route
            logger.exception("route '%s': publishing failed; going on in %g s", self.name, _LONGEST_PAUSE / 30)
            self._wake_in(_LONGEST_PAUSE / 30)

    def _adopt(self) -> None:
        """Use the newest target and settings."""
        target, settings = self._changes.pop()
        self._changes.clear()
        self._target.give_back(self, 0, is_idle=True)
        self._target, self.priority = target, settings.priority
        self._window = settings.buffer.in_flight
        self._bucket = TokenBucket.of(settings.rate)
        self._is_held = False

    def _settle(self) -> None:
        """Remove the messages that the target has confirmed from the buffer, and collect the failed ones."""
        outcomes, count = self._outcomes, 0
        while outcomes:
            stored, promise = outcomes.popleft()
            count += 1
            error = promise.exception(0)
            if error is None:
                if count == 1:  # one of each burst is measured
                    self.latency.record(max(0.0, clock.wall() - stored.timestamp))
                self.published += 1
                self._delays = None
                self._queue.settle(stored.offset, len(stored.payload))
            else:
                self._failed.append((stored, error))
        if count:
            self.in_flight -= count
            self._target.give_back(self, count, is_idle=not self._queue.has_next)

    def _retry(self) -> None:
        """Return the failed messages to the buffer, in order, but for those that cannot be published."""
        failed, self._failed = sorted(self._failed, key=lambda each: each[0].offset), []
        again: list[StoredMessage] = []
        reason: MessagingError | None = None
        for stored, error in failed:
            if isinstance(error, PublishRefusedError):
                stored.attempts += 1
            is_dead = isinstance(error, _PERMANENT) or stored.attempts >= ATTEMPTS
            if is_dead and self._dead_letter(stored, error):
                self._queue.settle(stored.offset, len(stored.payload))
                continue
            again.append(stored)
            reason = reason or error
        if reason is None:
            return
        self.retried += len(again)
        self._queue.put_back(again)
        self._is_held = isinstance(reason, ClosedError)
        if self._is_stopped or self._is_held:
            return
        if self._delays is None:
            self._delays = Backoff(_SHORTEST_PAUSE, _LONGEST_PAUSE)
        pause = next(self._delays)
        if isinstance(reason, PublishRefusedError):  # the broker works, and the messages behind this one wait
            pause = min(pause, _REFUSED_PAUSE)
        logger.warning(
            "route '%s': %s not taken: %s; publishing again in %.3g s",
            self.name,
            counted(len(again), "message"),
            reason,
            pause,
        )
        self._not_before = clock.monotonic() + pause
        self._wake_in(pause)

    def _publish(self) -> bool:
        """Publish what there is room for; return whether to go on at once."""
        buffer, queue, target = self._buffer, self._queue, self._target
        wanted = self._wanted()
        if wanted <= 0:
            # with a full window it goes on soon, and routes of lower priority still wait for it
            target.give_back(self, 0, is_idle=wanted < 0)
            return False
        window = self._window
        granted = target.take(self, wanted)
        done, is_refused = 0, False
        try:
            while done < granted and queue.unrecorded < window:
                stored = buffer.take()
                if stored is None:
                    break
                try:
                    promise = target.publish(stored)
                except BoundReachedError:
                    is_refused = True
                    queue.put_back([stored])
                    self._wake_in(_NO_ROOM)
                    return False
                except MessagingError as error:
                    is_refused = True
                    self._failed.append((stored, error))
                    return True
                done += 1
                self.in_flight += 1
                promise.listen(partial(self._note, stored, promise))
        finally:
            if self._bucket is not None:
                self._bucket.take(done)
            if done < granted:
                target.give_back(self, granted - done, is_idle=is_refused or not queue.has_next)
        return done > 0

    def _wanted(self) -> int:
        """Return how many messages may be published now, as far as this route is concerned.

        0: its window is full; -1: it has nothing to publish, or must not.
        """
        if self._is_stopped or self._is_held or self._failed or self._changes or not self._queue.has_next:
            return -1
        if not self._target.messaging.connection_state.value.is_up:
            return -1
        left = self._not_before - clock.monotonic()
        if left > 0:
            self._wake_in(left)  # again: timers of some event loops fire a little early
            return -1
        # not more than it can publish: routes that take places and return them would wake each other for ever
        wanted = max(0, min(_BURST, self._window - max(self.in_flight, self._queue.unrecorded)))
        if self._bucket is None or not wanted:
            return wanted
        available = self._bucket.available()
        if available < 1:
            self._wake_in(self._bucket.wait())
            return -1
        return min(wanted, available)
