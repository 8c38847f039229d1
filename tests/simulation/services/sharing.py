"""Shared queues: groups whose members take messages in turns, hold, settle and reject them, and come and go.

What is promised, and checked (``docs/channels.md``, ``docs/guarantees.md``, ``docs/extensions.md``, ``docs/mqtt.md``):

- each message that was confirmed is handled by a member of each group, becomes a dead letter, is discarded where
  ``maxDeliveries`` says so, or has expired; what a member held that closed or crashed, another one handles;
- no two members of a group have a message, unless it was rejected, or its holder has closed or lost its connection;
- ``prefetch`` bounds the messages in hand, at the broker and in the program;
- a rejected message comes again, marked as redelivered, or is a dead letter with the reason in its headers; it is one
  no sooner than the settings say, and does not come again behind that;
- a verdict is refused only if a connection was lost or a stream closed;
- a message that has expired is neither sent nor delivered by the broker, and none expires too soon;
- a message that does not fit the model of a stream or handler is not handed out, and ends none of them; it becomes a
  dead letter that says ``invalid``, if there is a channel for them;
- credentials that change lose and repeat nothing, see :mod:`.tokens`.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging import MessagingError
from tests.simulation.brokers.amqp import AmqpBroker
from tests.simulation.brokers.mqtt.broker import MqttBroker
from tests.simulation.brokers.mqtt.settings import MqttSettings
from tests.simulation.brokers.mqtt.topics import SharedGroup
from tests.simulation.fault_plans import CHANNEL_FAULTS, Breaks, draw_faults
from tests.simulation.plans import Fault, Plan, Step
from tests.simulation.services import messages
from tests.simulation.services.messages import SLACK, open_outcomes
from tests.simulation.services.sharing_ledger import CHANNEL, DEAD, Delivery, Ledger, Sent
from tests.simulation.services.sharing_worker import Letters, Worker
from tests.simulation.services.tokens import METHOD, Issuer, draw_credentials, draw_rotations
from tests.simulation.simulation import Keeper, Role, Simulation, scheduling, span

if TYPE_CHECKING:
    import random

    from tests.simulation.world.world import Host

#: a time to live that no run takes, seconds
_LONG: Final = 7200.0


class Publisher(messages.Publisher):
    """Publishes messages, some of them with a time to live."""

    simulation: Sharing  # type: ignore[assignment]

    def do_publish(
        self, count: int, size: int, ttl: float | None = None, priority: int | None = None, malformed: int = 0
    ) -> None:
        """Step: publish so many messages at once; the last ``malformed`` of them fit no model."""
        options, ledger = self.simulation.plan.options, self.simulation.ledger
        timeout = options["publisher"]["timeout"]
        for left in range(count, 0, -1):
            message = f"{self.name}:{self.number}"
            self.number += 1
            now = self.world.scheduler.now
            ledger.sent[message] = "sent"
            more = ledger.more[message] = Sent(now, inf if ttl is None else ttl, is_malformed=left <= malformed)
            ledger.due[message] = now + timeout + SLACK
            payload = message.encode().ljust(size, b".")
            if options["is_typed"] and not more.is_malformed:
                payload = b'"%s"' % payload  # JSON
            try:
                promise = self.m.publish(CHANNEL, payload, time_to_live=ttl, priority=priority, **options["publish"])
            except MessagingError as error:
                self._settled(message, error)
                continue
            self.promises[message] = promise
            if options["is_durable"]:
                promise.stored.add_done_callback(lambda stored, message=message: self._stored(message, stored))
            promise.add_done_callback(
                lambda promise, message=message: self._settled(message, promise.exception(0))  # type: ignore[misc]
            )

    def _settled(self, message: str, error: BaseException | None) -> None:
        more, now = self.simulation.ledger.more[message], self.world.scheduler.now
        super()._settled(message, error)
        limit = min(more.ttl, self.simulation.plan.options["publisher"]["timeout"])
        if type(error).__name__ == "DeadlineError" and now < more.at + limit - 1e-6:
            self.simulation.broken(f"{message} failed {more.at + limit - now:g} s before its deadline")


class Sharing(Simulation):
    """See the module."""

    name = "sharing"

    # --- brokers

    def make_broker(self, protocol: str, host: Host) -> Any:
        """See ``Simulation``: a broker that asks who has issued a secret."""
        self.issuer = issuer = Issuer(self) if self.plan.options["credentials"] else None
        if protocol == "amqp":
            broker = AmqpBroker(host)
            if issuer is not None:
                broker.login = issuer.is_valid
            return broker
        settings = MqttSettings(max_queued=0, redistribute_shared=True, share_to_connected=True)
        if issuer is not None:
            settings.auth_method = METHOD
            settings.authenticate = lambda _client_id, username, secret: issuer.is_valid(
                username, (secret or b"").decode()
            )
        return MqttBroker(host, settings)

    def url(self) -> str:
        """See ``Simulation``."""
        url = super().url()
        return url.replace("guest:guest@", "") if self.plan.options["credentials"] else url

    def connect(self, role: Role, **settings: Any) -> Any:
        """See ``Simulation``: with credentials that change, if the plan has some."""
        if self.plan.options["has_envelope"]:
            settings["envelope"] = True
        issuer = self.issuer if self.protocol != "memory" else None
        if issuer is None:
            return super().connect(role, **settings)
        import messaging

        role.note(f"connect {settings} with credentials".replace(str(self.world.disk.folder), "disk"))
        m = messaging.connect(self.url(), **settings, **issuer.settings(role))
        issuer.watch(role, m)
        return m

    def _listen(self) -> None:
        """Have the ledger told what the broker does."""
        ledger, broker = self.ledger, self.broker
        if isinstance(broker, AmqpBroker):
            broker.on_accepted = lambda _exchange, key, body: self._taken(key == "orders.new", body)
            broker.on_delivered = self._handed_to
            broker.on_dropped = lambda reason, _exchange, _key, body: ledger.ended(ledger.message(body), "", reason)
        elif broker is not None:
            broker.on_accepted = lambda _client_id, topic, payload, _qos: self._taken(topic == CHANNEL, payload)
            broker.on_delivered = lambda _client_id, topic, payload, _qos, _again: (
                ledger.handed(ledger.message(payload)) if topic == CHANNEL else None
            )
            broker.on_dropped = lambda reason, client_id, topic, payload, _qos: (
                ledger.ended(ledger.message(payload), client_id, reason) if topic == CHANNEL else None
            )

    def _taken(self, is_ours: bool, payload: bytes) -> None:
        message = self.ledger.message(payload)
        if not is_ours:
            return
        self.ledger.taken(message)
        if isinstance(self.broker, MqttBroker) and message in self.ledger.more:
            found = [
                each.members[0].group
                for each in self.broker.router.receivers(CHANNEL)
                if isinstance(each, SharedGroup) and each.members
            ]
            for group in self.groups:
                if group not in found:
                    self.ledger.more[message].unrouted[group] = None

    def _handed_to(self, consumer: Any, body: bytes) -> None:
        if consumer.queue.name not in self.groups:
            return
        self.ledger.handed(self.ledger.message(body))
        prefetch = self.plan.options["subscribe"].get("prefetch")
        # "On AMQP and memory:// the broker keeps to it as well" (``docs/guarantees.md``)
        if prefetch is not None and consumer.in_flight > prefetch:
            self.broken(f"the broker has delivered {consumer.in_flight} messages to a member, of {prefetch}")

    # --- what the ledger asks

    def members(self, group: str) -> list[str]:
        """Return the names of the members of a group."""
        return [each.name for each in self.roles if isinstance(each, Worker) and each.name.partition("-")[0] == group]

    def has_broken(self, role: str, begin: float, end: float) -> bool:
        """Return whether a connection of a role ended in that time."""
        if self.protocol == "memory":
            # the loop of the broker makes the cut, and may be held up before
            begin -= self.plan.options["longest"] if self.plan.options["hold_up"] else 0.0
            return any(begin <= moment <= end and name in (role, None) for moment, name in self.cuts)
        # the channel, or the consumer alone, may have ended as well
        return self.may_end_channels or self.breaks.between(role, begin, end)

    def has_any_trouble(self) -> bool:
        """Return whether a member of any group has lost a connection, or closed a stream."""
        return any(self.ledger.has_trouble(group, 0.0) for group in self.groups)

    def may_duplicate(self, message: str) -> bool:
        """Return whether a message may have been published twice, or come twice after a delay of its redelivery."""
        if self.protocol == "memory":
            return self.has_broken(message.partition(":")[0], self.ledger.more[message].at, inf)
        return self.delays_redelivery

    def note_delivery(self, group: str, message: str, delivery: Delivery, is_again: bool) -> None:
        """Write a delivery to the history."""
        self.world.note(delivery.member, f"{message} came to {group}" + (" again" if is_again else ""))

    def settings_of(self, role: Role) -> dict[str, Any]:
        """Return the settings of an instance that consumes."""
        settings = dict(self.plan.options["consumer"])
        if self.protocol.startswith("mqtt") and (self.plan.options["has_session"] or isinstance(role, Letters)):
            settings |= {"client_id": role.name, "clean_start": False}
            if self.protocol == "mqtt5":
                settings["session_expiry"] = 86_400
        elif self.protocol.startswith("mqtt"):
            settings["client_id"] = role.name
        return settings

    # --- running

    def begin(self) -> None:
        """See ``Simulation``."""
        options = self.plan.options
        faults = self.plan.faults
        if self.service is not None:
            self.breaks = self.service.broker = Breaks(self.broker, self.world.scheduler)
        self.groups: dict[str, int] = options["groups"]
        #: whether no fault happens; and whether no thread is held up, either
        self.is_calm = not faults
        self.is_quick = self.is_calm and not options["hold_up"]
        #: a broker that was killed may have lost the answers of its clients
        self.restarts = any(each.name == "restart_broker" for each in faults)
        self.may_end_channels = any(name in each.arguments for each in faults for name in CHANNEL_FAULTS)
        #: whether deliveries are counted that no program has seen
        self.counts_unseen = self.protocol == "memory" or "queue_type" in options["subscribe"]
        self.delays_redelivery = "redelivery_delay" in options["subscribe"]
        self.cuts: list[tuple[float, str | None]] = []
        self.ledger = Ledger(self)
        self._listen()
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        if "dead_letter_channel" in options["subscribe"]:
            self.roles.append(Letters(self, "letters"))
        for group, size in self.groups.items():
            self.roles += [Worker(self, f"{group}-{number + 1}") for number in range(size)]
        self.roles += [Publisher(self, f"publisher-{number + 1}") for number in range(options["publishers"])]

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        ledger = self.ledger
        for message, state in ledger.sent.items():
            if state == "sent":
                return False
            if state in ("confirmed", "stored"):
                for group in self.groups:
                    if not ledger.is_through(group, message):
                        return False
        return True

    def judge(self) -> None:
        """See ``Simulation``."""
        ledger, may_arrive = self.ledger, open_outcomes(self.plan)
        for message, state in ledger.sent.items():
            arrived = [group for group in self.groups if (group, message) in ledger.deliveries]
            if state == "sent":
                self.broken(f"the promise of {message} has no outcome")
            elif state in ("confirmed", "stored"):
                for group in self.groups:
                    if not ledger.is_through(group, message):
                        self.broken(f"{message} was {state}, and is lost to {group}")
            elif state not in may_arrive and arrived:
                self.broken(f"{message} arrived although its promise failed with {state}")

    # --- faults

    def fault_cut(self, role: str | None) -> None:
        """See ``Simulation``."""
        self.cuts.append((self.world.scheduler.now, role))
        super().fault_cut(role)

    def fault_restart_broker(self, seconds: float, is_kill: bool) -> None:
        """See ``Simulation``."""
        self.ledger.restarted = self.world.scheduler.now
        super().fault_restart_broker(seconds, is_kill)

    def fault_issuer(self, seconds: float, failure: str) -> None:
        """Fault: the providers of credentials fail."""
        issuer = self.issuer
        if issuer is not None:
            issuer.failure = failure
            self._for(seconds, "failing providers", lambda: setattr(issuer, "failure", ""))

    def fault_rotate(self, role: str | None, is_hard: bool) -> None:
        """Fault: the credentials that a role has, or all, are replaced."""
        if self.issuer is not None:
            self.issuer.revoke(role, is_hard=is_hard)

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        is_amqp, is_mqtt = protocol == "amqp", protocol.startswith("mqtt")
        groups = {"a": random.choice((1, 2, 2, 3))}
        if random.random() < 0.25:
            groups["b"] = random.choice((1, 2))
        way = random.choice(("on", "coroutine", "iterator", "manual", "manual", "manual"))
        has_session = not is_mqtt or random.random() < 0.65
        has_envelope = protocol == "mqtt311" and random.random() < 0.5
        publisher: dict[str, Any] = {
            "timeout": random.choice((20.0, 60.0, 600.0)),
            "reconnect_max": random.choice((1.0, 5.0, 30.0)),
        }
        consumer: dict[str, Any] = {"reconnect_max": random.choice((1.0, 5.0, 30.0))}
        subscribe: dict[str, Any] = {"qos": random.choice((1, 2)) if is_mqtt else 1}
        if has_session and random.random() < (0.7 if is_mqtt else 0.3):
            subscribe["keep_subscription"] = True
        publish: dict[str, Any] = {"qos": random.choice((1, 2))} if is_mqtt else {"guaranteed_delivery": True}
        concurrency = random.choice((1, 2, 4)) if way in ("on", "coroutine") else 1
        if random.random() < 0.8:
            subscribe["prefetch"] = random.choice((concurrency, concurrency + 1, 5))
        if random.random() < 0.3:
            subscribe["buffer_size"] = random.choice((1, 2, 5))
        if way == "iterator" and not is_mqtt and random.random() < 0.5:
            subscribe["auto_acknowledge"] = True
        rejects = random.choice((0, 1, 3)) if way != "iterator" else 0
        if rejects and random.random() < 0.6:
            if random.random() < 0.7:
                subscribe["dead_letter_channel"] = DEAD
            if "dead_letter_channel" not in subscribe or random.random() < 0.6:
                subscribe["max_deliveries"] = random.choice((1, 2, 3))
            rejects = random.choice((rejects, 6, 10))
        if is_mqtt:
            for settings in (publisher, consumer):
                settings["keepalive"] = random.choice((2, 10, 60))
        elif is_amqp:
            if random.random() < 0.4:
                subscribe["queue_type"] = random.choice(("classic", "quorum"))
            for settings in (publisher, consumer):
                settings["heartbeat"] = random.choice((2, 10, 60))
        if not is_mqtt and rejects and random.random() < 0.2:
            subscribe["redelivery_delay"] = random.choice((0.05, 0.5))
        has_ttl = protocol != "mqtt311" or has_envelope
        names = [f"{group}-{number + 1}" for group, size in groups.items() for number in range(size)]
        publishers = random.choice((1, 1, 2))
        steps = cls._publishing(
            random,
            publishers,
            has_ttl=has_ttl and random.random() < 0.6,
            has_priority=not is_mqtt and random.random() < 0.4,
        )
        steps += cls._consuming(random, names, way)
        roles = sorted({step.role for step in steps})
        if protocol == "memory" and random.random() < 0.3:
            consumer["max_queue_length"] = publisher["max_queue_length"] = random.choice((5, 50))
        credentials = draw_credentials(random, protocol)
        faults = draw_faults(random, protocol, roles)
        if protocol == "memory" and faults:
            faults += [Fault(span(random, 1e-3, 10.0), "cut", {"role": random.choice(roles)}) for _ in range(2)]
        if credentials and (faults or random.random() < 0.3):
            faults += draw_rotations(random, roles)
        if has_envelope:  # "so the clocks of publishers and subscribers must agree" (``docs/extensions.md``)
            faults = [fault for fault in faults if fault.name != "wall_clock"]
        is_typed = random.random() < 0.3 and cls._make_typed(random, way, subscribe, steps)
        options = {
            **scheduling(random),
            "groups": groups,
            "publishers": publishers,
            "way": way,
            "concurrency": concurrency,
            "rejects": rejects,
            "publisher": publisher,
            "consumer": consumer,
            "publish": publish,
            "subscribe": subscribe,
            "has_session": has_session,
            "has_envelope": has_envelope,
            "is_typed": is_typed,
            "credentials": credentials,
            "is_durable": random.random() < 0.25,
            "has_late_letters": False,
        }
        if "dead_letter_channel" in subscribe and protocol != "mqtt311" and random.random() < 0.25:
            # "A dead letter that nothing receives is not lost where the broker says so"
            options["has_late_letters"] = True
            steps += [
                Step("letters", "pause", {"seconds": random.choice((0.5, 3.0, 20.0))}),
                Step("letters", "begin", {}),
            ]
        return Plan(options, tuple(steps), tuple(sorted(faults, key=lambda fault: fault.at)))

    @staticmethod
    def _make_typed(random: random.Random, way: str, subscribe: dict[str, Any], steps: list[Step]) -> bool:
        """Have some messages fit no model, and streams say what becomes of those; return whether they do."""
        if "auto_acknowledge" in subscribe:
            return False
        if way == "iterator":
            subscribe |= random.choice(({"dead_letter_channel": DEAD}, {"max_deliveries": random.choice((1, 2, 3))}))
        elif way == "manual" and not {"dead_letter_channel", "max_deliveries"} & subscribe.keys():
            return False  # "or it comes again for ever" (``docs/guarantees.md``)
        for step in steps:
            if step.name == "publish" and random.random() < 0.3:
                step.arguments["malformed"] = random.choice((1, step.arguments["count"]))
        return True

    @staticmethod
    def _publishing(random: random.Random, publishers: int, *, has_ttl: bool, has_priority: bool) -> list[Step]:
        steps: list[Step] = []
        for number in range(publishers):
            name = f"publisher-{number + 1}"
            for _ in range(random.randint(10, 25)):
                chosen = random.random()
                if chosen < 0.6:
                    arguments: dict[str, Any] = {
                        "count": random.choice((1, 1, 2, 5, 12)),
                        "size": random.choice((0, 0, 40, 400)),
                    }
                    if has_ttl and random.random() < 0.6:
                        arguments["ttl"] = random.choice((span(random, 0.01, 5.0), 1.0, 2.0, _LONG))
                    if has_priority and random.random() < 0.6:
                        arguments["priority"] = random.choice((1, 5, 9))
                    steps.append(Step(name, "publish", arguments))
                elif chosen < 0.8:
                    steps.append(Step(name, "pause", {"seconds": span(random, 1e-4, 3.0)}))
                elif chosen < 0.96:
                    steps.append(Step(name, "wait", {}))
                else:
                    steps.append(Step(name, "reopen", {}))
        return steps

    @staticmethod
    def _consuming(random: random.Random, names: list[str], way: str) -> list[Step]:
        steps: list[Step] = []
        for name in names:
            for _ in range(random.randint(7, 14)):
                chosen = random.random()
                if chosen < 0.4:
                    steps.append(Step(name, "pause", {"seconds": span(random, 1e-3, 3.0)}))
                elif chosen < 0.75:
                    if way != "manual":
                        steps.append(Step(name, "slow", {"seconds": random.choice((0.0, span(random, 1e-3, 0.3)))}))
                    elif random.random() < 0.5:
                        steps.append(Step(name, "hold", {"count": random.choice((0, 1, 3, 10, 50))}))
                    else:
                        steps.append(Step(name, "settle", {"count": random.choice((1, 2, 5, 50))}))
                elif chosen < 0.9:
                    steps.append(
                        Step(name, "reopen_stream", {"seconds": random.choice((0.0, span(random, 1e-3, 2.0)))})
                    )
                else:
                    steps.append(Step(name, "reopen", {"seconds": random.choice((0.0, span(random, 1e-3, 2.0)))}))
        return steps
