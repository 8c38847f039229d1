"""Features together: generated combinations, and combinations that failed once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from messaging import AcknowledgeType, Features, Message, Messaging
from messaging.model import channels
from messaging.testing.conformance.helpers import (
    ack_state,
    acknowledgement,
    direct,
    feature,
    manual,
    publish,
    subscription_to,
)
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread, observed, results

if TYPE_CHECKING:
    from messaging.testing.conformance.backends import Backend

#: how a consumer may take messages; those of the second line can reject and go on
PLAIN: Final = ("observer", "iterator", "async iterator")
JUDGING: Final = ("manual", "filter", "handler")


class Member:
    """A consumer. It rejects ``n:r`` until the group it belongs to has seen that ``r`` times."""

    def __init__(self, m: Messaging, channel: str, how: str, options: dict[str, Any], seen: Counter[bytes]) -> None:
        self.got: Recorder[bytes] = Recorder()
        self.how = how
        self._seen = seen
        judge: dict[str, dict[str, Any]] = {
            "filter": {"filter": self._accepts},
            "handler": {"handle": self._judge},
        }
        if how in JUDGING:
            context = direct(m, channel, **judge.get(how, {}), extensions=options)
        else:
            context = m.context_builder().channel(channel).extensions(options).build_context()
        self.stream = m.subscription.subscribe(context)
        if how in PLAIN[1:]:
            in_thread(self._iterate)
        else:
            self.stream.subscribe({"observer": self._note, "manual": self._judge}.get(how))
        self.stream.ready.result(PATIENCE)

    def _note(self, message: Message) -> None:
        self.got.append(message.payload)

    def _accepts(self, message: Message) -> bool:
        self._note(message)
        self._seen[message.payload] += 1
        return self._seen[message.payload] > rejections(message.payload)

    def _judge(self, message: Message) -> None:
        handler = acknowledgement(message).acknowledge_handler
        assert handler.acknowledge() if self._accepts(message) else handler.reject()

    def _iterate(self) -> None:
        if self.how == "iterator":
            for message in self.stream:
                self._note(message)
        else:
            asyncio.run(self._aiterate())

    async def _aiterate(self) -> None:
        async for message in self.stream:
            self._note(message)


def rejections(payload: bytes) -> int:
    """How often a message is to be rejected."""
    return int(payload.split(b":")[1])


class Group:
    """A subscription, private or shared, as it came out of the dice."""

    def __init__(self, dice: random.Random, backend: Backend, m: Messaging, base: str, dead: str) -> None:
        self.pattern = base + dice.choice(("/a/b", "/a/+", "/a/#", "/+/b", "/#"))
        self.options: dict[str, Any] = {"guaranteedDelivery": True}
        for key, values in {
            "prefetch": (1, 2, 7),
            "bufferSize": (1, 2, 10),
            "guaranteedOrdering": (True,),
            "autoAcknowledge": (True,),
        }.items():
            if dice.random() < 0.3:
                self.options[key] = dice.choice(values)
        self.judges = dice.random() < 0.6 and "autoAcknowledge" not in self.options
        self.limit: int | None = None
        if self.judges and dice.random() < 0.5:
            self.options["deadLetterChannel"] = dead
            self.limit = dice.choice((1, 2, 3))
            if self.limit > 1 or dice.random() < 0.5:
                self.options["maxDeliveries"] = self.limit
        members = 1
        if dice.random() < 0.4:
            self.options["queue"] = backend.queue()
            # competing consumers may count deliveries apart
            members = 1 if self.limit is not None else dice.choice((1, 2, 3))
        seen: Counter[bytes] = Counter()
        ways = JUDGING if self.judges else PLAIN
        self.members = [Member(m, self.pattern, dice.choice(ways), self.options, seen) for _ in range(members)]

    def deliveries(self, payload: bytes) -> int:
        """How often a message is to be delivered to this group."""
        wanted = rejections(payload) + 1 if self.judges else 1
        return min(wanted, self.limit) if self.limit is not None else wanted

    def buries(self, payload: bytes) -> bool:
        """Whether a message is to become a dead letter."""
        return self.limit is not None and rejections(payload) >= self.limit

    def check(self, published: list[tuple[str, bytes]]) -> None:
        """Wait until everything has come as often as it should, then see that nothing else has."""
        matches = channels.matcher(self.pattern)
        wanted = [payload for channel, payload in published if matches(channel)]
        exactly = Counter({payload: self.deliveries(payload) for payload in wanted})

        def got() -> Counter[bytes]:
            return Counter(payload for member in self.members for payload in [*member.got])

        eventually(lambda: got() >= exactly, f"{self}: every delivery")
        assert got() == exactly, str(self)
        if len(self.members) == 1:
            first = list(dict.fromkeys(self.members[0].got))
            if not self.judges or "guaranteedOrdering" in self.options:
                assert first == wanted, str(self)
        for member in self.members:
            eventually(lambda each=member: self._adds_up(each), f"{self}: {member.stream.counters}")

    def _adds_up(self, member: Member) -> bool:
        counters = member.stream.counters
        taken = counters.received + counters.redelivered
        # an iterator acknowledges when asked for the next one, which it is by now
        return taken == len(member.got) == counters.acknowledged + counters.rejected

    def __str__(self) -> str:
        return f"{self.pattern} {self.options} {[member.how for member in self.members]}"


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_DEAD_LETTER_CHANNEL, Features.EXTENSION_QUEUE, Features.WILDCARDS)
@table("seed", range(16))
def test_whatever_is_combined_each_message_is_delivered_as_often_as_it_should(backend: Backend, seed: int) -> None:
    """Patterns that overlap, ways to consume and to settle, queues, credit, buffers, dead letters."""
    dice = random.Random(seed)
    base, dead = backend.channel("generated"), backend.channel("dead")
    # one process is all the members of a queue, or MQTT 3.1.1 cannot tell which subscription a message is for
    consuming = backend.connect()
    publishing = backend.connect() if dice.random() < 0.7 else consuming
    graves = observed(consuming.subscribe(dead, **backend.reliable))
    groups = [Group(dice, backend, consuming, base, dead) for _ in range(dice.randint(1, 4))]
    published = [
        (
            base + dice.choice(("/a/b", "/a/c", "/a", "/x/b", "/a/b/c")),
            b"%d:%d" % (number, dice.choice((0, 0, 1, 2, 3))),
        )
        for number in range(dice.choice((5, 40, 100)))
    ]
    context: dict[str, Any] = dict(backend.reliable)
    if Features.EXTENSION_HEADERS in publishing.features and dice.random() < 0.5:
        context |= {"headers": {"k": "v"}, "content_type": "x/y", "time_to_live": 60.0}
    idle = [member for group in groups for member in group.members if dice.random() < 0.3]
    for member in idle:
        member.stream.pause()
    results(publishing.publish(channel, payload, **context) for channel, payload in published)
    for member in idle:
        member.stream.resume()
    for group in groups:
        group.check(published)
    buried = Counter(
        payload
        for group in groups
        for channel, payload in published
        if channels.matcher(group.pattern)(channel) and group.buries(payload)
    )
    assert Counter(graves.wait_payloads(buried.total())) == buried
    results(member.stream.close() for group in groups for member in group.members)
    assert publishing.runtime.get_runtime_dto().publisher.pending == 0


def levels(m: Messaging) -> list[str]:
    """The acknowledged levels of ``qos`` here."""
    return ["1", "2"] if "mqtt" in m.runtime.get_runtime_dto().protocols else ["1"]


@feature(Features.EXTENSION_QOS)
def test_messages_of_all_levels_go_out_side_by_side(backend: Backend) -> None:
    """A broker's limit for one level counts those of another, and those over it cost the connection."""
    channel, m = backend.channel(), backend.connect()
    inbox = observed(m.subscribe(channel, qos=levels(m)[-1]))
    dice = random.Random(1)
    for batch in range(4):
        numbers = range(batch * 150, batch * 150 + 150)
        results(m.publish(channel, b"%d" % number, qos=dice.choice(levels(m))) for number in numbers)
    assert sorted(map(int, inbox.wait_payloads(600))) == list(range(600))
    assert m.runtime.get_runtime_dto().connection.cause is None, "it was never lost"


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_QOS)
@table("held", [1, 5, 8])
def test_messages_in_hand_do_not_hold_up_another_stream(backend: Backend, held: int) -> None:
    """With credit for ten, shared or not, ``held`` unsettled ones leave some for the others."""
    credit: dict[str, Any] = {"receive_maximum": 10} if "mqtt" in backend.name else {"prefetch": 10}
    m, other = backend.connect(**credit), backend.connect()
    kept, busy = backend.channel("kept"), backend.channel("busy")
    hands = observed(m.subscription.subscribe(manual(m, kept, qos="1")))
    publish(other, kept, [b""] * held, qos="1")
    hands.wait_for(held)
    stream = m.subscribe(busy, qos="1")
    stream.pause()
    inbox = observed(stream)
    publish(other, busy, [b"%d" % number for number in range(300)], qos="1")
    stream.resume()
    assert [int(payload) for payload in inbox.wait_payloads(300)] == list(range(300))


@feature(Features.EXTENSION_QOS)
def test_an_idle_stream_without_acknowledgement_holds_up_nobody(backend: Backend) -> None:
    """Not even one that shares its subscription at the broker with one that acknowledges."""
    credit: dict[str, Any] = {"receive_maximum": 10} if "mqtt" in backend.name else {}
    channel, m, other = backend.channel(), backend.connect(**credit), backend.connect()
    idle = m.subscribe(channel, qos="0", buffer_size=5)
    idle.ready.result(PATIENCE)
    inbox = observed(m.subscribe(channel, qos="1"))
    publish(other, channel, [b"%d" % number for number in range(100)], qos="1")
    assert [int(payload) for payload in inbox.wait_payloads(100)] == list(range(100))
    eventually(lambda: idle.counters.dropped == 95, "the idle one keeps its bound")
    message = idle.receive(PATIENCE)
    assert (message.payload, ack_state(message)) == (b"95", AcknowledgeType.UNSUPPORTED)
    idle.close().result(PATIENCE)


@feature(Features.EXTENSION_QOS, Features.WILDCARDS)
@table("first", ["0", "1"])
@table("patterns", [("a/b", "a/+"), ("a/+", "a/b"), ("a/#", "a/b"), ("a/b", "a/b")])
def test_overlapping_streams_keep_their_own_level(backend: Backend, patterns: tuple[str, str], first: str) -> None:
    """One that asked for acknowledgement has it, whatever others asked for; and the other way round.

    A broker of MQTT 3.1.1 sends one packet for overlapping filters, with the QoS of any one.
    """
    if backend.name.startswith("mqtt311") and patterns[0] != patterns[1]:
        patterns = ("a/b", "a/b")
    base, m = backend.channel(), backend.connect()
    streams = {
        qos: m.subscribe(f"{base}/{pattern}", qos=qos)
        for pattern, qos in zip(patterns, sorted("01", key=first.__ne__), strict=True)
    }
    results(stream.ready for stream in streams.values())
    publish(backend.connect(), f"{base}/a/b", [b"x"], qos="1")
    states = {qos: ack_state(stream.receive(PATIENCE)) for qos, stream in streams.items()}
    assert states == {"0": AcknowledgeType.UNSUPPORTED, "1": AcknowledgeType.RECEIVED}
    results(stream.close() for stream in streams.values())


@feature(Features.EXTENSION_OVERFLOW, Features.EXTENSION_AUTO_ACKNOWLEDGE, Features.EXTENSION_BUFFER_SIZE)
@table("auto", [False, True])
@table("size", [1, 3])
@table("policy", ["drop_oldest", "drop_latest", "block"])
def test_what_overflows_is_counted_and_the_stream_goes_on(backend: Backend, policy: str, size: int, auto: bool) -> None:
    """Received is delivered and dropped, with acknowledgement on arrival and without."""
    channel, m, other = backend.channel(), backend.connect(), backend.connect()
    stream = m.subscribe(channel, overflow=policy, buffer_size=size, auto_acknowledge=auto, **backend.reliable)
    stream.ready.result(PATIENCE)
    sent = [b"%d" % number for number in range(20)]
    publish(other, channel, sent, **backend.reliable)
    if policy != "block":
        # not ``received``: that is counted as a batch comes in, and who consumes then makes room for the rest of it
        eventually(lambda: stream.counters.dropped == 20 - size, "everything arrived")
        eventually(lambda: (dto := subscription_to(m, channel)) and dto.buffered == size, "its buffer is full")
    inbox = observed(stream)
    kept = {"drop_oldest": sent[-size:], "drop_latest": sent[:size], "block": sent}[policy]
    assert inbox.wait_payloads(len(kept)) == kept
    for number in range(20, 60):
        publish(other, channel, [b"%d" % number], **backend.reliable)
        inbox.wait_payload(b"%d" % number)
    counters = stream.counters
    eventually(lambda: counters.received == counters.delivered + counters.dropped == 60, f"{counters}")
