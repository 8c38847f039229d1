"""Validation and serialization by pydantic: types are compiled once, and errors omit the values.

Every function is thread safe.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticErrorMixin
from pydantic_core import SchemaSerializer, SchemaValidator, from_json

from messaging.codecs.bounds import MAX_EXPONENT, holds_vast, may_collide
from messaging.codecs.cache import BoundedCache
from messaging.errors import ArgumentError, DecodeError

logger = logging.getLogger(__name__)

#: maximum number of cached compiled types
_CACHE: Final = 512
#: an error with more problems than this names only their number: describing each one costs memory
_MANY_PROBLEMS: Final = 1000
_SHOWN_PROBLEMS: Final = 5
_SHOWN_LENGTH: Final = 200


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


class _Compiled(NamedTuple):
    #: kept alive, so that no other object gets its id
    model: Any
    validator: SchemaValidator
    #: values for which validation could take very long
    risks: tuple[Risk, ...]


#: by the id of the model
_validators: Final[BoundedCache[int, _Compiled]] = BoundedCache(_CACHE)


def is_any(model: Any) -> bool:
    """Return whether ``model`` accepts any value."""
    return model is None or model is Any or model is object


def validate_json(model: Any, data: bytes, content_type: str) -> Any:
    """Parse JSON and validate it in one step.

    Raises:
        DecodeError: ``data`` does not fit ``model``, or pydantic cannot validate ``model``.
    """
    compiled = _compiled_model(model)
    if compiled.risks:
        _refuse_risks(compiled.risks, len(data), functools.partial(from_json, data), content_type)
    return _validated(compiled.validator.validate_json, data, content_type)


def validate_python(model: Any, value: Any, size: int, content_type: str) -> Any:
    """Validate ``value``, which another parser made of ``size`` bytes; raises as :func:`validate_json`."""
    if is_any(model):
        return value
    compiled = _compiled_model(model)
    if compiled.risks:
        _refuse_risks(compiled.risks, size, lambda: value, content_type)
    return _validated(compiled.validator.validate_python, value, content_type)


def _refuse_risks(risks: Sequence[Risk], size: int, read: Callable[[], Any], content_type: str) -> None:
    try:
        problem = problem_with(risks, size, read)
    except ValueError:  # of the parser: validation reports it
        return
    if problem is not None:
        raise DecodeError(f"{content_type}: {problem}")


def _validated(validate: Callable[[Any], Any], value: Any, content_type: str) -> Any:
    try:
        return validate(value)
    except ValidationError as error:
        problem = describe(error)
    except Exception as error:  # noqa: BLE001 - a validator of the model may raise anything
        problem = f"{type(error).__name__} while validating"
    # outside of the handlers: the context of the error would hold the input
    raise DecodeError(f"{content_type}: {problem}")


def describe(error: ValidationError) -> str:
    """Return places and reasons of an error without the input, which may be secret or huge."""
    count = error.error_count()
    if count > _MANY_PROBLEMS:
        return f"{count} problems with {error.title}"
    shown = []
    for problem in error.errors(include_url=False, include_input=False)[:_SHOWN_PROBLEMS]:
        text = problem["msg"]
        if problem["type"] == "union_tag_invalid":  # the message quotes the tag
            text = f"the tag is none of {problem['ctx']['expected_tags']}"
        where = ".".join(shorten(str(part), 80) for part in problem["loc"])
        shown.append(f"{where}: {shorten(text)}" if where else shorten(text))
    if count > len(shown):
        shown.append(f"and {count - len(shown)} more")
    return f"{error.title}: {'; '.join(shown)}"


def shorten(text: str, length: int = _SHOWN_LENGTH) -> str:
    """Return ``text``, cut to ``length`` characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


def check_model(model: Any) -> None:
    """Refuse a type that pydantic cannot validate, before the first message arrives.

    Raises:
        ArgumentError: ``model`` is no type, or refers to an undefined one.
    """
    if model is None:
        return
    try:
        _compiled_model(model)
    except DecodeError as error:
        raise ArgumentError(str(error)) from None


def _compiled_model(model: Any) -> _Compiled:
    known = _validators.get(id(model))
    if known is not None:
        return known
    try:
        if inspect.isroutine(model) or isinstance(model, functools.partial):
            # pydantic would call it with the payload as its arguments
            raise TypeError("it is a function; a handler is given to m.on(), an observer to the stream")
        adapter: Any = _adapter(model)
        compiled = _Compiled(model, adapter.validator, risks_of(adapter.core_schema))
    except Exception as error:
        raise DecodeError(f"{shorten(repr(model))} is no type pydantic can validate: {reason_of(error)}") from error
    _validators[id(model)] = compiled
    return compiled


def reason_of(error: Exception) -> str:
    """Return why pydantic cannot validate a type, in one line."""
    text = error.message if isinstance(error, PydanticErrorMixin) else str(error)  # without the address of a page
    return f"{type(error).__name__}: {shorten(' '.join(text.split()))}"


def _adapter(model: Any) -> TypeAdapter[Any]:
    try:
        hash(model)
    except TypeError:
        return _compile.__wrapped__(model)
    # keyed by the repr as well: A | B equals B | A, but pydantic tries the types in their order
    return _compile(model, repr(model))


@lru_cache(maxsize=_CACHE)
def _compile(model: Any, _shown: str = "") -> TypeAdapter[Any]:
    adapter = TypeAdapter(model)
    if not adapter.pydantic_complete:  # else an undefined name would fail at the first message only
        adapter.rebuild(raise_errors=True)
    return adapter


def serializer_of(obj: Any) -> SchemaSerializer | None:
    """Return the serializer of a pydantic model, or of a dataclass that pydantic accepts; else ``None``."""
    kind: Any = type(obj)
    serializer: SchemaSerializer | None = getattr(kind, "__pydantic_serializer__", None)
    if serializer is None and hasattr(kind, "__dataclass_fields__"):
        return _dataclass_serializer(kind)
    return serializer


@lru_cache(maxsize=_CACHE)
def _dataclass_serializer(kind: Any) -> SchemaSerializer | None:
    try:
        adapter: Any = _compile.__wrapped__(kind)
        serializer: SchemaSerializer = adapter.serializer
    except Exception as error:  # noqa: BLE001 - then its values are encoded without their declared types
        logger.debug("dataclass %s is encoded without its types: %s", kind.__qualname__, type(error).__name__)
        return None
    return serializer


# --- models for which validation can take very long: found by their schema, and their slow values refused


#: Numbers beyond 64 bitsin one payload. A sender can choose them to have one hash, and a set or a map of ``n`` such
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
    """Return the problem with the value that ``read`` returns, or ``None``; ``size``: of the payload, bytes."""
    met = [risk for risk in risks if size >= risk.smallest]
    if met:
        value = read()
        for risk in met:
            if risk.is_met(value):
                return risk.problem
    return None
