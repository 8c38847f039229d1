"""The faults of :mod:`tests.simulation.planted` fit the current sources."""

from __future__ import annotations

import ast
from collections import Counter

from tests.house import ROOT
from tests.simulation.planted import PLANTED, SERVICES, Planted, edited


def problems(planted: Planted) -> list[str]:
    """Return why a fault cannot be put into the current sources."""
    found = [] if planted.service in SERVICES else [f"{planted.name}: no service {planted.service!r}"]
    if not planted.edits:
        found.append(f"{planted.name}: no edits")
    try:
        texts = edited(planted)
    except (OSError, ValueError) as error:
        return [*found, str(error)]
    for file, text in texts.items():
        if ast.dump(ast.parse(text)) == ast.dump(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            found.append(f"{planted.name}: {file} means the same as before")
    for argument in planted.test.split():
        file, _, names = argument.partition("::")
        if not file.endswith(".py"):
            continue
        if not (ROOT / file).is_file():
            found.append(f"{planted.name}: no test file {file}")
        elif names and f"def {names.split('::')[-1].partition('[')[0]}(" not in (ROOT / file).read_text("utf-8"):
            found.append(f"{planted.name}: no test {names} in {file}")
    return found


def test_every_planted_fault_fits_the_current_sources() -> None:
    assert [problem for planted in PLANTED for problem in problems(planted)] == []


def test_planted_faults_have_different_names_and_edits() -> None:
    for what in ([each.name for each in PLANTED], [each.edits for each in PLANTED]):
        assert [value for value, count in Counter(what).items() if count > 1] == []


def test_every_service_has_planted_faults() -> None:
    counts = Counter(each.service for each in PLANTED)
    assert {service: counts[service] for service in SERVICES if counts[service] < 3} == {}
