"""The faults of :mod:`tests.mutations` fit the current sources."""

from __future__ import annotations

import ast
from collections import Counter

from tests.house import ROOT
from tests.mutations import FAULTS, Fault


def problems(fault: Fault) -> list[str]:
    """Return why a fault cannot be put into the current sources."""
    file = ROOT / fault.file
    if not file.is_file():
        return [f"{fault.name}: no file {fault.file}"]
    text = file.read_text(encoding="utf-8")
    count = text.count(fault.before)
    if count != 1:
        return [f"{fault.name}: its text stands in {fault.file} {count} times"]
    found = []
    try:
        if ast.dump(ast.parse(text.replace(fault.before, fault.after))) == ast.dump(ast.parse(text)):
            found.append(f"{fault.name}: {fault.file} means the same as before")
    except SyntaxError as error:
        found.append(f"{fault.name}: {fault.file} is not Python: {error}")
    paths = [each.partition("::")[0] for each in fault.tests.split() if "/" in each]
    return found + [f"{fault.name}: no tests in {path}" for path in paths if not (ROOT / path).exists()]


def test_every_fault_fits_the_current_sources() -> None:
    assert [problem for fault in FAULTS for problem in problems(fault)] == []


def test_faults_have_different_names_and_texts() -> None:
    for what in ([each.name for each in FAULTS], [(each.file, each.before, each.after) for each in FAULTS]):
        assert [value for value, count in Counter(what).items() if count > 1] == []


def test_the_page_says_how_many_faults_there_are() -> None:
    assert f"{len(FAULTS)} faults, one at a time" in (ROOT / "docs/development.md").read_text(encoding="utf-8")
