"""Requests and replies: requesters and responders that keep what the broker has, and come back.

What is promised, and checked (``docs/reply-to.md``, ``docs/faults.md``):

- each request has an outcome by its deadline, or when its instance closes: its own reply, or an error;
- a request that failed as not sent, or as not routable, is never handled; nor is one whose call raised;
- the replies of a stream come in order and complete, without gaps and repetitions; an error comes behind them;
- handlers work on as many requests as they may, and on none after their instance was closed;
- a handler of many replies ends when its requester wants no more, or is gone;
- where the protocol keeps requests for the next responder, no request is lost with one;
- when all faults are over the next requests are answered, and the counters agree with the outcomes;
- nothing is left at the broker: no subscription, no queue.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import OutcomeUnknownError, ReplyError
from tests.simulation.fault_plans import watch_channels
from tests.simulation.plans import Plan, Step
from tests.simulation.services.messages import Messages
from tests.simulation.services.requests_ledger import (
    ANSWERED,
    CLOSED,
    KILLED,
    NEVER_HANDLED,
    SLACK,
    Ask,
    Ledger,
)
from tests.simulation.services.requests_requester import Requester
from tests.simulation.services.requests_responder import Responder
from tests.simulation.simulation import Keeper, Role, Simulation, scheduling, span

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from messaging import MessagingError

#: faults that leave the connections, and the processes, as they are
_HARMLESS: Final = frozenset({"slow_sync", "wall_clock", "failing_sync"})
#: a deadline that no request misses without a fault, seconds
_LONG: Final = 300.0
#: verbs that handlers with one reply understand, by the name of their channel
_VERBS: Final = {
    "one": ("echo", "echo", "echo", "fail", "ask"),
    "two": ("echo", "echo", "fail"),
    "later": ("later", "later", "never"),
}


class Requests(Simulation):
    """Requesters and responders."""

    name = "requests"

    def url(self, **query: Any) -> str:
        """See ``Simulation``. Without properties a request needs an envelope."""
        url = super().url(**query)
        return url + "&envelope=true" if self.protocol == "mqtt311" else url

    def begin(self) -> None:
        """See ``Simulation``."""
        options = self.plan.options
        self.ledger = Ledger()
        self.most_pending: int = options["requester"].get("max_pending_requests", 10_000)
        self.responders = [Responder(self, f"responder-{number + 1}") for number in range(options["responders"])]
        self.requesters = [Requester(self, f"requester-{number + 1}") for number in range(options["requesters"])]
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        self.roles += [*self.responders, *self.requesters]
        self._is_resting = False
        beats = [
            each.get("keepalive", each.get("heartbeat", 0)) for each in (options["responder"], options["requester"])
        ]
        #: time after which each lost connection has been noticed, seconds
        self.notice = 1.0 if {fault.name for fault in self.plan.faults} <= _HARMLESS else 2.0 * max(beats) + 1.0
        faults = {fault.name for fault in self.plan.faults} - _HARMLESS
        steps = {(step.role.partition("-")[0], step.name) for step in self.plan.steps}
        is_calm = options["hold_up"] == 0.0 or options["longest"] <= 0.2
        killed = {fault.arguments["role"].partition("-")[0] for fault in self.plan.faults if fault.name == "kill"}
        only_responders = faults <= {"kill"} and killed <= {"responder"}
        # a subscription that ends leaves nothing in a session; of overlapping queues each leaves a request to the other
        # while the handlers that have it are not the same
        is_kept = options["keeps"] and (
            ("responder", "unregister") not in steps or (self.protocol == "amqp" and not options["overlaps"])
        )
        #: where the broker closes channels, for no reason: when it does
        self.breaks = watch_channels(self)
        #: nothing goes wrong between the roles
        self.is_quiet = is_calm and not faults
        is_steady = not {("responder", "reopen"), ("responder", "unregister")} & steps
        #: requests have to be answered whatever becomes of the responders
        self.must_answer = is_calm and ((self.is_quiet and is_steady) or (only_responders and is_kept))
        self.may_stop = bool(faults) or not is_steady
        #: replies may reach an instance that comes after the one that asked
        self.may_get_foreign = not self.is_quiet or ("requester", "reopen") in steps
        #: a request is handled by one handler of each responder, or of one of them
        self.is_handled_once = self.is_quiet and is_steady and ("responder", "rank") not in steps

    def qos(self, level: int) -> dict[str, Any]:
        """Return the keywords of a request with this quality of service."""
        return {"qos": level} if self.protocol.startswith("mqtt") or level == 0 else {}

    # --- books

    def ask(self, role: Role, name: str, channel: str, verb: str, **terms: Any) -> Ask:
        """Enter a request that ``role`` is about to make."""
        ask = Ask(name, role.name, channel, verb, **terms)
        self.ledger.add(ask)
        ask.asked = self.world.scheduler.now
        ask.due = ask.asked + ask.timeout + SLACK
        role.note(f"{name} to {channel}: {verb}")
        return ask

    def killed(self, role: Role) -> None:
        """Note that the former process of ``role`` was killed, if there was one: its requests have no outcome."""
        for ask in self.ledger.waiting:
            if ask.requester == role.name:
                ask.state = KILLED

    def settled(self, ask: Ask, error: BaseException | None, payload: bytes | None) -> None:
        """Enter the outcome of a request with one reply."""
        self._outcome(ask, error)
        instance = ask.instance
        if type(error) is OutcomeUnknownError and self._is_full(ask):
            self.ledger.held.append((ask.asked, self.world.scheduler.now))
        if instance is not None:
            if error is None:
                instance.answered += 1
            elif isinstance(error, ReplyError):
                instance.faults += 1
            else:
                instance.failed += 1
        if error is None and payload != ask.reply():
            self.broken(f"{ask.name} got the reply {payload!r}")
        if error is None and ask.fails and ask.verb != "items":
            self.broken(f"{ask.name} got a reply, although its handler fails")

    def _is_full(self, ask: Ask) -> bool:
        """Return whether a handler has made this request, and unanswered ones fill the window of its instance."""
        if not self.protocol.startswith("mqtt") or not ask.is_inner or ask.instance is None:
            return False
        session = self.broker.sessions.get(ask.instance.m.runtime.get_runtime_dto().connection.client_id)
        return session is not None and session.connection is not None and not session.quota

    def stream_ended(self, ask: Ask, error: MessagingError | None, state: str) -> None:
        """Enter the end of a stream of replies."""
        if error is None and not state and ask.is_given_up:
            state = CLOSED
        self._outcome(ask, error, state)
        if ask.items != [*range(len(ask.items))]:
            self.broken(f"the replies to {ask.name} are {ask.items}")
        count = ask.count if ask.verb == "items" else 1
        if error is None and not state and (ask.fails or len(ask.items) != count):
            self.broken(f"{ask.name} has {len(ask.items)} replies of {count} at its end")

    def _outcome(self, ask: Ask, error: BaseException | None, state: str = "") -> None:
        if ask.state:
            self.broken(f"{ask.name} has a second outcome: {error!r} after {ask.state}")
        ask.state = state or (ANSWERED if error is None else type(error).__name__)
        ask.ended = self.world.scheduler.now
        if isinstance(error, ReplyError):
            ask.reason = error.kind
        self.world.note(ask.requester, f"{ask.name} {ask.state} {ask.reason}".rstrip())
        if self.world.scheduler.now > ask.due:
            self.broken(f"{ask.name} took until {ask.state} for longer than its deadline")

    # --- rest

    def probes(self) -> list[tuple[str, str]]:
        """Return channels and verbs that have to be answered when all faults are over."""
        verbs = {"one": "echo", "two": "echo", "later": "later", "many": "items"}
        names = dict.fromkeys(name for each in self.responders for name in each.registered)
        return [(f"svc/{name}", verbs[name]) for name in names if name in verbs]

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        if not self._is_resting:
            self._is_resting = True
            for role in (*self.responders, *self.requesters):
                role.process.start(role.look, "look")
        return (
            all(each.is_checked for each in self.requesters)
            and not self.ledger.waiting
            and not any(self._working())
            and not [*self._at_broker()]
        )

    def _working(self) -> Iterator[str]:
        for served in self.ledger.served:
            if served.active and any(served.instance is each.instance for each in self.responders):
                yield f"{served.active} requests on {served.channel}"

    def judge(self) -> None:
        """See ``Simulation``."""
        for ask in self.ledger.asks.values():
            self._judge(ask)
        for responder in self.responders:
            if not responder.is_online:
                self.broken(f"{responder.name} is not online: {responder.m.runtime.get_runtime_dto()}")
        for what in self._working():
            self.broken(f"handlers have not ended: {what}")
        for requester in self.requesters:
            if not requester.is_checked:
                self.broken(f"{requester.name} has not come to its end")
        for what in self._at_broker():
            self.broken(f"at the broker there is left: {what}")

    def _judge(self, ask: Ask) -> None:
        name = f"{ask.name} ({ask.verb} on {ask.channel}, timeout {ask.timeout:g})"
        if not ask.state:
            self.broken(f"{name} has no outcome")
        elif ask.handled and (ask.state in NEVER_HANDLED or ask.state.startswith("raised")):
            self.broken(f"{name} was handled, although it failed with {ask.state}")
        elif ask.state == ANSWERED and not ask.handled:
            self.broken(f"{name} was answered, but no handler has seen it")
        if ask.state == "RequestCancelledError" and not ask.is_cancelled:
            self.broken(f"{name} failed with {ask.state}, but was not cancelled")
        if ask.state == "ClosedError" and not ask.is_given_up:
            self.broken(f"{name} failed with {ask.state}, but its instance was not closed")
        if ask.state == "ConnectionLostError" and self.is_quiet:
            self.broken(f"{name} failed with {ask.state}, but no connection was lost")
        if ask.state == "ReplyError" and not (ask.reason == "PlannedError" and ask.fails):
            is_stopped = ask.reason == "ClosedError" and self.may_stop
            if not (is_stopped or self._is_refused(ask)) or ask.is_probe:
                self.broken(f"{name} failed with a ReplyError of kind {ask.reason}")
        if self.is_handled_once and ask.handled > (1 if self.plan.options["keeps"] else len(self.responders)):
            self.broken(f"{name} was handled {ask.handled} times")
        if self._is_owed(ask) and ask.state not in (ANSWERED, CLOSED, "ReplyError") and not self._is_held(ask):
            self.broken(f"{name} failed with {ask.state}, although it was kept for a responder")

    def _is_refused(self, ask: Ask) -> bool:
        """Return whether the broker may have refused the reply: it has closed a channel of a responder meanwhile."""
        breaks = self.breaks
        return breaks is not None and breaks.has_refused(ask.reason, ask.handlers, ask.asked, ask.ended)

    def _is_held(self, ask: Ask) -> bool:
        """Return whether the request ran out of time behind handlers that waited for replies in vain.

        "While they fill it, the broker sends the instance nothing else that is acknowledged, neither requests of other
        channels nor replies" (``docs/reply-to.md``, Where and how many). A window that stays full fails the probes.
        """
        if ask.is_probe or ask.state != "OutcomeUnknownError":
            return False
        return any(begin <= ask.ended <= end + SLACK for begin, end in self.ledger.held)

    def _is_owed(self, ask: Ask) -> bool:
        """Return whether the request has to be answered."""
        if ask.is_probe:
            return True
        if not self.must_answer or ask.is_given_up or ask.verb == "never" or ask.state == KILLED:
            return False
        if ask.timeout < _LONG or ask.qos == 0 or ask.state == "raised TooManyRequestsError":
            return False
        is_deferred = ask.verb == "later" and self.may_stop
        return not is_deferred and not (self.may_stop and self.plan.options["acknowledges_early"])

    def _at_broker(self) -> Iterator[str]:
        """Yield what requesters have left at the broker, beside the reply channels of their instances."""
        if self.protocol.startswith("mqtt") and not self.plan.options["has_sessions"]:
            for client, session in self.broker.sessions.items():
                replies = [name for name in session.subscriptions if not name.startswith(("svc/", "$share/"))]
                if len(replies) > 1:
                    yield f"subscriptions of {client}: {replies}"
        elif self.protocol == "amqp":
            for name, queue in self.broker.vhosts["/"].queues.items():
                if not name.startswith("svc-") and queue.owner is not None and "reply" in name:
                    yield f"queue {name}"

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        is_mqtt = protocol.startswith("mqtt")
        responders, requesters = random.choice((1, 1, 2)), random.choice((1, 1, 2))
        queue = random.random() < 0.5
        has_sessions = is_mqtt and random.random() < 0.4
        settings: list[dict[str, Any]] = []
        for _ in range(2):
            each: dict[str, Any] = {"reconnect_max": random.choice((1.0, 5.0, 30.0))}
            if is_mqtt:
                each["keepalive"] = random.choice((2, 10, 30))
            elif protocol == "amqp":
                each["heartbeat"] = random.choice((2, 10, 30))
                if random.random() < 0.2:
                    each["publish_window"] = random.choice((1, 2, 7))
            settings.append(each)
        responder, requester = settings
        responder["close_timeout"] = random.choice((1.0, 5.0, 30.0))
        if random.random() < 0.2:
            requester["max_pending_requests"] = random.choice((1, 3, 10))
        acknowledges_early = random.random() < 0.1
        overlaps = protocol != "mqtt311" and random.random() < 0.2
        channels = cls._channels(random, is_mqtt, queue, acknowledges_early, overlaps)
        roles = [f"responder-{number + 1}" for number in range(responders)]
        roles += [f"requester-{number + 1}" for number in range(requesters)]
        steps: list[Step] = []
        is_steady = random.random() < 0.4
        for role in roles:
            kind = cls._responder_step if role.startswith("responder") else cls._requester_step
            for _ in range(random.randint(5, 14) if role.startswith("responder") else random.randint(14, 34)):
                name, arguments = kind(random, protocol, [*channels], is_steady, has_sessions)
                if name == "rank" and queue and overlaps:  # all programs of overlapping queues need the same rankings
                    name, arguments = "pause", {"seconds": 0.01}
                steps.append(Step(role, name, arguments))
            if role.startswith("responder"):
                steps.append(Step(role, "restore", {}))
        faults = Messages._faults(random, protocol, roles)
        if random.random() < 0.3:
            faults = [
                replace(fault, arguments=fault.arguments | {"role": random.choice(roles[:responders])})
                if fault.name == "kill"
                else fault
                for fault in faults
                if fault.name == "kill" or fault.name in _HARMLESS
            ]
        options = {
            **scheduling(random),
            "responders": responders,
            "requesters": requesters,
            "channels": channels,
            "responder": responder,
            "requester": requester,
            "has_sessions": has_sessions,
            "is_durable": random.random() < 0.15,
            "overlaps": overlaps,
            "acknowledges_early": acknowledges_early,
            "keeps": queue if not is_mqtt else has_sessions and not queue and responders == 1,
        }
        return Plan(options, tuple(steps), tuple(faults))

    @staticmethod
    def _channels(
        random: random.Random, is_mqtt: bool, queue: bool, acknowledges_early: bool, overlaps: bool
    ) -> dict[str, dict[str, Any]]:
        ways = {
            "one": random.choice(("function", "coroutine", "function")),
            "two": random.choice(("function", "coroutine", "service")),
            "later": random.choice(("function", "coroutine")),
            "many": random.choice(("generator", "async generator", "observable", "list")),
        }
        if overlaps:
            ways["any"] = "generator"
        found: dict[str, dict[str, Any]] = {}
        prefetch, buffer_size = random.choice((None, None, 1, 5)), random.choice((None, None, 2, 5))
        for name, way in ways.items():
            extensions: dict[str, Any] = {"qos": random.choice((1, 2))} if is_mqtt else {}
            if queue:
                extensions["queue"] = f"svc-{name}"
            if acknowledges_early:
                extensions["auto_acknowledge"] = True
            if prefetch is not None:
                extensions["prefetch"] = prefetch
            if buffer_size is not None:
                extensions["buffer_size"] = buffer_size
            found[name] = {
                "channel": "svc/+" if name == "any" else f"svc/{name}",
                "way": way,
                "concurrency": random.choice((None, None, 1, 3)),
                "ranking": -1 if name == "any" else 0,
                "is_expected": random.random() < 0.5,
                "extensions": extensions,
            }
        return found

    @staticmethod
    def _responder_step(
        random: random.Random, protocol: str, names: list[str], is_steady: bool, has_sessions: bool
    ) -> tuple[str, dict[str, Any]]:
        chosen = random.random()
        if is_steady or chosen < 0.5:
            return "pause", {"seconds": span(random, 1e-4, 3.0)}
        if chosen < 0.68:
            return "unregister", {"name": random.choice(names)}
        if chosen < 0.86:
            return "register", {"name": random.choice(names)}
        if chosen < 0.9:
            return "rank", {"name": random.choice(names), "ranking": random.choice((-2, 0, 3))}
        return "reopen", {}

    @staticmethod
    def _requester_step(
        random: random.Random, protocol: str, names: list[str], is_steady: bool, has_sessions: bool
    ) -> tuple[str, dict[str, Any]]:
        chosen = random.random()
        qos = random.choice((0, 1, 1, 2, 2)) if protocol.startswith("mqtt") else random.choice((0, 1, 1, 1, 1, 1))
        timeout = random.choice((2.0, 20.0, _LONG, _LONG))
        pause = random.choice((0.0, 0.0, span(random, 1e-4, 0.3)))
        if chosen < 0.4:
            name = random.choice(("one", "one", "two", "later"))
            arguments = {
                "channel": f"svc/{name}",
                "verb": random.choice(_VERBS[name]),
                "count": random.choice((1, 1, 2, 5, 20)),
                "way": random.choice(("promise", "promise", "loop")),
                "is_given": random.random() < 0.15,
                "pause": pause,
                "qos": qos,
                "timeout": timeout,
            }
            return "ask", arguments
        if chosen < 0.62:
            count = random.choice((0, 1, 3, 20, 100))
            taken = random.choice((None, None, None, 1, 3))
            if taken is not None and protocol != "mqtt311" and not has_sessions and random.random() < 0.5:
                count, pause = 5_000, max(pause, 0.01)  # more than anybody takes
            fail_at = random.choice((0, min(1, count), count)) if count < 1000 and random.random() < 0.2 else None
            arguments = {
                "channel": "svc/many",
                "verb": "items",
                "count": count,
                "fail_at": fail_at,
                "pause": pause,
                "qos": qos or 1,
                "timeout": timeout,
                "taken": taken,
                "way": random.choice(("iterate", "iterate", "loop")),
                "slow": random.choice((0.0, 0.0, span(random, 1e-4, 0.3))),
                "buffer_size": random.choice((None, None, 1, 5)),
            }
            return "ask_many", arguments
        if chosen < 0.8:
            return "pause", {"seconds": span(random, 1e-4, 3.0)}
        if chosen < 0.9:
            return "wait", {}
        if chosen < 0.94:
            return "cancel", {"way": "promise"}
        if chosen < 0.97:
            return "close_streams", {}
        return "reopen", {}
