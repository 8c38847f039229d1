"""Measures which branches of the product the runs take, so that blind corners are seen: ``--coverage``."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.runner import Case, Result

_SOURCES: Final = ("messaging", "adapters")


def _measurement() -> Any:
    import coverage  # not for runs that are not measured: it takes a while

    # in memory: the files of a world are its own
    return coverage.Coverage(
        data_file=None, branch=True, concurrency=["greenlet"], source=[*_SOURCES], omit=["messaging/testing/*"],
        config_file=False,
    )  # fmt: skip


def measure(case: Case, wants_history: bool) -> Result:
    """Run a case in this process, see ``runner.run_here``; the result says what ran."""
    from tests.simulation.runner import run_here

    measurement = _measurement()
    measurement.start()
    try:
        result = run_here(case, wants_history=wants_history)
    finally:
        measurement.stop()
    result.measured = base64.b64encode(measurement.get_data().dumps()).decode()
    return result


class Coverage:
    """Sums up what several runs have measured.

    Args:
        import_all: imports the product, which executes the statements of its modules.
    """

    def __init__(self, import_all: Callable[[], object]) -> None:
        self._total = _measurement()
        self._total.start()
        import_all()
        self._total.stop()

    def add(self, result: Result) -> None:
        """Add what a run has measured."""
        from coverage import CoverageData

        data = CoverageData(no_disk=True)
        data.loads(base64.b64decode(result.measured))
        self._total.get_data().update(data)

    def report(self, stream: Any) -> None:
        """Write for each module how many of its statements and branches ran, and which did not."""
        self._total.report(file=stream, show_missing=True, skip_covered=True, skip_empty=True, sort="-miss")
