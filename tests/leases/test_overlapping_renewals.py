"""What a holder knows of a lease of another process, against a model of the grantor: any order of answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from messaging.errors import OutcomeUnknownError, UnknownLeaseError
from messaging.leases import ANY, Lease
from messaging.leases.lease import Renewal
from tests.leases.clocks import FakeClock

_LONGEST = 50.0
_DEFAULT = 7.0
_BEGIN = 20.0


@dataclass(eq=False)
class Asked:
    """A renewal on its way: what the holder has noted, and what the grantor has granted."""

    renewal: Renewal
    granted: float | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the grantor has granted less than was asked for: only its answer tells the holder."""
        duration = math.inf if self.renewal.duration == ANY else self.renewal.duration
        return self.granted is not None and self.granted < duration


class Renewals(RuleBasedStateMachine):
    """The grantor has requests in any order, or never, and its answers come in any order, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        grantor: object = object()
        self.lease = Lease("lease", grantor, _BEGIN, _BEGIN)  # type: ignore[arg-type]  # never asked
        self.asked: list[Asked] = []
        #: when the lease expires at the grantor
        self.expires = self.clock.now + _BEGIN
        #: since the last moment without a request: when the lease expired then, the first request, the fewest seconds,
        #: and whether a renewal was granted or lost
        self.before = self.expires
        self.first = self.clock.now
        self.fewest = math.inf
        self.is_renewed = False

    @rule(seconds=st.floats(0.01, 5.0))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(duration=st.one_of(st.just(ANY), st.sampled_from((1.0, 10.0, 30.0, 50.0, 100.0, math.inf))))
    def ask(self, duration: float) -> None:
        if not self.asked:
            self.before, self.first, self.fewest = self.lease.expires, self.clock.now, math.inf
            self.is_renewed = False
        if duration != ANY:  # it counts while it is pending, also if it is refused then
            self.fewest = min(self.fewest, duration)
        self.asked.append(Asked(self.lease.note_asked(duration, self.clock.now)))

    @precondition(lambda self: any(each.granted is None for each in self.asked))
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from([each for each in self.asked if each.granted is None]))
        duration = chosen.renewal.duration
        chosen.granted = _DEFAULT if duration == ANY else min(duration, _LONGEST)
        self.expires = self.clock.now + chosen.granted

    @precondition(lambda self: any(each.granted is not None for each in self.asked))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from([each for each in self.asked if each.granted is not None]))
        self.asked.remove(chosen)
        self.is_renewed = True
        assert chosen.granted is not None
        self.lease.note_answered(chosen.renewal, chosen.granted)
        self.fewest = min(self.fewest, chosen.granted)
        assert self.lease.duration == chosen.granted
        assert self.lease.requested == chosen.renewal.duration

    @precondition(lambda self: any(each.renewal.duration != ANY for each in self.asked))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A request or its answer is lost. How long the grantor would grant by itself is not known to the holder."""
        chosen = data.draw(st.sampled_from([each for each in self.asked if each.renewal.duration != ANY]))
        self.asked.remove(chosen)
        self.is_renewed = True
        self.lease.note_answered(chosen.renewal, OutcomeUnknownError("lost"))
        self.fewest = min(self.fewest, chosen.renewal.duration)

    @precondition(lambda self: any(each.granted is None for each in self.asked))
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from([each for each in self.asked if each.granted is None]))
        self.asked.remove(chosen)
        before = self.lease.expires
        self.lease.note_answered(chosen.renewal, UnknownLeaseError("refused"))
        assert self.lease.expires >= before
        if not self.asked and not self.is_renewed:
            assert self.lease.expires == self.before  # as if it had not been asked for

    @precondition(lambda self: not any(each.is_cut for each in self.asked))
    @invariant()
    def never_longer_than_at_the_grantor(self) -> None:
        assert self.lease.expires <= self.expires + 1e-9

    @precondition(lambda self: not self.asked)
    @invariant()
    def not_shorter_than_it_must(self) -> None:
        assert self.lease.expires >= min(self.before, self.first + self.fewest)


TestRenewals = Renewals.TestCase
TestRenewals.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
