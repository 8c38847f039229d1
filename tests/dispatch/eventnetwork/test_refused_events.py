"""Events that are not taken: their senders are answered, too, and wait for no consumer that never receives them."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest

import messaging
from messaging.dispatch.eventdata import WireEvent, encode
from messaging.dispatch.eventnetwork import ArrivedEvent, DeliveryNotification
from messaging.dispatch.eventnetwork.intake import RefusalLog
from messaging.errors import DecodeError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.dispatch.eventnetwork.conftest import Join
from tests.dispatch.eventnetwork.plain import answers_to, event

SENDER = str(uuid4())
ASKS: dict[str, Any] = {"sender": SENDER, "id": "e1", "notify": True}
#: bytes of the largest event that is read
LIMIT = 4_000

#: events on ``a/x`` that are refused, all of them with a sender that waits for ``e1``
REFUSED: dict[str, bytes] = {
    "a field of the wrong type": event(1, time="now", **ASKS),
    "a reply topic of the wrong type": event(1, reply=7, **ASKS),
    "a path that is no list": event(1, path="x", **ASKS),
    "no data": json.dumps({"event": 1, **ASKS}).encode(),
    "an error event without its error": json.dumps({"event": 1, "kind": "error", **ASKS}).encode(),
    "an unknown kind": event(1, kind="update", **ASKS),
    "a later layout": json.dumps({"event": 2, **ASKS, "data": 1}).encode(),
    "another topic than its channel": event(1, topic="a/y", **ASKS),
    "data that is no JSON": json.dumps({"event": 1, **ASKS}).encode()[:-1] + b',"data":[1,]}',
    "data that is no UTF-8": json.dumps({"event": 1, **ASKS}).encode()[:-1] + b',"data":"\xff"}',
    "data that is cut off": json.dumps({"event": 1, **ASKS}).encode()[:-1] + b',"data":{"a":[1,2',
    "too large": json.dumps({"event": 1, **ASKS}).encode()[:-1] + b',"data":"' + LIMIT * b"x" + b'"}',
    "a CBOR field of the wrong type": encode(WireEvent.of("a/x", 1, sender=SENDER, id="e1", notify=True), as_cbor=True)
    .replace(b"\x65topic\x63a/x", b"\x65topic\x07"),
    "a key that is written with escapes": json.dumps({"event": 2, **ASKS, "data": 1})
    .replace("notify", r"\u006eotify")
    .encode(),
    "it passed the member": b"path",
    "a sequence in place of an id": event(1, time="now", sender=SENDER, sequence=7, notify=True),
}  # fmt: skip


@table("payload", REFUSED)
def test_a_refused_event_is_answered(join: Join, memory: str, payload: bytes) -> None:
    network = f"{memory}-{uuid4()}"
    member = join(network, "a/x", settings={"max_event_bytes": LIMIT})
    if payload == b"path":
        payload = event(1, path=[member.id], **ASKS)
    with messaging.connect(network) as plain:
        found = answers_to(plain, SENDER)
        plain.publish("topics/a/x", payload).result(PATIENCE)
        plain.publish("topics/a/x", event("after", **{**ASKS, "id": "e2"})).result(PATIENCE)
        eventually(lambda: len(found) == 2)
        expected = f"{SENDER}-7" if b'"sequence"' in payload else "e1"
        assert [(each["kind"], each["event"]) for each in found] == [("notified", expected), ("notified", "e2")]
        assert member.service.values == ["after"]


@table("error", {"refused": DecodeError("no"), "a defect": ValueError("no")})
def test_an_event_that_the_service_refuses_is_answered_once(
    join: Join, memory: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    network = f"{memory}-{uuid4()}"
    one, two = join(network), join(network, "a/x")

    def refuse(arrival: ArrivedEvent) -> None:
        if arrival.event.value() == 2 and arrival.notified is not None:
            arrival.notified()
        raise error

    two.service.act = refuse
    eventually(lambda: one.node.sender.has_consumer("a/x") and one.node.get_dto().is_settled)
    for number in (1, 2):
        found = DeliveryNotification(str(number), PATIENCE)
        one.send("a/x", number, found)
        assert found.promise.exception(PATIENCE) is None


def test_an_event_without_a_sender_that_waits_is_not_answered(join: Join, memory: str) -> None:
    join(memory, "a/x")
    with messaging.connect(memory) as plain:
        found = answers_to(plain, SENDER)
        for fields in ({**ASKS, "notify": False}, {**ASKS, "sender": "me"}, {**ASKS, "id": 7}):
            plain.publish("topics/a/x", event(1, time="now", **fields)).result(PATIENCE)
        plain.publish("topics/a/x", b"[]").result(PATIENCE)
        plain.publish("topics/a/x", event(1, **ASKS)).result(PATIENCE)
        eventually(lambda: found)
        assert [each["event"] for each in found] == ["e1"]


def test_a_refusal_that_is_not_logged_costs_no_text() -> None:
    class Message:
        channel = "topics/a"
        reads = 0

        @property
        def payload(self) -> bytes:
            self.reads += 1
            return event(1, sender=SENDER)

    message, log = Message(), RefusalLog("a member")
    for _ in range(100):
        log.log("an event", DecodeError("no"), message)  # type: ignore[arg-type]
    assert (message.reads, log.refused) == (1, 100)
