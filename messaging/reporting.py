"""Reporters: parts of a program that report their state to metrics, health checks and the monitor.

A part registers a :class:`Reporter` in the service registry for as long as it lives. What reads the reports finds them
there by :func:`reporters`; neither side knows the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from messaging.services import ServiceRegistry


class Reporter(Protocol):
    """A part of a program that reports its state. Thread safe."""

    #: what the part is, in snake case: ``instance``, ``typed_event_bus``, ``journal``, ``gateway`` ...
    kind: str
    #: distinguishes the parts of one kind; for people
    name: str

    def report(self) -> Any:
        """Return a snapshot of the state: a frozen dataclass of plain values, tuples and further dataclasses.

        Called from any thread, often, and never waits. It holds no secret.
        """

    def problems(self) -> Sequence[str]:
        """Return what keeps the part from working now, each a text for people; empty: it works.

        Called from any thread, often, and never waits.
        """


def reporters(services: ServiceRegistry) -> list[Reporter]:
    """Return the reporters that are registered in ``services``, in the order of kind and name."""
    found: list[Reporter] = []
    for reference in services.find(Reporter):
        reporter: Reporter | None = services.get(reference)
        if reporter is not None:
            found.append(reporter)
    return sorted(found, key=lambda each: (each.kind, each.name))
