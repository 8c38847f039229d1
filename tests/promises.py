"""Compare the promises that tests show with an earlier revision: ``python -m tests.promises --before REVISION``.

Three kinds of promises are counted: rows of tables in the pages that name tests (requirements, guarantees, features),
scenarios, and sections of specifications. A scenario or a section is shown where a test names it: in its name, in its
docstring, in the rows of its table, or in the docstring of its class or module.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from tests.house import ROOT, at, say

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDERS = ("tests", "messaging/testing/conformance")
KINDS = ("row of a page", "scenario", "section")

#: ``test_06_07_the_sender…`` and ``Scenarios 42 and 51``
_NUMBERS_OF_A_NAME = re.compile(r"^test_((?:\d+_)+)")
_SCENARIOS = re.compile(r"\bscenarios?\s+((?:\d+(?:\s*\[\w\])?(?:\s*(?:,|and|to|-)\s*)?)+)", re.IGNORECASE)
_SECTIONS = re.compile(r"\b(?:(?:RFC|EV|LE|TX|LU)\s+[0-9A-Z]+(?:\.[0-9]+)*|157(?:\.\d+)+|(?:MSG|DE|J)\d{1,3})\b")
_TEST = re.compile(r"`((?:tests|messaging/testing/conformance)/[\w/]+\.py)(?:::(\w+(?:::\w+)?))?`")


class Suite:
    """The tests below ``root``, and the promises that they show."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.functions: dict[str, set[str]] = defaultdict(set)
        self.promises: dict[str, dict[str, set[str]]] = {kind: defaultdict(set) for kind in KINDS}
        for folder in FOLDERS:
            for file in sorted((root / folder).rglob("test_*.py")):
                self._read(file)
        for page in sorted((root / "docs").rglob("*.md")):
            self._read_page(page)

    def _read(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        place = file.relative_to(self.root)
        room = "messaging" if place.parts[0] == "messaging" else place.parts[1]
        rooms = ("typedevent", "eventadmin") if room == "dispatch" else (room,)  # it is what both services share
        for around, test in _tests(tree):
            self.functions[str(place)].add(test.name)
            decorators = " ".join(ast.get_source_segment(text, each) or "" for each in test.decorator_list)
            said = " ".join(filter(None, (*around, ast.get_docstring(test), decorators)))
            node = f"{place}::{test.name}"
            numbers = {int(each) for found in _SCENARIOS.findall(said) for each in _spread(found)}
            if (named := _NUMBERS_OF_A_NAME.match(test.name)) is not None:
                numbers |= {int(each) for each in named[1].split("_") if each}
            for number, each in itertools.product(numbers, rooms):
                self.promises["scenario"][f"{each} {number}"].add(node)
            for section in _SECTIONS.findall(said):
                self.promises["section"][" ".join(section.split())].add(node)

    def _read_page(self, page: Path) -> None:
        for line in page.read_text(encoding="utf-8").splitlines():
            if not line.startswith("|") or not (cited := _TEST.findall(line)):
                continue
            row = " | ".join(cell.strip() for cell in line.strip("|").split("|") if not _TEST.search(cell))
            for file, name in cited:
                found = self.functions.get(file, set())
                if (name.rpartition("::")[2] in found) if name else (self.root / file).exists():
                    self.promises["row of a page"][f"{page.stem}: {row}"].add(f"{file}::{name}")


def _tests(tree: ast.Module) -> Iterator[tuple[list[str], ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the tests of a module, with the docstrings around each."""
    outer = [ast.get_docstring(tree) or ""]
    for node in tree.body:
        members = [node] if not isinstance(node, ast.ClassDef) else node.body
        around = outer if not isinstance(node, ast.ClassDef) else [*outer, ast.get_docstring(node) or ""]
        for each in members:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test_"):
                yield around, each


def _spread(numbers: str) -> Iterator[int]:
    """Yield the numbers of a text such as ``42, 44 to 46 and 51``."""
    for found in re.finditer(r"(\d+)(?:\s*(?:to|-)\s*(\d+))?", re.sub(r"\[\w\]", "", numbers)):
        yield from range(int(found[1]), int(found[2] or found[1]) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.promises", description=__doc__)
    parser.add_argument("--before", metavar="REVISION", required=True, help="the earlier revision")
    parser.add_argument("--show", action="store_true", help="list the promises of today with the number of their tests")
    arguments = parser.parse_args()
    now = Suite()
    with tempfile.TemporaryDirectory() as folder:
        at(arguments.before, Path(folder))
        before = Suite(Path(folder))
    say(f"{'promises':20}{'before':>9}{'now':>9}{'lost':>9}")
    lost: list[str] = []
    for kind in KINDS:
        gone = sorted(before.promises[kind].keys() - now.promises[kind].keys())
        say(f"{kind:20}{len(before.promises[kind]):>9}{len(now.promises[kind]):>9}{len(gone):>9}")
        lost += [f"lost {kind}: {each} (was {', '.join(sorted(before.promises[kind][each]))})" for each in gone]
    say(f"{'test functions':20}{_count(before):>9}{_count(now):>9}")
    for line in lost:
        say(line)
    if arguments.show:
        for kind in KINDS:
            for promise, tests in sorted(now.promises[kind].items()):
                say(f"{kind} {promise}: {len(tests)}")
    return 1 if lost else 0


def _count(suite: Suite) -> int:
    return sum(map(len, suite.functions.values()))


if __name__ == "__main__":
    sys.exit(main())
