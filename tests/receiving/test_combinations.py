"""Ways to consume, ways to settle and extensions, combined: every message is accepted or dead-lettered, once.

``memory://`` and the public API throughout. Which combinations are tried is generated; the expected outcome follows
from a script: how often each message is refused before it is accepted.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from reactivex import operators as ops

import messaging
from messaging import AcknowledgeMessageContextBuilder, DeadlineError, Message, MessageContext, MessageStream, Messaging
from messaging.services import ServiceRegistry
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread, results
from messaging_adapters.memory import broker as module
from tests.doubles.fake import on_loop
from tests.doubles.fixtures import QUICK
from tests.doubles.memory import broker_of, drop_and_reconnect

_numbers = itertools.count()

#: the same examples each time, and the first one that fails as it is: making it smaller takes as many waits in vain
QUICKLY = settings(max_examples=40, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))

#: how the messages of one subscription are consumed
KINDS = ("observer", "operator", "manual", "later", "filter", "handler", "iterator", "async")
#: of these, what a refusal ends the stream
ENDING = ("observer", "operator", "iterator", "async")


class RefusedError(Exception):
    """Raised by consumers that refuse by raising."""


class Ledger:
    """The expected and the actual outcome of each message. Thread safe."""

    def __init__(self, refusals: dict[bytes, int]) -> None:
        self._lock = threading.Lock()
        self.refusals = refusals
        self.attempts: Counter[bytes] = Counter()
        self.accepted: list[bytes] = []

    def decide(self, message: Message) -> bool:
        with self._lock:
            payload = message.payload
            self.attempts[payload] += 1
            accept = self.attempts[payload] > self.refusals[payload]
            if accept:
                self.accepted.append(payload)
            return accept

    def take_back(self, message: Message) -> None:
        with self._lock:
            self.accepted.remove(message.payload)

    def insist(self, message: Message) -> None:
        if not self.decide(message):
            raise RefusedError


def context_of(kind: str, ledger: Ledger, extensions: dict[str, Any]) -> MessageContext:
    builder = AcknowledgeMessageContextBuilder()
    if kind == "filter":
        builder.filter_acknowledge(ledger.decide)
    elif kind == "handler":
        builder.handle_acknowledge(
            lambda message: message.acknowledge() if ledger.decide(message) else message.reject()
        )
    contexts = builder.message_context_builder() if kind in ("manual", "later", "filter", "handler") else None
    return (contexts or messaging.MessageContextBuilder()).channel("a").extensions(extensions).build_context()


class Worker:
    """Consumes in its way until it is stopped; begins anew whenever a refusal ended its stream."""

    def __init__(self, m: Messaging, kind: str, ledger: Ledger, extensions: dict[str, Any], must_settle: bool) -> None:
        self.m = m
        self.kind = kind
        self.ledger = ledger
        self.context = context_of(kind, ledger, extensions)
        self.stop = threading.Event()
        self.begun: Recorder[str] = Recorder()
        self.streams: list[MessageStream] = []
        self.errors: list[BaseException] = []
        self.must_settle = must_settle
        self.running = in_thread(self.run)
        self.begun.wait_for(1)

    def run(self) -> None:
        consume = {"iterator": self.iterator, "async": self.async_iterator}.get(self.kind, self.push)
        while not self.stop.is_set():
            consume()

    def open(self) -> MessageStream:
        stream = self.m.subscription.subscribe(self.context)
        self.streams.append(stream)
        return stream

    def push(self) -> None:
        stream = self.open()
        over = threading.Event()
        source: Any = stream
        on_next: Callable[[Message], object] = lambda _: None  # noqa: E731
        if self.kind == "observer":
            on_next = self.ledger.insist
        elif self.kind == "operator":
            source = stream.pipe(ops.map(self.ledger.insist))
        elif self.kind == "manual":
            on_next = self.settle
        elif self.kind == "later":

            def on_next(message: Message) -> None:
                threading.Thread(target=self.settle, args=(message,)).start()

        disposable = source.subscribe(on_next, lambda error: self.ended(error, over), over.set)
        self.begun(self.kind)
        while not over.is_set() and not self.stop.is_set():
            over.wait(0.01)
        disposable.dispose()
        stream.close().result(PATIENCE)

    def ended(self, error: Exception, over: threading.Event) -> None:
        if not isinstance(error, RefusedError):
            self.errors.append(error)
        over.set()

    def settle(self, message: Message) -> None:
        accepts = self.ledger.decide(message)
        settled = message.acknowledge() if accepts else message.reject()
        if not settled and self.must_settle:
            self.errors.append(AssertionError(f"the verdict on {message.payload!r} was not taken"))
        elif not settled and accepts:
            self.ledger.take_back(message)  # its stream was closed before: it comes again

    def iterator(self) -> None:
        try:
            with self.open() as stream:
                self.begun(self.kind)
                while not self.stop.is_set():
                    try:
                        message = stream.receive(0.02)
                    except DeadlineError:
                        continue
                    self.ledger.insist(message)
        except RefusedError:
            pass

    def async_iterator(self) -> None:
        async def consume() -> None:
            async with self.open() as stream:
                self.begun(self.kind)
                while not self.stop.is_set():
                    try:
                        message = await asyncio.wait_for(anext(stream), 0.02)
                    except TimeoutError:
                        continue
                    self.ledger.insist(message)

        with suppress(RefusedError):
            asyncio.run(consume())

    def finish(self) -> None:
        self.stop.set()
        self.running.result(PATIENCE)
        assert self.errors == []


@dataclass
class Plan:
    """What hypothesis chose."""

    refusals: list[int]
    priorities: list[int | None]
    workers: list[str]
    prefetch: int | None
    buffer_size: int | None
    ordered: bool
    max_deliveries: int | None
    dead_letters: bool
    disturbances: list[str] = field(default_factory=list)

    @property
    def extensions(self) -> dict[str, Any]:
        given: dict[str, Any] = {
            "queue": "q",
            "prefetch": self.prefetch,
            "bufferSize": self.buffer_size,
            "guaranteedOrdering": self.ordered or None,
            "maxDeliveries": self.max_deliveries,
            "deadLetterChannel": "dead" if self.dead_letters else None,
        }
        return {key: value for key, value in given.items() if value is not None}

    @property
    def is_exact(self) -> bool:
        """Whether a delivery is an attempt: a message still buffered when its stream ended counts as delivered, too."""
        one_at_a_time = self.ordered or self.prefetch == 1
        return not self.disturbances and (one_at_a_time or not {*ENDING} & {*self.workers})

    @property
    def attempts_allowed(self) -> float:
        """After how many refusals a message is given up."""
        if self.max_deliveries is not None:
            return self.max_deliveries
        return 1 if self.dead_letters else float("inf")


MESSAGES = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 2, 3]), st.sampled_from([None, None, 1, 9])), max_size=12)


@st.composite
def plans(draw: st.DrawFn, disturbances: tuple[str, ...] = ()) -> Plan:
    messages = draw(MESSAGES)
    return Plan(
        [refusals for refusals, _ in messages],
        [priority for _, priority in messages],
        draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)),
        draw(st.sampled_from([1, 1, 2, None])),
        draw(st.sampled_from([1, 2, None])),
        draw(st.booleans()),
        draw(st.sampled_from([None, 1, 2, 3])),
        draw(st.booleans()),
        draw(st.lists(st.sampled_from(disturbances), max_size=4)) if disturbances else [],
    )


@contextmanager
def connected(**settings: Any) -> Iterator[Callable[[], Messaging]]:
    """Makes instances that meet at one broker of their own, and closes them."""
    url = f"memory://combinations{next(_numbers)}"
    made: list[Messaging] = []

    def make() -> Messaging:
        made.append(messaging.connect(url, services=ServiceRegistry(), **{**QUICK, **settings}))
        return made[-1]

    try:
        yield make
    finally:  # what a test that fails leaves open would make later ones fail
        for m in made:
            m.close()
    assert [m.runtime.get_runtime_dto().publisher.pending for m in made] == [0] * len(made)
    assert url.removeprefix("memory://") not in module._brokers


def carry_out(plan: Plan) -> tuple[Ledger, list[bytes]]:
    """Publish and consume as planned; returns what the consumers saw, and the dead letters."""
    payloads = [b"%d" % number for number in range(len(plan.refusals))]
    ledger = Ledger(dict(zip(payloads, plan.refusals, strict=True)))
    limit = plan.attempts_allowed
    with connected() as make:
        keeper, m = make(), make()
        dead: Recorder[bytes] = Recorder()
        keeper.subscribe("dead").subscribe(lambda message: dead.append(message.payload))
        with keeper.subscribe("a", queue="q"):
            pass  # from here on the broker has the queue
        publications = [
            (payload, {} if priority is None else {"priority": priority})
            for payload, priority in zip(payloads, plan.priorities, strict=True)
        ]
        half = len(payloads) // 2
        sent = [keeper.publish("a", payload, **options) for payload, options in publications[:half]]
        workers = [Worker(m, kind, ledger, plan.extensions, not plan.disturbances) for kind in plan.workers]
        sent += [keeper.publish("a", payload, **options) for payload, options in publications[half:]]
        for number, disturbance in enumerate(plan.disturbances):
            disturb(disturbance, m, workers[number % len(workers)])
        results(sent)

        def is_over() -> bool:
            done = {*ledger.accepted, *dead}
            if not plan.dead_letters:
                done |= {payload for payload, count in ledger.attempts.items() if count >= limit}
            if not plan.is_exact and not plan.dead_letters and plan.max_deliveries is not None:
                done |= {payload for payload in ledger.attempts if ledger.refusals[payload]}
            return done >= {*payloads}

        try:
            eventually(is_over)
        except AssertionError:
            pytest.fail(f"{plan}: attempts {ledger.attempts}, accepted {ledger.accepted}, dead {dead}")
        queue = broker_of(keeper).queues["q"]

        def is_empty() -> bool:
            return not len(queue) and not any(consumer.unsettled for consumer in queue.consumers)

        eventually(lambda: on_loop(is_empty), "what a lost connection did not acknowledge is consumed again")
        for worker in workers:
            worker.finish()
        assert on_loop(lambda: (len(queue), len(queue.consumers))) == (0, 0), "nothing is left over"
        keeper.publish("dead", b"end").result(PATIENCE)
        dead.wait_until(lambda seen: b"end" in seen)
        for worker in workers:
            for stream in worker.streams:
                counters = stream.counters
                assert counters.received >= counters.delivered
                assert counters.dropped == counters.invalid == 0
        return ledger, dead[:-1]


def disturb(what: str, m: Messaging, worker: Worker) -> None:
    stream = worker.streams[-1]
    if what == "pause":
        stream.pause()
        stream.resume()
    elif what == "close":
        if worker.kind not in ("iterator", "async"):  # what those have in hand would be accepted by it
            stream.close().result(PATIENCE)
    else:
        drop_and_reconnect(m)


@given(plans())
@QUICKLY
def test_every_message_is_accepted_or_dead_lettered_once(plan: Plan) -> None:
    ledger, dead = carry_out(plan)
    limit = plan.attempts_allowed
    assert len(ledger.accepted) == len({*ledger.accepted}), "accepted once"
    assert len(dead) == len({*dead}), "dead-lettered once"
    assert not {*ledger.accepted} & {*dead}, "not both"
    for payload, refusals in ledger.refusals.items():
        if refusals == 0:
            assert payload in ledger.accepted
            assert ledger.attempts[payload] == 1
        assert ledger.attempts[payload] <= limit
        if plan.is_exact:
            assert (payload in ledger.accepted) == (refusals < limit), (payload, refusals)
            assert ledger.attempts[payload] == min(refusals + 1, limit)


@given(plans(("pause", "pause", "close")))
@QUICKLY
def test_pausing_and_closing_in_between_changes_nothing(plan: Plan) -> None:
    ledger, dead = carry_out(plan)
    assert len(ledger.accepted) == len({*ledger.accepted})
    assert len(dead) == len({*dead})
    assert not {*ledger.accepted} & {*dead}


@given(plans(("drop", "drop", "pause", "close")))
@QUICKLY
def test_losing_the_connection_in_between_loses_no_message(plan: Plan) -> None:
    ledger, dead = carry_out(plan)
    for payload, refusals in ledger.refusals.items():
        if refusals == 0:
            assert payload in ledger.accepted
        if plan.attempts_allowed == float("inf"):
            assert payload in ledger.accepted
        assert payload in ledger.accepted or payload in dead or not plan.dead_letters
