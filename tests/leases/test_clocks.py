"""Leases and time: a wall clock that is set, a machine that starts anew, a process that is suspended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Final

import pytest

from messaging import execution
from messaging.errors import DecodeError
from messaging.leases import Landlord, StoredTime
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.leases.clocks import FakeClock

_DAY: Final = 86_400.0

_SUSPENDED: Final = """
import sys
from messaging.leases import Landlord
from messaging.errors import UnknownLeaseError
from messaging.testing.waiting import Recorder
ended = Recorder()
landlord = Landlord()
short, long = landlord.grant(0.5, ended), landlord.grant(6000.0, ended)
print("ready", flush=True)
sys.stdin.readline()
assert short.is_ended and landlord.lease(short.id) is None
try:
    short.renew(10.0)
except UnknownLeaseError:
    pass
else:
    raise AssertionError("an expired lease was renewed")
assert not long.is_ended and long.renew(6000.0).result() == 3600.0
assert len(ended.wait_for(1)) == 1
"""


@table("shift", [_DAY, -_DAY])
def test_a_wall_clock_that_is_set_changes_no_lease(monkeypatch: pytest.MonkeyPatch, shift: float) -> None:
    """No lease expires early, and none lives on."""
    clock = FakeClock()
    with Landlord() as landlord:
        lease = landlord.grant(100.0)
        monkeypatch.setattr(execution.clock, "wall", lambda: time.time() + shift)
        clock.advance(99.0)
        landlord.expire()
        assert lease.remaining == 1.0
        assert lease.renew(100.0).result() == 100.0
        clock.advance(101.0)
        assert lease.is_expired


@table("shift", [_DAY, -_DAY])
def test_a_stored_end_is_independent_of_the_wall_clock_until_the_machine_starts_anew(
    monkeypatch: pytest.MonkeyPatch, shift: float
) -> None:
    clock = FakeClock()
    wall = 1e9
    monkeypatch.setattr("messaging.leases.lease._BOOT", "first")
    monkeypatch.setattr(execution.clock, "wall", lambda: wall)
    stored = StoredTime.from_value(StoredTime.after(100.0).to_value())
    clock.advance(40.0)
    monkeypatch.setattr(execution.clock, "wall", lambda: wall + shift)
    assert stored.remaining() == 60.0
    # after a start of the machine the lease clock begins anew, and the wall clock is all there is
    clock.now = 5.0
    monkeypatch.setattr("messaging.leases.lease._BOOT", "second")
    monkeypatch.setattr(execution.clock, "wall", lambda: wall + 40.0)
    assert stored.remaining() == 60.0
    endless = StoredTime.from_value(StoredTime.after(float("inf")).to_value())
    assert endless.remaining() == float("inf")


@table("value", [None, [], ["b", 1.0], ["b", "x", 1.0], "text", 5, ["b", 10**400, 0], ["b", 1.0, "nan"]])
def test_a_malformed_stored_time_is_refused(value: object) -> None:
    with pytest.raises(DecodeError):
        StoredTime.from_value(value)


def test_a_suspended_process_refuses_expired_leases_when_it_goes_on() -> None:
    """Suspended and continued by signals; the first call after that comes before any timer."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SUSPENDED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(0.7)  # sleeps: the process is suspended for longer than its lease lasts
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
