"""The intake of a route: applies the pipeline to messages of the source, and stores what comes out of it.

A message of the source is acknowledged when everything that was made of it is on the disk, when the pipeline has
filtered it out, or when it is a dead letter. Until then its broker has it, and delivers it again after a crash.

**Threads.** The messages of a route are handled one at a time, on worker threads: functions of a configuration run
there. Outcomes arrive on the thread of the journal. Timers run on the engine's loop and only wake a worker.

**Rings.** A gateway recognises a message that it has passed on by its name in a header. A broker without headers, MQTT
3.1.1 without the envelope, loses it: in a ring over such a broker a message goes round for ever. Nothing tells it from
equal messages of a device, which must not be dropped. A ring repeats it fast, though, and that is reported.

**Bounds.** The source sends ahead as many messages as ``prefetch`` says. Where it cannot be held back, at QoS 0, the
intake waits while ``_STORING`` messages wait for the disk, and the buffer of the stream overflows, as its policy says.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

from messaging import Messaging
from messaging.codecs.cache import BoundedCache
from messaging.errors import ClosedError, JournalError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Flag, Serial, clock, engine
from messaging.gateway.buffer import Buffer
from messaging.gateway.destinations import Destination, Destinations, MessageTraits, passed_gateways
from messaging.gateway.pipeline import Draft, Passed, Pipeline, is_redelivered
from messaging.gateway.settings import RouteSettings
from messaging.gateway.stored import Settleable, StoredMessage
from messaging.gateway.subscriptions import PACKET_ID, SourceSubscription
from messaging.journal import Record
from messaging.model import AcknowledgeMessageContext, Features, MessageContext, ReceivedMessage, stored_properties

logger = SafeLog(__name__)

#: messages that may wait for the disk where the source cannot be held back
_STORING: Final = 10_000
#: how long a source without acknowledgement is held up for the disk at a time, seconds
_HOLD: Final = 30.0
#: pause before a dead letter is written again after a failure, seconds
_RETRY: Final = 0.5
#: channels whose captures and target are kept
_CACHED: Final = 4096

#: equal messages of one channel, and the time in which they come, seconds
MANY: Final = 100
WITHIN: Final = 10.0
#: pause between two reports, seconds
_RING_SILENCE: Final = 600.0
#: different messages that are counted
_RING_KNOWN: Final = 10_000


class IntakeCounts:
    """Numbers of messages of the source since the start.

    Attributes:
        received: from the broker.
        filtered: acknowledged without being stored, because the pipeline let them out.
        looped: dropped, because they had passed this gateway before.
        repeated: acknowledged without being stored, because they were delivered again and are stored already.
        failed: dead letters, because the pipeline or the target cannot handle them.
    """

    __slots__ = ("failed", "filtered", "looped", "received", "repeated")

    def __init__(self) -> None:
        self.received = self.filtered = self.looped = self.repeated = self.failed = 0


class Rules:
    """How the messages of a route are handled: what a changed configuration replaces. For one thread at a time."""

    def __init__(self, name: str, settings: RouteSettings, pipeline: Pipeline, destinations: Destinations) -> None:
        self.name = name
        self.settings = settings
        self.pipeline = pipeline
        self.destinations = destinations
        #: whether messages are held for a time
        self.has_timers = settings.batch is not None or (settings.sample is not None and settings.sample.keep == "last")
        self._direct: BoundedCache[tuple[Any, ...], Destination] = BoundedCache(_CACHED)

    def direct(self, context: MessageContext, extensions: Mapping[str, Any]) -> Destination:
        """Return the destination of a message that the pipeline leaves as it is."""
        channel = context.channel
        assert channel is not None  # noqa: S101  # received messages have one
        user_headers = extensions.get(Features.EXTENSION_HEADERS)
        key = (
            channel,
            context.content_type,
            context.content_encoding,
            extensions.get("retain"),
            extensions.get("priority"),
        )
        is_plain = not user_headers and context.correlation_id is None
        found = self._direct.get(key) if is_plain else None
        if found is None:
            values = self.destinations.values(channel)
            found = self.destinations.find(self.destinations.template.render(values), MessageTraits.of(context), values)
            if is_plain:
                self._direct[key] = found
        return found

    def draft(self, payload: bytes, context: MessageContext, message_id: str | None, source: Any) -> Draft:
        """Return a received message for the pipeline."""
        channel = context.channel or ""
        extensions = context.extensions
        made = Draft(
            channel,
            payload,
            captures=self.destinations.values(channel),
            content_type=context.content_type,
            content_encoding=context.content_encoding,
            headers=dict(extensions.get(Features.EXTENSION_HEADERS) or {}),
            message_id=message_id,
        )
        made.timestamp = clock.wall()
        made.retain = bool(extensions.get(Features.EXTENSION_RETAIN))
        made.sources = (source,)
        return made

    def rerun(
        self, payload: bytes, context: MessageContext, message_id: str | None, source: Any
    ) -> list[StoredMessage]:
        """Return what comes out of a message that was received before, with the source as its only token.

        Raises:
            MessagingError: the message fails again.
        """
        passed = self.pipeline.process(self.draft(payload, context, message_id, source), clock.monotonic())
        for each in passed.released:
            each.context.settle(True)
        ready = [*passed.ready, *self.pipeline.due().ready]
        if not ready:  # filtered out by now
            source.settle(True)
        return [
            StoredMessage(each.payload, self.of_draft(each), each.message_id or message_id or "", each.contexts)
            for each in ready
        ]

    def of_draft(self, draft: Draft) -> Destination:
        """Return the destination of a message that has passed the pipeline."""
        values = {**self.destinations.values(draft.channel), **draft.captures}
        channel = draft.target or self.destinations.template.render(values)
        traits = MessageTraits(
            draft.content_type,
            draft.content_encoding,
            headers=draft.headers,
            passed=passed_gateways({Features.EXTENSION_HEADERS: draft.headers}),
            retain=draft.retain,
        )
        return self.destinations.find(channel, traits, values)


class RingWatch:
    """Counts equal messages of one source. For one thread at a time."""

    __slots__ = ("_counts", "_silent_until")

    def __init__(self) -> None:
        #: message -> how often it came, and since when
        self._counts: BoundedCache[int, tuple[int, float]] = BoundedCache(_RING_KNOWN)
        self._silent_until = 0.0

    def note(self, channel: str, payload: bytes, now: float) -> bool:
        """Count a message; return whether it is to be reported that equal ones come as fast as in a ring."""
        key = hash((channel, payload))
        count, since = self._counts.get(key) or (0, now)
        if now - since > WITHIN:
            count, since = 0, now
        self._counts[key] = (count + 1, since)
        if count + 1 < MANY or now < self._silent_until:
            return False
        self._silent_until = now + _RING_SILENCE
        return True


class RouteIntake:
    """Takes the messages of one route. Thread safe.

    Args:
        rules: how they are handled.
        source: the instance that they come from.
        buffer: where they are stored.
        counts: are kept over a change of the source.

    Attributes:
        subscription: at the source.
        rules: the present ones. Used by the worker of the intake only.
    """

    def __init__(self, rules: Rules, source: Messaging, buffer: Buffer, counts: IntakeCounts) -> None:
        self.counts = counts
        self.rules = rules
        #: the rules that take the place of the present ones with the next message
        self._replacement: Rules | None = None
        self._source = source
        self._buffer = buffer
        self._is_stopped = False
        self._recognition = buffer.recognition
        rules.pipeline.recognition = buffer.recognition
        self._ring = None if Features.EXTENSION_HEADERS in source.features else RingWatch()
        self._room = buffer.room
        # --- with batches or held samples, a worker of its own handles messages and timers
        self._inbox: deque[Any] = deque()
        self._is_pending = False
        self._timer: asyncio.TimerHandle | None = None
        self._serial = Serial(self._drain_inbox, lambda: self._is_pending)
        self.subscription = SourceSubscription(
            rules.name, rules.settings, source, self._enqueue if rules.has_timers else self._handle
        )

    def replace(self, rules: Rules) -> None:
        """Handle messages by other rules from the next one on. The source must be the same, and ``has_timers``."""
        rules.pipeline.recognition = self._recognition
        self._replacement = rules
        if rules.has_timers:
            self._wake()

    def _adopt(self) -> None:
        """Change to the new rules, after what the old ones hold is stored. On the worker."""
        rules, self._replacement = self._replacement, None
        if rules is not None:
            old, self.rules = self.rules, rules
            rules.pipeline.inherit(old.pipeline)
            self._finish(old, old.pipeline.due())

    def pause(self) -> None:
        """Take no more messages. Those that are not stored stay with their broker."""
        self._is_stopped = self.subscription.subscribing.is_stopped = True
        if self._timer is not None:
            engine().call(self._timer.cancel)
        self._room.wake()

    # --- messages

    def _handle(self, message: ReceivedMessage) -> None:
        """Handle a message. On a worker thread, one at a time."""
        if self._is_stopped:
            return
        if self._replacement is not None:
            self._adopt()
        context = message.context
        self.counts.received += 1
        rules = self.rules
        extensions = context.extensions
        try:
            passed = passed_gateways(extensions)
            if passed and rules.destinations.is_loop(passed):
                self._refuse_looped(context, passed)
                return
            if self._ring is not None and self._ring.note(context.channel, message.payload, clock.monotonic()):
                logger.warning(
                    "route '%s': %d equal messages of %r within %g s: if they come from a ring of gateways, they go "
                    "round for ever, because '%s' carries no headers; set version=5, or envelope=true on all sides",
                    rules.name, MANY, context.channel, WITHIN, self._source.name,
                )  # fmt: skip
            message_id = extensions.get(Features.EXTENSION_MESSAGE_ID) or self._identify(message, extensions)
            if rules.pipeline.is_plain:
                destination = rules.direct(context, extensions)
                key = self._recognition.key(message_id, destination.channel, message.payload)
                if key and is_redelivered(message) and self._is_repeated(key, (context,)):
                    return
                self._store(StoredMessage(message.payload, destination, message_id, (context,), key))
            else:
                draft = rules.draft(message.payload, context, message_id, message)
                self._finish(rules, rules.pipeline.process(draft, clock.monotonic()))
        except ClosedError:
            return
        except MessagingError as error:
            self._fail(message, error)
        except Exception as error:  # a defect: the message must not be lost, and the route must go on
            logger.exception("route '%s': a message of %r failed", rules.name, context.channel)
            self._fail(message, MessagingError(f"{type(error).__name__}: {error}"))

    def _finish(self, rules: Rules, passed: Passed) -> None:
        """Store what has passed the pipeline, and acknowledge what has not."""
        self.counts.repeated += passed.repeated
        self.counts.filtered += passed.filtered
        for message in passed.released:
            message.context.settle(True)
        for draft in passed.ready:
            try:
                destination = rules.of_draft(draft)
                payload, message_id = draft.payload, draft.message_id or self._recognition.new_id()
                # what a pipeline makes of a redelivered message is compared: each part of it is stored once
                key = self._recognition.key(message_id, destination.channel, payload)
                if key and draft.is_redelivered and self._is_repeated(key, draft.contexts):
                    continue
                stored = StoredMessage(payload, destination, message_id, draft.contexts, key, draft.members)
            except MessagingError as error:
                for message in draft.sources:
                    self._fail(message, error)
                continue
            self._store(stored)

    def _is_repeated(self, key: str, sources: Sequence[Settleable]) -> bool:
        """Return whether a redelivered message is stored already, or about to be; then acknowledge it with that one."""
        if not self._recognition.joins(key, sources):
            if not self._recognition.is_stored(key):
                return False
            for source in sources:
                source.settle(True)
        self.counts.repeated += 1
        return True

    def _store(self, stored: StoredMessage) -> None:
        buffer = self._buffer
        if buffer.storing >= _STORING:  # of a source that cannot be held back
            self._room.wait_for(lambda: buffer.storing < _STORING or self._is_stopped, _HOLD)
        with suppress(ClosedError):  # it stays with its broker
            buffer.store(stored, self._is_left)

    def _is_left(self) -> bool:
        return self._is_stopped

    def _identify(self, message: ReceivedMessage, extensions: Mapping[str, Any]) -> str:
        """Return an id for a message that has none: the same as before, if its source delivers it again."""
        packet = extensions.get(PACKET_ID)
        if packet is None:
            return self._recognition.new_id()
        return self._recognition.identify(
            packet, message.context.channel, message.payload, is_redelivered=is_redelivered(message),
            connection=self._source.connection_state.value,
        )  # fmt: skip

    def _refuse_looped(self, context: AcknowledgeMessageContext, passed: Sequence[str]) -> None:
        if not self.counts.looped:
            logger.warning(
                "route '%s': dropped a message of %r that has passed the gateways %s: there is a loop of routes",
                self.rules.name, context.channel, ", ".join(passed),
            )  # fmt: skip
        self.counts.looped += 1
        context.settle(True)

    def _fail(self, message: ReceivedMessage, error: MessagingError) -> None:
        """Make a message of the source a dead letter, and acknowledge it. Waits for the disk."""
        self.counts.failed += 1
        context = message.context
        if self.counts.failed == 1:
            logger.warning("route '%s': a message of %r is a dead letter: %s", self.rules.name, context.channel, error)
        record = source_record(message)
        is_reported = False
        while not self._is_stopped:
            try:
                self._buffer.add_dead_letter(record, error)
                context.settle(True)
                return
            except JournalError as failure:
                if not is_reported:
                    logger.error("route '%s': %s; trying again each %g s", self.rules.name, failure, _RETRY)
                is_reported = True
                Flag().wait(_RETRY)

    # --- batches and held samples

    def _enqueue(self, message: ReceivedMessage) -> None:
        self._inbox.append(message)
        if len(self._inbox) >= _STORING:
            self._room.wait_for(lambda: len(self._inbox) < _STORING or self._is_stopped, _HOLD)
        self._wake()

    def _wake(self) -> None:
        if not self._is_pending:
            self._is_pending = True
            self._serial.wake()

    def _drain_inbox(self) -> None:
        self._is_pending = False
        if self._replacement is not None:
            self._adopt()
        while self._inbox:
            self._handle(self._inbox.popleft())
            if self._room.flags:
                self._room.wake()
        self._pass_due(clock.monotonic())

    def _pass_due(self, now: float) -> None:
        pipeline = self.rules.pipeline
        due = pipeline.next_due
        if due is None or self._is_stopped:
            return
        if due <= now:
            self._finish(self.rules, pipeline.due(now))
            due = pipeline.next_due
        if due is not None:
            running = engine()
            running.call(self._arm, max(0.001, due - now))

    def _arm(self, pause: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_stopped:
            self._timer = clock.call_later(engine().loop, pause, self._wake)


def source_record(message: ReceivedMessage) -> Record:
    """Return a message of the source as the record of a dead letter: its offset is -1, it was not in the buffer."""
    context = message.context
    extensions = {key: value for key, value in context.extensions.items() if key != Features.EXTENSION_QOS}
    plain = MessageContext(
        context.channel, None, context.content_type, context.content_encoding, context.correlation_id,
        context.reply_to_channel, MappingProxyType(extensions),
    )  # fmt: skip
    message_id = context.extensions.get(Features.EXTENSION_MESSAGE_ID)
    return Record(-1, clock.wall(), context.channel, message.payload, stored_properties(plain), message_id)
