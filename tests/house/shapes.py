"""The sizes of modules, classes and functions, and the shapes that hide a hop."""

from __future__ import annotations

import ast
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.house.sources import FACES, Found, Function, House, docstring, lines_of, name_of

MAX_METHODS = 22
MAX_PARAMETERS = 8
MAX_LINES = 600
MIN_LINES = 60

#: decorators that make a method an attribute
PROPERTIES = {"property", "cached_property"}


def classes(house: House) -> list[Found]:
    """Return the classes of the product, those in classes and functions included."""
    return [Found(file, node.lineno, node.name) for file, node in house.find(ast.ClassDef)]


def large_classes(house: House) -> list[Found]:
    """Return the classes with more than ``MAX_METHODS`` methods.

    Properties count, and so do the methods of bases in the same module, and of their bases there. The overloads of a
    method, and the getter and setter of a property, are one method.
    """
    found = []
    for file in house.product:
        known = {node.name: node for node in house.nodes[file] if isinstance(node, ast.ClassDef)}
        for node in house.nodes[file]:
            if not isinstance(node, ast.ClassDef):
                continue
            count = len({name for each in _lineage(node, known) for name in _methods(each)})
            if count > MAX_METHODS:
                found.append(Found(file, node.lineno, f"{node.name}: {count} methods"))
    return found


def large_constructors(house: House) -> list[Found]:
    """Return the ``__init__`` with more than ``MAX_PARAMETERS`` parameters besides ``self``.

    ``*args`` and ``**kwargs`` count as one each. Fields of a dataclass or a named tuple do not count.
    """
    return [
        Found(file, function.lineno, f"{node.name}: {count} parameters")
        for file, node in house.find(ast.ClassDef)
        for function in node.body
        if isinstance(function, Function) and function.name == "__init__"
        if (count := len(_parameters(function)) - 1) > MAX_PARAMETERS
    ]


def lonely_protocols(house: House) -> list[Found]:
    """Return the protocols and abstract classes that at most one class of the product implements.

    A class implements an abstract class that it inherits from. It implements a protocol that it inherits from, or of
    which it has all members by their names, inherited ones included. Classes with abstract methods and protocols are
    no implementations. A protocol with ``__call__`` alone is left out: functions implement it. Bases are looked up by
    their name, in the same module first.
    """
    known = _Classes(house)
    found = []
    for file, node in known.nodes:
        members = known.members(file, node)
        if known.is_protocol(node):
            if members - {"__slots__"} == {"__call__"}:
                continue
        elif not _has_abstract_methods(node):
            continue
        count = sum(
            known.inherits(*each, node) or (known.is_protocol(node) and members <= known.members(*each))
            for each in known.nodes
            if each[1] is not node and not known.is_protocol(each[1]) and not _has_abstract_methods(each[1])
        )
        if count <= 1:
            kind = "protocol" if known.is_protocol(node) else "abstract class"
            found.append(Found(file, node.lineno, f"{kind} {node.name}: {count} implementations"))
    return found


def forwarders(house: House) -> list[Found]:
    """Return the functions and methods that only forward.

    The body of a forwarder, without its docstring, is one call, returned or awaited or neither. The called thing is a
    name or a dotted name (``function``, ``self._buffer.put``). Each argument is a parameter of the forwarder, by its
    own name, and the arguments stand in the order of the parameters. Parameters may be left out, all of them too. A
    property is a forwarder if it returns an attribute of an attribute (``self._buffer.size``).
    """
    return [
        Found(file, node.lineno, f"{node.name} -> {ast.unparse(target)}")
        for file, node in house.find(ast.FunctionDef, ast.AsyncFunctionDef)
        if (target := _forwarded(node)) is not None
    ]


def base_exceptions(house: House) -> list[Found]:
    """Return the handlers of ``BaseException``, alone or among others."""
    return [
        Found(file, node.lineno, f"except {ast.unparse(node.type)}")
        for file, node in house.find(ast.ExceptHandler)
        if node.type is not None
        and any(isinstance(each, ast.Name) and each.id == "BaseException" for each in ast.walk(node.type))
    ]


def large_modules(house: House) -> list[Found]:
    """Return the modules with more than ``MAX_LINES`` lines."""
    return [Found(file, 1, f"{count} lines") for file in house.product if (count := house.length(file)) > MAX_LINES]


def small_modules(house: House) -> list[Found]:
    """Return the modules with fewer than ``MIN_LINES`` lines, without faces."""
    return [
        Found(file, 1, f"{count} lines")
        for file in house.product
        if file.stem not in FACES and (count := house.length(file)) < MIN_LINES
    ]


def mean_length(house: House, *, with_docstrings: bool = False) -> float:
    """Return the mean number of lines of code of a function; or of all its lines, from the decorators on.

    Lines of code are those without docstrings, comments and blank lines. The lines of a function in a function count
    for both.
    """
    lengths: list[int] = []
    for file in house.product:
        code = {number for number, _ in house.code(file)}
        functions = [node for node in house.nodes[file] if isinstance(node, Function)]
        lengths += [
            len(lines_of(each)) if with_docstrings else len(code.intersection(lines_of(each))) for each in functions
        ]
    return statistics.fmean(lengths)


def suppressions(house: House) -> list[Found]:
    """Return the places where a check of ruff or mypy is switched off."""
    return [
        Found(file, number, line.strip())
        for file, text in house.files.items()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(r"#\s*(noqa|type:\s*ignore)", line)
    ]


class _Classes:
    """The classes of the product, and what they inherit."""

    def __init__(self, house: House) -> None:
        self.nodes = list(house.find(ast.ClassDef))
        self._by_name: dict[str, list[tuple[Path, ast.ClassDef]]] = defaultdict(list)
        for file, node in self.nodes:
            self._by_name[node.name].append((file, node))
        self._lineages: dict[ast.ClassDef, list[ast.ClassDef]] = {}
        self._members: dict[ast.ClassDef, set[str]] = {}

    def is_protocol(self, node: ast.ClassDef) -> bool:
        return any(name_of(base) == "Protocol" for base in node.bases)

    def inherits(self, file: Path, node: ast.ClassDef, ancestor: ast.ClassDef) -> bool:
        return ancestor in self._lineage(file, node)

    def members(self, file: Path, node: ast.ClassDef) -> set[str]:
        """Return the names of the attributes and methods of a class and of its bases."""
        if node not in self._members:
            self._members[node] = {name for each in self._lineage(file, node) for name in _attributes(each)}
        return self._members[node]

    def _lineage(self, file: Path, node: ast.ClassDef) -> list[ast.ClassDef]:
        if node not in self._lineages:
            self._lineages[node] = [node]  # a name may lead back to the class itself
            for name in map(name_of, node.bases):
                known = [each for each in self._by_name[name] if each[1] is not node]
                for place, base in [each for each in known if each[0] == file] or known:
                    self._lineages[node] += self._lineage(place, base)
        return self._lineages[node]


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names that the body of a class binds, and those that its methods set on ``self``."""
    for each in node.body:
        if isinstance(each, Function):
            yield each.name
            yield from (
                target.attr
                for target in ast.walk(each)
                if isinstance(target, ast.Attribute)
                and isinstance(target.ctx, ast.Store)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            )
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.Assign):
            yield from (target.id for target in each.targets if isinstance(target, ast.Name))


def _has_abstract_methods(node: ast.ClassDef) -> bool:
    functions = [each for each in node.body if isinstance(each, Function)]
    return any(name_of(each) == "abstractmethod" for function in functions for each in function.decorator_list)


def _methods(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, Function)}


def _lineage(node: ast.ClassDef, known: Mapping[str, ast.ClassDef]) -> Iterable[ast.ClassDef]:
    """Return a class and those among the known ones that it inherits from."""
    found = [node]
    for each in found:
        bases = [known[name] for name in map(name_of, each.bases) if name in known]
        found += [base for base in bases if base not in found]
    return found


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of the parameters, in their order."""
    given = function.args
    several = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [each.arg for each in several if each is not None]


def _forwarded(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.expr | None:
    """Return the name of the callable or attribute that a function forwards to, if it does nothing else."""
    body = function.body[1:] if docstring(function) else function.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return None
    value = body[0].value
    if any(name_of(each) in PROPERTIES for each in function.decorator_list):
        is_deep = isinstance(value, ast.Attribute) and isinstance(value.value, ast.Attribute) and _is_dotted(value)
        return value if is_deep else None
    if isinstance(value, ast.Await):
        value = value.value
    if not isinstance(value, ast.Call) or not _is_dotted(value.func):
        return None
    arguments = [each.value if isinstance(each, ast.Starred) else each for each in value.args]
    names = [ast.unparse(each) for each in arguments]
    names += [ast.unparse(each.value) if each.arg in (None, ast.unparse(each.value)) else "" for each in value.keywords]
    own = _parameters(function)
    return value.func if names == [name for name in own if name in names] else None


def _is_dotted(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_dotted(node.value))
