"""The measures and their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from tests.house import imports, names, shapes, shared, timing, trace
from tests.house.sources import House

#: a measure is a number, or the number of the places that it lists
Measure = Callable[[House], Sequence[object] | float]


def lines_of_product(house: House) -> int:
    """Return the lines of ``messaging`` and ``adapters``, without ``messaging.testing``."""
    return sum(map(house.length, house.product))


def lines_of_tests(house: House) -> int:
    """Return the lines of the tests, with ``messaging.testing``."""
    return sum(len(text.splitlines()) for text in house.tests().values())


MEASURES: Final[Mapping[str, Measure]] = {
    "lines of messaging and adapters": lines_of_product,
    "lines of tests, messaging.testing included": lines_of_tests,
    "modules": lambda house: house.product,
    "modules in the root of messaging": imports.root_modules,
    f"modules over {shapes.MAX_LINES} lines": shapes.large_modules,
    f"modules under {shapes.MIN_LINES} lines": shapes.small_modules,
    "module names used several times": names.shared_module_names,
    "import floors of messaging": imports.floor_plan,
    "import cycles": imports.cycles,
    "reads of other modules' private names": imports.private_reads,
    "classes": shapes.classes,
    f"classes over {shapes.MAX_METHODS} methods": shapes.large_classes,
    f"constructors over {shapes.MAX_PARAMETERS} parameters": shapes.large_constructors,
    "protocols with one implementation": shapes.lonely_protocols,
    "nouns with several classes": names.shared_nouns,
    "mean lines of a function": partial(shapes.mean_length, with_docstrings=True),
    "mean lines of code of a function": shapes.mean_length,
    "pure forwarders": shapes.forwarders,
    f"pairs of places that share {shared.LEAST} lines": shared.shared_runs,
    "except BaseException": shapes.base_exceptions,
    "modules that a publish enters": partial(trace.modules, what="publish"),
    "calls of a publish": lambda house: trace.functions(house, "publish").total(),
    "modules that a request enters": partial(trace.modules, what="request"),
    "calls of a request": lambda house: trace.functions(house, "request").total(),
    "sleeps in tests without a reason": timing.sleeps,
    "sleeps in tests with a reason": partial(timing.sleeps, with_reason=True),
    "definitions of PATIENCE in tests": timing.patiences,
    "functions of tests that wait by hand": timing.waits,
    "vague subjects in sources and pages": names.vague_words,
    "noqa and type: ignore": shapes.suppressions,
    "direct uses of the clock": timing.clock_uses,
}
