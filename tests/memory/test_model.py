"""The broker behind ``memory://`` against a model that keeps plain lists: nothing lost, nothing twice, all in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from messaging import Features, MessageContext
from messaging.model import Incoming, PublishOptions, SubscribeOptions, SubscriptionSpec, matcher, parse_url
from messaging_adapters.memory import MemoryAdapter, MemorySettings, broker, queues
from messaging_adapters.memory.broker import MemoryBroker
from messaging_adapters.memory.queues import MemoryConsumer, Queue, QueueLimits
from tests.doubles.plans import plan_of


@dataclass(eq=False)
class Sent:
    """A message in a queue of the model."""

    number: str
    payload: bytes
    channel: str
    priority: int | None
    qos: str
    expires: float | None
    retained: bool = False
    deliveries: int = 0


@dataclass(eq=False)
class Receiver:
    """A sink, and what the model knows of its consumer."""

    adapter: MemoryAdapter
    prefetch: int
    #: acknowledges everything at once, from within ``deliver``
    eager: bool
    arrived: list[Incoming] = field(default_factory=list)
    unsettled: list[tuple[Incoming, Sent]] = field(default_factory=list)
    paused: bool = False
    handle: MemoryConsumer | None = None

    def deliver(self, batch: Sequence[Incoming]) -> None:
        self.arrived += batch
        if self.eager:
            self.adapter.acknowledge([incoming.token for incoming in batch if incoming.token is not None])

    def fail(self, error: Exception) -> None:
        raise AssertionError(error)

    @property
    def credit(self) -> float:
        if self.paused:
            return 0
        return float("inf") if self.eager else self.prefetch - len(self.unsettled)


@dataclass(eq=False)
class Line:
    """A queue of the model: ``waiting`` is in the order in which it is to be handed out."""

    patterns: set[str]
    receivers: list[Receiver] = field(default_factory=list)
    waiting: list[Sent] = field(default_factory=list)
    #: found credit when they were published: nothing overtakes them any more
    due: list[Sent] = field(default_factory=list)

    def publish(self, sent: Sent) -> None:
        if len(self.receivers) == 1 and not self.waiting and not self.receivers[0].paused:
            receiver = self.receivers[0]
            if len(receiver.unsettled) + sum(each.qos != "0" for each in self.due) < receiver.prefetch:
                self.due.append(sent)
                return
        self.append(sent)

    def append(self, sent: Sent) -> None:
        at = sum((each.priority or 0) >= (sent.priority or 0) for each in self.waiting)
        self.waiting.insert(at, sent)

    def put_back(self, sent: Sent) -> None:
        sent.deliveries += 1
        at = sum((each.priority or 0) > (sent.priority or 0) for each in self.waiting)
        self.waiting.insert(at, sent)


CHANNELS = st.sampled_from(["a", "a/b", "c"])
PATTERNS = st.sampled_from(["a", "a/+", "#", "c"])
MESSAGES = st.tuples(
    CHANNELS,
    st.sampled_from([None, 1, 5]),
    st.sampled_from(["0", "1", "1"]),
    st.sampled_from([None, None, 2.0]),
    st.booleans(),
)


class BrokerMachine(RuleBasedStateMachine):
    """Publishers and consumers in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.patch = pytest.MonkeyPatch()
        for module in (broker, queues):
            self.patch.setattr(module, "clock", SimpleNamespace(monotonic=lambda: self.now))
        self.broker = MemoryBroker("model")
        self.adapter = MemoryAdapter(parse_url("memory://model"), MemorySettings(), "model")
        self.lines: dict[str | None, Line] = {}
        self.private: list[Line] = []
        self.retained: dict[str, Sent] = {}
        self.count = 0

    def teardown(self) -> None:
        self.patch.undo()

    def everywhere(self) -> Iterator[Line]:
        yield from self.private
        yield from self.lines.values()

    def receivers(self) -> list[tuple[Line, Receiver]]:
        return [(line, receiver) for line in self.everywhere() for receiver in line.receivers]

    def is_alive(self, sent: Sent) -> bool:
        return sent.expires is None or self.now < sent.expires

    @initialize()
    def begin(self) -> None:
        self.subscribe("#", None, 2, eager=False)

    @rule(pattern=PATTERNS, queue=st.sampled_from([None, "q", "q"]), prefetch=st.integers(1, 3), eager=st.booleans())
    def subscribe(self, pattern: str, queue: str | None, prefetch: int, eager: bool) -> None:
        receiver = Receiver(self.adapter, prefetch, eager)
        if queue is None:
            line = Line({pattern})
            self.private.append(line)
            for channel, sent in [*self.retained.items()]:
                if not self.is_alive(sent):
                    del self.retained[channel]
                elif matcher(pattern)(channel):
                    line.append(replace(sent, retained=True))
        else:
            line = self.lines.setdefault(queue, Line(set()))
            line.patterns.add(pattern)
        line.receivers.append(receiver)
        options = SubscribeOptions(qos="1", queue=queue, prefetch=prefetch)
        receiver.handle = self.broker.subscribe(SubscriptionSpec(pattern, None, options), receiver, QueueLimits(1000))

    @rule(messages=st.lists(MESSAGES, min_size=1, max_size=5))
    def publish(self, messages: list[tuple[str, int | None, str, float | None, bool]]) -> None:
        touched: set[Queue] = set()
        for channel, priority, qos, ttl, retain in messages:
            self.count += 1
            number = str(self.count)
            payload = b"" if retain and self.count % 3 == 0 else b"%d" % self.count
            options = PublishOptions(qos=qos, retain=retain, priority=priority, time_to_live=ttl)
            plan = plan_of(MessageContext(channel, correlation_id=number), options)
            outgoing: Any = SimpleNamespace(payload=payload, plan=plan, correlation_id=number)
            queues = self.broker.route(plan)
            self.broker.publish(outgoing, queues)
            touched.update(queues)
            expires = None if ttl is None else self.now + ttl
            for line in self.everywhere():
                if any(matcher(pattern)(channel) for pattern in line.patterns):
                    line.publish(Sent(number, payload, channel, priority, qos, expires))
            if retain and payload:
                self.retained[channel] = Sent(number, payload, channel, priority, qos, expires)
            elif retain:
                self.retained.pop(channel, None)
        for queue in touched:
            queue.dispatch()

    @precondition(lambda self: any(receiver.unsettled for _, receiver in self.receivers()))
    @rule(data=st.data(), accept=st.booleans())
    def settle(self, data: st.DataObject, accept: bool) -> None:
        line, receiver = data.draw(st.sampled_from([each for each in self.receivers() if each[1].unsettled]))
        chosen = data.draw(st.lists(st.sampled_from(receiver.unsettled), min_size=1, unique_by=id))
        chosen.sort(key=receiver.unsettled.index)
        tokens = [incoming.token for incoming, _ in chosen]
        receiver.unsettled = [each for each in receiver.unsettled if each not in chosen]
        if accept:
            self.adapter.acknowledge(tokens)
        else:
            for _, sent in reversed(chosen):
                line.put_back(sent)
            self.adapter.reject(tokens)
        # settling again is without effect
        self.adapter.acknowledge(tokens)
        self.adapter.reject(tokens)

    @rule(data=st.data())
    def pause_or_resume(self, data: st.DataObject) -> None:
        if self.receivers():
            _, receiver = data.draw(st.sampled_from(self.receivers()))
            receiver.paused = not receiver.paused
            (self.adapter.pause if receiver.paused else self.adapter.resume)(receiver.handle)

    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        if not self.receivers():
            return
        line, receiver = data.draw(st.sampled_from(self.receivers()))
        assert receiver.handle is not None
        line.receivers.remove(receiver)
        if line in self.private:
            self.private.remove(line)
        for _, sent in reversed(receiver.unsettled):
            line.put_back(sent)
        self.broker.unsubscribe(receiver.handle)
        self.broker.unsubscribe(receiver.handle)
        assert all(self.adapter.is_stale(incoming.token) for incoming, _ in receiver.unsettled)

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0

    @invariant()
    def what_can_be_handed_out_has_been(self) -> None:
        for line in self.everywhere():
            due, line.due = line.due, []
            line.waiting = [sent for sent in line.waiting if self.is_alive(sent)]
            credit = sum(receiver.credit for receiver in line.receivers) - sum(sent.qos != "0" for sent in due)
            while line.waiting and credit > 0:
                due.append(line.waiting.pop(0))
                credit -= due[-1].qos != "0"
            for receiver in line.receivers:
                self.compare(receiver, due)
            assert due == []

    def compare(self, receiver: Receiver, due: list[Sent]) -> None:
        """What ``receiver`` got is ``due``, in its order; takes it out of there."""
        arrived, receiver.arrived = receiver.arrived, []
        at = 0
        for incoming in arrived:
            while due[at].number != incoming.correlation_id:
                at += 1
            sent = due.pop(at)
            assert (incoming.payload, incoming.channel) == (sent.payload, sent.channel)
            told = incoming.extensions
            assert incoming.delivery_count == sent.deliveries + 1
            assert told.get("redelivered", False) == bool(sent.deliveries)
            assert told.get(Features.EXTENSION_PRIORITY) == sent.priority
            assert told.get(Features.EXTENSION_RETAIN, False) == sent.retained
            assert (Features.EXTENSION_TIME_TO_LIVE in told) == (sent.expires is not None)
            assert (incoming.token is None) == (sent.qos == "0")
            if incoming.token is not None and not receiver.eager:
                receiver.unsettled.append((incoming, sent))


TestBrokerAgainstModel = BrokerMachine.TestCase
TestBrokerAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
