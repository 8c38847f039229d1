"""Joint subscriptions at a broker that does as a test says."""

from __future__ import annotations

from typing import Any

import pytest

from messaging import ClosedError, InvalidChannelError, Messaging, UnsupportedFeatureError
from messaging.errors import ArgumentError, ConnectionLostError, SubscriptionRefusedError
from messaging.model import AcknowledgeType, Incoming
from messaging.receiving import JointSubscription
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, results
from tests.doubles.fake import FakeBroker, on_loop, settle_loop
from tests.doubles.fixtures import Connect
from tests.doubles.timers import LongTimers


class Taken:
    """A joint subscription and its batches."""

    def __init__(self, m: Messaging, *channels: str, **options: Any) -> None:
        self.batches: Recorder[list[Incoming]] = Recorder()
        self.events: Recorder[Any] = Recorder()
        self.joint: JointSubscription = m.subscription.open_joint(self.batches.append, **options)
        self.joint.on_restored = lambda: self.events.append("restored")
        self.joint.on_failed = lambda channel, error: self.events.append((channel, error))
        for channel in channels:
            self.joint.add(channel).result(PATIENCE)

    @property
    def payloads(self) -> list[list[bytes]]:
        settle_loop()
        return [[incoming.payload for incoming in batch] for batch in self.batches]


def channels_of(broker: FakeBroker) -> list[str]:
    return [handle.spec.channel for handle in broker.live]


def test_the_messages_of_one_turn_are_one_batch(broker: FakeBroker, m: Messaging) -> None:
    taken = Taken(m, "a", "b")

    def deliver() -> None:
        for payload in (b"1", b"2", b"3"):
            for handle in broker.live:
                handle.sink.deliver([Incoming(payload, handle.spec.channel)])

    on_loop(deliver)
    assert taken.payloads == [[b"1", b"1", b"2", b"2", b"3", b"3"]]
    assert {incoming.acknowledge_state for incoming in taken.batches[0]} == {AcknowledgeType.UNSUPPORTED}


def test_options_are_checked_as_those_of_any_subscription(m: Messaging, bare: FakeBroker, connect: Connect) -> None:
    for options, error in [
        ({"qos": "7"}, ArgumentError), ({"qos": "2"}, UnsupportedFeatureError), ({"prefetch": 0}, ArgumentError),
        ({"queue": ""}, ArgumentError), ({"queue": 1}, ArgumentError),
    ]:  # fmt: skip
        with pytest.raises(error):
            m.subscription.open_joint(print, **options)
    with pytest.raises(ArgumentError):
        m.subscription.open_joint(None)
    joint = m.subscription.open_joint(print)
    for channel in ("", "a/#/b", 7):
        with pytest.raises(InvalidChannelError):
            joint.add(channel)
    other = connect(bare).subscription.open_joint(print)
    with pytest.raises(UnsupportedFeatureError):
        other.add("a/#")


def test_messages_are_acknowledged_when_they_are_settled(broker: FakeBroker, m: Messaging) -> None:
    taken = Taken(m, "a", "b")
    first = broker.deliver(b"1", b"2", channel="a", handle=0)
    second = broker.deliver(b"3", channel="b", handle=1)
    assert taken.payloads == [[b"1", b"2"], [b"3"]]
    assert broker.acknowledged == []
    taken.joint.settle(taken.batches[1])
    broker.wait_acknowledged(1)
    taken.joint.settle([*taken.batches[0], *taken.batches[1]])
    broker.wait_acknowledged(3)
    settle_loop()
    assert broker.acknowledged == [*second, *first]


def test_verdicts_on_messages_of_a_lost_connection_are_dropped(broker: FakeBroker, m: Messaging) -> None:
    taken = Taken(m, "a")
    broker.deliver(b"1", channel="a")
    settle_loop()
    broker.lose_and_reconnect(1)
    assert taken.events.wait_for(1) == ["restored"]
    taken.joint.settle(taken.batches[0])
    fresh = broker.deliver(b"2", channel="a")
    settle_loop()
    taken.joint.settle(taken.batches[1])
    broker.wait_acknowledged(1)
    assert broker.acknowledged == fresh


def test_a_refusal_rejects_one_promise_and_removes_one_channel(broker: FakeBroker, m: Messaging) -> None:
    taken = Taken(m, "a")
    broker.errors["subscribe"].append(SubscriptionRefusedError("no"))
    with pytest.raises(SubscriptionRefusedError, match="no"):
        taken.joint.add("b").result(PATIENCE)
    taken.joint.add("c").result(PATIENCE)
    assert taken.joint.channels == ("a", "c")
    assert channels_of(broker) == ["a", "c"]
    assert taken.events == []
    taken.joint.add("b").result(PATIENCE)
    assert taken.joint.channels == ("a", "c", "b")
    assert repr(taken.joint) == f"<JointSubscription of {m.name!r}: 3 channels, open>"


def test_a_defect_refuses_one_channel(broker: FakeBroker, m: Messaging, caplog: pytest.LogCaptureFixture) -> None:
    taken = Taken(m, "a")
    broker.errors["subscribe"].append(ZeroDivisionError())
    with pytest.raises(SubscriptionRefusedError) as caught:
        taken.joint.add("b").result(PATIENCE)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "the adapter failed to join 'b'" in caplog.text
    assert taken.joint.channels == ("a",)


def test_channels_that_the_broker_ends_are_reported_and_can_be_added_again(broker: FakeBroker, m: Messaging) -> None:
    taken = Taken(m, "a", "b")
    error = SubscriptionRefusedError("the queue was deleted")
    broker.end_joint(error)
    assert taken.events.wait_for(2) == [("a", error), ("b", error)]
    assert taken.joint.channels == ()
    taken.joint.remove("a").result(PATIENCE)
    taken.joint.add("a").result(PATIENCE)
    assert channels_of(broker) == ["a"]


def test_a_channel_that_is_refused_after_a_reconnect_is_reported(broker: FakeBroker, m: Messaging) -> None:
    taken = Taken(m, "a", "b")
    error = SubscriptionRefusedError("not any more")
    broker.errors["subscribe"].append(error)
    broker.lose_and_reconnect(1)
    assert taken.events.wait_for(2) == [("a", error), "restored"]
    assert taken.joint.channels == ("b",)
    assert channels_of(broker) == ["b"]


def test_all_channels_are_back_before_restored_is_called(broker: FakeBroker, m: Messaging) -> None:
    taken = Taken(m, *(f"c/{number}" for number in range(50)))
    found: Recorder[list[str]] = Recorder()
    taken.joint.on_restored = lambda: found.append(channels_of(broker))
    broker.lose_and_reconnect(50)
    found.wait_for(1)
    assert sorted(found[0]) == sorted(taken.joint.channels)


def test_restored_is_called_also_if_the_connection_is_lost_before_all_first_channels_are_joined(
    broker: FakeBroker, m: Messaging
) -> None:
    broker.go_down()
    taken, errors = Taken(m), broker.errors["subscribe"]
    first = taken.joint.add("a")
    taken.joint.remove("x")  # changes of another kind are applied by themselves
    second = taken.joint.add("b")
    first.listen(lambda: errors.append(ConnectionLostError("lost")))
    broker.gates["open"].open()
    first.result(PATIENCE)
    eventually(lambda: not errors)
    broker.lose()
    second.result(PATIENCE)
    eventually(lambda: taken.events == ["restored"])


def test_a_kept_session_needs_no_new_subscriptions(broker: FakeBroker, m: Messaging) -> None:
    broker.resumes = True
    taken = Taken(m, "a", "b")
    broker.go_down()
    promises = [taken.joint.add("c"), taken.joint.remove("a")]
    broker.gates["open"].open()
    results(promises)
    assert channels_of(broker) == ["b", "c"]
    eventually(lambda: taken.events == ["restored"])
    assert len(broker.handles) == 3


@table("resumes", [False, True])
def test_a_change_that_a_loss_interrupts_is_applied_later(broker: FakeBroker, connect: Connect, resumes: bool) -> None:
    m = connect(broker)
    broker.resumes = resumes
    taken = Taken(m, "a", "b")
    broker.gates["subscribe"].close()
    promise = taken.joint.add("c")
    eventually(lambda: broker.gates["subscribe"].waiting == 1)
    opened = broker.opened
    broker.lose()
    broker.wait_open(opened + 1)
    assert not promise.done()
    broker.gates["subscribe"].open()
    promise.result(PATIENCE)
    assert taken.joint.channels == ("a", "b", "c")
    assert sorted(channels_of(broker)) == ["a", "b", "c"]
    broker.gates["unsubscribe"].close()
    promise = taken.joint.remove("a")
    eventually(lambda: broker.gates["unsubscribe"].waiting == 1)
    broker.gates["unsubscribe"].open()
    promise.result(PATIENCE)
    assert sorted(channels_of(broker)) == ["b", "c"]


def test_messages_of_a_removed_channel_are_acknowledged_and_dropped(broker: FakeBroker, m: Messaging) -> None:
    taken = Taken(m, "a", "b", "c", queue="q")
    taken.joint.remove("c").result(PATIENCE)
    broker.deliver(b"1", channel="c", handle=0)
    broker.wait_acknowledged(1)
    broker.deliver(b"2", channel="b", handle=1)
    assert taken.payloads == [[b"2"]]


def test_messages_wait_for_their_channels(broker: FakeBroker, m: Messaging, long_timers: LongTimers) -> None:
    """An earlier process left them: they are neither acknowledged nor lost while this one adds its channels."""
    taken = Taken(m, "a", queue="q")
    broker.deliver(b"1", channel="b", handle=0)
    broker.deliver(b"2", channel="c/d", handle=0)
    broker.deliver(b"3", channel="elsewhere", handle=0)
    broker.deliver(b"4", channel="b", handle=0)
    broker.deliver(b"5", channel="dead/1", handle=0)
    settle_loop()
    assert (taken.payloads, broker.acknowledged) == ([], [])
    promises = [taken.joint.add(each) for each in ("b", "c/#")]
    results(promises)
    assert [each for batch in taken.payloads for each in batch] == [b"1", b"2", b"4"]
    taken.joint.abandon(lambda channel: channel.startswith("dead/"))
    broker.wait_acknowledged(1)
    broker.deliver(b"6", channel="dead/1", handle=0)
    broker.wait_acknowledged(2)
    long_timers.elapse()
    broker.wait_acknowledged(3)  # no channel came for the one elsewhere
    assert [each for batch in taken.payloads for each in batch] == [b"1", b"2", b"4"]


def test_messages_that_wait_for_channels_are_forgotten_with_the_connection(broker: FakeBroker, m: Messaging) -> None:
    taken = Taken(m, "a", queue="q")
    broker.deliver(b"1", channel="b", handle=0)
    settle_loop()
    broker.lose_and_reconnect(1)  # the queue delivers it again
    taken.joint.add("b").result(PATIENCE)
    assert taken.payloads == []


def test_pausing_reaches_the_broker_and_lasts_over_a_reconnect(broker: FakeBroker, m: Messaging) -> None:
    taken = Taken(m, "a", qos="0")
    for _ in range(2):
        taken.joint.pause()
    eventually(lambda: broker.suspended and all(handle.paused for handle in broker.live))
    taken.joint.add("b").result(PATIENCE)
    assert all(handle.paused for handle in broker.live)
    broker.lose_and_reconnect(2)
    eventually(lambda: all(handle.paused for handle in broker.live))
    assert broker.suspended
    taken.joint.resume()
    eventually(lambda: not broker.suspended and not any(handle.paused for handle in broker.live))
    taken.joint.pause()
    eventually(lambda: broker.suspended)
    taken.joint.close().result(PATIENCE)
    assert not broker.suspended


def test_reading_goes_on_for_a_moment_each_second_while_it_is_paused(broker: FakeBroker, m: Messaging) -> None:
    """Answers to keepalives must get through."""
    Taken(m, "a", qos="0").joint.pause()
    eventually(lambda: broker.suspensions >= 2)


@pytest.mark.usefixtures("virtual_clock")
def test_closing_settles_the_promises_of_changes_that_are_unanswered(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, close_timeout=0.2)
    taken = Taken(m, "a")
    broker.gates["subscribe"].close()
    promises = [taken.joint.add("b"), taken.joint.remove("a"), taken.joint.add("c")]
    eventually(lambda: broker.gates["subscribe"].waiting == 1)
    taken.joint.close().result(PATIENCE)
    for promise in promises:
        assert isinstance(promise.exception(PATIENCE), ClosedError)
    broker.gates["subscribe"].open()
    eventually(lambda: not broker.live, "the late subscription has ended, too")


@pytest.mark.usefixtures("virtual_clock")
def test_a_joint_that_is_closed_while_it_subscribes_again_ends_its_late_subscription(
    broker: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    m = connect(broker, close_timeout=0.2)
    taken = Taken(m, "a")
    broker.gates["subscribe"].close()
    opened = broker.opened
    broker.lose()
    broker.wait_open(opened + 1)
    eventually(lambda: broker.gates["subscribe"].waiting == 1)
    taken.joint.close().result(PATIENCE)
    broker.gates["subscribe"].open()
    eventually(lambda: len(broker.handles) == 2 and not broker.live, "the late subscription has ended")
    settle_loop()
    assert "failed to unsubscribe" not in caplog.text


def test_a_joint_of_a_queue_waits_for_a_closed_one_that_still_subscribes(broker: FakeBroker, m: Messaging) -> None:
    former = Taken(m, "a", queue="q")
    broker.gates["subscribe"].close()
    opened = broker.opened
    broker.lose()
    broker.wait_open(opened + 1)
    eventually(lambda: broker.gates["subscribe"].waiting == 1)
    former.joint.close()
    later = m.subscription.open_joint(print, queue="q")
    joined = later.add("a")
    settle_loop()
    assert broker.gates["subscribe"].waiting == 1, "two consumers of one queue would mix up its order"
    broker.gates["subscribe"].open()
    joined.result(PATIENCE)
    assert len(broker.live) == 1


def test_a_joint_of_a_queue_waits_for_a_closed_one_that_still_unsubscribes(broker: FakeBroker, m: Messaging) -> None:
    former = Taken(m, "a", queue="q")
    broker.gates["unsubscribe"].close()
    former.joint.close()
    eventually(lambda: broker.gates["unsubscribe"].waiting == 1)
    joined = m.subscription.open_joint(print, queue="q").add("a")
    other = m.subscription.open_joint(print, queue="other").add("a")
    other.result(PATIENCE)
    settle_loop()
    assert not joined.done()
    broker.gates["unsubscribe"].open()
    joined.result(PATIENCE)


def test_closing_the_instance_while_it_is_disconnected_settles_every_promise(broker: FakeBroker, m: Messaging) -> None:
    taken = Taken(m, "a")
    broker.go_down()
    promises = [taken.joint.add("b"), taken.joint.remove("a")]
    settle_loop()
    assert not any(promise.done() for promise in promises)
    m.close()
    for promise in promises:
        assert isinstance(promise.exception(PATIENCE), ClosedError)
    taken.joint.close().result(PATIENCE)


def test_callbacks_that_raise_cost_nothing_more(
    broker: FakeBroker, m: Messaging, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bytes] = []

    def take(batch: list[Incoming]) -> None:
        seen.extend(incoming.payload for incoming in batch)
        raise ValueError("in take")

    joint = m.subscription.open_joint(take)
    joint.on_restored = lambda: 1 / 0
    joint.add("a").result(PATIENCE)
    broker.deliver(b"1")
    broker.lose_and_reconnect(1)
    broker.deliver(b"2")
    settle_loop()
    assert seen == [b"1", b"2"]
    assert "in take" in caplog.text
    assert "ZeroDivisionError" in caplog.text
