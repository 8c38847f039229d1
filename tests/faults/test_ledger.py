"""The comparison passes what is right, and finds each kind of wrong: a checker that cannot fail is worth nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import DeadlineError
from tests.faults.ledger import (
    Arrivals,
    ForgedError,
    History,
    PublisherLog,
    Stamp,
    Verdict,
    compare,
    decode,
    encode,
    read_log,
)

RUN = "run"
names = st.text("abcxyz0189-", min_size=1, max_size=8)
stamps = st.builds(Stamp, names, names, st.integers(0, 2**40))


@dataclass
class Story:
    """What happened, by hand: two publishers, and what arrived of them."""

    histories: dict[str, History]
    arrived: list[Stamp]

    def verdict(self, *extra: bytes) -> Verdict:
        arrivals = Arrivals(RUN)
        for stamp in self.arrived:
            arrivals.add(encode(stamp, b"body"))
        for payload in extra:
            arrivals.add(payload)
        return compare(self.histories, arrivals)

    def first_of(self, publisher: str) -> list[int]:
        """Positions of the first deliveries of a publisher's messages."""
        seen: set[int] = set()
        positions = []
        for position, stamp in enumerate(self.arrived):
            if stamp.publisher == publisher and stamp.sequence not in seen:
                seen.add(stamp.sequence)
                positions.append(position)
        return positions


@st.composite
def faithful(draw: st.DrawFn) -> Story:
    """A story in which every promise was kept, with failures, repetitions and messages that came unconfirmed."""
    histories: dict[str, History] = {}
    streams: list[list[Stamp]] = []
    for publisher in ("p1", "p2"):
        history = histories[publisher] = History()
        stream: list[Stamp] = []
        arrives: list[Stamp] = []
        for sequence in range(draw(st.integers(2, 12))):
            fate = draw(st.sampled_from(["confirmed", "confirmed", "failed", "unknown", "open"]))
            history.attempted[sequence] = float(sequence)
            if fate == "confirmed":
                history.confirmed[sequence] = float(sequence)
            elif fate != "open":
                history.failed[sequence] = "OutcomeUnknownError" if fate == "unknown" else "DeadlineError"
            if fate == "confirmed" or (fate != "failed" and draw(st.booleans())):
                arrives.append(Stamp(RUN, publisher, sequence))
        position = 0
        for back in draw(st.lists(st.integers(0, 3), max_size=3)):  # the connection was lost: some of it comes again
            end = draw(st.integers(position, len(arrives)))
            stream += arrives[position:end]
            position = max(0, end - back)
        stream += arrives[position:]
        streams.append(stream)
    mixed: list[Stamp] = []
    while any(streams):
        stream = draw(st.sampled_from([each for each in streams if each]))
        mixed.append(stream.pop(0))
    return Story(histories, mixed)


@given(stamps, st.binary(max_size=200))
def test_a_payload_tells_its_stamp_and_body(stamp: Stamp, body: bytes) -> None:
    assert decode(encode(stamp, body)) == (stamp, body)


@given(stamps, st.binary(max_size=50), st.data())
def test_any_change_of_a_payload_is_noticed(stamp: Stamp, body: bytes, data: st.DataObject) -> None:
    payload = bytearray(encode(stamp, body))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises((ForgedError, UnicodeDecodeError)):
        decode(bytes(payload))
    with pytest.raises(ForgedError):
        decode(bytes(encode(stamp, body)[:-1]))


@given(faithful())
def test_kept_promises_pass(story: Story) -> None:
    verdict = story.verdict().check()
    assert verdict.duplicates == len(story.arrived) - len(set(story.arrived))
    assert verdict.received == len(set(story.arrived))
    confirmed = {Stamp(RUN, name, each) for name, history in story.histories.items() for each in history.confirmed}
    assert verdict.confirmed == len(confirmed)
    assert verdict.unconfirmed == len(set(story.arrived) - confirmed)
    attempted = sum(len(history.attempted) for history in story.histories.values())
    assert verdict.confirmed + sum(verdict.failed.values()) + verdict.open == attempted


@given(faithful(), st.data())
def test_a_confirmed_message_that_never_came_is_lost(story: Story, data: st.DataObject) -> None:
    confirmed = [Stamp(RUN, name, each) for name, history in story.histories.items() for each in history.confirmed]
    if not confirmed:
        return
    victim = data.draw(st.sampled_from(confirmed))
    story.arrived = [stamp for stamp in story.arrived if stamp != victim]
    verdict = story.verdict()
    assert verdict.lost == (victim,)
    with pytest.raises(AssertionError, match="1 lost"):
        verdict.check()
    verdict.check(may_lose=True)


@given(faithful(), st.data())
def test_a_message_that_was_never_attempted_is_unexpected(story: Story, data: st.DataObject) -> None:
    ghost = data.draw(
        st.sampled_from([Stamp(RUN, "p1", 10_000), Stamp(RUN, "p3", 0), Stamp("another-run", "p1", 0)]), "ghost"
    )
    story.arrived.insert(data.draw(st.integers(0, len(story.arrived))), ghost)
    verdict = story.verdict()
    assert len(verdict.unexpected) == 1
    with pytest.raises(AssertionError, match="1 unexpected"):
        verdict.check(may_lose=True)


@given(faithful())
def test_a_message_that_is_known_to_have_failed_must_not_come(story: Story) -> None:
    for publisher, history in story.histories.items():
        for sequence, kind in history.failed.items():
            arrived = [*story.arrived, Stamp(RUN, publisher, sequence)]
            verdict = Story(story.histories, arrived).verdict()
            assert len(verdict.unexpected) == (kind != "OutcomeUnknownError")


def test_what_comes_again_of_an_earlier_run_is_counted_and_nothing_else() -> None:
    arrivals = Arrivals(RUN, {"before"})
    for run in ("before", RUN, "another"):
        arrivals.add(encode(Stamp(run, "p1", 0)))
    verdict = compare({"p1": History(attempted={0: 0.0}, confirmed={0: 0.0})}, arrivals)
    assert (arrivals.late, verdict.received, len(verdict.unexpected), verdict.duplicates) == (1, 1, 1, 0)


@given(faithful(), stamps)
def test_a_forged_message_is_unexpected(story: Story, stamp: Stamp) -> None:
    right = encode(Stamp(RUN, "p1", 0), b"body")
    for payload in (b"", b"something else", right[:-1] + b"!", right.replace(b"p1 0", b"p1 1")):
        verdict = story.verdict(payload)
        assert len(verdict.unexpected) == 1
        assert verdict.duplicates == story.verdict().duplicates


@given(faithful(), st.data())
def test_a_message_that_was_overtaken_is_out_of_order(story: Story, data: st.DataObject) -> None:
    for publisher in story.histories:
        first = story.first_of(publisher)
        if len(first) < 2:
            continue
        before, after = sorted(data.draw(st.sets(st.sampled_from(first), min_size=2, max_size=2)))
        victim = story.arrived[before]
        # its first delivery now comes right after that of one of its successors
        arrived = [stamp for stamp in story.arrived[: after + 1] if stamp != victim]
        verdict = Story(story.histories, [*arrived, victim, *story.arrived[after + 1 :]]).verdict()
        assert victim in verdict.disorder
        with pytest.raises(AssertionError, match="out of order"):
            verdict.check()


@given(faithful(), st.data())
def test_repetitions_are_counted_and_no_fault(story: Story, data: st.DataObject) -> None:
    if not story.arrived:
        return
    before = story.verdict()
    position = data.draw(st.integers(0, len(story.arrived) - 1))
    story.arrived.insert(data.draw(st.integers(position + 1, len(story.arrived))), story.arrived[position])
    assert story.verdict().check().duplicates == before.duplicates + 1


# --- the log


def test_the_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    with PublisherLog(tmp_path / "log") as log:
        log.attempt(range(5))
        log.confirm(0)
        log.fail(1, DeadlineError("late"))
        log.confirm(3)
        log.attempt([5])
    log.close()
    log.confirm(4)  # too late
    history = read_log(tmp_path / "log")
    assert [*history.attempted] == [0, 1, 2, 3, 4, 5]
    assert [*history.confirmed] == [0, 3]
    assert history.failed == {1: "DeadlineError"}
    assert history.attempted[0] <= history.confirmed[0] <= history.attempted[5]


def test_a_log_that_ends_within_a_line_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"1.0 attempted 0\n1.0 attempted 1\n2.0 confirmed 0\n2.0 confirmed 1")
    assert [*read_log(path).confirmed] == [0]
    path.write_bytes(b"1.0 attempted 0\n1.0 dreamt 1\n")
    with pytest.raises(ValueError, match="dreamt"):
        read_log(path)


def test_what_was_attempted_is_in_the_file_before_it_is_sent(tmp_path: Path) -> None:
    """The publisher is killed right after: no buffer of its own gets written any more."""
    program = (
        "import os, pathlib, signal, sys; from tests.faults.ledger import PublisherLog\n"
        "log = PublisherLog(pathlib.Path(sys.argv[1])); log.attempt(range(1000)); log.confirm(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "log"], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert done.returncode == -signal.SIGKILL
    history = read_log(tmp_path / "log")
    assert len(history.attempted) == 1000
    assert not history.confirmed
