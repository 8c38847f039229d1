"""Finds code that asks for the time, sets a timer or waits with a time limit without the clock of the project."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: the module that may use all of it
CLOCK = Path("messaging/execution/clock.py")
#: they are not asked to: a test or a command waits for what is outside the process
EXEMPT = tuple(map(Path, ("messaging/testing", "messaging/cli", "adapters/pyspark_messaging", "adapters/spark")))

TIME = {
    "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep",
    "clock_gettime", "clock_gettime_ns", "gmtime", "localtime", "ctime",
}  # fmt: skip
ASYNCIO = {"timeout", "timeout_at", "wait_for"}
#: their objects wait with a time limit
THREADING = {"Barrier", "Condition", "Event", "Timer"}
QUEUE = {"LifoQueue", "PriorityQueue", "Queue", "SimpleQueue"}
DATETIME = {"now", "utcnow", "today"}


def is_asked(file: Path) -> bool:
    """Return whether the module ``file`` has to use the clock."""
    return file != CLOCK and not any(file.is_relative_to(folder) for folder in EXEMPT)


def direct_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each use of the time in a module that does not go through the clock."""
    modules = _modules(tree)
    has_locks = _has_locks(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = {"time": TIME, "asyncio": ASYNCIO | {"sleep"}, "threading": THREADING, "queue": QUEUE}
            found = names.get(node.module or "", set()) & {each.name for each in node.names}
            yield from ((node.lineno, f"from {node.module} import {name}") for name in sorted(found))
        elif isinstance(node, ast.Attribute):
            if _is_direct(node, modules):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and _waits(node, modules, has_locks=has_locks):
            yield node.lineno, ast.unparse(node)


def _modules(tree: ast.AST) -> dict[str, str]:
    """Return the imported modules by the names they have here."""
    return {
        each.asname or each.name: each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for each in node.names
    }


def _has_locks(tree: ast.AST) -> bool:
    """Return whether the module makes a lock with the clock, for its waits."""
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) == "clock.lock" for node in ast.walk(tree))


def _is_direct(node: ast.Attribute, modules: dict[str, str]) -> bool:
    owner = ast.unparse(node.value)
    module = modules.get(owner)
    if module == "time":
        return node.attr in TIME
    if module == "asyncio":
        return node.attr in ASYNCIO
    if module == "threading":
        return node.attr in THREADING
    if module == "queue":
        return node.attr in QUEUE
    if owner.rpartition(".")[2] in ("datetime", "date"):
        return node.attr in DATETIME
    if node.attr in ("call_later", "call_at"):
        return owner != "clock"
    return node.attr == "time" and owner.removesuffix("()").endswith(("loop", "event_loop"))


def _waits(node: ast.Call, modules: dict[str, str], *, has_locks: bool) -> bool:
    """Return whether a call waits with a time limit, other than for a lock of the clock."""
    if not isinstance(node.func, ast.Attribute):
        return False
    owner, name = ast.unparse(node.func.value), node.func.attr
    timed = any(each.arg == "timeout" and ast.unparse(each.value) != "None" for each in node.keywords)
    if modules.get(owner) == "asyncio":
        return (name == "wait" and timed) or (name == "sleep" and ast.unparse(node.args[0]) != "0")
    if name == "acquire":
        return not has_locks and (timed or len(node.args) > 1)
    return name == "join" and timed
