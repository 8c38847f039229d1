"""Messages: publishers and consumers of one channel that keep what the broker has, and come back.

What is promised, and checked (``docs/guarantees.md``, ``docs/faults.md``):

- each message whose promise resolved is handled, or becomes a dead letter;
- no message arrives that was not sent, or whose promise failed with another error than ``OutcomeUnknownError``;
- the first deliveries of a publisher come in its order, where one consumer takes one message at a time;
- a message comes twice only if something failed, was closed, or its handler raised;
- each promise has an outcome when its deadline has passed;
- interceptors see each message, and each outcome once; handlers run in their contexts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from messaging import MessagingError
from messaging.execution import clock
from tests.simulation.fault_plans import HALF_LOSSES
from tests.simulation.plans import Fault, Plan, Step
from tests.simulation.services.watching import Watched, Watching
from tests.simulation.simulation import AMQP_FAULTS, MQTT_FAULTS, Keeper, Simulation, scheduling, span
from tests.simulation.world.world import PlannedError

if TYPE_CHECKING:
    import random

    from messaging import Promise

CHANNEL: Final = "orders/new"
DEAD: Final = "orders/dead"
#: time that a promise may take beyond its deadline, virtual seconds. Threads are held up for up to 20 s at each point
SLACK: Final = 60.0
#: errors after which a message may arrive all the same
_OPEN_OUTCOMES: Final = frozenset({"OutcomeUnknownError", "killed"})


def open_outcomes(plan: Plan) -> frozenset[str]:
    """Return the outcomes of promises after which a message may arrive or not.

    A broker that closes channels for no reason may take a message, close the channel, and close the next one over the
    same message: to the client it is the one that was refused.
    """
    closes = any("close_channel" in fault.arguments for fault in plan.faults)
    return _OPEN_OUTCOMES | {"PublishRefusedError"} if closes else _OPEN_OUTCOMES


class Ledger:
    """What was sent, what became of it, and what arrived."""

    def __init__(self) -> None:
        #: by message, in the order of sending: "sent", "confirmed", or the name of an error
        self.sent: dict[str, str] = {}
        #: how often a message was handled, in the order of the first time
        self.handled: dict[str, int] = {}
        self.dead: dict[str, int] = {}
        #: acknowledged by closing a stream whose iterator had them, and whose process has died over them
        self.unhandled: dict[str, None] = {}
        #: when the promise of a message has to have an outcome
        self.due: dict[str, float] = {}

    def is_there(self, message: str) -> bool:
        """Return whether a message has arrived."""
        return message in self.handled or message in self.dead or message in self.unhandled


class Publisher(Watched):
    """Publishes messages that are numbered through all its lives."""

    simulation: Messages

    def open(self) -> None:
        """Connect."""
        ledger = self.simulation.ledger
        for message, state in ledger.sent.items():
            if message.startswith(f"{self.name}:") and state == "sent":
                ledger.sent[message] = "killed" if not self._is_stored(message) else "stored"
        self.promises: dict[str, Promise[None]] = getattr(self, "promises", {})
        self.promises.clear()
        self.stored: dict[str, None] = getattr(self, "stored", {})
        self.number = getattr(self, "number", 0)
        self._connect()

    def _is_stored(self, message: str) -> bool:
        return message in getattr(self, "stored", {})

    def _connect(self) -> None:
        options = self.simulation.plan.options
        settings = dict(options["publisher"])
        if options["is_durable"]:
            settings["outbox_path"] = str(self.world.disk.folder / self.name)
        self.m = self.simulation.connect(self, retry_connect=True, **settings, **self.watched(may_refuse=True))

    def do_publish(self, count: int, size: int) -> None:
        """Step: publish so many messages at once."""
        options = self.simulation.plan.options
        ledger = self.simulation.ledger
        timeout = options["publisher"]["timeout"]
        for _ in range(count):
            message = f"{self.name}:{self.number}"
            self.number += 1
            ledger.sent[message] = "sent"
            ledger.due[message] = self.world.scheduler.now + timeout + SLACK
            payload = message.encode().ljust(size, b".")
            try:
                promise = self.m.publish(CHANNEL, payload, **options["publish"])
            except MessagingError as error:
                self._settled(message, error)
                continue
            self.promises[message] = promise
            if options["is_durable"]:
                promise.stored.add_done_callback(lambda stored, message=message: self._stored(message, stored))
            promise.add_done_callback(
                lambda promise, message=message: self._settled(message, promise.exception(0))  # type: ignore[misc]
            )

    def _stored(self, message: str, promise: Promise[None]) -> None:
        if promise.exception(0) is None:
            self.stored[message] = None

    def _settled(self, message: str, error: BaseException | None) -> None:
        simulation = self.simulation
        outcome = "confirmed" if error is None else type(error).__name__
        self.note(f"{message} {outcome}")
        simulation.ledger.sent[message] = outcome
        if self.world.scheduler.now > simulation.ledger.due[message]:
            simulation.broken(f"the promise of {message} took until {outcome} for longer than its deadline")

    def do_wait(self) -> None:
        """Step: wait for all outcomes."""
        for promise in [*self.promises.values()]:
            promise.exception(timeout=self.simulation.plan.options["publisher"]["timeout"] + SLACK)
        self.promises.clear()

    def do_reopen(self) -> None:
        """Step: close the instance, and open another."""
        self.m.close()
        for message, promise in self.promises.items():
            if not promise.done():
                self.simulation.broken(f"the promise of {message} has no outcome after close()")
        self._connect()

    def close(self) -> None:
        """Close the instance."""
        self.m.close()


class Consumer(Watched):
    """Consumes messages, in one of several ways."""

    simulation: Messages

    def __init__(self, simulation: Simulation, name: str) -> None:
        super().__init__(simulation, name)
        #: messages that an iterator is handling, and its stream; the streams that were closed
        self.in_hand: dict[str, Any] = {}
        self.closed_streams: list[Any] = []

    def open(self) -> None:
        """Connect and subscribe."""
        # iterators: acknowledged "when the next message is asked for or the stream is closed" (docs/guarantees.md)
        died_over = [message for message, stream in self.in_hand.items() if stream in self.closed_streams]
        self.simulation.ledger.unhandled |= dict.fromkeys(died_over)
        self.in_hand, self.closed_streams = {}, []
        self.failing = 0
        self.slow = 0.0
        #: a stream or handler ended with an error: it is not begun again by itself
        self.has_lost = False
        self._connect()

    def rest(self) -> None:
        """Begin anew what has ended with an error, as programs do that have to go on."""
        if self.has_lost:
            self.note("subscribe again")
            self._close_streams()
            self._subscribe()

    def _ended(self, what: Any, error: BaseException | None) -> None:
        if error is not None and what in (self.stream, self.letters):
            self.note(f"the stream has ended: {type(error).__name__}: {error}")
            self.has_lost = True

    def _connect(self) -> None:
        options = self.simulation.plan.options
        settings = dict(options["consumer"])
        if self.simulation.protocol.startswith("mqtt"):
            settings["client_id"] = self.name
        self.m = self.simulation.connect(self, retry_connect=True, **settings, **self.watched())
        self._subscribe()

    def _subscribe(self) -> None:
        """Subscribe, as often as it takes: the broker may refuse it, and the connection be lost."""
        while True:
            try:
                self._try_to_subscribe()
            except MessagingError as error:
                self.note(f"cannot subscribe: {type(error).__name__}: {error}")
                clock.pause(0.5)
            else:
                return

    def _try_to_subscribe(self) -> None:
        options = self.simulation.plan.options
        way = options["way"]
        self.letters: Any = None
        self.has_lost = False
        if options["subscribe"].get("dead_letter_channel") and self.name == "consumer-1":
            where: dict[str, Any] = {"keep_subscription": True}
            if not self.simulation.protocol.startswith("mqtt"):
                where["queue"] = "letters"
            self.letters = self.m.on(DEAD, self._letter, model=bytes, qos=1, **where)
        subscribe = dict(options["subscribe"])
        if way == "on":
            self.stream: Any = self.m.on(
                CHANNEL, self._handle, model=bytes, concurrency=options["concurrency"], **subscribe
            )
        elif way == "coroutine":
            self.stream = self.m.on(
                CHANNEL, self._handle_in_loop, model=bytes, concurrency=options["concurrency"], **subscribe
            )
        elif way == "manual":
            self.stream = self.m.subscribe(CHANNEL, acknowledge="manual", **subscribe)
            self.process.start(partial(self._iterate_manually, self.stream), "iterator")
            self.stream.ready.result(SLACK)
        else:
            self.stream = self.m.subscribe(CHANNEL, **subscribe)
            self.process.start(partial(self._iterate, self.stream), "iterator")
            self.stream.ready.result(SLACK)
        handlers = [self.stream] if way in ("on", "coroutine") else []
        for each in (*handlers, self.letters):
            if each is not None:
                each.closed.add_done_callback(lambda closed, each=each: self._ended(each, closed.exception(0)))

    # --- handling

    def _arrived(self, payload: bytes) -> str:
        message = payload.rstrip(b".").decode()
        simulation = self.simulation
        if self.watching and Watching.current.get() != payload:
            simulation.broken(f"{message} is handled outside of the context of its interceptor")
        state = simulation.ledger.sent.get(message)
        if state is None:
            simulation.broken(f"a message arrived that was not sent: {message!r}")
        return message

    def _work(self, payload: bytes) -> str:
        """Return the message, unless its handling fails."""
        message = self._arrived(payload)
        if self.failing > 0:
            self.failing -= 1
            self.note(f"{message} fails")
            raise PlannedError("as planned")
        return message

    def _took(self, message: str) -> None:
        handled = self.simulation.ledger.handled
        handled[message] = handled.get(message, 0) + 1
        self.note(f"{message} handled" + (" again" if handled[message] > 1 else ""))

    def _handle(self, payload: bytes) -> None:
        message = self._work(payload)
        if self.slow:
            clock.pause(self.slow)
        self._took(message)

    async def _handle_in_loop(self, payload: bytes) -> None:
        message = self._work(payload)
        if self.slow:
            await clock.sleep(self.slow)
        self._took(message)

    def _iterate(self, stream: Any) -> None:
        try:
            for message in stream:
                name = self._arrived(message.payload)
                self.in_hand[name] = stream
                if self.slow:
                    clock.pause(self.slow)
                self._took(name)
                self.in_hand.pop(name, None)
        except MessagingError as error:
            self._ended(stream, error)

    def _iterate_manually(self, stream: Any) -> None:
        try:
            for message in stream:
                handler = message.context.acknowledge_handler
                try:
                    name = self._work(message.payload)
                except PlannedError:
                    handler.reject()
                    continue
                if self.slow:
                    clock.pause(self.slow)
                self._took(name)
                handler.acknowledge()
        except MessagingError as error:
            self._ended(stream, error)

    def _letter(self, payload: bytes) -> None:
        message = self._arrived(payload)
        dead = self.simulation.ledger.dead
        dead[message] = dead.get(message, 0) + 1
        self.note(f"{message} is a dead letter")

    # --- steps

    def do_fail(self, count: int) -> None:
        """Step: fail the handling of the next messages."""
        self.failing += count

    def do_slow(self, seconds: float) -> None:
        """Step: take so long for each message from now on."""
        self.slow = seconds

    def do_reopen_stream(self) -> None:
        """Step: close the stream, and subscribe again."""
        self._close_streams()
        self._subscribe()

    def do_reopen(self) -> None:
        """Step: close the instance, and open another."""
        self.closed_streams.append(self.stream)
        self.m.close()
        self._connect()

    def _close_streams(self) -> None:
        self.closed_streams.append(self.stream)
        self.stream.close()
        if self.letters is not None:
            self.letters.close()

    def close(self) -> None:
        """Close the instance."""
        self.m.close()


class Messages(Simulation):
    """Publishers and consumers."""

    name = "messages"

    def begin(self) -> None:
        """See ``Simulation``."""
        self.ledger = Ledger()
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        for number in range(self.plan.options["consumers"]):
            self.roles.append(Consumer(self, f"consumer-{number + 1}"))
        for number in range(self.plan.options["publishers"]):
            self.roles.append(Publisher(self, f"publisher-{number + 1}"))

    @property
    def watching(self) -> list[Watching]:
        """The interceptors of all roles."""
        return [watching for role in self.roles if isinstance(role, Watched) for watching in role.watching]

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        return self._has_arrived() and all(each.is_idle for each in self.watching)

    def _has_arrived(self) -> bool:
        ledger = self.ledger
        for message, state in ledger.sent.items():
            if state == "sent":
                return False
            if state in ("confirmed", "stored") and not ledger.is_there(message):
                return False
        return True

    def judge(self) -> None:
        """See ``Simulation``."""
        ledger, options = self.ledger, self.plan.options
        for each in self.watching:
            if not each.is_idle:
                self.broken(f"an interceptor has not been told of {each.published or each.processed}")
        may_arrive = open_outcomes(self.plan)
        for message, state in ledger.sent.items():
            has_arrived = ledger.is_there(message)
            if state == "sent":
                self.broken(f"the promise of {message} has no outcome")
            elif state in ("confirmed", "stored") and not has_arrived:
                self.broken(f"{message} was {state}, and is lost")
            elif state not in ("confirmed", "stored") and state not in may_arrive and has_arrived:
                self.broken(f"{message} arrived although its promise failed with {state}")
        if options["consumers"] == 1 and options["concurrency"] == 1 and not options["may_reorder"]:
            self._check_order()
        if not options["may_repeat"] and not self.plan.faults:
            for message, count in ledger.handled.items():
                if count > 1:
                    self.broken(f"{message} was handled {count} times, although nothing failed")

    def _check_order(self) -> None:
        last: dict[str, int] = {}
        for message in self.ledger.handled:
            publisher, number = message.split(":")
            if int(number) < last.get(publisher, -1):
                self.broken(f"{message} was handled for the first time behind {publisher}:{last[publisher]}")
                return
            last[publisher] = int(number)

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        publishers, consumers = random.choice((1, 1, 2)), 1
        way = random.choice(("on", "coroutine", "iterator", "manual"))
        is_amqp, is_mqtt = protocol == "amqp", protocol.startswith("mqtt")
        publisher: dict[str, Any] = {
            "timeout": random.choice((20.0, 60.0, 600.0)),
            "reconnect_max": random.choice((1.0, 5.0, 30.0)),
        }
        consumer: dict[str, Any] = {"reconnect_max": random.choice((1.0, 5.0, 30.0))}
        subscribe: dict[str, Any] = {"qos": random.choice((1, 2)) if is_mqtt else 1, "keep_subscription": True}
        publish: dict[str, Any] = {"qos": random.choice((1, 2))} if is_mqtt else {"guaranteed_delivery": True}
        if is_mqtt:
            consumer |= {"clean_start": False}
            if protocol == "mqtt5":
                consumer |= {"session_expiry": 86_400}
            for settings in (publisher, consumer):
                settings["keepalive"] = random.choice((2, 10, 60))
        else:
            subscribe["queue"] = "orders"
            if is_amqp and random.random() < 0.3:
                subscribe["queue_type"] = "quorum"
            for settings in (publisher, consumer):
                if is_amqp:
                    settings["heartbeat"] = random.choice((2, 10, 60))
        if is_amqp and random.random() < 0.3:
            publisher["publish_window"] = random.choice((1, 2, 7))
        concurrency = random.choice((1, 1, 3)) if way in ("on", "coroutine") else 1
        if random.random() < 0.3:
            subscribe["prefetch"] = random.choice((concurrency, 5))
        if random.random() < 0.3:
            subscribe["buffer_size"] = random.choice((1, 2, 5))
        may_fail = way in ("on", "coroutine", "manual") and random.random() < 0.5
        if may_fail and random.random() < 0.5:
            subscribe["dead_letter_channel"] = DEAD
            subscribe["max_deliveries"] = random.choice((1, 2, 3))
        steps: list[Step] = []
        for number in range(publishers):
            name = f"publisher-{number + 1}"
            for _ in range(random.randint(8, 30)):
                chosen = random.random()
                if chosen < 0.55:
                    count = random.choice((1, 1, 2, 5, 20))
                    steps.append(Step(name, "publish", {"count": count, "size": random.choice((0, 0, 40, 400, 5000))}))
                elif chosen < 0.75:
                    steps.append(Step(name, "pause", {"seconds": span(random, 1e-4, 3.0)}))
                elif chosen < 0.95:
                    steps.append(Step(name, "wait", {}))
                else:
                    steps.append(Step(name, "reopen", {}))
        for number in range(consumers):
            name = f"consumer-{number + 1}"
            for _ in range(random.randint(8, 20)):
                chosen = random.random()
                if chosen < 0.6:
                    steps.append(Step(name, "pause", {"seconds": span(random, 1e-4, 3.0)}))
                elif chosen < 0.7:
                    steps.append(Step(name, "slow", {"seconds": random.choice((0.0, span(random, 1e-4, 0.2)))}))
                elif chosen < 0.85:
                    if may_fail:
                        steps.append(Step(name, "fail", {"count": random.choice((1, 1, 2, 5))}))
                elif chosen < 0.93:
                    steps.append(Step(name, "reopen_stream", {}))
                else:
                    steps.append(Step(name, "reopen", {}))
        roles = sorted({step.role for step in steps})
        faults = cls._faults(random, protocol, roles)
        names = {fault.name for fault in faults}
        done = {step.name for step in steps}
        options = {
            **scheduling(random),
            "publishers": publishers,
            "consumers": consumers,
            "way": way,
            "concurrency": concurrency,
            "publisher": publisher,
            "consumer": consumer,
            "publish": publish,
            "subscribe": subscribe,
            "is_durable": random.random() < 0.3,
            "may_reorder": bool(
                {"kill", "broker", "restart_broker"} & names
                or {"fail", "reopen_stream", "reopen"} & done
                or (protocol == "amqp" and HALF_LOSSES & names)
            ),
            "may_repeat": bool({"reopen_stream", "reopen", "fail"} & done),
            "intercept": {"refused": random.choice((0, 0, 3, 20))} if random.random() < 0.25 else None,
        }
        return Plan(options, tuple(steps), tuple(faults))

    @classmethod
    def _faults(cls, random: random.Random, protocol: str, roles: list[str]) -> list[Fault]:
        if random.random() < 0.1:
            return []
        makers: list[Any] = [
            lambda: ("slow_sync", {"seconds": span(random, 0.1, 10.0), "longest": span(random, 0.01, 1.0)}),
            lambda: (
                "wall_clock",
                {"role": random.choice(roles), "offset": random.choice((-3600.0, -5.0, 5.0, 86_400.0))},
            ),
        ]
        if protocol == "memory":
            makers += [lambda: ("cut", {"role": random.choice(roles)})] * 4
        else:
            kinds = AMQP_FAULTS if protocol == "amqp" else MQTT_FAULTS
            makers = [
                *makers,
                *[lambda: ("cut", {"role": random.choice([*roles, None])})] * 6,
                *[lambda: ("black_hole", {"role": random.choice([*roles, None]), "seconds": span(random, 0.01, 60.0)})]
                * 2,
                lambda: ("stall", {"role": random.choice([*roles, None]), "seconds": span(random, 0.01, 10.0)}),
                lambda: ("refuse", {"seconds": span(random, 0.01, 20.0)}),
                lambda: ("silence", {"seconds": span(random, 0.01, 20.0)}),
                lambda: ("no_names", {"seconds": span(random, 0.01, 20.0)}),
                lambda: (
                    "slow_network",
                    {
                        "seconds": span(random, 0.1, 20.0),
                        "longest": span(random, 0.001, 1.0),
                        "piece": random.choice((1, 3, 50, 65_536)),
                    },
                ),
                *[lambda: ("restart_broker", {"seconds": span(random, 0.01, 10.0), "is_kill": random.random() < 0.5})]
                * 2,
                *[lambda: ("broker", {"seconds": span(random, 0.1, 20.0), **random.choice(kinds)})] * 3,
                *[
                    lambda: (
                        "kill",
                        {
                            "role": random.choice(roles),
                            "seconds": span(random, 0.01, 10.0),
                            "vanishes": random.random() < 0.3,
                        },
                    )
                ]
                * 3,
            ]
        faults = []
        for _ in range(random.choice((1, 2, 2, 3, 3, 4, 6))):
            name, arguments = random.choice(makers)()
            faults.append(Fault(span(random, 1e-3, 10.0), name, arguments))
        return sorted(faults, key=lambda fault: fault.at)
