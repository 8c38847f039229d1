"""Streams: one instance with several of them, over channels that overlap, which come, go, and hold back verdicts.

What is promised, and checked (``docs/guarantees.md``):

- a stream receives each message that was published while it was open, also if it is closed and opened again meanwhile:
  the messages that it has not taken wait for "the next stream with the same channel and queue";
- a subscription that is kept gets all messages from its beginning on, but for those of the moment in which it is made
  again with other options (``docs/mqtt.md``);
- a stream receives messages of its own channel alone, in the order of their publisher;
- a message comes twice only if something failed, was closed, or was rejected; with QoS 2 and sessions also not after
  the loss of a connection;
- "``acknowledge_handler`` answers ``False`` for a message of a lost connection", if the session was lost with it;
- a stream that is closed and not kept leaves no subscription.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging import MessagingError
from messaging.execution import clock
from tests.simulation.plans import Fault, Plan, Step
from tests.simulation.services.messages import SLACK, open_outcomes
from tests.simulation.simulation import AMQP_FAULTS, MQTT_FAULTS, Keeper, Role, Simulation, scheduling, span

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from messaging import Message

CHANNELS: Final = ("plant/1", "plant/2", "other")
FILTERS: Final = ("plant/1", "plant/+", "plant/#", "other", "#", "plant/2")
#: the stream of a channel that was closed has to be opened again within this time to get what came meanwhile: "if they
#: fill it while other streams of the instance wait for messages, they are acknowledged and dropped after 30 s", and a
#: session keeps a subscription that ended without a connection for as long. Virtual seconds
_SOON: Final = 25.0


def _matches(pattern: str, channel: str) -> bool:
    return pattern in (channel, "#") or (pattern in ("plant/+", "plant/#") and channel.startswith("plant/"))


@dataclass(slots=True)
class Sent:
    """A message that was published.

    Attributes:
        channel: where.
        state: "sent", "confirmed", "killed", or the name of an error.
        at, confirmed: when, virtual seconds.
    """

    channel: str
    at: float
    state: str = "sent"
    confirmed: float = inf


@dataclass(slots=True)
class Slot:
    """A channel that is subscribed to, by one stream after the other.

    Attributes:
        pattern: of its channels.
        keeps: its streams keep the subscription.
        is_wanted: a stream is to be open; a new process opens it again.
        since: from when on messages are owed to it, virtual seconds; infinite: none are.
        windows: former times in which messages were owed.
        closed: when its last stream was closed.
        restarted: when the first stream of the last instance was opened.
        arrived: how often each message came, in the order of the first time.
        options: of its next stream: MQTT 5 has one subscription for each filter, with one value of each.
        granted: of its last stream that was ready.
        changing: since when it is made again with other options; infinite: it is not.
        gaps: times in which the subscription was made again with other options.
    """

    pattern: str
    keeps: bool
    is_wanted: bool = False
    since: float = inf
    windows: list[tuple[float, float]] = field(default_factory=list)
    closed: float = -inf
    restarted: float = -inf
    arrived: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    granted: dict[str, Any] = field(default_factory=dict)
    changing: float = inf
    gaps: list[tuple[float, float]] = field(default_factory=list)

    def owes(self, sent: Sent) -> bool:
        """Return whether the slot has to get a message."""
        if sent.state != "confirmed" or not _matches(self.pattern, sent.channel):
            return False
        # "the broker receives it between the two packets: lost" (``docs/mqtt.md``)
        if any(begin <= sent.confirmed and sent.at <= end for begin, end in self.gaps):
            return False
        return sent.at >= self.since or any(begin <= sent.at and sent.confirmed <= end for begin, end in self.windows)


class Publisher(Role):
    """Publishes numbered messages to several channels."""

    simulation: Streams

    def open(self) -> None:
        """Connect."""
        for message, sent in self.simulation.sent.items():
            if message.startswith(f"{self.name}:") and sent.state == "sent":
                sent.state = "killed"
        self.promises: list[Any] = []
        self.number = getattr(self, "number", 0)
        self._connect()

    def _connect(self) -> None:
        settings = dict(self.simulation.plan.options["publisher"])
        if self.simulation.is_mqtt:
            settings["client_id"] = self.name
        self.m = self.simulation.connect(self, retry_connect=True, **settings)

    def do_publish(self, channel: str, count: int, size: int) -> None:
        """Step: publish so many messages at once."""
        for _ in range(count):
            message = f"{self.name}:{self.number}"
            self.number += 1
            sent = self.simulation.sent[message] = Sent(channel, self.world.scheduler.now)
            try:
                promise = self.m.publish(
                    channel, message.encode().ljust(size, b"."), **self.simulation.plan.options["publish"]
                )
            except MessagingError as error:
                sent.state = type(error).__name__
                continue
            self.promises.append(promise)
            promise.add_done_callback(
                lambda promise, message=message: self._settled(message, promise.exception(0))  # type: ignore[misc]
            )

    def _settled(self, message: str, error: BaseException | None) -> None:
        sent, now = self.simulation.sent[message], self.world.scheduler.now
        sent.state = "confirmed" if error is None else type(error).__name__
        if error is None:
            sent.confirmed = now
        self.note(f"{message} {sent.state}")
        if now > sent.at + self.simulation.plan.options["publisher"]["timeout"] + SLACK:
            self.simulation.broken(f"the promise of {message} took until {sent.state} for longer than its deadline")

    def do_wait(self) -> None:
        """Step: wait for all outcomes."""
        for promise in self.promises:
            promise.exception(timeout=self.simulation.plan.options["publisher"]["timeout"] + SLACK)
        self.promises.clear()

    def do_reopen(self) -> None:
        """Step: close the instance, and open another."""
        self.m.close()
        self._connect()

    def close(self) -> None:
        """Close the instance."""
        self.m.close()


class Receiver(Role):
    """Has the streams of all slots, in one instance."""

    simulation: Streams

    def open(self) -> None:
        """Connect, and open the streams that the process before had."""
        self.streams: dict[int, Any] = {}
        #: slots whose streams have ended by themselves
        self.lost: set[int] = set()
        #: messages without a verdict, by the connections that there were when they came
        self.held: list[tuple[int, str, Message[Any], int]] = []
        self.holds = self.slow = 0.0
        self._connect()

    def _connect(self) -> None:
        settings = dict(self.simulation.plan.options["receiver"])
        if self.simulation.is_mqtt:
            settings["client_id"] = self.name
        self.m = self.simulation.connect(self, retry_connect=True, **settings)
        self.m.connection_state.subscribe(self._state)
        #: slots that this instance has had a stream of
        self.known: set[int] = set()
        for number, slot in enumerate(self.simulation.slots):
            if slot.is_wanted:
                self._open(number)

    def _state(self, state: Any) -> None:
        if state.name == "connected":
            self.simulation.connections += 1
            self.simulation.begin_again()

    def rest(self) -> None:
        """Settle what is held, and have all streams open."""
        self.holds = 0.0
        self.do_settle(is_rejected=False)
        for number in range(len(self.simulation.slots)):
            if number in self.lost:
                self._close(number)
            if number not in self.streams:
                self._open(number)

    # --- streams

    def _open(self, number: int) -> None:
        """Open a stream, as often as it takes: the broker may refuse it, and the connection be lost."""
        slot, options = self.simulation.slots[number], self.simulation.plan.options
        if self.world.scheduler.now > slot.closed + _SOON:
            slot.windows.clear()  # a slot that keeps its subscription has none
        slot.is_wanted = True
        self.lost.discard(number)
        where: dict[str, Any] = {"keep_subscription": True} if slot.keeps else {}
        if not self.simulation.is_mqtt and slot.keeps:
            where["queue"] = f"queue-{number}"
        where |= slot.options
        if slot.options != slot.granted:
            slot.changing = min(slot.changing, self.world.scheduler.now)
        stream = None
        while True:
            try:
                stream = self.m.subscribe(slot.pattern, acknowledge="manual", **options["subscribe"], **where)
                self.streams[number] = stream
                self.process.start(partial(self._iterate, number, stream), f"stream-{number}")
                stream.ready.result(SLACK)
            except MessagingError as error:
                self.note(f"cannot subscribe: {type(error).__name__}: {error}")
                if slot.options and stream is not None:  # it would be in the way of one with other options
                    stream.close()
                clock.pause(0.5)
            else:
                break
        if slot.changing < inf:
            slot.gaps.append((slot.changing, self.world.scheduler.now))
            slot.granted, slot.changing = slot.options, inf
        if number not in self.known:
            self.known.add(number)
            slot.restarted = self.world.scheduler.now
        if not self.simulation.forgotten:
            slot.since = min(slot.since, self.world.scheduler.now)
        self.simulation.begin_again()

    def _close(self, number: int) -> None:
        slot, now = self.simulation.slots[number], self.world.scheduler.now
        slot.is_wanted = False
        if not slot.keeps:
            if slot.since < now:
                slot.windows.append((slot.since, now))
            slot.since = inf
        stream = self.streams.pop(number)
        stream.close()
        slot.closed = self.world.scheduler.now
        self.lost.discard(number)

    def _iterate(self, number: int, stream: Any) -> None:
        try:
            for message in stream:
                self._take(number, message)
        except MessagingError as error:
            if self.streams.get(number) is stream:
                self.note(f"stream {number} has ended: {type(error).__name__}: {error}")
                slot = self.simulation.slots[number]
                if not slot.keeps:
                    slot.since = inf
                self.lost.add(number)

    def _take(self, number: int, message: Message[Any]) -> None:
        simulation = self.simulation
        slot, name = simulation.slots[number], message.payload.rstrip(b".").decode()
        sent = simulation.sent.get(name)
        if sent is None or message.context.channel != sent.channel or not _matches(slot.pattern, sent.channel):
            simulation.broken(f"{name!r} of {message.context.channel} arrived at a stream of {slot.pattern}")
            return
        slot.arrived[name] = slot.arrived.get(name, 0) + 1
        self.note(f"{name} at {number}" + (" again" if slot.arrived[name] > 1 else ""))
        if self.slow:
            clock.pause(self.slow)
        held = (number, name, message, simulation.connections)
        if self.holds > 0 and self.world.scheduler.random.random() < self.holds:
            self.held.append(held)
        else:
            self._settle(held, is_rejected=False)

    def _settle(self, held: tuple[int, str, Message[Any], int], *, is_rejected: bool) -> None:
        number, name, message, connection = held
        handler = message.context.acknowledge_handler
        is_lost = self.simulation.is_lost_with_session(name, connection)
        done = handler.reject() if is_rejected else handler.acknowledge()
        if done and is_lost:
            self.simulation.broken(f"{name} of a session that was lost was settled at {number}")

    # --- steps

    def do_open(self, number: int, **options: Any) -> None:
        """Step: open the stream of a slot, with these options if there are any."""
        if number not in self.streams:
            self.simulation.slots[number].options = options or self.simulation.slots[number].options
            self._open(number)

    def do_close(self, number: int) -> None:
        """Step: close the stream of a slot."""
        if number in self.streams:
            self._close(number)

    def do_exchange(self, number: int, **options: Any) -> None:
        """Step: close the stream of a slot, and open another at once, with these options if there are any."""
        self.do_close(number)
        self.simulation.slots[number].options = options or self.simulation.slots[number].options
        self._open(number)

    def do_hold(self, part: float) -> None:
        """Step: leave a part of the messages without a verdict from now on."""
        self.holds = part

    def do_settle(self, is_rejected: bool) -> None:
        """Step: settle the messages that have no verdict."""
        held, self.held = self.held, []
        for each in held:
            self._settle(each, is_rejected=is_rejected)

    def do_slow(self, seconds: float) -> None:
        """Step: take so long for each message from now on."""
        self.slow = seconds

    def do_reopen(self) -> None:
        """Step: close the instance, and open another with the same streams."""
        now = self.world.scheduler.now
        for slot in self.simulation.slots:
            if not slot.keeps and slot.since < inf and not self.simulation.is_mqtt:
                slot.windows.append((slot.since, now))
                slot.since = inf
        self.m.close()
        self.streams.clear()
        self.lost.clear()
        self.held.clear()
        self._connect()

    def close(self) -> None:
        """Close the streams, then the instance."""
        self.holds = 0.0
        for number in [*self.streams]:
            self._close(number)
        end = self.world.scheduler.now + 60.0
        while (left := [*self.simulation.subscriptions_left()]) and self.world.scheduler.now < end:
            clock.pause(0.2)
        for each in left:
            self.simulation.broken(f"left over: a subscription to {each}")
        self.m.close()


class Streams(Simulation):
    """Publishers, and a receiver of many streams."""

    name = "streams"

    @property
    def is_mqtt(self) -> bool:
        """Whether it runs on MQTT."""
        return self.protocol.startswith("mqtt")

    def begin(self) -> None:
        """See ``Simulation``."""
        options = self.plan.options
        self.sent: dict[str, Sent] = {}
        self.slots = [Slot(pattern, keeps) for pattern, keeps in options["slots"]]
        for number in options["opened"]:
            self.slots[number].is_wanted = True
        #: number of connections that the receiver has had
        self.connections = self._connections_then = 0
        #: when the broker has forgotten all sessions; 0: never
        self.forgotten = 0.0
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        self.roles.append(Receiver(self, "receiver"))
        for number in range(options["publishers"]):
            self.roles.append(Publisher(self, f"publisher-{number + 1}"))

    # --- sessions

    def fault_forget_sessions(self, seconds: float) -> None:
        """Fault: the broker is killed, and starts without anything of before.

        "lost are the messages that came while there was neither session nor connection, and the messages that the
        session held" (``docs/faults.md``).
        """
        if not self.broker.is_running:
            return
        self.fault_restart_broker(seconds, is_kill=True)
        self.broker.forget()
        self.forgotten = self.world.scheduler.now
        self._connections_then = self.connections
        for slot in self.slots:
            slot.windows.clear()
            slot.since = inf

    def begin_again(self) -> None:
        """After the loss of a session: note which slots are subscribed to in the next one."""
        session = self.broker.sessions.get("receiver") if self.forgotten else None
        for slot in self.slots:
            if session is not None and slot.is_wanted and slot.pattern in session.subscriptions:
                slot.since = min(slot.since, self.world.scheduler.now)

    def is_lost_with_session(self, name: str, connection: int) -> bool:
        """Return whether a message that came over one connection was of a session that was lost before the last one."""
        has_next = connection <= self._connections_then < self.connections
        return has_next and self.sent[name].confirmed < self.forgotten

    def subscriptions_left(self) -> Iterator[str]:
        """Yield the filters of the receiver's session, but for those that are kept."""
        if not self.is_mqtt:
            return
        session = self.broker.sessions.get("receiver")
        kept = {slot.pattern for slot in self.slots if slot.keeps}
        if session is not None:
            yield from (each for each in session.subscriptions if each not in kept)

    # --- judging

    def _owed(self) -> Iterator[tuple[int, str]]:
        may_be_lost = self._may_lose()
        for number, slot in enumerate(self.slots):
            if may_be_lost and not slot.keeps:
                continue
            for name, sent in self.sent.items():
                if name not in slot.arrived and slot.owes(sent) and not self._goes_to_others(slot, sent):
                    yield number, name

    def _goes_to_others(self, slot: Slot, sent: Sent) -> bool:
        """Return whether a message may have gone to other streams of the session alone.

        "A program that starts anew does not know what the one before it had subscribed to: a message that comes before
        all its streams are open goes to those that are" (``docs/guarantees.md``).
        """
        if not self.is_mqtt:
            return False
        if not any(other is not slot and _matches(other.pattern, sent.channel) for other in self.slots):
            return False
        # messages that waited at the broker do not tell that they were for a stream that is closed: on MQTT 3.1.1, and
        # where a broker has restored a session, for which it makes one copy for all filters
        is_untold = self.protocol == "mqtt311" or "restart_broker" in self.world.faults
        is_former = is_untold and not slot.keeps and sent.at < slot.since
        # "a stream with ``noLocal`` misses such a message" (``docs/mqtt.md``)
        has_no_local = is_untold and any(each.get("no_local") for each in (slot.options, slot.granted))
        return is_former or has_no_local or sent.at <= slot.restarted

    def _may_lose(self) -> bool:
        """Whether streams that are not kept miss messages: "the queue of the subscription ends with it"."""
        if self.is_mqtt:
            return False
        return bool(self.plan.faults) or any(step.name in ("close", "exchange", "reopen") for step in self.plan.steps)

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        return all(sent.state != "sent" for sent in self.sent.values()) and next(self._owed(), None) is None

    def judge(self) -> None:
        """See ``Simulation``."""
        may_arrive = open_outcomes(self.plan) | {"confirmed"}
        for name, sent in self.sent.items():
            if sent.state == "sent":
                self.broken(f"the promise of {name} has no outcome")
            for number, slot in enumerate(self.slots):
                if name in slot.arrived and sent.state not in may_arrive:
                    self.broken(f"{name} arrived at {number} although its promise failed with {sent.state}")
        for number, name in self._owed():
            self.broken(f"{name} was confirmed, and is lost to stream {number}")
        faults = {fault.name for fault in self.plan.faults}
        done = {step.name for step in self.plan.steps if step.role == "receiver"}
        rejects = any(step.name == "settle" and step.arguments["is_rejected"] for step in self.plan.steps)
        is_exact = self.is_mqtt and self.plan.options["publish"]["qos"] == 2 and (
            self.plan.options["subscribe"]["qos"] == 2
        )  # fmt: skip
        harmless = {"cut", "black_hole", "stall", "slow_network", "refuse", "silence", "wall_clock", "slow_sync"}
        closes = {"close", "exchange", "reopen"} & done
        if not closes and not rejects and faults <= (harmless if is_exact else set()):
            self._check_once()
        # "RabbitMQ holds the unsettled messages of the old consumer until it notices, too" (``docs/faults.md``)
        half_lost = set() if self.is_mqtt else {"black_hole", "stall", "silence"}
        if not closes and not rejects and faults <= harmless - half_lost:
            self._check_order()

    def _check_once(self) -> None:
        for number, slot in enumerate(self.slots):
            for name, count in slot.arrived.items():
                if count > 1 and self.sent[name].state != "killed":
                    self.broken(f"{name} came to stream {number} {count} times")

    def _check_order(self) -> None:
        for number, slot in enumerate(self.slots):
            last: dict[str, int] = {}
            for name in slot.arrived:
                if self.sent[name].at < slot.since:
                    continue  # of before its subscription: the broker resent it for another filter
                publisher, _, at = name.partition(":")
                if int(at) < last.get(publisher, -1):
                    self.broken(f"{name} came to stream {number} behind {publisher}:{last[publisher]}")
                    return
                last[publisher] = int(at)

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        is_mqtt = protocol.startswith("mqtt")
        publishers = random.choice((1, 1, 2))
        qos = random.choice((1, 2)) if is_mqtt else 1
        timeout = random.choice((20.0, 60.0, 600.0))
        publisher: dict[str, Any] = {"timeout": timeout, "reconnect_max": random.choice((1.0, 5.0))}
        receiver: dict[str, Any] = {"reconnect_max": random.choice((1.0, 5.0))}
        subscribe: dict[str, Any] = {"qos": qos}
        publish: dict[str, Any] = {"qos": random.choice((1, 2))} if is_mqtt else {"guaranteed_delivery": True}
        for settings in (publisher, receiver):
            if is_mqtt:
                settings |= {"clean_start": False, "keepalive": random.choice((2, 10, 60))}
                if protocol == "mqtt5":
                    settings["session_expiry"] = 86_400
            elif protocol == "amqp":
                settings["heartbeat"] = random.choice((2, 10, 60))
        if random.random() < 0.3:
            subscribe["buffer_size"] = random.choice((1, 2, 5))
        if protocol == "mqtt5" and random.random() < 0.2:
            receiver["receive_maximum"] = random.choice((5, 20))
        filters = random.sample(FILTERS, random.choice((2, 3, 3, 4)))
        slots = [(pattern, random.random() < 0.4) for pattern in filters]
        opened = [number for number in range(len(slots)) if random.random() < 0.7]
        is_steady = random.random() < 0.3  # nothing is closed: order and exactness can be judged
        steps = cls._publishers_steps(random, publishers)
        for _ in range(random.randint(12, 24)):
            steps.append(cls._receivers_step(random, len(slots), is_steady=is_steady))
        faults = cls._faults(random, protocol, sorted({step.role for step in steps}), is_steady=is_steady)
        options = {
            **scheduling(random),
            "publishers": publishers,
            "publisher": publisher,
            "receiver": receiver,
            "publish": publish,
            "subscribe": subscribe,
            "slots": slots,
            "opened": opened,
        }
        if protocol == "mqtt5" and random.random() < 0.5:
            steps = [cls._with_options(random, step) for step in steps]
        return Plan(options, tuple(steps), tuple(faults))

    @staticmethod
    def _publishers_steps(random: random.Random, publishers: int) -> list[Step]:
        steps = []
        for number in range(publishers):
            name = f"publisher-{number + 1}"
            for _ in range(random.randint(12, 30)):
                chosen = random.random()
                if chosen < 0.6:
                    count, size = random.choice((1, 1, 2, 5, 12)), random.choice((0, 0, 40, 3000))
                    channel = random.choice(CHANNELS)
                    steps.append(Step(name, "publish", {"channel": channel, "count": count, "size": size}))
                elif chosen < 0.85:
                    steps.append(Step(name, "pause", {"seconds": span(random, 1e-4, 5.0)}))
                elif chosen < 0.97:
                    steps.append(Step(name, "wait", {}))
                else:
                    steps.append(Step(name, "reopen", {}))
        return steps

    @staticmethod
    def _receivers_step(random: random.Random, slots: int, *, is_steady: bool) -> Step:
        number = random.randrange(slots)
        chosen = random.random()
        if chosen < 0.3:
            return Step("receiver", "pause", {"seconds": span(random, 1e-4, 5.0)})
        if chosen < 0.4:
            return Step("receiver", "slow", {"seconds": random.choice((0.0, span(random, 1e-4, 0.1)))})
        if chosen < 0.5:
            return Step("receiver", "hold", {"part": random.choice((0.0, 0.3, 1.0))})
        if chosen < 0.6:
            return Step("receiver", "settle", {"is_rejected": not is_steady and random.random() < 0.5})
        if is_steady or chosen < 0.7:
            return Step("receiver", "open", {"number": number})
        if chosen < 0.82:
            return Step("receiver", "close", {"number": number})
        if chosen < 0.95:
            return Step("receiver", "exchange", {"number": number})
        return Step("receiver", "reopen", {})

    @staticmethod
    def _with_options(random: random.Random, step: Step) -> Step:
        if step.name not in ("open", "exchange"):
            return step
        chosen = {key: random.random() < 0.5 for key in ("no_local", "retain_as_published")}
        return Step(step.role, step.name, {**step.arguments, **chosen})

    @classmethod
    def _faults(cls, random: random.Random, protocol: str, roles: list[str], *, is_steady: bool) -> list[Fault]:
        if random.random() < 0.1:
            return []
        makers: list[Any] = [lambda: ("cut", {"role": random.choice(roles)})] * (5 if is_steady else 3)
        if protocol != "memory":
            kinds = AMQP_FAULTS if protocol == "amqp" else MQTT_FAULTS
            some = [*roles, None]
            makers = [
                *makers,
                lambda: ("black_hole", {"role": random.choice(some), "seconds": span(random, 0.01, 60.0)}),
                lambda: ("stall", {"role": random.choice(some), "seconds": span(random, 0.01, 10.0)}),
                lambda: ("refuse", {"seconds": span(random, 0.01, 20.0)}),
                lambda: ("slow_network", {"seconds": span(random, 0.1, 20.0), "longest": span(random, 0.001, 1.0),
                                          "piece": random.choice((1, 3, 50, 65_536))}),
            ]  # fmt: skip
            if not is_steady:
                makers += [
                    lambda: ("restart_broker", {"seconds": span(random, 0.01, 10.0), "is_kill": random.random() < 0.5}),
                    lambda: ("broker", {"seconds": span(random, 0.1, 20.0), **random.choice(kinds)}),
                    lambda: ("kill", {"role": random.choice(roles), "seconds": span(random, 0.01, 10.0),
                                      "vanishes": random.random() < 0.3}),
                ]  # fmt: skip
        if protocol.startswith("mqtt") and not is_steady:
            makers.append(lambda: ("forget_sessions", {"seconds": span(random, 0.01, 10.0)}))
        faults: list[Fault] = []
        for _ in range(random.choice((1, 2, 2, 3, 4, 6))):
            name, arguments = random.choice(makers)()
            if name != "forget_sessions" or name not in {fault.name for fault in faults}:
                faults.append(Fault(span(random, 1e-3, 15.0), name, arguments))
        return sorted(faults, key=lambda fault: fault.at)
