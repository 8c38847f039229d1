"""Format, lint, types and layers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from messaging.testing.tables import table
from tests.conftest import LONGEST
from tests.house import House, imported_names

ROOT = Path(__file__).parents[1]
SHIPPED = ("messaging", "adapters", "examples", "benchmarks")

#: They run code that the other side sent, or (aio-pika's patterns) use one that does by default.
UNSAFE = ("pickle", "_pickle", "cloudpickle", "dill", "jsonpickle", "marshal", "shelve", "aio_pika.patterns")


def run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}{done.stderr}"


def violations(folders: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    found = []
    for file in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        package = ".".join(file.relative_to(ROOT).parent.parts)
        for line, name in imported_names(ast.parse(file.read_text(encoding="utf-8")), package):
            if any(name == module or name.startswith(f"{module}.") for module in forbidden):
                found.append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    return found


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", "--no-fix")


def test_everything_is_formatted() -> None:
    run("ruff", "format", "--check")


@pytest.mark.slow
@pytest.mark.timeout(300)  # without a cache mypy reads the stubs of every dependency
def test_types_are_strictly_right() -> None:
    run("mypy")


def test_the_layers_of_the_packages_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def house() -> House:
    """All modules, read once."""
    return House()


def test_no_module_imports_itself_through_others(house: House) -> None:
    assert house.cycles() == []


def test_the_test_files_that_begin_first_exist() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_nothing_unpickles() -> None:
    assert violations(SHIPPED, UNSAFE) == []


@table(
    "statement, names",
    [
        ("import a.b as c", {"a.b"}),
        ("def f():\n    from a import b", {"a", "a.b"}),
        ("from . import a", {"p.q", "p.q.a"}),
        ("from ..a import b", {"p.a", "p.a.b"}),
    ],
)
def test_imports_are_found_wherever_they_hide(statement: str, names: set[str]) -> None:
    assert {name for _, name in imported_names(ast.parse(statement), "p.q")} == names


def test_every_dependency_declares_its_lowest_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [Requirement(line) for group in groups for line in group]
    without = [each.name for each in wanted if each.name != "rx-messaging" and ">=" not in str(each.specifier)]
    assert without == []


def test_the_page_on_the_architecture_names_modules_and_rooms_that_exist(house: House) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = {each.removeprefix("messaging.") for each in house.modules}
    paths = page[page.index("## The paths") :]
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)", paths))
    assert named - modules == set()
    floors = {
        room: int(floor)
        for floor, rooms in re.findall(r"^\| (\d+) \| (.+?) \|", page, re.M)
        for room in re.findall(r"`(\w+)`", rooms)
    }
    assert floors == house.floors()
