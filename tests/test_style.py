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
from tests.clock_uses import direct_uses
from tests.house import House, clock_uses, cycles, floors, imported_names, patiences, sleeps

ROOT = Path(__file__).parents[1]
SHIPPED = ("messaging", "adapters", "examples", "benchmarks")

#: They run code that the other side sent, or (aio-pika's patterns) use one that does by default.
UNSAFE = ("pickle", "_pickle", "cloudpickle", "dill", "jsonpickle", "marshal", "shelve", "aio_pika.patterns")


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}{done.stderr}"


def violations(folders: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    found = []
    for file in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        package = ".".join(file.relative_to(ROOT).parent.parts)
        for line, name in imported_names(ast.walk(ast.parse(file.read_text(encoding="utf-8"))), package):
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
    assert cycles(house) == []


def test_every_part_asks_the_clock_for_the_time(house: House) -> None:
    assert clock_uses(house) == []


def test_no_test_sleeps_without_a_reason(house: House) -> None:
    assert sleeps(house) == []


def test_there_is_one_patience(house: House) -> None:
    assert patiences(house) == []


def test_uses_of_the_time_are_found_however_they_are_written() -> None:
    rows = {
        "import time\ntime.monotonic()": ["time.monotonic"],
        "import time as t\nf(t.sleep)": ["t.sleep"],
        "from time import time_ns as now": ["from time import time_ns"],
        "engine().loop.call_later(1, f)": ["engine().loop.call_later"],
        "call(self._loop.call_at, when, f)": ["self._loop.call_at"],
        "self._engine.loop.time() + 1": ["self._engine.loop.time"],
        "asyncio.get_running_loop().time()": ["asyncio.get_running_loop().time"],
        "import asyncio\nasync def f(): await asyncio.sleep(x)": ["asyncio.sleep(x)"],  # sleeps: a sample
        "import asyncio\nasync def f(): await asyncio.sleep(0)": [],
        "import asyncio\nasync def f(): await asyncio.wait([g], timeout=1)": ["asyncio.wait([g], timeout=1)"],
        "import asyncio\nasync def f(): await asyncio.wait([g])": [],
        "import asyncio\nasyncio.timeout(1)": ["asyncio.timeout"],
        "import asyncio\nasyncio.wait_for(f, 1)": ["asyncio.wait_for"],
        "import threading\nthreading.Event()": ["threading.Event"],
        "import threading\nlock = threading.Lock()\nlock.acquire(timeout=1)": ["lock.acquire(timeout=1)"],
        "lock = clock.lock()\nlock.acquire(timeout=1)": [],
        "from queue import SimpleQueue": ["from queue import SimpleQueue"],
        "thread.join(timeout=1)": ["thread.join(timeout=1)"],
        "datetime.now(UTC)": ["datetime.now"],
        "clock.monotonic(), clock.call_later(loop, 1, f), time.monotonic()": [],
    }
    found = {text: [use for _, use in direct_uses(ast.parse(text))] for text in rows}
    assert found == rows


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
    assert {name for _, name in imported_names(ast.walk(ast.parse(statement)), "p.q")} == names


def test_every_dependency_declares_its_lowest_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [Requirement(line) for group in groups for line in group]
    without = [each.name for each in wanted if each.name != "rx-messaging" and ">=" not in str(each.specifier)]
    assert without == []


def test_the_page_on_the_architecture_names_modules_and_rooms_that_exist(house: House) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = page[: page.index("## Threads")]
    rooms = [room for names in re.findall(r"^  ([a-z]+(?:, [a-z]+)*)  +", picture, re.M) for room in names.split(", ")]
    assert sorted(rooms) == sorted(floors(house))
    known = {module.removeprefix("messaging."): _functions(house.trees[file]) for module, file in house.modules.items()}
    blocks = re.findall(r"^```text\n(.*?)^```$", page[page.index("## The paths") :], re.M | re.S)
    hops = [re.split(r"  +", line, maxsplit=2) for block in blocks for line in block.splitlines()]
    assert hops
    assert [(module, name) for module, name, _ in hops if name not in known.get(module, ())] == []
    mentioned = {name for *_, text in hops for name in re.findall(r"[A-Z]\w+\.\w+", text)}
    assert mentioned - set().union(*known.values()) == set()


def _functions(tree: ast.Module) -> set[str]:
    """Return the functions that a module defines, and the methods as ``Class.method``."""
    found = set()
    for each in tree.body:
        if isinstance(each, ast.ClassDef):
            found |= {f"{each.name}.{inner.name}" for inner in each.body if isinstance(inner, _FUNCTION)}
        elif isinstance(each, _FUNCTION):
            found.add(each.name)
    return found
