"""The sources that are measured: of this tree, or of an earlier revision."""

from __future__ import annotations

import ast
import gc
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).parents[2]
SOURCES = ("messaging", "adapters")
#: tests that ship with the sources: their lines count with those of the tests
SHIPPED_TESTS = Path("messaging/testing")
#: they hand names on and hold no logic
FACES = {"__init__", "__main__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function
Node = TypeVar("Node", bound=ast.AST)


class Found(NamedTuple):
    """A place in the sources, and what is there."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class House:
    """The sources below ``root``, read once. ``product`` names the files without ``messaging.testing``."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.files = {
            file.relative_to(root): file.read_text(encoding="utf-8")
            for folder in SOURCES
            for file in sorted((root / folder).rglob("*.py"))
        }
        gc.disable()  # the trees stay: looking for cycles in them doubles the time
        try:
            self.trees = {file: ast.parse(text) for file, text in self.files.items()}
            self.nodes = {file: list(ast.walk(tree)) for file, tree in self.trees.items()}
        finally:
            gc.enable()
        self.product = [file for file in self.files if not file.is_relative_to(SHIPPED_TESTS)]
        # before the adapters had packages of their own, their folder was one
        self.import_roots = [root] if Path("adapters/__init__.py") in self.files else [root, root / "adapters"]
        self.modules = {self._module(file): file for file in self.files}

    def _module(self, file: Path) -> str:
        top = next(each for each in reversed(self.import_roots) if (self.root / file).is_relative_to(each))
        parts = (self.root / file).relative_to(top).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def find(self, *kinds: type[Node]) -> Iterator[tuple[Path, Node]]:
        """Yield the nodes of these kinds in the product, each with its file."""
        for file in self.product:
            yield from ((file, node) for node in self.nodes[file] if isinstance(node, kinds))

    def length(self, file: Path) -> int:
        """Return the number of lines of a file, blank lines and comments included."""
        return len(self.files[file].splitlines())

    def code(self, file: Path) -> list[tuple[int, str]]:
        """Return number and stripped text of each line, without blank lines, comments and docstrings."""
        said = [docstring(node) for node in self.nodes[file] if isinstance(node, Documented)]
        skipped = {line for each in said if each is not None for line in lines_of(each)}
        return [
            (number, text)
            for number, line in enumerate(self.files[file].splitlines(), 1)
            if number not in skipped and (text := line.strip()) and not text.startswith("#")
        ]

    def tests(self) -> dict[Path, str]:
        """Return the text of each module of the tests, those that ship with the sources included."""
        own = {file.relative_to(self.root): file for file in sorted((self.root / "tests").rglob("*.py"))}
        found = {file: path.read_text(encoding="utf-8") for file, path in own.items()}
        return found | {file: text for file, text in self.files.items() if file.is_relative_to(SHIPPED_TESTS)}


def lines_of(node: ast.stmt) -> range:
    """Return the numbers of the lines of a statement, decorators included."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    return range(first, (node.end_lineno or first) + 1)


def docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt | None:
    """Return the statement that is the docstring of a module, class or function."""
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first
    return None


def name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name, without what stands in brackets or parentheses behind it."""
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def at(revision: str, folder: Path) -> House:
    """Return the sources of a revision, unpacked into ``folder``."""
    done = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return House(folder)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
