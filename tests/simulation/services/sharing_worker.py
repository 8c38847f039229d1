"""Members of a group that shares a queue: they take messages in several ways, hold them, and settle them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import StringConstraints

from messaging import Message, MessagingError
from messaging.errors import DecodeError
from messaging.execution import clock
from tests.simulation.services.messages import SLACK
from tests.simulation.services.sharing_ledger import CHANNEL, DEAD, Delivery
from tests.simulation.simulation import Role
from tests.simulation.world.world import PlannedError

if TYPE_CHECKING:
    from messaging import Promise
    from tests.simulation.services.sharing import Sharing

#: a text in JSON: unlike ``str``, a model of which no payload is plain text
MODEL: Final[Any] = Annotated[str, StringConstraints(min_length=1)]


class Client(Role):
    """A program with a subscription, which it makes again when it has ended with an error."""

    simulation: Sharing
    m: Any = None
    #: number of the subscription in the life of the program
    subscriptions = 0

    def open(self) -> None:
        """Connect and subscribe."""
        self.has_lost = False
        self.subscriptions = 0
        self.stream: Any = None
        self.simulation.ledger.closing.pop(self.name, None)  # of the last life
        self.connect()

    def connect(self) -> None:
        """Open an instance, and subscribe."""
        self.m = self.simulation.connect(self, retry_connect=True, **self.simulation.settings_of(self))
        self.subscribe()

    def subscribe(self) -> None:
        """Subscribe, as often as it takes: the broker may refuse it, and the connection be lost."""
        while True:
            self.has_lost = False
            self.subscriptions += 1
            moments = self.simulation.ledger.closed.setdefault(self.name, [])
            moments.append(self.world.scheduler.now)
            try:
                self.begin()
            except MessagingError as error:
                self.note(f"cannot subscribe: {type(error).__name__}: {error}")
                clock.pause(0.5)
            else:
                moments.append(self.world.scheduler.now)
                self.simulation.ledger.away.pop(self.name, None)
                return

    def begin(self) -> None:
        """Subscribe once."""
        raise NotImplementedError

    def ended(self, stream: Any, error: BaseException | None) -> None:
        """Note the end of a stream."""
        if error is not None and stream is self.stream:
            self.note(f"the stream has ended: {type(error).__name__}: {error}")
            self.has_lost = True
            if isinstance(error, DecodeError):
                self.simulation.broken(f"a malformed message has ended the stream of {self.name}: {error}")

    def watch(self) -> None:
        """Be told when the stream, that of a handler, ends."""
        stream = self.stream
        stream.closed.add_done_callback(lambda closed: self.ended(stream, closed.exception(0)))

    def rest(self) -> None:
        """Begin anew what has ended with an error."""
        if self.has_lost:
            self.note("subscribe again")
            self.leave(self.stream.close)
            self.subscribe()

    def leave(self, close: Any) -> None:
        """Close something, and note when. What comes until the next subscription counts as if it was handed out."""
        moments = self.simulation.ledger.closed.setdefault(self.name, [])
        moments.append(self.world.scheduler.now)
        self.simulation.ledger.away[self.name] = None
        closing: Promise[None] | None = close()
        moments.append(self.world.scheduler.now)
        if closing is not None:
            # a stream that finishes its last messages may still get some, and leave them to the next one
            pending = self.simulation.ledger.closing.setdefault(self.name, {})
            pending[closing] = None
            closing.add_done_callback(lambda closed: self._left(closed, pending))

    def _left(self, closed: Promise[None], pending: dict[Any, None]) -> None:
        pending.pop(closed, None)
        self.simulation.ledger.closed[self.name].append(self.world.scheduler.now)

    def close(self) -> None:
        """Close the instance."""
        self.leave(self.m.close)

    def do_reopen(self, seconds: float) -> None:
        """Step: close the instance, and open another after some time."""
        self.leave(self.m.close)
        clock.pause(seconds)
        self.connect()


class Letters(Client):
    """Takes the dead letters, in some plans after a while in which nothing receives them."""

    has_begun = False

    def connect(self) -> None:
        """See ``Client``."""
        if self.has_begun or not self.simulation.plan.options["has_late_letters"]:
            super().connect()
            ledger = self.simulation.ledger
            ledger.letters_since = min(ledger.letters_since, self.world.scheduler.now)

    def do_begin(self) -> None:
        """Step: take the dead letters from now on."""
        self.has_begun = True
        self.connect()

    def begin(self) -> None:
        """See ``Client``."""
        protocol = self.simulation.protocol
        where: dict[str, Any] = {} if protocol.startswith("mqtt") else {"queue": "letters"}
        self.stream = self.m.on(DEAD, self._take, qos=1, keep_subscription=True, **where)
        self.watch()

    def _take(self, message: Message) -> None:
        simulation, ledger = self.simulation, self.simulation.ledger
        name = ledger.message(message.payload)
        if name not in ledger.sent:
            simulation.broken(f"a dead letter arrived that was not sent: {name!r}")
            return
        ledger.dead[name] = ledger.dead.get(name, 0) + 1
        headers = message.context.extensions.get("headers") or {}
        self.note(f"{name} is a dead letter: {headers.get('x-dead-letter-reason')}")
        if simulation.protocol != "mqtt311" or simulation.plan.options["has_envelope"]:
            self._check(name, headers)

    def _check(self, name: str, headers: Any) -> None:
        simulation, ledger = self.simulation, self.simulation.ledger
        subscribe = simulation.plan.options["subscribe"]
        most = subscribe.get("max_deliveries")
        reason = headers.get("x-dead-letter-reason")
        is_malformed = ledger.more[name].is_malformed
        # "rejected, maxDeliveries, invalid or closed"; "the reason closed" is that of messages that were never rejected
        expected = ["rejected" if most is None else "maxDeliveries"]
        if is_malformed:
            # deliveries that no program has seen may be too many
            expected = ["invalid", *expected] if most is not None and simulation.counts_unseen else ["invalid"]
        if not simulation.plan.options["has_session"]:
            # "MQTT without a session: dead-lettered if a dead-letter channel is set", when its stream closes
            expected += ["closed", "rejected"]
        if reason not in expected or headers.get("x-dead-letter-channel") != CHANNEL:
            simulation.broken(f"the dead letter {name} says {dict(headers)}")
            return
        if reason == "closed" or is_malformed:
            return
        # of a lost connection: "The others stay, because private queues die with their connection. They go to the
        # dead-letter channel when they are rejected" (``docs/guarantees.md``), although the verdict is refused
        if not simulation.plan.options["has_session"] and ledger.is_rejected_too_late(name):
            return
        seen = max(ledger.rejections(group, name) for group in simulation.groups)
        least = (
            1
            if most is None or reason == "rejected" or (simulation.counts_unseen and simulation.has_any_trouble())
            else most
        )
        if seen < least:
            simulation.broken(f"{name} is a dead letter after {seen} rejections, of {least}")


class Worker(Client):
    """A member of a group. Its name is that of the group, and a number."""

    def open(self) -> None:
        """See ``Client``."""
        self.group = self.name.partition("-")[0]
        self.random = self.world.chance(f"{self.name}.{self.lives}")
        #: how many messages it keeps in hand before it settles one
        self.holding = 0
        self.slow = 0.0
        #: the message whose body of an iteration has not ended
        self.iterated = ""
        self.hand: list[tuple[Any, str, Delivery]] = []
        #: how many handlers run
        self.running = 0
        super().open()

    def begin(self) -> None:
        """See ``Client``."""
        options = self.simulation.plan.options
        way = options["way"]
        subscribe = dict(options["subscribe"])
        if options["is_typed"]:
            subscribe["model"] = MODEL
        # what a stream held that has ended, others have
        self.hand = []
        if way in ("on", "coroutine"):
            handle: Any = self._handle if way == "on" else self._handle_in_loop
            self.stream = self.m.on(CHANNEL, handle, queue=self.group, concurrency=options["concurrency"], **subscribe)
            self.watch()
            return
        more = {"acknowledge": "manual"} if way == "manual" else {}
        self.stream = self.m.subscribe(CHANNEL, queue=self.group, **more, **subscribe)
        run = self._hold if way == "manual" else self._iterate
        stream = self.stream
        self.process.start(lambda: run(stream), "iterator")
        stream.ready.result(SLACK)

    # --- verdicts

    def _arrived(self, message: Message) -> tuple[str, Delivery]:
        simulation = self.simulation
        name = simulation.ledger.message(message.payload)
        delivery = Delivery(self.name, (self.lives, self.subscriptions), self.world.scheduler.now)
        simulation.ledger.delivered(self.group, name, delivery, dict(message.context.extensions))
        return name, delivery

    def _is_bad(self, name: str) -> bool:
        """Return whether a delivery is to be rejected; in the end none is, unless all are."""
        rejects: int = self.simulation.plan.options["rejects"]
        count = len(self.simulation.ledger.deliveries.get((self.group, name), ()))
        return (int(name.partition(":")[2]) * 3 + count * 7) % 10 < rejects

    def _settled(self, name: str, delivery: Delivery, verdict: str) -> None:
        delivery.verdict, delivery.settled = verdict, self.world.scheduler.now
        self.note(f"{name} {verdict}")
        if verdict == "acknowledged":
            handled = self.simulation.ledger.handled
            handled[self.group, name] = handled.get((self.group, name), 0) + 1

    def _begin_work(self, message: Message) -> tuple[str, Delivery]:
        name, delivery = self._arrived(message)
        self.running += 1
        options = self.simulation.plan.options
        most = min(options["concurrency"], options["subscribe"].get("prefetch", options["concurrency"]))
        if self.running > most and not self._has_lately_lost(delivery):
            self.simulation.broken(f"{self.name} handles {self.running} messages at a time, of {most}")
        return name, delivery

    def _has_lately_lost(self, delivery: Delivery) -> bool:
        # a handler of a subscription that has ended may go on, for `close_timeout`
        return self.simulation.has_broken(self.name, 0.0, delivery.at) or self.subscriptions > 1

    def _end_work(self, name: str, delivery: Delivery) -> None:
        self.running -= 1
        if self._is_bad(name):
            self._settled(name, delivery, "rejected")
            raise PlannedError("as planned")
        self._settled(name, delivery, "acknowledged")

    def _handle(self, message: Message) -> None:
        name, delivery = self._begin_work(message)
        if self.slow:
            clock.pause(self.slow)
        self._end_work(name, delivery)

    async def _handle_in_loop(self, message: Message) -> None:
        name, delivery = self._begin_work(message)
        try:
            if self.slow:
                await clock.sleep(self.slow)
        except BaseException:
            self.running -= 1
            raise
        self._end_work(name, delivery)

    def _iterate(self, stream: Any) -> None:
        try:
            for message in stream:
                name, delivery = self._arrived(message)
                self.iterated = name
                if stream is not self.stream:  # it came while the stream was closed
                    self._closed_over_it()
                if self.slow:
                    clock.pause(self.slow)
                self.iterated = ""
                self._settled(name, delivery, "acknowledged")
        except MessagingError as error:
            self.ended(stream, error)

    def _closed_over_it(self) -> None:
        """Note that the stream was closed while a message of it was iterated, which acknowledges that message."""
        # "when the next message is asked for or the stream is closed" (``docs/guarantees.md``)
        self.simulation.ledger.handled.setdefault((self.group, self.iterated), 0)

    def _hold(self, stream: Any) -> None:
        try:
            for message in stream:
                if stream is not self.stream:
                    continue  # closed meanwhile, while this thread was held up: the message is released
                name, delivery = self._arrived(message)
                self.hand.append((message, name, delivery))
                self._check_hand()
                while len(self.hand) > self.holding:
                    self._settle_one()
        except MessagingError as error:
            self.ended(stream, error)

    def _check_hand(self) -> None:
        """Check ``prefetch``: "maximum of unsettled messages in the consumer's hands" (``docs/extensions.md``)."""
        prefetch = self.simulation.plan.options["subscribe"].get("prefetch")
        if prefetch is None:
            return
        now, more = self.world.scheduler.now, self.simulation.ledger.more
        # "answers False for a message of a lost connection" (``docs/guarantees.md``): it counts no more, also if it was
        # handed out later
        alive = [name for _, name, _ in self.hand if not self.simulation.has_broken(self.name, more[name].at, now)]
        if len(alive) > prefetch:
            self.simulation.broken(f"{self.name} has {len(alive)} messages in hand, of {prefetch}: {alive}")

    def _settle_one(self) -> None:
        if not self.hand:
            return
        message, name, delivery = self.hand.pop(self.random.randrange(len(self.hand)))
        verdict = "rejected" if self._is_bad(name) else "acknowledged"
        delivery.verdict = verdict  # it may come again before this thread goes on
        found = message.reject() if verdict == "rejected" else message.acknowledge()
        too_late = "rejected too late" if verdict == "rejected" else "refused"
        self._settled(name, delivery, verdict if found else too_late)
        if not found and not self.simulation.ledger.has_trouble(self.group, self.simulation.ledger.more[name].at):
            self.simulation.broken(f"the verdict of {self.name} on {name} is refused, although nothing was lost")

    # --- steps

    def rest(self) -> None:
        """See ``Client``."""
        super().rest()
        self.slow, self.holding = 0.0, 0
        self.do_settle(len(self.hand))

    def do_settle(self, count: int) -> None:
        """Step: settle so many of the messages in hand, in any order."""
        for _ in range(count):
            self._settle_one()

    def do_hold(self, count: int) -> None:
        """Step: keep so many messages in hand from now on."""
        self.holding = count

    def do_slow(self, seconds: float) -> None:
        """Step: take so long for each message from now on."""
        self.slow = seconds

    def do_reopen_stream(self, seconds: float) -> None:
        """Step: close the stream, and subscribe again after some time."""
        stream, self.stream, self.hand = self.stream, None, []
        if self.iterated:
            self._closed_over_it()
        self.leave(stream.close)
        clock.pause(seconds)
        self.subscribe()
