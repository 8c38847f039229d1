"""A route: intake, buffer and drain of the messages from one source to one target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from messaging import Messaging, Promise
from messaging.errors import ArgumentError, ConfigurationError, DeadlineError, JournalError, MessagingError
from messaging.errors.text import SafeLog, counted
from messaging.execution import Waiters, clock, seconds
from messaging.gateway.buffer import Buffer
from messaging.gateway.dead_letters import TARGET, Letter, ReplayResult, Selection, letters
from messaging.gateway.destinations import Destination, Destinations
from messaging.gateway.drain import Drain, Target
from messaging.gateway.intake import IntakeCounts, RouteIntake, Rules
from messaging.gateway.pipeline import Pipeline
from messaging.gateway.reports import BufferDTO, RouteDTO
from messaging.gateway.settings import RouteSettings
from messaging.gateway.stored import StoredMessage
from messaging.journal import Record
from messaging.model import Features, Message, MessageContext, restored_context

logger = SafeLog(__name__)

#: how long the end of a subscription waits for messages on their way to the disk, seconds
STORE_TIMEOUT: Final = 5.0
#: how long a replay waits until a message is on the disk, seconds
_REPLAY_TIMEOUT: Final = 30.0


class _ReplayToken:
    """The source of a message that is replayed: tells when it is on the disk."""

    __slots__ = ("context", "is_settled", "settled")

    def __init__(self, settled: Waiters) -> None:
        self.context = self
        self.is_settled = False
        self.settled = settled

    def settle(self, acknowledged: bool) -> None:  # noqa: ARG002  # the interface of received contexts
        """Note that the message is on the disk. On the thread of the journal."""
        self.is_settled = True
        self.settled.wake()


class Route:
    """One route of a running gateway. Its methods but :meth:`report` and :meth:`problems` are for one thread.

    Args:
        name: of the route.
        settings: of the route.
        gateway: name of the gateway.
        path: folder of its buffer.
        max_hops: see the settings of the gateway.

    Raises:
        JournalError: the folder cannot be used.
        ConfigurationError: a step of the pipeline cannot be made.

    Attributes:
        drain: publishes the stored messages.
        intake: takes the messages of the source.
    """

    def __init__(
        self, name: str, settings: RouteSettings, gateway: str, path: Path, max_hops: int,
        instances: Mapping[str, Messaging], targets: Mapping[str, Target],
    ) -> None:  # fmt: skip
        self.name = name
        self.settings = settings
        self._gateway = gateway
        self._max_hops = max_hops
        self._instances = instances
        self._targets = targets
        self._counts = IntakeCounts()
        rules = self._rules(settings)
        self.buffer = Buffer(name, path, settings.buffer, self._wake)
        self._target = targets[settings.target.instance]
        self._target.widen(settings.buffer.in_flight)
        self.drain = Drain(
            name, self.buffer, self._target, priority=settings.priority, in_flight=settings.buffer.in_flight,
            rate=settings.rate, dead_letter=self._keep_dead_letter,
        )  # fmt: skip
        self.intake = RouteIntake(rules, instances[settings.source.instance], self.buffer, self._counts)

    def _rules(self, settings: RouteSettings) -> Rules:
        target = self._instances[settings.target.instance]
        if settings.compress is not None and Features.MESSAGE_PROPERTIES not in target.features:
            raise ConfigurationError(
                f"routes.{self.name}.compress: the instance '{settings.target.instance}' cannot tell receivers of a "
                f"content encoding: it has no feature {Features.MESSAGE_PROPERTIES!r}"
            )
        return Rules(
            self.name,
            settings,
            Pipeline(settings, gateway=self._gateway, name=self.name, request_rebirth=self._rebirth_requests(settings)),
            Destinations(settings.source, settings.target, self._gateway, self._max_hops, target),
        )

    def _rebirth_requests(self, settings: RouteSettings) -> Callable[[str, bytes], None]:
        """Return what publishes commands to the source. For any thread; it does not wait."""
        source = self._instances[settings.source.instance]

        def publish(channel: str, payload: bytes) -> None:
            extensions = {Features.EXTENSION_QOS: 0} if Features.EXTENSION_QOS in source.features else {}
            try:
                source.publisher.publish(Message(payload, MessageContext(channel, extensions=extensions)))
            except MessagingError as error:
                logger.warning("route '%s': no rebirth is requested at %r: %s", self.name, channel, error)

        return publish

    def _wake(self) -> None:
        drain = getattr(self, "drain", None)  # the journal may tell of old records while this is being made
        if drain is not None:
            drain.wake()

    # --- running

    def start(self) -> None:
        """Publish what is stored, and subscribe to the source."""
        if not self.settings.enabled:
            return
        depth = self.buffer.queue.depth
        if depth:
            logger.info("route '%s': publishing %s", self.name, counted(depth, "stored message"))
        self.drain.note_target_back()
        self.intake.subscription.subscribing.start()

    @property
    def is_drained(self) -> bool:
        """Return whether nothing is stored that is not published, and nothing is in flight."""
        return not self.buffer.storing and self.drain.is_idle

    def close(self) -> None:
        """Close the buffer, which keeps its messages, after the intake was paused."""
        self.drain.stop()
        try:
            self.buffer.close()
        except JournalError as error:
            logger.error("route '%s': %s", self.name, error)

    # --- changing

    def change(self, settings: RouteSettings) -> None:
        """Run by other settings from now on; the buffer stays as it is.

        Raises:
            ConfigurationError: a step of the pipeline cannot be made. The old settings stay.
        """
        old, rules = self.settings, self._rules(settings)
        drain, target = self.drain, self._targets[settings.target.instance]
        if (target, settings.priority, settings.rate, settings.buffer.in_flight) != (
            self._target, old.priority, old.rate, old.buffer.in_flight,
        ):  # fmt: skip
            self._target = target
            drain.change(target, settings)
        if settings.enabled and not old.enabled:
            drain.note_target_back()  # as at the start: what is stored may wait, and no message comes that wakes it
        self.settings = settings
        same_source = settings.source == old.source and settings.enabled == old.enabled
        is_alike = rules.has_timers == self.intake.rules.has_timers and settings.target.retain == old.target.retain
        if same_source and is_alike:
            self.intake.replace(rules)
            return
        before, after = self.intake, RouteIntake(
            rules, self._instances[settings.source.instance], self.buffer, self._counts
        )  # fmt: skip
        self.intake = after
        waits = after.subscription.excludes(before.subscription)
        if settings.enabled and not waits:
            # the new subscription is made before the old one ends: a message may come twice, and none is missed
            after.subscription.subscribing.start()
        ended = self._end(before)
        if settings.enabled and waits:
            if ended is None:
                after.subscription.subscribing.start()
            else:
                ended.add_done_callback(lambda _: after.subscription.subscribing.start())

    def leave(self) -> None:
        """End the subscription, whose instance is closed next, until :meth:`change`. What is stored goes on."""
        self.settings = self.settings.model_copy(update={"enabled": False})
        self._end(self.intake)

    def _end(self, intake: RouteIntake) -> Promise[None] | None:
        intake.pause()
        # what is not acknowledged by then is given back, and would be stored twice
        self.buffer.wait_stored(STORE_TIMEOUT)
        return intake.subscription.end()

    def remove(self) -> None:
        """End the subscription of a route that is no longer configured; its buffer stays on the disk."""
        self.intake.pause()
        self.close()  # first: it stores, and acknowledges, what would be given back and stored twice
        self.intake.subscription.end()

    # --- dead letters

    def _keep_dead_letter(self, stored: StoredMessage, reason: MessagingError) -> bool:
        """Keep a message that cannot be published; return whether it is kept. On the worker of the drain."""
        destination = stored.destination
        record = Record(
            stored.offset, stored.timestamp or clock.wall(), destination.channel, stored.payload,
            destination.properties, stored.message_id,
        )  # fmt: skip
        try:
            self.buffer.add_dead_letter(record, reason)
        except MessagingError as error:
            logger.error("route '%s': a dead letter is not kept: %s; trying again", self.name, error)
            return False
        self._counts.failed += 1
        logger.error("route '%s': message %s to %r is a dead letter: %s: %s", self.name, stored.message_id,
                     destination.channel, type(reason).__name__, reason)  # fmt: skip
        return True

    def replay(self, selection: Selection, rate: float | None = None) -> ReplayResult:
        """Run the rest of the route again for dead letters, one after the other, by the present settings.

        From any thread; waits for the disk.

        Args:
            selection: which dead letters.
            rate: letters per second, at most; ``None``: unlimited.

        Raises:
            ArgumentError: the rate is not above 0.
            DeadlineError: a message is not on the disk in time. Its dead letter is kept.
            JournalError: a dead letter cannot be removed: it is kept, and its message is stored.
        """
        if rate is not None and not seconds(rate, "rate") > 0:
            raise ArgumentError(f"rate must be a number of messages per second above 0, not {rate!r:.40}")
        journal = self.buffer.journal
        # a pipeline of its own: that of the intake is used by its thread, and its deadbands are for new messages
        rules = self._rules(self.settings)
        rules.pipeline.reread(self.intake.rules.pipeline)
        done = failed = 0
        reason: str | None = None
        begin = clock.monotonic()
        waiters = Waiters()
        for letter in [*letters(journal, selection)]:
            if rate is not None:
                waiters.wait_for(lambda: False, begin + (done + failed) / rate - clock.monotonic())
            token = _ReplayToken(waiters)
            try:
                self._store_again(rules, letter, token)
            except MessagingError as error:
                failed += 1
                reason = f"{type(error).__name__}: {error}"
                continue
            if not waiters.wait_for(lambda token=token: token.is_settled, _REPLAY_TIMEOUT):  # type: ignore[misc]
                raise DeadlineError(
                    f"dead letter {letter.id}: not on the disk within {_REPLAY_TIMEOUT:g} s; it is kept"
                )
            journal.remove_dead_letters([letter.id])
            done += 1
        return ReplayResult(done, failed, reason)

    def _store_again(self, rules: Rules, letter: Letter, token: _ReplayToken) -> None:
        context = restored_context(letter.channel, letter.properties)
        if letter.stage == TARGET:
            destination = Destination(context, letter.properties)
            self.buffer.store(StoredMessage(letter.payload, destination, letter.message_id or "", [token]))
            return
        for stored in rules.rerun(letter.payload, context, letter.message_id, token):
            self.buffer.store(stored)

    def drop(self, selection: Selection) -> int:
        """Delete dead letters; return how many there were. From any thread. Raises ``JournalError``."""
        journal = self.buffer.journal
        return journal.remove_dead_letters([letter.id for letter in letters(journal, selection)])

    # --- state, from any thread

    def report(self) -> RouteDTO:
        """Return the state of the route."""
        buffer, counts, drain, settings = self.buffer, self._counts, self.drain, self.settings
        return RouteDTO(
            name=self.name,
            source=f"{settings.source.instance}:{settings.source.channel}",
            target=f"{settings.target.instance}:{settings.target.channel}",
            is_enabled=settings.enabled,
            is_source_up=self._is_up(settings.source.instance),
            is_subscribed=self.intake.subscription.is_confirmed,
            is_target_up=self._is_up(settings.target.instance),
            received=counts.received,
            filtered=counts.filtered,
            looped=counts.looped,
            repeated=counts.repeated,
            failed=counts.failed,
            published=drain.published,
            retried=drain.retried,
            in_flight=drain.in_flight,
            latency=drain.latency.get_dto(),
            buffer=BufferDTO(
                depth=buffer.queue.depth,
                bytes=buffer.journal.size,
                age=buffer.journal.ages.age_of(buffer.queue.first),
                storing=buffer.storing,
                accepted=buffer.accepted,
                dropped=buffer.dropped,
                dead_letters=buffer.journal.dead_letter_count,
                is_held_back=buffer.journal.is_blocked,
            ),
        )

    def _is_up(self, instance: str) -> bool:
        found = self._instances.get(instance)  # it may be about to be replaced
        return found is not None and found.connection_state.value.is_up

    def problems(self) -> list[str]:
        """Return what keeps the route from storing messages; a target that is away is no problem: messages wait."""
        if not self.settings.enabled:
            return []
        held = self.buffer.journal.disk.error
        found = [self.buffer.problem, self.intake.subscription.subscribing.problem]
        found += [] if held is None else [f"the source is held back: {held}"]
        return [f"route '{self.name}': {each}" for each in found if each is not None]
