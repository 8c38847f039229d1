"""Members that are plain programs: what is asked of them, and what they cannot do to others."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest

import messaging
from messaging.dispatch.eventnetwork import membership as module
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.dispatch.eventnetwork.conftest import Join
from tests.dispatch.eventnetwork.plain import announcement, answers_to, event, update


def test_announced_waits_for_members_that_answer(join: Join, memory: str) -> None:
    one, two = join(memory), join(memory)
    silent, answering = str(uuid4()), str(uuid4())
    with messaging.connect(memory) as plain:
        pings = answers_to(plain, "all")
        plain.publish("topics-members/all", update(silent, "a", heartbeat=60)).result(PATIENCE)
        one.node.announced(PATIENCE).result(PATIENCE)
        plain.publish("topics-members/all", update(answering, "a", heartbeat=60, answers=True)).result(PATIENCE)
        eventually(lambda: {silent, answering, two.id} == one.live())
        asking = one.node.announced(PATIENCE)
        eventually(lambda: [each for each in pings if each["kind"] == "ping" and each["member"] == one.id][1:])
        token = [each["token"] for each in pings if each["kind"] == "ping" and each["member"] == one.id][-1]
        assert not asking.done()
        pong = announcement("pong", answering, token=token, to=one.id)
        plain.publish(f"topics-members/{one.id}", pong).result(PATIENCE)
        asking.result(PATIENCE)


@table("kind", ["remove", "notified", "leave"])
def test_an_unknown_sender_that_says_nothing_of_itself_is_no_member(join: Join, memory: str, kind: str) -> None:
    network, member = f"{memory}-{uuid4()}", str(uuid4())
    one = join(network)
    with messaging.connect(network) as plain:
        payload = announcement(kind, member, event="e", interests=[{"topics": "a"}])
        plain.publish("topics-members/all", payload).result(PATIENCE)
        plain.publish("topics-members/all", update("00000000-0000-4000-8000-000000000001")).result(PATIENCE)
        eventually(lambda: one.live() == {"00000000-0000-4000-8000-000000000001"})
    assert one.node.get_dto().refused == 0


def test_a_ping_is_answered_also_by_a_member_that_knows_too_many_others(
    join: Join, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MEMBERS", 0)
    one, member = join(memory), str(uuid4())
    with messaging.connect(memory) as plain:
        heard = answers_to(plain, member)
        plain.publish("topics-members/all", announcement("ping", member, token="t")).result(PATIENCE)
        eventually(lambda: [each["token"] for each in heard if each["kind"] == "pong"] == ["t"])
    assert one.live() == set()


def test_a_member_of_a_closed_instance_is_not_connected(join: Join, memory: str) -> None:
    one, two = join(memory), join(memory)
    assert one.node.get_dto().is_connected
    one.instance.close()
    eventually(lambda: not one.node.get_dto().is_connected)
    assert one.node.problems()
    two.node.close().result(PATIENCE)
    assert not two.node.get_dto().is_connected


def test_a_refusal_names_channel_and_sender(join: Join, memory: str, caplog: pytest.LogCaptureFixture) -> None:
    refused = {
        "topics/a/x": event(1, time="now", sender=str(uuid4())),
        "topics-members/all": announcement("later", str(uuid4())),
    }
    for channel, payload in refused.items():
        network = f"{memory}-{uuid4()}"
        one = join(network, "a/x")
        with messaging.connect(network) as plain:
            plain.publish(channel, payload).result(PATIENCE)
            found = json.loads(payload)
            sender = found.get("sender") or found["member"]
            eventually(
                lambda channel=channel, sender=sender: any(  # type: ignore[misc]
                    repr(channel) in each and sender in each for each in caplog.messages
                )
            )
        assert one.node.get_dto().refused == 1
