"""The comparison passes what is right, and finds each kind of wrong: a checker that cannot fail is worth nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import DeadlineError
from messaging.testing.tables import table
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

#: the fate of each message of both publishers, by its sequence; an unknown and an open one may arrive or not
FATES = {"p1": "confirmed confirmed failed unknown unknown open open confirmed", "p2": "confirmed open confirmed"}
#: what arrives in a run that keeps every promise; some messages arrive again after a lost connection
KEPT = [("p1", 0), ("p2", 0), ("p1", 1), ("p1", 0), ("p1", 1), ("p1", 3), ("p1", 5), ("p2", 1), ("p1", 7), ("p2", 2)]


def verdict(arrived: list[tuple[str, int]], *extra: bytes) -> Verdict:
    histories = {publisher: History() for publisher in FATES}
    for publisher, fates in FATES.items():
        history = histories[publisher]
        for sequence, fate in enumerate(fates.split()):
            history.attempted[sequence] = 0.0
            if fate == "confirmed":
                history.confirmed[sequence] = 0.0
            elif fate != "open":
                history.failed[sequence] = "OutcomeUnknownError" if fate == "unknown" else "DeadlineError"
    arrivals = Arrivals(RUN, {"before"})
    for publisher, sequence in arrived:
        arrivals.add(encode(Stamp(RUN, publisher, sequence), b"body"))
    for payload in extra:
        arrivals.add(payload)
    return compare(histories, arrivals)


def test_kept_promises_pass_and_are_counted() -> None:
    found = verdict(KEPT, encode(Stamp("before", "p1", 0))).check()
    assert (found.confirmed, found.received, found.unconfirmed, found.duplicates, found.open) == (5, 8, 3, 2, 3)
    assert found.failed == {"DeadlineError": 1, "OutcomeUnknownError": 2}
    assert not found.lost
    assert verdict([*KEPT, KEPT[0]]).check().duplicates == 3


@table("victim", [("p1", 0), ("p1", 1), ("p1", 7), ("p2", 0), ("p2", 2)])
def test_a_confirmed_message_that_never_arrived_is_lost(victim: tuple[str, int]) -> None:
    found = verdict([each for each in KEPT if each != victim])
    assert found.lost == (Stamp(RUN, *victim),)
    with pytest.raises(AssertionError, match="1 lost"):
        found.check()
    found.check(may_lose=True)


RIGHT = encode(Stamp(RUN, "p1", 0), b"body")


@table(
    "payload",
    [
        encode(Stamp(RUN, "p1", 8)),  # never attempted
        encode(Stamp(RUN, "p3", 0)),
        encode(Stamp("another-run", "p1", 0)),
        encode(Stamp(RUN, "p1", 2)),  # failed
        b"",
        b"something else",
        RIGHT[:-1] + b"!",
        RIGHT.replace(b"p1 0", b"p1 1"),
    ],
)
def test_a_message_that_must_not_arrive_is_unexpected(payload: bytes) -> None:
    found = verdict(KEPT, payload)
    assert (len(found.unexpected), found.duplicates) == (1, 2)
    with pytest.raises(AssertionError, match="1 unexpected"):
        found.check(may_lose=True)


@table("before, after", [(0, 2), (2, 5), (5, 8), (1, 9)])
def test_a_message_that_was_overtaken_is_out_of_order(before: int, after: int) -> None:
    victim = KEPT[before]
    arrived = [each for each in KEPT[: after + 1] if each != victim]
    found = verdict([*arrived, victim, *KEPT[after + 1 :]])
    assert Stamp(RUN, *victim) in found.disorder
    with pytest.raises(AssertionError, match="out of order"):
        found.check()
    found.check(ordered=False)


@given(stamps, st.binary(max_size=200), st.data())
def test_a_payload_has_its_stamp_and_body_and_any_change_is_noticed(
    stamp: Stamp, body: bytes, data: st.DataObject
) -> None:
    payload = bytearray(encode(stamp, body))
    assert decode(bytes(payload)) == (stamp, body)
    with pytest.raises(ForgedError):
        decode(bytes(payload[:-1]))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises((ForgedError, UnicodeDecodeError)):
        decode(bytes(payload))


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


def test_a_publisher_cuts_off_the_line_that_the_one_before_was_killed_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"1.0 attempted 0\n1.5 confirmed 0\n2.0 conf")
    with PublisherLog(path) as log:
        log.attempt([1])
    history = read_log(path)
    assert ([*history.attempted], [*history.confirmed]) == ([0, 1], [0])


def test_attempts_are_in_the_file_before_they_are_sent(tmp_path: Path) -> None:
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
