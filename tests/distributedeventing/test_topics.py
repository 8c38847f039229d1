"""Topics: wildcards and private topics (RFC 214 5.1.3, 5.2.2). Numbers are those of the scenarios."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from messaging.distributedeventing import DistributableEvent, DistributedEventAdmin, PushEvent
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.distributedeventing.conftest import Consumer, Nodes, Pair, consume, flush, record


@table(
    "topics, expected",
    [("foo/bar*", ["foo/bar", "foo/bark"]), ("foo/bar**", ["foo/bar", "foo/bark", "foo/bar/foobar"])],
)
def test_19_wildcards_match_as_in_the_table(admin: DistributedEventAdmin, topics: str, expected: list[str]) -> None:
    recorder = record(admin, topics, is_whole=True)
    for topic in ("foo/bar", "foo/bark", "foo/baa", "foo/bar/foobar"):
        admin.publish_event(topic, 1)
    flush(admin)
    assert [each.topic for each in recorder.values] == expected


def test_20_a_private_topic_is_matched_by_its_name_only(admin: DistributedEventAdmin) -> None:
    topic = admin.create_private_topic()
    exact, wildcard = record(admin, topic), record(admin, "**")
    admin.publish_event(topic, 1)
    flush(admin)
    assert exact.values == [1]
    assert wildcard.values == []


def test_21_private_topics_never_repeat(admin: DistributedEventAdmin) -> None:
    program = "from messaging.distributedeventing import DistributedEventAdmin as A; print(A().create_private_topic())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    topics = [admin.create_private_topic() for _ in range(1000)] + [other.strip()]
    assert len({*topics}) == 1001
    assert all(each.startswith(".") for each in topics)


def test_22_a_private_topic_carries_data_sessions_and_replies(pair: Pair) -> None:
    topic, replies = pair.one.create_private_topic(), Consumer()
    recorder = Consumer()
    consume(pair.other, recorder, topic, is_whole=True, lifecycle="SESSION")

    def answer(event: PushEvent[DistributableEvent[Any]]) -> None:
        if event.kind == "data" and event.value.reply_to is not None:
            pair.other.publish_event(event.value.reply_to, event.value.data + 1)

    pair.other.on(topic, handler=answer, is_whole=True)
    pair.announce()
    session = pair.one.create_session(topic, int, replies, int)
    pair.announce()
    session.publish_event(1)
    eventually(lambda: replies.values == [2])
    session.close()
    eventually(lambda: recorder.kinds == ["data", "close"])


def test_23_a_subscription_made_before_the_first_event_misses_nothing(pair: Pair) -> None:
    topic = pair.other.create_private_topic()
    seen: Recorder[int] = Recorder()
    with pair.other.create_subscription(topic, int) as subscription:
        subscription.ready.result(PATIENCE)
        for number in range(20):
            pair.one.publish_event(topic, number)
        subscription.subscribe(seen)
        assert seen.wait_for(20) == list(range(20))


def test_24_no_wildcard_of_the_network_reaches_a_private_topic(nodes: Nodes, transport: str) -> None:
    one, other = nodes(transport), nodes(transport)
    topic = one.create_private_topic()
    wildcard, exact = record(other, "**"), record(other, topic)
    prefix = one.get_dto().node.prefix  # type: ignore[union-attr]
    other.announced().result(PATIENCE)
    one.announced().result(PATIENCE)
    one.publish_event(topic, 1)
    one.publish_event("a", 2)
    eventually(lambda: exact.values == [1])
    eventually(lambda: wildcard.values == [2])
    assert one.node is not None
    assert not one.node.names.of(topic).startswith(f"{prefix}/")
