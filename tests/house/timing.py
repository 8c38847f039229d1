"""Where the sources ask for the time without the clock, and where tests wait by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.clock_uses import direct_uses, is_asked
from tests.house.sources import Found, Function, House

#: what stands at the end of a line of a test that sleeps, before the reason
SLEEPS = "# sleeps: "
#: modules of the tests' own tools, which may wait by hand
WAITING = {Path("messaging/testing") / f"{name}.py" for name in ("brokers", "clock", "postgresql", "waiting")}


def clock_uses(house: House) -> list[Found]:
    """Return the places that ask for the time, or wait with a time limit, without the clock."""
    return [
        Found(file, line, text)
        for file, tree in house.trees.items()
        if is_asked(file)
        for line, text in direct_uses(tree)
    ]


def sleeps(house: House, *, with_reason: bool = False) -> list[Found]:
    """Return the places where a test sleeps without a reason at the end of the line; or those with one.

    ``sleep(0)`` is no sleep: it hands over to other tasks. Programs in a string count as well.
    """
    return [
        each
        for each in _matches(house, r"(?<!def )(?<!clock\.)\bu?sleep\((?!0[,)])")
        if (SLEEPS in each.text) is with_reason
    ]


def patiences(house: House) -> list[Found]:
    """Return the definitions of a ``PATIENCE`` beside the one of ``messaging.testing.waiting``."""
    return _matches(house, r"^\s*_?[A-Z_]*PATIENCE[A-Z_]*\b[^=(]*= *[\d.]+ *(#|$)")


def waits(house: House) -> list[Found]:
    """Return the functions of tests that wait by hand: in a loop that sleeps or looks at the clock."""
    return [
        Found(file, function.lineno, function.name)
        for file, text in house.tests().items()
        if file not in WAITING
        for function in ast.walk(ast.parse(text))
        if isinstance(function, Function) and _waits(function)
    ]


def _matches(house: House, pattern: str) -> list[Found]:
    """Return the lines of tests that a pattern is found in."""
    return [
        Found(file, number, line.strip())
        for file, text in house.tests().items()
        if file not in WAITING
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]


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
