"""What pydantic does for the codecs: types compiled once, and its errors without the values.

Everything here may be called from any thread.
"""

from __future__ import annotations

import functools
import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from messaging.codecs.risks import Risk, problem_with, risks_of
from messaging.errors import ArgumentError, DecodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pydantic_core import SchemaSerializer, SchemaValidator

logger = logging.getLogger(__name__)

#: compiled types that are kept
_CACHE: Final = 512
#: of an error with more problems than this, only their number is told: describing each costs memory
_MANY_PROBLEMS: Final = 1000
_SHOWN_PROBLEMS: Final = 5
_SHOWN_LENGTH: Final = 200


class _Compiled(NamedTuple):
    #: kept so that its id stays its own
    model: Any
    validator: SchemaValidator
    #: values that validation could take very long for
    risks: tuple[Risk, ...]


#: by the id of the model
_validators: dict[int, _Compiled] = {}


def is_any(model: Any) -> bool:
    """Whether ``model`` asks for nothing in particular."""
    return model is None or model is Any or model is object


def validate_json(model: Any, data: bytes, content_type: str) -> Any:
    """Parse and validate in one go.

    Raises:
        DecodeError: ``data`` does not fit ``model``, or ``model`` is nothing pydantic can validate.
    """
    compiled = _compiled_model(model)
    if compiled.risks:
        _refuse_risks(compiled.risks, len(data), functools.partial(from_json, data), content_type)
    return _validated(compiled.validator.validate_json, data, content_type)


def validate_python(model: Any, value: Any, size: int, content_type: str) -> Any:
    """Validate what another parser made of ``size`` bytes; any ``value`` if ``model`` asks for nothing.

    Raises:
        DecodeError: as validate_json.
    """
    if is_any(model):
        return value
    compiled = _compiled_model(model)
    if compiled.risks:
        _refuse_risks(compiled.risks, size, lambda: value, content_type)
    return _validated(compiled.validator.validate_python, value, content_type)


def _refuse_risks(risks: Sequence[Risk], size: int, read: Callable[[], Any], content_type: str) -> None:
    try:
        problem = problem_with(risks, size, read)
    except ValueError:  # the parser's: validating tells what is wrong
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
    # outside of the handlers: the error's context would hold the input
    raise DecodeError(f"{content_type}: {problem}")


def describe(error: ValidationError) -> str:
    """Where and why, but never the input: it may be secret, or huge."""
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
    """``text``, cut to ``length`` characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


def check_model(model: Any) -> None:
    """Refuse, before the first message does, what pydantic cannot validate.

    Raises:
        ArgumentError: ``model`` is no type, or refers to one that is not defined.
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
        adapter: Any = _adapter(model)
        compiled = _Compiled(model, adapter.validator, risks_of(adapter.core_schema))
    except Exception as error:
        raise DecodeError(
            f"{shorten(repr(model))} is no type pydantic can validate: {type(error).__name__}: {shorten(str(error))}"
        ) from error
    if len(_validators) >= _CACHE:
        _validators.clear()
    _validators[id(model)] = compiled
    return compiled


def _adapter(model: Any) -> TypeAdapter[Any]:
    try:
        hash(model)
    except TypeError:
        return _compile(model)
    # equal is not enough: A | B equals B | A, but pydantic tries them in that order
    return _compiled(model, repr(model))


@lru_cache(maxsize=_CACHE)
def _compiled(model: Any, _shown: str) -> TypeAdapter[Any]:
    return _compile(model)


def _compile(model: Any) -> TypeAdapter[Any]:
    adapter = TypeAdapter(model)
    if not adapter.pydantic_complete:  # names that cannot be found would be told of at the first message only
        adapter.rebuild(raise_errors=True)
    return adapter


def serializer_of(obj: Any) -> SchemaSerializer | None:
    """What knows the fields of ``obj``, if it is a pydantic model, or a dataclass that pydantic takes."""
    kind: Any = type(obj)
    serializer: SchemaSerializer | None = getattr(kind, "__pydantic_serializer__", None)
    if serializer is None and hasattr(kind, "__dataclass_fields__"):
        return _dataclass_serializer(kind)
    return serializer


@lru_cache(maxsize=_CACHE)
def _dataclass_serializer(kind: Any) -> SchemaSerializer | None:
    try:
        serializer: Any = _compile(kind).serializer
    except Exception as error:  # noqa: BLE001 - then it is encoded by what its fields hold
        logger.debug("dataclass %s is encoded without its types: %s", kind.__qualname__, type(error).__name__)
        return None
    return serializer  # type: ignore[no-any-return]
