"""Makes a failing case smaller: fewer steps, fewer faults, the same promise broken."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tests.simulation.runner import Case, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.runner import Stems

#: other worlds in which a smaller plan is tried: with fewer steps, the same choices of threads mean something else
_WORLDS: Final = 3


def kind_of(failure: str) -> str:
    """Return a failure without what differs between runs of the same defect: numbers, and what follows a colon."""
    return re.sub(r"\d+", "0", failure.partition(": ")[0])[:80]


def shrink(case: Case, stems: Stems, told: Callable[[str], object]) -> Case:
    """Return a case with as few steps and faults as can be left out one after the other.

    Args:
        case: a case that fails; one that passes is returned as it is.
        stems: run the cases.
        told: called with each smaller case.
    """
    failures = stems.run(case).failures
    if not failures:
        return case
    wanted = kind_of(failures[0])

    def fails(tried: Case) -> Case | None:
        for world in (case.world, *range(1, _WORLDS)):
            found = replace(tried, world=world)
            if any(kind_of(failure) == wanted for failure in stems.run(found).failures):
                return found
        return None

    plan = plan_of(case)
    best = replace(
        case,
        steps=case.steps if case.steps is not None else tuple(range(len(plan.steps))),
        faults=case.faults if case.faults is not None else tuple(range(len(plan.faults))),
    )
    for name in ("faults", "steps"):
        size = max(1, len(getattr(best, name)) // 2)
        while size:
            at = 0
            while at < len(getattr(best, name)):
                numbers = getattr(best, name)
                smaller = fails(replace(best, **{name: numbers[:at] + numbers[at + size :]}))
                if smaller is None:
                    at += size
                else:
                    best = smaller
                    told(str(best))
            size //= 2
    return best
