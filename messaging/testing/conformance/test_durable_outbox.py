"""The durable outbox (``outbox_path``): accepted messages outlive the connection, the instance and their deadlines."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import ClosedError, Features, Messaging, OutcomeUnknownError, UnsupportedFeatureError
from messaging.errors import InvalidExtensionError, JournalLockedError
from messaging.journal import Journal
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature, nothing_more, receive, wire
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, results


def payloads(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def reliably(backend: Backend, **more: Any) -> dict[str, Any]:
    return {**backend.reliable, **more}


def test_a_message_is_stored_and_confirmed(backend: Backend, channel: str, tmp_path: Path) -> None:
    m = backend.connect(outbox_path=tmp_path / "outbox")
    with backend.connect().subscribe(channel, **backend.reliable) as stream:
        promise = m.publish(channel, b"1", **backend.reliable)
        assert promise.stored.result(PATIENCE) is None
        assert promise.result(PATIENCE) is None
        assert promise.stored.result(0) is None
        assert receive(stream, 1) == [b"1"]
    m.close()
    with Journal.view(tmp_path / "outbox") as journal:
        assert journal.end == journal.cursors()["outbox"] == 1


def test_store_and_forward_resolves_without_a_connection(backend: Backend, channel: str, tmp_path: Path) -> None:
    m, link = backend.connect_severable(outbox_path=tmp_path / "outbox")
    assert Features.EXTENSION_STORE_AND_FORWARD in m.features
    with backend.connect().subscribe(channel, **backend.reliable) as stream:
        link.down()
        for payload in payloads(20):
            m.publish(channel, payload, **reliably(backend, store_and_forward=True)).result(PATIENCE)
        waiting = m.publish(channel, b"20", **backend.reliable)
        waiting.stored.result(PATIENCE)
        assert not waiting.done()
        link.up()
        assert receive(stream, 21) == payloads(21)
        assert waiting.result(PATIENCE) is None


def test_store_and_forward_includes_guaranteed_delivery(backend: Backend, channel: str, tmp_path: Path) -> None:
    m, link = backend.connect_severable(outbox_path=tmp_path / "outbox")
    with pytest.raises(InvalidExtensionError, match="guaranteedDelivery"):
        m.publish(channel, b"", store_and_forward=True, qos="0")
    link.down()
    m.publish(channel, b"1", store_and_forward=True).result(PATIENCE)
    m.close()
    with Journal.view(tmp_path / "outbox") as journal:
        (record,) = journal.read()
    assert record.context.extensions == {Features.EXTENSION_GUARANTEED_DELIVERY: True}


def test_messages_of_a_closed_instance_are_sent_by_the_next_with_their_ids(backend: Backend, tmp_path: Path) -> None:
    channel = backend.channel()
    m, link = backend.connect_severable(outbox_path=tmp_path / "outbox")
    link.down()
    promises = [m.publish(channel, payload, **backend.reliable) for payload in payloads(50)]
    promises[-1].stored.result(PATIENCE)
    m.close()
    for promise in promises:
        with pytest.raises(OutcomeUnknownError, match="it is stored, and the next instance"):
            promise.result(0)
    with Journal.view(tmp_path / "outbox") as journal:
        ids = [record.message_id for record in journal.read()]
        assert len({*ids}) == 50
    with backend.connect().subscribe(channel, **backend.reliable) as stream:
        later = backend.connect(outbox_path=tmp_path / "outbox")
        later.publish(channel, b"50", **backend.reliable).result(PATIENCE)
        received = [stream.receive(timeout=PATIENCE) for _ in range(51)]
        assert [message.payload for message in received] == payloads(51)
        if Features.EXTENSION_MESSAGE_ID in m.features:
            known = [message.context.extensions.get("messageId") for message in received[:50]]
            assert known in (ids, [None] * 50)
        eventually(lambda: later.runtime.get_runtime_dto().publisher.pending == 0, "everything to be confirmed")


@pytest.mark.envelope
@feature("messageId")
@table("qos", ["0", "1"])
def test_an_id_of_the_application_outlives_the_instance(backend: Backend, tmp_path: Path, qos: str) -> None:
    m, link = backend.connect_severable(outbox_path=tmp_path / "outbox")
    channel = backend.channel()
    link.down()
    m.publish(channel, b"1", qos=qos, message_id="mine").stored.result(PATIENCE)
    m.close()
    with backend.connect().subscribe(channel, **backend.reliable) as stream:
        backend.connect(outbox_path=tmp_path / "outbox")
        assert stream.receive(PATIENCE).context.extensions["messageId"] == "mine"


@pytest.mark.envelope
def test_the_whole_context_is_stored(backend: Backend, channel: str, tmp_path: Path) -> None:
    m, link = backend.connect_severable(outbox_path=tmp_path / "outbox")
    context = backend.full_context(m)
    with backend.connect().subscribe(channel, **backend.reliable) as stream:
        m.publish(channel, b"before", **context).result(PATIENCE)
        expected = stream.receive(timeout=PATIENCE).context
        link.down()
        m.publish(channel, b"after", **context).stored.result(PATIENCE)
        m.close()
        backend.connect(outbox_path=tmp_path / "outbox")
        found = stream.receive(timeout=PATIENCE).context
    assert found.values_beside_channel() == expected.values_beside_channel()
    told = {Features.EXTENSION_TIME_TO_LIVE, Features.EXTENSION_MESSAGE_ID, "timestamp", "packetId", "streamOffset"}
    assert {k: v for k, v in found.extensions.items() if k not in told} == {
        k: v for k, v in expected.extensions.items() if k not in told
    }


@feature("timeToLive")
def test_a_message_whose_time_to_live_ended_in_the_outbox_is_not_sent(backend: Backend, tmp_path: Path) -> None:
    m, link = backend.connect_severable(outbox_path=tmp_path / "outbox")
    channel = backend.channel()
    link.down()
    promise = m.publish(channel, b"short", **reliably(backend, time_to_live=0.1, store_and_forward=True))
    promise.result(PATIENCE)
    accepted = time.time()
    m.publish(channel, b"long", **reliably(backend, time_to_live=60.0, store_and_forward=True)).result(PATIENCE)
    m.close()
    eventually(lambda: time.time() > accepted + 0.1, "the message to expire")
    with backend.connect().subscribe(channel, **backend.reliable) as stream:
        later = backend.connect(outbox_path=tmp_path / "outbox")
        assert receive(stream, 1) == [b"long"]
        nothing_more(later, channel, stream, **backend.reliable)
        assert later.runtime.get_runtime_dto().publisher.failed == 1


def test_more_messages_than_memory_holds_arrive_in_order(backend: Backend, channel: str, tmp_path: Path) -> None:
    m, link = backend.connect_severable(outbox_path=tmp_path / "outbox", outbox_size=10)
    with backend.connect().subscribe(channel, **backend.reliable) as stream:
        link.down()
        promises = [m.publish(channel, payload, **backend.reliable) for payload in payloads(2000)]
        promises[-1].stored.result(PATIENCE)
        link.up()
        assert receive(stream, 2000) == payloads(2000)
        results(promises)


@feature("mandatory")
def test_an_unroutable_message_is_a_dead_letter_and_holds_up_no_other(backend: Backend, tmp_path: Path) -> None:
    m = backend.connect(outbox_path=tmp_path / "outbox")
    channel = backend.channel()
    with backend.connect().subscribe(channel, **backend.reliable) as stream:
        lost = m.publish(backend.channel("nowhere"), b"lost", mandatory=True)
        kept = m.publish(channel, b"kept", **backend.reliable)
        with pytest.raises(messaging.errors.UnroutableError):
            lost.result(PATIENCE)
        kept.result(PATIENCE)
        assert receive(stream, 1) == [b"kept"]
    m.close()
    with Journal.view(tmp_path / "outbox") as journal:
        (letter,) = journal.dead_letters()
        assert letter.reason.startswith("UnroutableError")
        assert journal.cursors()["outbox"] == 2


@wire
def test_an_instance_accepts_messages_before_its_first_connection(backend: Backend, tmp_path: Path) -> None:
    link = backend.wire()
    link.cut()
    channel = backend.channel()
    with backend.connect().subscribe(channel, **backend.reliable) as stream:
        m = link.connect(outbox_path=tmp_path / "outbox", retry_connect=True, reconnect_max=0.1)
        assert not m.ready.done()
        m.publish(channel, b"early", **reliably(backend, store_and_forward=True)).result(PATIENCE)

        async def main() -> None:
            async with m:
                await m.publish(channel, b"too", **reliably(backend, store_and_forward=True))
                assert not m.ready.done()
                link.up()
                await m

        asyncio.run(main())
        assert receive(stream, 2) == [b"early", b"too"]


@pytest.mark.envelope
@feature("replyTo")
def test_requests_are_not_stored(backend: Backend, responder: Messaging, channel: str, tmp_path: Path) -> None:
    m = backend.connect(outbox_path=tmp_path / "outbox")

    @responder.reply(channel)
    def answer(request: bytes) -> bytes:
        return b"reply"

    assert m.request(channel, b"request", timeout=PATIENCE).result(PATIENCE).payload == b"reply"
    m.close()
    with Journal.view(tmp_path / "outbox") as journal:
        assert journal.end == 0


def test_one_instance_at_a_time_has_an_outbox(backend: Backend, tmp_path: Path) -> None:
    m = backend.connect(outbox_path=tmp_path / "outbox")

    async def connect_too() -> None:
        await messaging.connect(backend.url, outbox_path=tmp_path / "outbox", connect_timeout=0.2)

    with pytest.raises(JournalLockedError, match="outbox_path"):
        asyncio.run(connect_too())  # elsewhere a call waits for an instance that is closing
    m.close()
    again = backend.connect(outbox_path=tmp_path / "outbox")
    again.close()
    with pytest.raises(ClosedError):
        again.publish(backend.channel(), b"")


def test_without_an_outbox_nothing_is_stored(m: Messaging, channel: str) -> None:
    assert Features.EXTENSION_STORE_AND_FORWARD not in m.features
    with pytest.raises(UnsupportedFeatureError, match="set outbox_path"):
        m.publish(channel, b"", store_and_forward=True)
    promise = m.publish(channel, b"", store_and_forward=False)
    promise.result(PATIENCE)
    with pytest.raises(UnsupportedFeatureError, match="outbox_path"):
        promise.stored.result(PATIENCE)
