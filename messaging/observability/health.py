"""Health and readiness of a program, from what its parts report.

*Healthy* means that the process works: its engine's loop and a worker thread respond. *Ready* means that no part
reports a problem: instances are connected, journals can be written, routes of a gateway run.

**Threads.** The functions may be called from any thread but the engine's; they wait at most as long as they say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from messaging.errors import ArgumentError
from messaging.errors.checks import check_optional, check_result
from messaging.execution import Flag, engine, seconds, workers
from messaging.services import ServiceRegistry, default_registry
from messaging.services.reporting import reporters

if TYPE_CHECKING:
    from collections.abc import Mapping

#: how long the engine and a worker may take to respond, seconds
RESPONSE_TIMEOUT: Final = 2.0
#: problems that are told, at most
_MOST: Final = 100


class Health(NamedTuple):
    """The outcome of a check.

    Attributes:
        is_right: whether there is no problem.
        problems: what is wrong, each with the part that says so: ``instance 'plant': …``.
        parts: number of parts that were asked.
    """

    is_right: bool
    problems: tuple[str, ...]
    parts: int

    def as_dict(self) -> Mapping[str, Any]:
        """Return the outcome for JSON."""
        return {"status": "ok" if self.is_right else "failing", "problems": list(self.problems), "parts": self.parts}


def check_health(timeout: float = RESPONSE_TIMEOUT) -> Health:
    """Return whether the engine's loop and a worker thread respond within ``timeout`` seconds.

    Raises:
        ArgumentError: ``timeout`` is no number of seconds.
    """
    limit = seconds(timeout)
    if not limit > 0:
        raise ArgumentError(f"timeout must be above 0, not {timeout!r:.40}")
    flag = Flag()
    try:
        engine().call(workers().submit, flag.set)
    except RuntimeError as error:  # the loop has ended
        return Health(False, (f"engine: {error}",), 1)
    if flag.wait(limit):
        return Health(True, (), 1)
    return Health(False, (f"engine: the event loop or the worker threads did not respond within {limit:g} s",), 1)


def check_readiness(services: ServiceRegistry | None = None, timeout: float = RESPONSE_TIMEOUT) -> Health:
    """Return whether the program is healthy, and none of its parts reports a problem.

    Args:
        services: the registry of the parts; ``None``: that of the process.
        timeout: see :func:`check_health`.

    Raises:
        ArgumentError: an argument is not as described.
    """
    check_optional("services", services, ServiceRegistry)
    health = check_health(timeout)
    if not health.is_right:
        return health
    problems: list[str] = []
    found = reporters(default_registry() if services is None else services)
    for each in found:
        try:
            problems += [
                f"{each.kind} '{each.name}': {problem}" for problem in check_result(each.problems(), "problems")
            ]
        except Exception as error:  # noqa: BLE001  # of a reporter of any program
            problems.append(f"{each.kind} '{each.name}': its problems cannot be read: {type(error).__name__}")
    return Health(not problems, tuple(problems[:_MOST]), len(found))
