"""Store-and-forward agents (EV.3.1)."""

from __future__ import annotations

import asyncio
import errno
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging.errors import (
    ArgumentError,
    ClosedError,
    InvalidEventError,
    JournalError,
    JournalFullError,
    ListenerGoneError,
)
from messaging.leases import Landlord
from messaging.remoteevent import (
    EventGenerator,
    EventServer,
    ListenerReference,
    RemoteGenerator,
    RetryPolicy,
    StoreAndForwardAgent,
)
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import FAST, Recorder, event, events, ready

Reopen = Callable[..., StoreAndForwardAgent]


@pytest.fixture
def reopen(tmp_path: Path, target: Recorder, other: Recorder) -> Iterator[Reopen]:
    opened: list[StoreAndForwardAgent] = []

    def make(**options: Any) -> StoreAndForwardAgent:
        for each in opened:
            each.close()
        options = {"retry": FAST, "listeners": {"target": target, "other": other}, **options}
        opened.append(StoreAndForwardAgent(tmp_path / "agent", **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_events_for_an_unreachable_listener_are_kept_and_tried_again(reopen: Reopen, target: Recorder) -> None:
    """Scenarios 30 and 32: the call of the generator has long returned, and the events come in order."""
    target.error = OSError("unreachable")
    agent = reopen(target=target)
    for each in events(1, 5):
        agent.notify(each)
    assert agent.pending == 5
    target.calls.wait_for(3)
    target.error = None
    eventually(lambda: target.numbers == [1, 2, 3, 4, 5])
    eventually(lambda: agent.pending == 0)


def test_the_chain_is_invisible(reopen: Reopen, target: Recorder) -> None:
    """Scenario 31."""
    agent = reopen(target=target)
    with EventGenerator("boiler", events=["hot"], begin=0) as generator:
        registration = generator.register("hot", {"h": b"\x00"}, agent, 60.0)
        generator.generate("hot")
        target.events.wait_for(1)
    (received,) = target.events
    assert (received.source, received.id, received.sequence_number) == ("boiler", "hot", 1)
    assert received.handback == {"h": b"\x00"}
    assert received.kind == registration.kind


def test_delivery_to_a_listener_that_is_gone_stops_and_the_events_stay(reopen: Reopen, target: Recorder) -> None:
    """Scenario 33: a definite failure."""
    target.error = ListenerGoneError("gone")
    agent = reopen(target=target)
    assert agent.deliver(events(1, 5)).result(PATIENCE) == [None] * 5
    target.calls.wait_for(1)
    agent.notify(event(6))
    assert agent.pending == 6
    assert len(target.calls) == 1
    target.error = None
    agent.resume()
    eventually(lambda: target.numbers == [*range(1, 7)])


def test_an_indefinite_failure_is_tried_again_up_to_a_bound(reopen: Reopen, target: Recorder) -> None:
    """Scenario 33."""
    target.error = OSError("away")
    agent = reopen(target=target, retry=RetryPolicy(attempts=5, first_delay=0.005, max_delay=0.01))
    agent.notify(event(1))
    counts = agent.counts()
    assert counts is not None
    eventually(lambda: counts.dropped == 1)
    assert len(target.calls) == 5
    target.error = None
    agent.notify(event(2))
    eventually(lambda: target.numbers == [2])


def test_an_event_is_given_up_after_a_time(virtual_clock: VirtualClock, reopen: Reopen, target: Recorder) -> None:
    """Scenario 33."""
    target.error = OSError("away")
    agent = reopen(target=target, retry=RetryPolicy(max_age=600.0, first_delay=1.0, max_delay=60.0))
    agent.notify(event(1))
    virtual_clock.advance(599.0)
    assert agent.pending == 1
    virtual_clock.advance(61.0)
    assert agent.pending == 0
    assert len(target.calls) >= 10


def test_an_event_that_the_listener_refuses_is_dropped_and_the_next_one_tried(reopen: Reopen, target: Recorder) -> None:
    """Scenario 33: a bad argument."""
    errors = {2: ValueError("bad"), 4: TypeError("bad")}

    def refuse_some(received: Any) -> None:
        if received.sequence_number in errors:
            raise errors[received.sequence_number]
        target.notify(received)

    agent = reopen(target=refuse_some)
    assert agent.deliver(events(1, 5)).result(PATIENCE) == [None] * 5
    eventually(lambda: target.numbers == [1, 3, 5])
    counts = agent.counts()
    assert counts is not None
    eventually(lambda: counts.invalid == 2)


def test_the_agent_issues_longer_leases_and_renews_the_shorter_one_upstream(
    virtual_clock: VirtualClock, reopen: Reopen, target: Recorder
) -> None:
    """Scenario 34."""
    agent = reopen()
    with (
        Landlord(max_duration=30.0) as landlord,
        EventGenerator("s", events=[1], begin=0, landlord=landlord) as generator,
    ):
        upstream = generator.register(1, None, agent, 60.0)
        registration = agent.register("s", 1, "h", target, 600.0, upstream=upstream.lease)
        assert upstream.lease.duration == 30.0
        assert registration.lease.duration == 600.0
        virtual_clock.advance(120.0)
        generator.generate(1)
        target.events.wait_for(1)
        assert target.events[0].handback == "h"
        registration.lease.cancel()
        virtual_clock.advance(31.0)
        assert upstream.lease.is_ended


def test_nothing_accepted_is_lost_by_a_restart(reopen: Reopen, target: Recorder, other: Recorder) -> None:
    """Scenario 35."""
    target.error = other.error = OSError("away")
    agent = reopen(target=target)
    registration = agent.register("source", 1, "other", other, 100.0)
    assert agent.deliver(events(1, 300)).result(PATIENCE) == [None] * 300
    agent = reopen(target=target)
    agent.notify(event(301))
    assert [each.id for each in agent.landlord.leases()] == [registration.lease.id]
    target.error = other.error = None
    eventually(lambda: target.numbers == [*range(1, 302)])
    eventually(lambda: other.numbers == [*range(1, 302)])
    assert {each.handback for each in other.events} == {"other"}


def test_a_duplicate_is_acknowledged_and_forwarded_once(reopen: Reopen, target: Recorder) -> None:
    """Scenario 6."""
    agent = reopen(target=target)
    agent.deliver(events(1, 50)).result(PATIENCE)
    assert agent.deliver(events(40, 60)).result(PATIENCE) == [None] * 21
    agent = reopen(target=target)
    assert agent.deliver(events(55, 70)).result(PATIENCE) == [None] * 16
    eventually(lambda: target.numbers and target.numbers[-1] == 70)
    assert target.numbers == [*range(1, 71)]


def test_a_registration_gets_only_events_of_its_kind_and_after_it(
    reopen: Reopen, target: Recorder, other: Recorder
) -> None:
    agent = reopen()
    agent.deliver(events(1, 10)).result(PATIENCE)
    registration = agent.register("source", 1, None, target, 100.0)
    assert registration.sequence_number == 10
    agent.register("source", 2, None, other, 100.0)
    agent.deliver([*events(11, 12), event(1, 2), event(1, 1, "another")]).result(PATIENCE)
    eventually(lambda: target.numbers == [11, 12])
    eventually(lambda: other.numbers == [1])


def test_what_cannot_be_stored_is_not_acknowledged(reopen: Reopen, target: Recorder) -> None:
    target.error = OSError("away")
    agent = reopen(target=target, max_bytes=64 * 1024)
    stored = 0
    while (outcome := agent.deliver([event(stored + 1, handback="x" * 200)]).result(PATIENCE)[0]) is None:
        stored += 1
        assert stored < 3000
    assert isinstance(outcome, JournalFullError)
    target.error = None
    eventually(lambda: target.numbers == [*range(1, stored + 1)])


def test_what_is_dropped_to_make_room_is_counted(reopen: Reopen, target: Recorder) -> None:
    target.error = OSError("away")
    agent = reopen(target=target, max_bytes=64 * 1024, full="drop_oldest")
    for first in range(1, 2001, 100):
        given = [event(number, handback="x" * 200) for number in range(first, first + 100)]
        assert agent.deliver(given).result(PATIENCE) == [None] * 100
    assert agent.dropped > 0
    target.error = None
    eventually(lambda: target.numbers and target.numbers[-1] == 2000)
    assert target.numbers == sorted(target.numbers)


def test_bad_arguments_are_refused(reopen: Reopen, tmp_path: Path) -> None:
    agent = reopen()
    junk: tuple[tuple[Any, Any, Any], ...] = (("", 1, Recorder()), ("s", True, Recorder()), ("s", 1, "x"))
    for source, event_id, listener in junk:
        with pytest.raises((ArgumentError, InvalidEventError)):
            agent.register(source, event_id, None, listener, 60.0)
    with pytest.raises(ArgumentError, match="after a restart"):
        agent.register("s", 1, None, Recorder(), 60.0)
    assert len(agent.landlord) == 0
    for options in ({"target": "x"}, {"name": ""}):
        with pytest.raises(ArgumentError):
            StoreAndForwardAgent(tmp_path / "b", **options)
    agent.close()
    agent.close()
    for call in (lambda: agent.notify(event(1)), lambda: agent.register("s", 1, None, Recorder(), 60.0)):
        with pytest.raises(ClosedError):
            call()


@table("options", [{"attempts": 0}, {"attempts": True}, {"max_age": 0}, {"first_delay": -1}, {"max_delay": "x"}])
def test_a_policy_without_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        RetryPolicy(**options)


def test_events_since_a_given_number_are_forwarded_also_if_they_are_stored_already(
    reopen: Reopen, other: Recorder
) -> None:
    """EV.3.1: the registration promises all events behind its number."""
    agent = reopen()
    for each in events(1, 4):
        agent.notify(each)
    registration = agent.register("source", 1, "h", other, 60.0, sequence_number=1)
    assert registration.sequence_number == 1
    agent.notify(event(5))
    eventually(lambda: other.numbers == [2, 3, 4, 5])
    with pytest.raises(InvalidEventError):
        agent.register("source", 1, None, other, 60.0, sequence_number=-1)


def test_a_registration_whose_lease_ends_while_it_is_made_leaves_nothing(reopen: Reopen, other: Recorder) -> None:
    agent = reopen()
    for _ in range(20):
        agent.register("source", 1, None, other, 1e-6)
    eventually(lambda: not agent._all_forwardings())
    eventually(lambda: [*agent._events.journal.cursors()] == ["checkpoint"])
    assert not agent._folder.table.keys_with("registration")


def test_nothing_is_delivered_by_an_agent_that_cannot_be_opened(
    reopen: Reopen, tmp_path: Path, target: Recorder, other: Recorder
) -> None:
    agent = reopen()
    agent.register("source", 1, None, other, 60.0)
    agent.close()
    target.error = OSError("away")
    with pytest.raises(JournalError, match="`listeners` lacks"):
        StoreAndForwardAgent(tmp_path / "agent", target=target)
    reopen(target=target)
    assert not target.calls


def test_events_for_the_target_of_an_earlier_run_wait_until_there_is_one(
    reopen: Reopen, target: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    target.error = OSError("away")
    reopen(target=target).notify(event(1))
    assert reopen().pending == 1
    assert "1 events wait for the target of an earlier run" in caplog.text
    target.error = None
    agent = reopen(target=target)
    eventually(lambda: target.numbers == [1])
    eventually(lambda: agent.pending == 0)
    reopen().notify(event(2))  # nothing waits for a target: there is none any more
    assert reopen().pending == 0


def test_an_agent_can_be_closed_on_an_event_loop(tmp_path: Path) -> None:
    async def main() -> None:
        agent = StoreAndForwardAgent(tmp_path / "loop")
        assert await agent.deliver(events(1, 3)) == [None] * 3
        agent.close()

    asyncio.run(main())
    with StoreAndForwardAgent(tmp_path / "loop") as agent:
        assert agent.deliver(events(1, 3)).result(PATIENCE) == [None] * 3
        assert agent.duplicates == 3


def test_the_lease_upstream_is_renewed_again_after_a_restart(
    virtual_clock: VirtualClock, reopen: Reopen, target: Recorder
) -> None:
    """Scenarios 34 and 35: over a broker, as the generator is in another process."""
    with (
        messaging.connect(f"memory://{uuid.uuid4().hex}") as m,
        Landlord(max_duration=60.0) as landlord,
        EventGenerator("s", events=[1], begin=0, landlord=landlord, retry=FAST) as generator,
        ready(EventServer(m, "generator", generator)),
    ):
        agent = reopen(messaging=m)
        with EventServer(m, "agent", agent):
            upstream = (
                RemoteGenerator(m, "generator").register(1, None, ListenerReference("agent"), 60.0).result(PATIENCE)
            )
            agent.register("s", 1, "h", target, 3600.0, upstream=upstream.lease)
        agent.close()
        agent = reopen(messaging=m)
        with ready(EventServer(m, "agent", agent)):
            (granted,) = landlord.leases()
            lease = landlord.lease(granted.id)
            assert lease is not None
            ends = lease.expires
            virtual_clock.advance(180.0)
            assert lease.expires > ends + 120.0
            generator.generate(1)
            eventually(lambda: target.numbers == [1])
        assert len(generator.landlord) == 1


def test_a_registration_ends_also_if_the_disk_fails(
    reopen: Reopen, other: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent = reopen()
    lease = agent.register("source", 1, None, other, 100.0).lease
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail_to_sync)
        lease.cancel()
        eventually(lambda: not agent._all_forwardings())
        eventually(lambda: "is not removed" in caplog.text)
    assert "Traceback" not in caplog.text


def fail_to_sync(_file: int) -> None:
    raise OSError(errno.EIO, "Input/output error")
