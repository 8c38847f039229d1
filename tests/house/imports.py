"""Which module imports which, and reads what of it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.house.sources import FACES, Found, House

#: names that begin with an underscore and are public all the same
PUBLIC = {"_asdict", "_fields", "_make", "_replace", "_value_", "_name_", "_generate_next_value_", "_missing_"}


def root_modules(house: House) -> list[str]:
    """Return the modules directly in ``messaging``."""
    return sorted(file.stem for file in house.files if file.parent == Path("messaging") and file.stem not in FACES)


def imports(house: House) -> dict[str, set[str]]:
    """Return the modules each module imports, in functions and under ``TYPE_CHECKING`` too."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, file in house.modules.items():
        package = module if file.stem == "__init__" else module.rpartition(".")[0]
        for _, name in imported_names(house.nodes[file], package):
            target = name if name in house.modules else name.rpartition(".")[0]
            if target in house.modules and target != module:
                found[module].add(target)
    # `from a import b` names `a` too: only where b is no module is a itself imported
    for module, file in house.modules.items():
        statements = [node for node in house.nodes[file] if isinstance(node, ast.Import | ast.ImportFrom)]
        for parent in list(found[module]):
            inner = {each for each in found[module] if each.startswith(f"{parent}.")}
            if inner and not _takes_from(statements, parent, house.modules):
                found[module].discard(parent)
    return dict(found)


def cycles(house: House) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle."""
    return [sorted(group) for group in _circles(imports(house)) if len(group) > 1]


def floors(house: House) -> dict[str, int]:
    """Return the floor of each room in ``messaging``: one above the highest room that it imports.

    A room is a package or a module directly in ``messaging``. Rooms in a circle stand on one floor.
    """
    edges: dict[str, set[str]] = defaultdict(set)
    for module, targets in imports(house).items():
        room = _room(module)
        if room:
            edges[room] |= {other for other in map(_room, targets) if other and other != room}
    for target in [each for targets in edges.values() for each in targets]:
        edges.setdefault(target, set())
    circle_of = {room: frozenset(group) for group in _circles(edges) for room in group}
    found: dict[frozenset[str], int] = {}

    def floor(group: frozenset[str]) -> int:
        if group not in found:
            below = {circle_of[other] for room in group for other in edges[room]} - {group}
            found[group] = 1 + max(map(floor, below), default=0)
        return found[group]

    return {room: floor(circle_of[room]) for room in edges}


def floor_plan(house: House) -> list[str]:
    """Return the rooms of each floor, from the lowest floor up."""
    rooms: dict[int, list[str]] = defaultdict(list)
    for room, floor in floors(house).items():
        rooms[floor].append(room)
    return [f"floor {floor}: {', '.join(sorted(rooms[floor]))}" for floor in sorted(rooms)]


def private_reads(house: House) -> list[Found]:
    """Return the uses of names with an underscore that another module defines."""
    return [each for file, nodes in house.nodes.items() for each in _private_reads(file, nodes)]


def imported_names(nodes: Iterable[ast.AST], package: str = "") -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of everything imported, in functions and ``if TYPE_CHECKING`` too.

    ``from a import b`` gives ``a`` and ``a.b``, since ``b`` may be a module.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _source(node, package)
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _source(node: ast.ImportFrom, package: str) -> str:
    parents = package.split(".")[: -node.level + 1 or None] if node.level else []
    return ".".join([*parents, *filter(None, [node.module])])


def _takes_from(statements: Iterable[ast.AST], parent: str, modules: Mapping[str, Path]) -> bool:
    """Return whether a name that is no module is taken from ``parent``, or ``parent`` itself is imported."""
    for node in statements:
        if isinstance(node, ast.Import) and any(alias.name == parent for alias in node.names):
            return True
        if not isinstance(node, ast.ImportFrom) or node.level or node.module != parent:
            continue
        if any(f"{parent}.{alias.name}" not in modules for alias in node.names):
            return True
    return False


def _room(module: str) -> str:
    """Return the room of ``messaging`` that a module is in; empty for the faces and other packages."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    return name if package == "messaging" and name not in FACES else ""


def _private_reads(file: Path, nodes: Iterable[ast.AST]) -> Iterator[Found]:
    own: set[str] = set(PUBLIC)
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            own.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # __slots__
            own.add(node.value)
    for node in nodes:
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
