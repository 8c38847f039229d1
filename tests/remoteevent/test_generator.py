"""Event generators (EV.2.3.4, EV.2.3.5): registering, numbers, handbacks, failures, leases and restarts."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from messaging.errors import (
    ArgumentError,
    ClosedError,
    InvalidEventError,
    JournalError,
    JournalFullError,
    JournalLockedError,
    JournalUnreadableError,
    LeaseDeniedError,
    UnknownEventError,
    UnknownLeaseError,
)
from messaging.journal import Journal
from messaging.leases import Landlord
from messaging.remoteevent import EventGenerator, RemoteEvent, RetryPolicy, SequenceTracker
from messaging.remoteevent.listener import LocalTarget
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, within
from tests.remoteevent.helpers import Recorder, generate
from tests.threads import in_threads

FAST: Final = RetryPolicy(attempts=3, first_delay=0.01, max_delay=0.02)


@pytest.fixture
def listener() -> Recorder:
    return Recorder()


@pytest.fixture
def generator() -> Iterator[EventGenerator]:
    with EventGenerator("source", events=["hot", "cold", 5], begin=0, retry=FAST) as made:
        yield made


def test_a_registration_has_id_source_lease_and_the_number_of_the_moment(
    generator: EventGenerator, listener: Recorder
) -> None:
    """Scenarios 7 and 9."""
    generate(generator, 3, "hot")
    registration = generator.register("hot", None, listener, 60.0)
    assert (registration.id, registration.source, registration.sequence_number) == ("hot", "source", 3)
    assert 59.0 < registration.lease.remaining <= 60.0
    assert registration.is_fully_ordered
    generator.generate("hot")
    listener.events.wait_for(1)
    assert listener.events[0].kind == registration.kind
    assert listener.numbers == [4]


def test_an_unknown_id_is_refused_and_no_lease_granted(generator: EventGenerator, listener: Recorder) -> None:
    """Scenario 8."""
    for unknown in ("warm", "5", 6, True, None, "", [], object()):
        with pytest.raises(UnknownEventError):
            generator.register(unknown, None, listener, 60.0)  # type: ignore[arg-type]
        with pytest.raises(UnknownEventError):
            generator.generate(unknown)  # type: ignore[arg-type]
    assert len(generator.landlord) == 0


@table("handback", [None, "text", b"\x00\xff", {"a": [1, {"b": b"c"}]}, 5, [None]])
def test_every_notification_carries_the_handback(generator: EventGenerator, listener: Recorder, handback: Any) -> None:
    """Scenario 10; a null handback is legal."""
    registration = generator.register("hot", handback, listener, 60.0)
    generate(generator, 3, "hot")
    assert [each.handback for each in listener.events.wait_for(3)] == [handback] * 3
    registration.lease.cancel()
    listener.events.clear()


def test_each_listener_gets_its_own_handback_with_the_same_number(generator: EventGenerator) -> None:
    """Scenario 11."""
    listeners = {name: Recorder() for name in "abc"}
    for name, each in listeners.items():
        generator.register("hot", name, each, 60.0)
    generate(generator, 5, "hot")
    eventually(lambda: all(len(each.events) == 5 for each in listeners.values()))
    for name, each in listeners.items():
        assert each.numbers == [1, 2, 3, 4, 5]
        assert {event.handback for event in each.events} == {name}


def test_only_the_listener_is_notified(generator: EventGenerator) -> None:
    """Scenario 12: the registrant is another object."""

    class Registrant(Recorder):
        def ask(self, listener: Recorder) -> None:
            generator.register("hot", None, listener, 60.0)

    registrant, listener = Registrant(), Recorder()
    registrant.ask(listener)
    generator.generate("hot")
    listener.events.wait_for(1)
    assert not registrant.calls


def test_generate_does_not_wait_and_a_listener_that_blocks_delays_no_other(generator: EventGenerator) -> None:
    """Scenario 13."""
    blocked, other = Recorder(), Recorder()
    with blocked.gate:
        generator.register("hot", None, LocalTarget(blocked, time_limit=0.2), 60.0)
        generator.register("hot", None, other, 60.0)
        for _ in range(10):
            assert generator.generate("hot").done()
        eventually(lambda: len(other.events) == 10)
        assert not blocked.calls
    generator.generate("hot")
    eventually(lambda: other.numbers == [*range(1, 12)])


def test_a_listener_that_does_not_know_a_kind_loses_that_registration_only(generator: EventGenerator) -> None:
    """Scenario 14."""
    listener = Recorder()
    listener.unknown = {("source", "cold")}
    hot = generator.register("hot", None, listener, 60.0)
    cold = generator.register("cold", None, listener, 60.0)
    generator.generate("cold")
    eventually(lambda: cold.lease.is_ended)
    with pytest.raises(UnknownLeaseError):
        cold.lease.renew(60.0)
    generator.generate("cold")
    generator.generate("hot")
    eventually(lambda: listener.of("hot") == [1])
    assert not hot.lease.is_ended
    assert len(listener.calls) == 2


def test_nothing_is_sent_after_the_lease_has_ended(generator: EventGenerator, listener: Recorder) -> None:
    """Scenario 18."""
    expiring = generator.register("hot", None, listener, 60.0)
    cancelled = generator.register("cold", None, listener, 60.0)
    generator.generate("hot")
    listener.events.wait_for(1)
    cancelled.lease.cancel()
    expiring.lease.renew(0.05)
    eventually(lambda: expiring.lease.is_ended)
    generator.generate("hot")
    generator.generate("cold")
    probe = Recorder()
    generator.register(5, None, probe, 60.0)
    generator.generate(5)
    probe.events.wait_for(1)
    assert listener.numbers == [1]


def test_numbers_rise_by_one_across_threads(generator: EventGenerator, listener: Recorder) -> None:
    """Scenario 3."""
    generator.register("hot", None, listener, 60.0)
    numbers: list[int] = []

    def run() -> None:
        numbers.extend(generator.generate("hot").result() for _ in range(200))

    in_threads(5, lambda _: run())
    assert sorted(numbers) == [*range(1, 1001)]
    eventually(lambda: len(listener.events) == 1000)
    assert listener.numbers == [*range(1, 1001)]
    assert generator.sequence_number("hot") == 1000


def test_a_failing_listener_is_tried_again_and_then_misses_the_event(generator: EventGenerator) -> None:
    listener = Recorder(OSError("away"))
    registration = generator.register("hot", None, listener, 60.0)
    tracker = SequenceTracker()
    tracker.expect(registration)
    generator.generate("hot")
    eventually(lambda: len(listener.calls) == 3)  # the attempts of the policy
    listener.error = None
    generator.generate("hot")
    eventually(lambda: listener.numbers == [2])
    assert tracker.note(listener.events[0]).missed == 1  # and can tell
    counts = generator.counts(registration)
    assert counts is not None
    assert (counts.dropped, counts.delivered) == (1, 1)


def test_a_slow_listener_of_a_full_queue_misses_the_oldest_events() -> None:
    listener = Recorder()
    with EventGenerator("source", events=[1], begin=0, max_pending=10) as generator:
        with listener.gate:
            registration = generator.register(1, None, listener, 60.0)
            generator.generate(1)
            eventually(lambda: generator.landlord.leases())
            generate(generator, 50)
            counts = generator.counts(registration)
            assert counts is not None
            assert counts.overflowed >= 30
        eventually(lambda: listener.numbers and listener.numbers[-1] == 51)
    assert listener.numbers[-10:] == [*range(42, 52)]
    assert listener.numbers == sorted(listener.numbers)


def test_a_coroutine_function_runs_on_the_loop_that_registered_it(generator: EventGenerator) -> None:
    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        found: list[Any] = []
        done = asyncio.Event()

        async def notify(event: RemoteEvent) -> None:
            found.append((event.sequence_number, asyncio.get_running_loop() is loop))
            if event.sequence_number == 3:
                done.set()

        generator.register("hot", None, notify, 60.0)
        for _ in range(3):
            await generator.generate("hot")
        await within(done.wait())
        return found

    assert asyncio.run(main()) == [(1, True), (2, True), (3, True)]


def test_bad_arguments_are_refused(generator: EventGenerator, listener: Recorder, tmp_path: Path) -> None:
    for junk in (None, 5, "listener", Recorder, object()):
        with pytest.raises(ArgumentError):
            generator.register("hot", None, junk, 60.0)
    for duration in (0, -5.0, "x"):
        with pytest.raises(ArgumentError):
            generator.register("hot", None, listener, duration)  # type: ignore[arg-type]
    with pytest.raises(InvalidEventError):
        generator.register("hot", object(), listener, 60.0)
    with pytest.raises(InvalidEventError):
        generator.generate("hot", unknown=5)
    assert len(generator.landlord) == 0
    assert generator.sequence_number("hot") == 0
    for options in ({"source": ""}, {"source": 5}, {"max_pending": 0}, {"max_bytes": True}, {"events": [""]}):
        with pytest.raises((ArgumentError, InvalidEventError)):
            EventGenerator(**options)
    with Landlord(max_leases=1) as landlord, EventGenerator(events=[1], landlord=landlord) as small:
        small.register(1, None, listener, 60.0)
        with pytest.raises(LeaseDeniedError):
            small.register(1, None, listener, 60.0)
    with EventGenerator(path=tmp_path / "one"), pytest.raises(JournalLockedError):
        EventGenerator(path=tmp_path / "one")


def test_a_closed_generator_refuses_everything(listener: Recorder) -> None:
    generator = EventGenerator(events=[1])
    registration = generator.register(1, None, listener, 60.0)
    generator.close()
    generator.close()
    assert registration.lease.is_ended
    for call in (lambda: generator.register(1, None, listener, 60.0), lambda: generator.generate(1)):
        with pytest.raises(ClosedError):
            call()


# --- persistent generators


def test_registrations_numbers_and_undelivered_events_survive_a_restart(tmp_path: Path) -> None:
    listener, late = Recorder(), Recorder()

    def open_again(**options: Any) -> EventGenerator:
        found = {"listener": listener, "late": late}
        return EventGenerator(events=[1, 2], path=tmp_path / "g", listeners=found, retry=FAST_FOREVER, **options)

    with open_again() as generator:
        source = generator.source
        registration = generator.register(1, "h", listener, 100.0)
        for _ in range(20):
            generator.generate(1).result(PATIENCE)
            generator.generate(2).result(PATIENCE)
        eventually(lambda: len(listener.events) == 20)
        registration.lease.renew(200.0).result()
        listener.error = OSError("away")
        for _ in range(10):
            generator.generate(1).result(PATIENCE)
        late_registration = generator.register(1, None, late, 100.0)
        assert late_registration.sequence_number == 30
    listener.error = None
    with open_again() as generator:
        assert generator.source == source
        assert (generator.sequence_number(1), generator.sequence_number(2)) == (30, 20)
        infos = {each.id: each for each in generator.landlord.leases()}
        assert 190 < infos[registration.lease.id].remaining <= 200
        generator.generate(1).result(PATIENCE)
        eventually(lambda: listener.numbers == [*range(1, 32)])
        eventually(lambda: late.numbers == [31])
        assert {each.handback for each in listener.events} == {"h"}
    with pytest.raises(JournalUnreadableError, match="belongs to"):
        EventGenerator("another", path=tmp_path / "g")
    with pytest.raises(JournalError, match="`listeners` lacks"):
        EventGenerator(path=tmp_path / "g")


FAST_FOREVER: Final = RetryPolicy(first_delay=0.01, max_delay=0.05)


def test_a_listener_that_cannot_be_found_again_is_refused(tmp_path: Path, listener: Recorder) -> None:
    with EventGenerator(events=[1], path=tmp_path / "g") as generator:
        with pytest.raises(ArgumentError, match="after a restart"):
            generator.register(1, None, listener, 60.0)
        assert len(generator.landlord) == 0


def test_an_ended_registration_is_not_back_after_a_restart(tmp_path: Path, listener: Recorder) -> None:
    options: dict[str, Any] = {"events": [1], "path": tmp_path / "g", "listeners": {"l": listener}}
    with EventGenerator(**options) as generator:
        expiring = generator.register(1, None, listener, 0.2)
        cancelled = generator.register(1, None, listener, 60.0)
        cancelled.lease.cancel()
    eventually(lambda: expiring.lease.is_expired)
    with EventGenerator(**options) as generator:
        assert len(generator.landlord) == 0
        generator.generate(1).result(PATIENCE)
    assert not listener.events


_KILLED: Final = """
import os, sys
from messaging.remoteevent import EventGenerator
with EventGenerator("source", events=[1, "b"], begin=0, path=sys.argv[1]) as generator:
    for _ in range(100_000):  # in turn, also after a kill in between
        behind = 1 if generator.sequence_number(1) < generator.sequence_number("b") else "b"
        number = generator.generate(behind).result(10)
        os.write(1, f"{number}\\n".encode())
"""


def test_numbers_are_fully_ordered_over_a_kill(tmp_path: Path) -> None:
    """Scenario 4: no number is given twice, and none is skipped."""
    last = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path / "g")], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(50):
            line = process.stdout.readline()
        process.kill()
        rest = process.stdout.read()
        process.wait()
        process.stdout.close()
        confirmed = [int(each) for each in (line + rest).splitlines(keepends=True) if each.endswith(b"\n")]
        with EventGenerator("source", events=[1, "b"], begin=0, path=tmp_path / "g") as generator:
            numbers = generator.sequence_number(1), generator.sequence_number("b")
            assert max(confirmed) <= max(numbers) <= max(confirmed) + 1  # one may be on the disk unconfirmed
            assert abs(numbers[0] - numbers[1]) <= 1
            assert max(numbers) > last
            last = max(numbers)


def test_events_after_a_registration_arrive_whatever_was_lost_by_a_kill_before_it(
    tmp_path: Path, listener: Recorder
) -> None:
    """The numbers of events that never reached the disk are part of the number of the registration."""
    options: dict[str, Any] = {"events": [1], "path": tmp_path / "g", "listeners": {"l": listener}}
    with EventGenerator(**options) as generator:
        generator.generate(1).result(PATIENCE)
        generator._kind(1).sequence += 100  # events on their way to the disk, which the kill loses
        assert generator.register(1, None, listener, 60.0).sequence_number == 101
        generator._kind(1).sequence -= 100
    with EventGenerator(**options) as generator:
        numbers = [generator.generate(1).result(PATIENCE) for _ in range(3)]
        assert numbers == [102, 103, 104]
        eventually(lambda: listener.numbers == numbers)


def test_a_generator_without_a_disk_repeats_no_number_in_its_next_run(listener: Recorder) -> None:
    """EV.2.3.2: a durable party would take the events of the next run for duplicates."""
    last = 0
    for _ in range(3):
        with EventGenerator("source", events=[1]) as generator:
            assert generator.register(1, None, listener, 60.0).sequence_number > last
            last = [generator.generate(1).result(0) for _ in range(1000)][-1]
            eventually(lambda: listener.numbers[-1:] == [last])  # noqa: B023
    assert listener.numbers == sorted(set(listener.numbers))


def test_a_number_is_free_if_its_event_was_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventGenerator(events=[1], path=tmp_path / "g") as generator:
        assert generator.generate(1).result(PATIENCE) == 1
        with monkeypatch.context() as patched:
            patched.setattr("messaging.remoteevent.event_journal._WAITING_BYTES", -1)
            assert isinstance(generator.generate(1).exception(PATIENCE), JournalFullError)
        assert generator.generate(1).result(PATIENCE) == 2
    with EventGenerator(path=tmp_path / "g") as generator:
        assert generator.sequence_number(1) == 2


def test_a_registration_whose_lease_ends_while_it_is_made_leaves_nothing(tmp_path: Path, listener: Recorder) -> None:
    for path in (None, tmp_path / "g"):
        with EventGenerator(events=[1], path=path, listeners={"l": listener}) as generator:
            for _ in range(20):
                generator.register(1, None, listener, 1e-6)
            eventually(lambda: not len(generator.landlord))
            eventually(lambda: not generator._kind(1).interests)


def test_events_of_another_version_of_their_class_are_not_lost_by_a_restart(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Hot(RemoteEvent):
        event_type = "versioned"
        celsius: float

    with EventGenerator(events=[1], path=tmp_path / "g", max_bytes=10**6) as generator:
        for _ in range(3):
            generator.generate(1, Hot, celsius=99.5).result(PATIENCE)
        generator._storage._checkpoint.store = lambda: None  # type: ignore[attr-defined]  # as if it was killed

    @dataclass(frozen=True, kw_only=True)
    class Hotter(RemoteEvent):
        event_type = "versioned"
        celsius: float
        sensor: str

    with EventGenerator(path=tmp_path / "g") as generator:
        assert generator.sequence_number(1) == 3
        assert generator.generate(1, Hotter, celsius=1.0, sensor="a").result(PATIENCE) == 4


async def _close_in_a_loop(path: Path) -> None:
    generator = await asyncio.to_thread(EventGenerator, "source", events=[1], path=path)
    await generator.generate(1)
    generator.close()


def test_a_persistent_generator_can_be_closed_on_an_event_loop(tmp_path: Path) -> None:
    asyncio.run(_close_in_a_loop(tmp_path / "g"))
    with EventGenerator(path=tmp_path / "g") as generator:
        assert generator.sequence_number(1) == 1


def test_an_event_with_a_value_without_a_form_is_refused_also_without_a_disk() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Odd(RemoteEvent):
        value: Any

    with EventGenerator("source", events=[1]) as generator:
        before = generator.sequence_number(1)
        with pytest.raises(InvalidEventError):
            generator.generate(1, Odd, value=object())
        assert generator.sequence_number(1) == before
        assert hash(Odd("a", 1, 1, {"map": []}, value=[])) == hash(Odd("a", 1, 1, {"map": []}, value=[]))


@table(
    "events, declared",
    {"a text": ("overheated", ["overheated"]), "a number": (7, [7]), "several": (("a", 1), ["a", 1])},
)
def test_a_single_kind_of_events_is_one_kind(events: Any, declared: list[Any]) -> None:
    with EventGenerator("g", events=events) as generator:
        for each in declared:
            generator.sequence_number(each)
        with pytest.raises(UnknownEventError):
            generator.sequence_number("o")


def test_kinds_of_events_that_are_none_are_refused() -> None:
    with pytest.raises(ArgumentError, match="events must be ids of events, not NoneType"):
        EventGenerator("g", events=None)  # type: ignore[arg-type]


def test_a_registration_ends_also_if_the_disk_fails(
    tmp_path: Path, listener: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets nothing more, and keeps no events on the disk; the failure is logged."""
    with EventGenerator(events=[1], path=tmp_path / "g", listeners={"l": listener}) as generator:
        lease = generator.register(1, None, listener, 60.0).lease
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", fail_to_sync)
            lease.cancel()
            eventually(lambda: not generator._kind(1).interests)
            eventually(lambda: "is not removed" in caplog.text)
        assert "Traceback" not in caplog.text
    with Journal.view(tmp_path / "g" / "events") as view:
        assert not [name for name in view.cursors() if name.startswith("lease ")]


def fail_to_sync(_file: int) -> None:
    raise OSError(errno.EIO, "Input/output error")
