"""Measure the structure of the sources: ``python -m tests.house [--before REVISION]``.

With ``--before``, the same measures of an earlier revision stand in a column of their own.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.clock_uses import direct_uses, is_asked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[1]
SOURCES = ("messaging", "adapters")
#: tests that ship with the sources: their lines count with those of the tests
SHIPPED_TESTS = Path("messaging/testing")
#: they hand names on and hold no logic
FACES = {"__init__", "__main__"}
MAX_METHODS = 20

#: subjects that name no thing; rule 1 of the style of this project
VAGUE = re.compile(r"\b(whoever|nobody|somebody|anybody|those that|what is|what was)\b", re.IGNORECASE)
#: names that begin with an underscore and are public all the same
PUBLIC = {"_asdict", "_fields", "_make", "_replace", "_value_", "_name_", "_generate_next_value_", "_missing_"}


#: what stands at the end of a line of a test that sleeps, before the reason
SLEEPS = "# sleeps: "
#: modules of the tests' own tools, which may wait by hand
WAITING = {Path("messaging/testing") / f"{name}.py" for name in ("brokers", "clock", "postgresql", "waiting")}


class Found(NamedTuple):
    """A place in the sources, and what is there."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class House:
    """The sources below ``root``, read once."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.files = {
            file.relative_to(root): file.read_text(encoding="utf-8")
            for folder in SOURCES
            for file in sorted((root / folder).rglob("*.py"))
        }
        self.trees = {file: ast.parse(text) for file, text in self.files.items()}
        self.modules = {_module(file): file for file in self.files}

    def root_modules(self) -> list[str]:
        """Return the modules directly in ``messaging``."""
        return sorted(file.stem for file in self.files if file.parent == Path("messaging") and file.stem not in FACES)

    def imports(self) -> dict[str, set[str]]:
        """Return the modules each module imports, in functions and under ``TYPE_CHECKING`` too."""
        found: dict[str, set[str]] = defaultdict(set)
        for module, file in self.modules.items():
            package = module if file.stem == "__init__" else module.rpartition(".")[0]
            for _, name in imported_names(self.trees[file], package):
                target = name if name in self.modules else name.rpartition(".")[0]
                if target in self.modules and target != module:
                    found[module].add(target)
        # `from a import b` names `a` too: only where b is no module is a itself imported
        for module, file in self.modules.items():
            for parent in list(found[module]):
                inner = {each for each in found[module] if each.startswith(f"{parent}.")}
                if inner and not _takes_from(self.trees[file], parent, self.modules):
                    found[module].discard(parent)
        return dict(found)

    def cycles(self) -> list[list[str]]:
        """Return the groups of modules that import each other in a circle."""
        return [sorted(group) for group in _circles(self.imports()) if len(group) > 1]

    def floors(self) -> dict[str, int]:
        """Return the floor of each room in ``messaging``: one above the highest room that it imports.

        A room is a package or a module directly in ``messaging``. Rooms in a circle stand on one floor.
        """
        edges: dict[str, set[str]] = defaultdict(set)
        for module, targets in self.imports().items():
            room = _room(module)
            if room:
                edges[room] |= {other for other in map(_room, targets) if other and other != room}
        for target in [each for targets in edges.values() for each in targets]:
            edges.setdefault(target, set())
        circle_of = {room: frozenset(group) for group in _circles(edges) for room in group}
        floors: dict[frozenset[str], int] = {}

        def floor(group: frozenset[str]) -> int:
            if group not in floors:
                below = {circle_of[other] for room in group for other in edges[room]} - {group}
                floors[group] = 1 + max(map(floor, below), default=0)
            return floors[group]

        return {room: floor(circle_of[room]) for room in edges}

    def large_classes(self) -> list[Found]:
        """Return the classes with more than ``MAX_METHODS`` methods, properties included."""
        return [
            Found(file, node.lineno, f"{node.name}: {count} methods")
            for file, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and (count := len(_methods(node))) > MAX_METHODS
        ]

    def private_reads(self) -> list[Found]:
        """Return the uses of names with an underscore that another module defines."""
        return [each for file, tree in self.trees.items() for each in _private_reads(file, tree)]

    def vague_words(self) -> list[Found]:
        """Return the subjects that name no thing, in the sources and the pages."""
        pages = [*(self.root / "docs").rglob("*.md"), self.root / "README.md"]
        texts = {**self.files, **{page.relative_to(self.root): page.read_text(encoding="utf-8") for page in pages}}
        return [
            Found(file, number, word)
            for file, text in texts.items()
            for number, line in enumerate(text.splitlines(), 1)
            for word in VAGUE.findall(line)
        ]

    def suppressions(self) -> list[Found]:
        """Return the places where a check of ruff or mypy is switched off."""
        return [
            Found(file, number, line.strip())
            for file, text in self.files.items()
            for number, line in enumerate(text.splitlines(), 1)
            if re.search(r"#\s*(noqa|type:\s*ignore)", line)
        ]

    def tests(self) -> dict[Path, str]:
        """Return the text of each module of the tests, those that ship with the sources included."""
        own = {file.relative_to(self.root): file for file in sorted((self.root / "tests").rglob("*.py"))}
        found = {file: path.read_text(encoding="utf-8") for file, path in own.items()}
        return found | {file: text for file, text in self.files.items() if file.is_relative_to(SHIPPED_TESTS)}

    def sleeps(self, *, with_reason: bool = False) -> list[Found]:
        """Return the places where a test sleeps without a reason at the end of the line; or those with one.

        ``sleep(0)`` is no sleep: it hands over to other tasks. Programs in a string count as well.
        """
        return [
            Found(file, number, line.strip())
            for file, text in self.tests().items()
            if file not in WAITING
            for number, line in enumerate(text.splitlines(), 1)
            if re.search(r"(?<!def )(?<!clock\.)\bu?sleep\((?!0[,)])", line) and (SLEEPS in line) is with_reason
        ]

    def patiences(self) -> list[Found]:
        """Return the definitions of a ``PATIENCE`` beside the one of ``messaging.testing.waiting``."""
        return [
            Found(file, number, line.strip())
            for file, text in self.tests().items()
            if file not in WAITING
            for number, line in enumerate(text.splitlines(), 1)
            if re.match(r"\s*_?[A-Z_]*PATIENCE[A-Z_]*\b[^=(]*= *[\d.]+ *(#|$)", line)
        ]

    def waits(self) -> list[Found]:
        """Return the functions of tests that wait by hand: in a loop that sleeps or looks at the clock."""
        return [
            Found(file, function.lineno, function.name)
            for file, text in self.tests().items()
            if file not in WAITING
            for function in ast.walk(ast.parse(text))
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and _waits(function)
        ]

    def clock_uses(self) -> list[Found]:
        """Return the places that ask for the time, or wait with a time limit, without the clock."""
        return [
            Found(file, line, text)
            for file, tree in self.trees.items()
            if is_asked(file)
            for line, text in direct_uses(tree)
        ]

    def measures(self) -> dict[str, int]:
        """Return each measure and its figure."""
        lines = {file: len(text.splitlines()) for file, text in self.files.items()}
        shipped = sum(count for file, count in lines.items() if file.is_relative_to(SHIPPED_TESTS))
        tests = sum(len(text.splitlines()) for text in self.tests().values())
        return {
            "modules in the root of messaging": len(self.root_modules()),
            "import floors of messaging": max(self.floors().values()),
            "import cycles": len(self.cycles()),
            f"classes over {MAX_METHODS} methods": len(self.large_classes()),
            "reads of other modules' private names": len(self.private_reads()),
            "lines of messaging and adapters": sum(lines.values()) - shipped,
            "lines of tests, messaging.testing included": tests,
            "sleeps in tests without a reason": len(self.sleeps()),
            "sleeps in tests with a reason": len(self.sleeps(with_reason=True)),
            "definitions of PATIENCE in tests": len(self.patiences()),
            "functions of tests that wait by hand": len(self.waits()),
            "vague subjects in sources and pages": len(self.vague_words()),
            "noqa and type: ignore": len(self.suppressions()),
            "direct uses of the clock": len(self.clock_uses()),
        }


def imported_names(tree: ast.AST, package: str = "") -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of everything imported, in functions and ``if TYPE_CHECKING`` too.

    ``from a import b`` gives ``a`` and ``a.b``, since ``b`` may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _source(node, package)
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _source(node: ast.ImportFrom, package: str) -> str:
    parents = package.split(".")[: -node.level + 1 or None] if node.level else []
    return ".".join([*parents, *filter(None, [node.module])])


def _takes_from(tree: ast.AST, parent: str, modules: Mapping[str, Path]) -> bool:
    """Return whether a name that is no module is taken from ``parent``, or ``parent`` itself is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name == parent for alias in node.names):
            return True
        if not isinstance(node, ast.ImportFrom) or node.level or node.module != parent:
            continue
        if any(f"{parent}.{alias.name}" not in modules for alias in node.names):
            return True
    return False


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    if parts[0] == "adapters":  # a folder of packages, and none itself
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(module: str) -> str:
    """Return the room of ``messaging`` that a module is in; empty for the faces and other packages."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    return name if package == "messaging" and name not in FACES else ""


def _waits(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function has a loop that sleeps or looks at the clock, and that says so nowhere."""
    names = {"sleep", "monotonic"}
    return any(
        isinstance(call, ast.Call) and (ast.unparse(call.func).rpartition(".")[2] in names) and not _yields(call)
        for loop in _own(function)
        if isinstance(loop, ast.While) and not (isinstance(loop.test, ast.Constant) and loop.test.value)
        for call in ast.walk(loop)
    )


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _own(node)


def _yields(call: ast.Call) -> bool:
    """Return whether a call is ``sleep(0)``."""
    return bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


def _methods(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def _private_reads(file: Path, tree: ast.AST) -> Iterator[Found]:
    own: set[str] = set(PUBLIC)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            own.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # __slots__
            own.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            yield Found(file, node.lineno, ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("_"):
            yield from (Found(file, node.lineno, each.name) for each in node.names if _is_private(each.name))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def _circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected parts of a graph (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            group = set()
            while node not in group:
                group.add(stack.pop())
            found.append(group)

    for node in list(edges):
        if node not in order:
            visit(node)
    return found


def at(revision: str, folder: Path) -> House:
    """Return the sources of a revision, unpacked into ``folder``."""
    done = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return House(folder)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--before", metavar="REVISION", help="an earlier revision to compare with")
    parser.add_argument("--show", action="store_true", help="list each place as well")
    arguments = parser.parse_args()
    house = House()
    now = house.measures()
    before: Mapping[str, int] = {}
    if arguments.before:
        with tempfile.TemporaryDirectory() as folder:
            before = at(arguments.before, Path(folder)).measures()
    for name, figure in now.items():
        say(f"{name:44}" + (f"{before[name]:>9,}" if before else "") + f"{figure:>9,}")
    if arguments.show:
        for circle in house.cycles():
            say("cycle:", ", ".join(circle))
        for room, floor in sorted(house.floors().items(), key=lambda each: (-each[1], each[0])):
            say(f"floor {floor}: {room}")
        for each in [
            *house.large_classes(),
            *house.private_reads(),
            *house.vague_words(),
            *house.suppressions(),
            *house.clock_uses(),
            *house.sleeps(),
            *house.patiences(),
            *house.waits(),
        ]:
            say(each)
        say(Counter(str(each.file.parent) for each in house.private_reads()))


if __name__ == "__main__":
    main()
