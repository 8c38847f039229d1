"""What a seed plans: which programs run, what each of them does, and what goes wrong when.

A plan is data. The same plan in the same world gives the same history. A failure is made smaller by a plan with fewer
steps or faults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True, slots=True)
class Step:
    """Something that a role does.

    Attributes:
        role: name of the role.
        name: of the method ``do_NAME`` of the role.
        arguments: of that method.
    """

    role: str
    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.role}: {self.name} {_shown(self.arguments)}".rstrip()


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at: when, seconds after the roles have begun.
        name: of the method ``fault_NAME`` of the simulation.
        arguments: of that method.
    """

    at: float
    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"at {self.at:.6f} {self.name} {_shown(self.arguments)}".rstrip()


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan.

    Attributes:
        options: choices that hold for the whole run: protocol, settings of the instances.
        steps: of all roles; each role does its own in this order.
        faults: in the order of their times.
    """

    options: dict[str, Any]
    steps: tuple[Step, ...]
    faults: tuple[Fault, ...]

    def only(self, steps: Collection[int] | None = None, faults: Collection[int] | None = None) -> Plan:
        """Return the plan with the steps and faults of these numbers; ``None``: all.

        Raises:
            LookupError: it has no step or fault of such a number.
        """
        for what, numbers, all_of in (("step", steps, self.steps), ("fault", faults, self.faults)):
            if wrong := [number for number in numbers or () if not 0 <= number < len(all_of)]:
                raise LookupError(f"there is no {what} {wrong[0]}: the plan has {len(all_of)}, from 0 on")
        return replace(
            self,
            steps=self.steps if steps is None else tuple(self.steps[at] for at in sorted(steps)),
            faults=self.faults if faults is None else tuple(self.faults[at] for at in sorted(faults)),
        )


def _shown(arguments: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in arguments.items()
    )
