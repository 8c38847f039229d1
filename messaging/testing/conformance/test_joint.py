"""Joint subscriptions: several channels, one order of arrival, one consumer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from messaging import ClosedError, Features, Messaging
from messaging.testing.conformance.helpers import feature, publish, receive, restart
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread, results

if TYPE_CHECKING:
    from messaging.model import Incoming
    from messaging.receiving import JointSubscription
    from messaging.testing.conformance.backends import Backend


class Joint:
    """A joint subscription, and the messages that it has taken and settled."""

    def __init__(self, m: Messaging, *channels: str, settles: bool = True, **options: Any) -> None:
        self.batches: list[int] = []
        self.taken: Recorder[tuple[str, bytes]] = Recorder()
        self.kept: Recorder[Incoming] = Recorder()
        self.restored = 0
        self.failed: list[tuple[str, Exception]] = []
        self._settles = settles
        self.subscription: JointSubscription = m.subscription.open_joint(self._take, **options)
        self.subscription.on_restored = self._on_restored
        self.subscription.on_failed = lambda channel, error: self.failed.append((channel, error))
        results([self.subscription.add(channel) for channel in channels])

    def _take(self, batch: list[Incoming]) -> None:
        assert threading.current_thread().name == "messaging-engine"
        self.batches.append(len(batch))
        self.taken.extend((incoming.channel, bytes(incoming.payload)) for incoming in batch)
        if self._settles:
            self.subscription.settle(batch)
        else:
            self.kept.extend(batch)

    def _on_restored(self) -> None:
        self.restored += 1

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, payload in [*self.taken]]

    def close(self) -> None:
        """End the subscription."""
        self.subscription.close().result(PATIENCE)

    def wait(self, count: int) -> list[bytes]:
        """Wait for ``count`` messages, and return the payloads so far."""
        self.taken.wait_for(count, patience=3 * PATIENCE)
        return self.payloads

    def wait_all(self, payloads: list[bytes], *, parted: bool = False) -> None:
        """Wait for the payloads, each once and in order.

        Of overlapping channels that are ``parted`` meanwhile, some may come again, after their first time.
        """
        if not parted:
            assert self.wait(len(payloads)) == payloads
            return
        eventually(lambda: set(payloads) <= {*self.payloads}, "all payloads")
        assert [*dict.fromkeys(self.payloads)] == payloads

    def wait_for(self, payload: bytes) -> list[bytes]:
        """Wait for a payload, and return the payloads so far."""
        eventually(lambda: payload in self.payloads, f"{payload!r} among the last {self.payloads[-5:]}")
        return self.payloads


def test_adding_and_removing_is_idempotent_and_applied_in_order(backend: Backend, m: Messaging) -> None:
    """A message of each channel is taken, and none of others."""
    channel, end = backend.channel(), backend.channel("end")
    joint = Joint(m, end)
    add, remove = joint.subscription.add, joint.subscription.remove
    results([add(channel), add(channel), remove(channel), remove(channel), add(channel), remove(channel)])
    assert joint.subscription.channels == (end,)
    publish(m, channel, [b"not taken"], **backend.reliable)
    add(channel).result(PATIENCE)
    publish(m, channel, [b"taken"], **backend.reliable)
    publish(m, end, [b"end"], **backend.reliable)
    assert joint.wait_for(b"end") == [b"taken", b"end"]
    joint.close()


def interleaved(publisher: Messaging, channels: list[str], payloads: list[bytes], context: dict[str, Any]) -> None:
    """Publish the payloads in turns on the channels, in chunks that a broker has room for."""
    for start in range(0, len(payloads), 500):
        results(
            publisher.publish(channels[number % len(channels)], payloads[number], **context)
            for number in range(start, min(start + 500, len(payloads)))
        )


@feature(Features.EXTENSION_QOS)
@table("acknowledged", [True, False])
def test_messages_of_several_channels_arrive_in_publishing_order(
    backend: Backend, m: Messaging, acknowledged: bool
) -> None:
    """Many of them in one read of the socket: they must not be sorted by channel there."""
    publisher = backend.connect()
    channels = [backend.channel(str(number)) for number in range(10)]
    payloads = [b"%d" % number for number in range(2000)]
    joint = Joint(m, *channels, **({} if acknowledged else {"qos": "0"}))
    interleaved(publisher, channels, payloads, backend.reliable)
    joint.wait_all(payloads)
    expected = [(channels[number % 10], payloads[number]) for number in range(2000)]
    assert joint.taken == expected
    assert len(joint.batches) > 1
    joint.close()


@feature(Features.WILDCARDS)
def test_channels_that_stay_miss_nothing_while_others_come_and_go(backend: Backend, m: Messaging) -> None:
    """Also patterns that overlap theirs: which one takes a message changes, and each is taken at least once."""
    publisher = backend.connect()
    base = backend.channel("flow")
    channels = [f"{base}/{number}/x" for number in range(10)]
    payloads = [b"%d" % number for number in range(3000)]
    joint = Joint(m, *channels)
    others = [f"{base}/#", f"{base}/+/x", f"{base}/1/#", f"{base}/other", f"{base}/2/+"]
    is_over = threading.Event()
    changes: Recorder[str] = Recorder()

    def change() -> None:
        while not is_over.is_set():
            for other in others:
                joint.subscription.add(other).result(PATIENCE)
            for other in others:
                joint.subscription.remove(other).result(PATIENCE)
                changes.append(other)

    changing = in_thread(change)
    try:
        interleaved(publisher, channels, payloads, backend.reliable)
        joint.wait_all(payloads, parted=True)
        changes.wait_for(10)
    finally:
        is_over.set()
        changing.result(3 * PATIENCE)
    assert joint.failed == []
    assert joint.subscription.channels == tuple(channels)
    joint.close()


@feature(Features.WILDCARDS)
def test_a_channel_whose_wider_pattern_is_removed_goes_on(backend: Backend, m: Messaging) -> None:
    """The wider one was there first, and took the messages of both."""
    publisher = backend.connect()
    base = backend.channel("wide")
    channels = [f"{base}/{number}" for number in range(3)]
    payloads = [b"%d" % number for number in range(1500)]
    joint = Joint(m, f"{base}/#", *channels)
    publishing = in_thread(interleaved, publisher, channels, payloads, backend.reliable)
    joint.wait(300)
    joint.subscription.remove(f"{base}/#").result(PATIENCE)
    publishing.result(3 * PATIENCE)
    joint.wait_all(payloads, parted=True)
    publish(publisher, f"{base}/gone", [b"gone"], **backend.reliable)
    publish(publisher, channels[0], [b"end"], **backend.reliable)
    assert [*dict.fromkeys(joint.wait_for(b"end"))] == [*payloads, b"end"]
    joint.close()


@feature(Features.EXTENSION_QOS)
@table("acknowledged", [True, False])
def test_messages_that_arrive_while_paused_are_not_lost(backend: Backend, m: Messaging, acknowledged: bool) -> None:
    publisher = backend.connect()
    channels = [backend.channel("0"), backend.channel("1")]
    payloads = [b"%d" % number for number in range(200)]
    joint = Joint(m, channels[0], **({} if acknowledged else {"qos": "0"}))
    joint.subscription.pause()
    joint.subscription.add(channels[1]).result(PATIENCE)
    interleaved(publisher, channels, payloads, backend.reliable)
    joint.subscription.resume()
    joint.wait_all(payloads)
    joint.close()


def test_other_subscriptions_to_a_joined_channel_are_independent(backend: Backend, m: Messaging) -> None:
    channel, end = backend.channel(), backend.channel("end")
    with m.subscribe(channel, **backend.reliable) as stream:
        joint = Joint(m, channel, end)
        publish(m, channel, [b"1"], **backend.reliable)
        joint.wait_for(b"1")
        joint.subscription.remove(channel).result(PATIENCE)
        publish(m, channel, [b"2"], **backend.reliable)
        publish(m, end, [b"end"], **backend.reliable)
        assert joint.wait_for(b"end") == [b"1", b"end"]
        assert receive(stream, 2) == [b"1", b"2"]
        joint.close()
        publish(m, channel, [b"3"], **backend.reliable)
        assert receive(stream, 1) == [b"3"]


@feature(Features.QUEUE_RETENTION, Features.EXTENSION_QUEUE)
def test_a_queue_keeps_its_channels_and_drops_the_messages_of_others(backend: Backend, m: Messaging) -> None:
    queue = backend.queue()
    stays, goes, removed = (backend.channel(name) for name in ("stays", "goes", "removed"))
    first = Joint(m, stays, goes, removed, queue=queue)
    first.subscription.remove(removed).result(PATIENCE)
    first.close()
    publish(m, removed, [b"removed"], **backend.reliable)
    publish(m, goes, [b"goes"], **backend.reliable)
    publish(m, stays, [b"stays"], **backend.reliable)
    second = Joint(m, stays, queue=queue)
    assert second.wait(1) == [b"stays"]
    publish(m, goes, [b"goes"], **backend.reliable)
    publish(m, stays, [b"end"], **backend.reliable)
    assert second.wait_for(b"end") == [b"stays", b"end"]
    second.close()


@feature(Features.BROKER_REDELIVERY, Features.EXTENSION_QUEUE, Features.ACKNOWLEDGE)
def test_messages_that_are_not_settled_when_it_closes_go_to_the_next_consumer(backend: Backend, m: Messaging) -> None:
    queue, channel = backend.queue(), backend.channel()
    first = Joint(m, channel, settles=False, queue=queue)
    publish(m, channel, [b"1", b"2", b"3"], **backend.reliable)
    first.wait(3)
    first.subscription.settle(first.kept[:1])
    first.close()
    second = Joint(m, channel, queue=queue)
    assert second.wait(2) == [b"2", b"3"]
    second.close()


@feature(Features.ACKNOWLEDGE, Features.WILDCARDS)
def test_messages_of_a_removed_channel_can_be_settled(backend: Backend, m: Messaging) -> None:
    """They are not released: another pattern that matches them stays, and has no copies of its own."""
    base = backend.channel("late")
    joint = Joint(m, f"{base}/#", f"{base}/a", settles=False)
    publish(m, f"{base}/a", [b"1"], **backend.reliable)
    joint.wait(1)
    joint.subscription.remove(f"{base}/#").result(PATIENCE)
    joint.subscription.settle(joint.kept)
    publish(m, f"{base}/a", [b"2"], **backend.reliable)
    assert joint.wait(2) == [b"1", b"2"]
    joint.close()


@feature(Features.WILDCARDS)
def test_a_message_that_several_patterns_match_is_taken_once(backend: Backend, m: Messaging) -> None:
    """A retained message, too."""
    base = backend.channel("over")
    retained = [b"retained"] if Features.EXTENSION_RETAIN in m.features else []
    for payload in retained:
        publish(m, f"{base}/a/x", [payload], retain=True, **backend.reliable)
    joint = Joint(m, f"{base}/#", f"{base}/+/x", f"{base}/a/x", f"{base}/a/+")
    payloads = [b"%d" % number for number in range(100)]
    publish(m, f"{base}/a/x", payloads, **backend.reliable)
    publish(m, f"{base}/end", [b"end"], **backend.reliable)
    assert joint.wait_for(b"end") == [*retained, *payloads, b"end"]
    joint.close()
    for _ in retained:
        publish(m, f"{base}/a/x", [b""], retain=True, **backend.reliable)


@table("what", ["subscription", "instance"])
def test_closing_settles_every_promise_and_ends_the_messages(backend: Backend, what: str) -> None:
    m, other, channel = backend.connect(), backend.connect(), backend.channel()
    joint = Joint(m, channel)
    pending = [joint.subscription.add(backend.channel(str(number))) for number in range(50)]
    closed = joint.subscription.close() if what == "subscription" else None
    if what == "instance":
        m.close()
    assert not joint.subscription.is_open
    late = [joint.subscription.add(channel), joint.subscription.remove(channel)]
    assert closed in (None, joint.subscription.close())
    joint.close()
    for promise in pending:
        assert isinstance(promise.exception(PATIENCE), (ClosedError, type(None)))
    assert isinstance(late[0].exception(PATIENCE), ClosedError)
    assert isinstance(late[1].exception(PATIENCE), ClosedError)
    publish(other, channel, [b"late"], **backend.reliable)
    with other.subscribe(channel, **backend.reliable) as stream:
        publish(other, channel, [b"1"], **backend.reliable)
        assert receive(stream, 1) == [b"1"]
    assert joint.taken == []
    m.close()
    with pytest.raises(ClosedError):
        m.subscription.open_joint(print)


def test_all_channels_are_back_after_a_reconnect(backend: Backend) -> None:
    """The channels from before, and the changes that were asked for while the link was down."""
    m, link = backend.connect_severable()
    publisher = backend.connect()
    channels = [backend.channel(str(number)) for number in range(40)]
    gone, new = backend.channel("gone"), backend.channel("new")
    joint = Joint(m, *channels, gone)
    assert joint.restored == 0
    link.down()
    changes = [joint.subscription.remove(gone), joint.subscription.add(new)]
    assert not any(promise.done() for promise in changes)
    link.up()
    results(changes)
    eventually(lambda: joint.restored == 1, "restored")
    publish(publisher, gone, [b"gone"], **backend.reliable)
    for channel in (*channels, new):
        publish(publisher, channel, [b"x"], **backend.reliable)
    assert joint.wait(41) == [b"x"] * 41
    assert {channel for channel, _ in joint.taken} == {*channels, new}
    joint.close()


@restart
def test_all_channels_are_back_after_the_broker_was_restarted(backend: Backend, m: Messaging) -> None:
    base = [backend.channel(str(number)) for number in range(100)]
    joint = Joint(m, *base)
    for restarts in (1, 2):
        backend.restart()
        eventually(lambda restarts=restarts: joint.restored >= restarts, "restored", patience=6 * PATIENCE)  # type: ignore[misc]
        before = len(joint.taken)
        interleaved(m, base, [b"x"] * 100, backend.reliable)
        joint.wait(before + 100)
        assert sorted(channel for channel, _ in joint.taken[before:]) == sorted(base)
    assert joint.failed == []
    joint.close()


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_PREFETCH)
def test_messages_beyond_the_prefetch_wait_until_others_are_settled(backend: Backend, m: Messaging) -> None:
    """MQTT has one credit for the whole connection, of its own size."""
    channels = [backend.channel("a"), backend.channel("b")]
    joint = Joint(m, *channels, settles=False, prefetch=5)
    payloads = [b"%d" % number for number in range(50)]
    interleaved(m, channels, payloads, backend.reliable)
    seen = 0
    while seen < 50:
        joint.kept.wait_for(seen + 1)
        if not backend.name.startswith("mqtt"):
            assert len(joint.kept) - seen <= 5
        batch = joint.kept[seen:]
        seen += len(batch)
        joint.subscription.settle(batch)
        joint.subscription.settle(batch)  # again: without effect
    assert joint.payloads == payloads
    joint.close()
