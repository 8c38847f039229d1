"""Compiled types: the functions that convert to a type, and how they see the values that they are given.

See :mod:`messaging.dispatch.eventdata.conversion` for the rules.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import numbers
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter

from messaging.codecs.bounds import holds_vast, is_vast
from messaging.dispatch.eventdata.problems import SHOWN_TYPE, fail, problem_of, with_article
from messaging.dispatch.eventdata.schema import Schema, has_fields, is_collection, is_simple, schema_of
from messaging.dispatch.eventdata.simple import Converter, instance_check, unwrapped
from messaging.errors import ConversionError


class CompiledType:
    """A compiled type that values are converted to.

    Args:
        convert: converts values that are not passed on. Raises ``ConversionError``, or any error of code in data and
            types.
        family: kind of its values, which orders the members of a union; empty if unknown.
        passes: classes whose direct instances are passed on unchanged.
        schema: the schema of the type, if it has one.
    """

    __slots__ = ("convert", "family", "guarded", "passes", "schema")

    def __init__(
        self, convert: Converter, family: str, passes: frozenset[type[Any]] = frozenset(), schema: Schema | None = None
    ) -> None:
        self.convert = convert
        self.family = family
        self.passes = passes
        self.schema = schema

        def guarded(value: Any) -> Any:
            if type(value) in passes:
                return value
            try:
                return convert(value)
            except ConversionError:
                raise
            except Exception as error:  # noqa: BLE001  # code in data and types may raise anything
                raise problem_of(error) from None

        self.guarded = guarded


def has_fraction(value: Any) -> bool:
    """Return whether a number would lose a part if it became an ``int``."""
    try:
        return is_vast(value) or bool(int(value) != value)
    except (ValueError, TypeError, ArithmeticError):
        return True


def family_of(value: Any) -> str:
    """Return the kind of a value; see ``CompiledType``."""
    value = unwrapped(value)
    for types_, family in _FAMILIES:
        if isinstance(value, types_):
            return family
    if has_fields(value):
        return "record"
    return "collection" if is_collection(value) else ""


_FAMILIES: Final[tuple[tuple[Any, str], ...]] = (
    (bool, "bool"),
    (enum.Enum, "enum"),
    (numbers.Number, "number"),
    (str, "text"),
    ((bytes, bytearray, memoryview), "bytes"),
    ((datetime.date, datetime.time, datetime.timedelta), "time"),
    (Mapping, "record"),
)


def union_problem(errors: list[tuple[str, Exception]], value: Any, wanted: str) -> ConversionError:
    """Return the error of a failed union: that of the only member of the value's family, if there is one."""
    family = family_of(value)
    alike = [error for each, error in errors if each == family]
    if len(alike) != 1:
        return fail(value, wanted)
    return problem_of(alike[0])


def elements_of(value: Any) -> Iterable[Any]:
    """Return the elements that a collection is made of."""
    if value is None:
        return ()
    found: Iterable[Any] = value if is_collection(value) else unwrapped(value)
    if is_collection(found):
        return found
    if isinstance(found, (Sequence, Set)) and not is_simple(found) and not has_fields(found):
        return found
    return (found,)


def record_of(value: Any, wanted: str) -> dict[Any, Any]:
    """Return the keys and values of a mapping, or the names and values of fields."""
    if isinstance(value, Mapping):
        return dict(value)
    schema = None if is_simple(value) else schema_of(type(value))
    if schema is not None:
        return record_of(value.root, wanted) if schema.is_root else schema.read(value)
    if is_collection(value):
        first = next(iter(value), None)
        if isinstance(first, Mapping) or has_fields(first):
            return record_of(first, wanted)
    raise fail(value, wanted)


# --- pydantic


def validator_of(type_: Any) -> Converter | None:
    """Return pydantic's validation of a type, or ``None`` if it has none."""
    for config in (None, ConfigDict(arbitrary_types_allowed=True)):
        with contextlib.suppress(Exception):  # pydantic raises many kinds
            adapter: TypeAdapter[Any] = TypeAdapter(type_, config=config)
            if not adapter.pydantic_complete:
                adapter.rebuild(raise_errors=True)
            return adapter.validate_python
    return None


def by_pydantic(type_: Any, class_: type[Any] | None) -> Converter:
    """Return a converter for types that the table does not name."""
    is_instance = None if class_ is None else instance_check(class_)
    validate = validator_of(type_)
    wanted = with_article(class_) if class_ is not None else str(type_)[:SHOWN_TYPE]

    def converter(value: Any) -> Any:
        if is_instance is not None and is_instance(value):
            return value
        if validate is None:
            raise fail(value, wanted)
        return validate(bounded(value))

    return converter


def bounded(value: Any) -> Any:
    """Return ``value`` unless it contains a number that takes pydantic very long to convert."""
    if holds_vast(value):
        raise ConversionError("", "has a number in it whose exponent or number of digits is out of bounds")
    return value
