"""Models for which validation can take very long: found by their schema, and their slow values refused.

Every function is thread safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from messaging.codecs.bounds import MAX_EXPONENT, holds_vast, may_collide


class Risk(NamedTuple):
    """Values for which the validation by a model takes very long.

    Attributes:
        is_met: returns whether a parsed payload has such values.
        smallest: minimum size of a payload with such values, bytes.
        problem: text for the error.
    """

    is_met: Callable[[Any], bool]
    smallest: int
    problem: str


#: Numbers beyond 64 bits in one payload. A sender can choose them to have one hash, and a set or a map of ``n`` such
#: numbers takes ``n * n`` steps. A number of 64 bits shares its hash with few others.
MAX_LONG_NUMBERS: Final = 1000

#: ``Fraction`` accepts a text with any exponent
_FRACTIONS: Final = Risk(
    holds_vast, 4, f"a number with an exponent or digits beyond {MAX_EXPONENT} does not become a Fraction"
)
_COLLISIONS: Final = Risk(
    lambda value: may_collide(value, MAX_LONG_NUMBERS),
    9 * MAX_LONG_NUMBERS,
    f"more than {MAX_LONG_NUMBERS} numbers beyond 64 bits do not become a set, or keys",
)
#: schemas of elements and keys whose hashes a sender cannot choose
_RANDOM_HASHES: Final = frozenset({"str", "bytes", "bool", "float", "none", "enum", "literal", "url"})


def risks_of(core_schema: Any) -> tuple[Risk, ...]:
    """Return the risks of a model by its core schema."""
    risks: dict[Risk, None] = {}
    for part in _parts(core_schema):
        kind = part.get("type") if isinstance(part, dict) else None
        # before 2.14, pydantic makes fractions with a function
        if kind == "fraction" or getattr(part, "__name__", "") == "fraction_validator":
            risks[_FRACTIONS] = None
        elif _may_be_number(_hashed(part)):
            risks[_COLLISIONS] = None
    return tuple(risks)


def _parts(core_schema: Any) -> Iterator[Any]:
    todo = [core_schema]
    while todo:
        part = todo.pop()
        yield part
        if isinstance(part, dict):
            todo.extend(part.values())
        elif isinstance(part, (list, tuple)):
            todo.extend(part)


_TEXT: Final = {"type": "str"}


def _hashed(schema: Any) -> Any:
    """Return the schema of the elements of a set, or of the keys of a map unless they stay as parsed."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "dict":
        keys = schema.get("keys_schema", _TEXT)
        return _TEXT if keys.get("type") == "any" else keys
    return schema.get("items_schema") if kind in ("set", "frozenset") else _TEXT


def _may_be_number(schema: Any) -> bool:
    return not isinstance(schema, dict) or schema.get("type") not in _RANDOM_HASHES


def problem_with(risks: Sequence[Risk], size: int, read: Callable[[], Any]) -> str | None:
    """Return the problem with the value that ``read`` returns, or ``None``. ``size``: of the payload, bytes.

    Raises:
        Exception: of ``read``.
    """
    met = [risk for risk in risks if size >= risk.smallest]
    if met:
        value = read()
        for risk in met:
            if risk.is_met(value):
                return risk.problem
    return None
