"""Folders that an earlier release wrote, and whose process was then killed, are opened and drained.

``data/written_before_queues.zip`` was written before ``journal.DurableQueue``: the outbox, the buffers of gateways and
the parties of remote events kept their places in ways of their own.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

import messaging
from messaging.gateway import Gateway
from messaging.journal import Journal
from messaging.leases import Landlord
from messaging.remoteevent import EventGenerator, EventMailbox, StoreAndForwardAgent
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from messaging.typedevent import DurableHistory, RangePolicy, TypedEventBus
from tests.gateway.kit import Broker, route, settings
from tests.remoteevent import helpers

#: of deduplication, seconds: the ids were stored when the folder was written
YEARS = 1e9


@pytest.fixture
def early(tmp_path: Path) -> Path:
    """The folder with what was written."""
    with zipfile.ZipFile(Path(__file__).parent / "data" / "written_before_queues.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path


def numbered(*numbers: int) -> list[bytes]:
    """Return payloads."""
    return [str(number).encode() for number in numbers]


def test_an_outbox_sends_what_its_broker_had_not_confirmed(early: Path) -> None:
    with Broker("memory://early-outbox", "orders") as orders:
        with messaging.connect("memory://early-outbox", outbox_path=early / "outbox"):
            orders.messages.wait_for(15)
        with messaging.connect("memory://early-outbox", outbox_path=early / "outbox") as again:
            again.publish("orders", b"last", guaranteed_delivery=True).result(PATIENCE)
        orders.messages.wait_for(16)
        assert orders.payloads == [*numbered(*range(5, 20)), b"last"]
        first = orders.messages[0].context
        assert (first.content_type, first.extensions["headers"]) == ("text/x", {"n": "5"})


def test_an_inbox_recognises_the_messages_that_were_handled(early: Path) -> None:
    handled: Recorder[messaging.Message] = Recorder()
    with messaging.connect("memory://early-inbox", inbox_path=early / "inbox") as m:
        m.on("orders", handled, deduplicate=YEARS).ready.result(PATIENCE)
        for number in (3, 4, 5):
            m.publish("orders", str(number), message_id=f"id-{number}").result(PATIENCE)
        handled.wait_for(1)
    assert handled.payloads == [b"5"]


def test_a_journal_knows_what_a_cursor_acknowledged_out_of_order(early: Path) -> None:
    with Journal.open(early / "journal") as journal:
        cursor = journal.cursor("reader")
        records = cursor.read(100)
        assert [each.offset for each in records] == [10, 11, 13, *range(15, 60)]
        assert (records[0].channel, bytes(records[0].payload)) == ("c/10", b"record 10" * 3)
        for each in records:
            cursor.acknowledge(each.offset)
    with Journal.open(early / "journal") as journal:
        assert journal.cursor("reader").read(100) == []


def test_a_mailbox_hands_out_what_was_not_taken(early: Path) -> None:
    box_id = (early / "mailbox.id").read_text()
    with EventMailbox(early / "mailbox", max_duration=4e9) as mailbox:
        box = mailbox.registration(box_id)
        taken = box.drain()
        assert helpers.taken(taken) == [*range(helpers.taken(taken)[0], 16)]
        assert helpers.taken(taken)[0] <= 4
    with EventMailbox(early / "mailbox", max_duration=4e9) as mailbox:
        assert len(mailbox.registration(box_id)) == 0


def test_an_agent_forwards_what_its_target_had_not_taken(early: Path) -> None:
    target = helpers.Recorder()
    with StoreAndForwardAgent(early / "agent", target=target, listeners={"target": target}) as agent:
        eventually(lambda: agent.pending == 0)
    assert target.numbers == [*range(1, 8)]


def test_a_generator_notifies_of_events_from_before(early: Path) -> None:
    listener = helpers.Recorder()
    with (
        Landlord("long", max_duration=4e9) as landlord,
        EventGenerator(
            "boiler", events=["hot"], path=early / "generator", listeners={"target": listener}, landlord=landlord
        ) as generator,
    ):
        listener.events.wait_for(6)
        generator.generate("hot")
        listener.events.wait_for(7)
    assert listener.numbers == [*range(1, 8)]
    assert listener.events[0].handback == {"h": 1}


@pytest.mark.parametrize("folder", ["gateway", "gateway-newest"])
def test_a_gateway_publishes_what_its_target_had_not_taken(early: Path, folder: str) -> None:
    order = "newest_first" if folder == "gateway-newest" else "oldest_first"
    instances = {"a": {"url": f"memory://early-{folder}-a"}, "b": {"url": f"memory://early-{folder}-b"}}
    routes = {"r": route(buffer={"order": order})}
    with Broker(f"memory://early-{folder}-b", "out/+") as target:
        with Gateway(settings(early / folder, instances=instances, routes=routes)) as gateway:
            target.messages.wait_for(12)
            eventually(lambda: gateway.route("r").report().buffer.depth == 0)
        with Gateway(settings(early / folder, instances=instances, routes=routes)) as gateway:
            assert gateway.route("r").report().buffer.depth == 0
        assert sorted(target.payloads) == sorted(numbered(*range(12)))


def test_a_history_replays_what_was_recorded(early: Path) -> None:
    past: Recorder[object] = Recorder()
    policies = {"orders/*": RangePolicy.at_most(100)}
    with TypedEventBus(history=policies, durable_history=DurableHistory(early / "history")) as bus:
        bus.on("orders/a", handler=past, history=10)
        past.wait_for(6)
    assert [*past] == [{"n": number} for number in range(6)]
