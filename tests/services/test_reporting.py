"""Reporters: parts register themselves for as long as they live, and say what their numbers mean."""

from __future__ import annotations

import dataclasses
import importlib
import time
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import ArgumentError
from messaging.distributedeventing import DistributedEventAdmin
from messaging.eventadmin import EventAdmin
from messaging.journal import Journal, JournalReporter
from messaging.services import ServiceRegistry
from messaging.services.reporting import (
    PartReporter,
    Reporter,
    counter,
    gauge,
    identity,
    label,
    meanings,
    register_reporter,
    reporters,
    state,
)
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from messaging.typedevent import DurableHistory, Tolerance, TypedEventBus
from tests.doubles.fake import FakeBroker
from tests.doubles.fixtures import Connect, broker, clean_environment, connect, fake_distribution, registry  # noqa: F401


def kinds_and_names(services: ServiceRegistry) -> list[tuple[str, str]]:
    return [(each.kind, each.name) for each in reporters(services)]


# --- who reports


def test_an_instance_reports_until_it_is_closed() -> None:
    services = ServiceRegistry()
    with messaging.connect("memory://reporting", services=services, name="plant") as m:
        assert kinds_and_names(services) == [("instance", "plant")]
        (reporter,) = reporters(services)
        assert reporter.report() == m.runtime.get_runtime_dto()
        assert list(reporter.problems()) == []
    assert reporters(services) == []


def test_event_services_and_their_connections_report_until_they_are_closed() -> None:
    services = ServiceRegistry()
    with (
        messaging.connect("memory://reporting-events", services=services, name="plant") as m,
        TypedEventBus(services, name="bus") as bus,
        EventAdmin(services, name="admin"),
        DistributedEventAdmin(services, name="far"),
    ):
        with bus.connect(m, "*") as connection:
            connection.ready.result(PATIENCE)
            assert kinds_and_names(services) == [
                ("distributed_event_admin", "far"),
                ("event_admin", "admin"),
                ("instance", "plant"),
                ("typed_event_bus", "bus"),
                ("typed_event_bus_connection", "bus/plant"),
            ]
            eventually(lambda: not any(each.problems() for each in reporters(services)))
        assert ("typed_event_bus_connection", "bus/plant") not in kinds_and_names(services)
    assert reporters(services) == []


def test_a_blocked_handler_is_a_problem_of_its_bus() -> None:
    services = ServiceRegistry()
    with TypedEventBus(services, name="bus", tolerance=Tolerance(failures=1)) as bus:

        @bus.on("a")
        def fail(_event: Any) -> None:
            raise ValueError("broken")

        bus.deliver_untyped("a", {"x": 1})
        bus.flush().result(PATIENCE)
        (reporter,) = reporters(services)
        eventually(lambda: bool(reporter.problems()))
        (problem,) = reporter.problems()
        assert problem.startswith("typed event bus 'bus': handler ")
        assert "is blocked: " in problem
        (handler,) = reporter.report().handlers
        assert handler.is_blocked
        assert handler.failures == 1


def test_the_journals_of_an_outbox_and_of_a_history_report(tmp_path: Path) -> None:
    services = ServiceRegistry()
    with (
        messaging.connect(
            "memory://reporting-outbox", services=services, name="plant", outbox_path=str(tmp_path / "outbox")
        ) as m,
        TypedEventBus(services, name="bus", durable_history=DurableHistory(tmp_path / "history")),
    ):
        found = kinds_and_names(services)
        assert ("journal", "plant/outbox") in found
        assert ("journal", "bus/history") in found
        m.publish("a", b"1", guaranteed_delivery=True).result(PATIENCE)
        eventually(lambda: m.runtime.get_runtime_dto().outbox.waiting == 0)
        outbox = m.runtime.get_runtime_dto().outbox
        assert (outbox.bytes, outbox.oldest, outbox.dead_letters, outbox.unstored) == (0, 0.0, 0, 0)
    assert reporters(services) == []


def test_a_durable_outbox_without_a_broker_reports_depth_and_age(tmp_path: Path) -> None:
    services = ServiceRegistry()
    with messaging.connect(
        "mqtt://127.0.0.1:1",
        services=services,
        name="plant",
        outbox_path=str(tmp_path),
        retry_connect=True,
        close_timeout=0.1,
    ) as m:
        for _ in range(3):
            m.publish("a", b"x" * 100, guaranteed_delivery=True)
        eventually(lambda: m.runtime.get_runtime_dto().outbox.waiting == 3)
        outbox = m.runtime.get_runtime_dto().outbox
        assert 300 < outbox.bytes < 3000
        assert 0 < outbox.oldest < 30
        (instance,) = [each for each in reporters(services) if each.kind == "instance"]
        (problem,) = instance.problems()
        assert problem.startswith("instance 'plant': ")


def test_a_connection_counts_its_connects_and_losses(
    broker: FakeBroker,  # noqa: F811
    connect: Connect,  # noqa: F811
    registry: ServiceRegistry,  # noqa: F811
) -> None:
    m = connect(broker, name="plant")
    (reporter,) = reporters(registry)
    found = m.runtime.get_runtime_dto().connection
    assert (found.connects, found.losses) == (1, 0)
    broker.gates["open"].close()
    broker.lose()
    eventually(lambda: bool(reporter.problems()))
    (problem,) = reporter.problems()
    assert problem.startswith("instance 'plant': reconnecting")
    broker.gates["open"].open()
    eventually(lambda: not reporter.problems())
    found = m.runtime.get_runtime_dto().connection
    assert (found.connects, found.losses) == (2, 1)


# --- journals


def test_a_journal_reports_its_backlog_cursors_and_dead_letters(tmp_path: Path) -> None:
    services = ServiceRegistry()
    with Journal.open(tmp_path / "j", max_records=3, full="reject") as journal:
        slow, fast = journal.cursor("slow"), journal.cursor("fast")
        with register_reporter(services, JournalReporter(journal, "mine")):
            assert kinds_and_names(services) == [("journal", "mine")]
            (reporter,) = reporters(services)
            assert reporter.report().oldest == 0.0
            for number in range(3):
                journal.append("a", b"%d" % number)
            fast.commit(2)
            slow.commit(0)
            journal.add_dead_letter(next(journal.read()), "refused")
            dto = reporter.report()
            assert (dto.begin, dto.end, dto.backlog, dto.dead_letters) == (0, 3, 3, 1)
            assert [(each.name, each.position, each.behind) for each in dto.cursors] == [("fast", 2, 1), ("slow", 0, 3)]
            assert 0 < dto.oldest < 30
            (problem,) = reporter.problems()
            assert "it is full" in problem
            slow.commit(3)
            assert reporter.problems() == ()
        assert reporters(services) == []
    assert "closed" in JournalReporter(journal).problems()[0]


def test_dead_letters_of_an_earlier_run_are_counted(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "j") as journal:
        journal.append("a", b"1")
        record = next(journal.read())
        for _ in range(3):
            journal.add_dead_letter(record, "refused", most=2)
        assert journal.get_dto().dead_letters == 2
    with Journal.open(tmp_path / "j") as journal:
        assert journal.get_dto().dead_letters == 2


def test_the_age_of_a_record_of_an_earlier_run_is_the_time_since_it_was_stored(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "j") as journal:
        journal.append("a", b"1", timestamp=time.time() - 3600)
    with Journal.open(tmp_path / "j") as journal:
        journal.append("a", b"2")
        assert 3590 < journal.ages.age_of(0) < 3700
        assert journal.ages.age_of(1) < 30
        assert journal.ages.age_of(2) == 0.0


# --- what the numbers mean


@dataclass(frozen=True, slots=True)
class Inner:
    name: str = field(metadata=label())
    sent: int = field(metadata=counter("sent", "messages"))


@dataclass(frozen=True, slots=True)
class Outer:
    id: int = field(metadata=identity())
    mode: str = field(metadata=state("mode", ["on", "off"]))
    full: bool = field(metadata=gauge("whether it is full", name="is_full"))
    inner: tuple[Inner, ...] = ()


def test_the_metadata_of_fields_gives_their_meanings() -> None:
    found = {each.field: each for each in meanings(Outer)}
    assert [each.role for each in found.values()] == ["identity", "state", "gauge", "part"]
    assert found["mode"].values == ("on", "off")
    assert found["full"].name == "is_full"
    assert found["inner"].name == "inner"
    assert [(each.name, each.role, each.unit) for each in meanings(Inner)] == [
        ("name", "label", ""),
        ("sent", "counter", "messages"),
    ]


@table("junk", [None, 1, "x", int, [], object()])
def test_a_report_that_is_no_dataclass_is_refused(junk: Any) -> None:
    with pytest.raises(ArgumentError, match="must be a dataclass"):
        meanings(junk)


@table("kind", ["", "Bus", "a b", "1x", None, 5, "größe"])
def test_a_kind_that_is_no_name_in_snake_case_is_refused(kind: Any) -> None:
    with pytest.raises(ArgumentError, match="snake case"):
        PartReporter(kind, "x", dict)


def test_reporters_are_ordered_by_kind_and_name() -> None:
    services = ServiceRegistry()
    for kind, name in (("b", "1"), ("a", "2"), ("a", "1")):
        register_reporter(services, PartReporter(kind, name, lambda: None))
    assert kinds_and_names(services) == [("a", "1"), ("a", "2"), ("b", "1")]
    assert all(services.get(each) is not None for each in services.find(Reporter))


def reports() -> Iterator[type]:
    """All dataclasses of the project whose fields have meanings."""
    root = Path(messaging.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if "from messaging.services.reporting import" not in path.read_text(encoding="utf-8"):
            continue
        name = ".".join(("messaging", *path.relative_to(root).with_suffix("").parts))
        for kind in [*vars(importlib.import_module(name)).values()]:
            if (
                isinstance(kind, type)
                and dataclasses.is_dataclass(kind)
                and kind.__module__ == name
                and any(each.role != "part" for each in meanings(kind))
            ):
                yield kind


def test_every_number_of_a_report_has_a_meaning() -> None:
    found = [*reports()]
    assert len(found) >= 12
    without = [
        f"{kind.__name__}.{each.name}"
        for kind in found
        for each in dataclasses.fields(kind)
        if typing.cast("str", each.type).split(" | ")[0] in ("int", "float", "bool") and not each.metadata
    ]
    assert without == []


def test_every_meaning_has_a_help_without_a_full_stop_and_a_name_in_snake_case() -> None:
    for kind in reports():
        for each in meanings(kind):
            if each.role in ("counter", "gauge", "state"):
                assert each.help, (kind, each.field)
                assert not each.help.endswith("."), (kind, each.field)
            assert each.name == "" or each.name.isidentifier(), (kind, each.field)
