"""Errors of failed conversions. They say where the data is wrong and why, and never contain the value."""

from __future__ import annotations

import typing
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core.core_schema import ErrorType

from messaging.errors import ConversionError

#: characters that an error shows of a path, of a key in it, and of a type
_SHOWN_PATH: Final = 300
SHOWN_KEY: Final = 80
SHOWN_TYPE: Final = 80
#: of a pydantic error with more problems than this, only their number is shown: describing each costs memory
_MANY_PROBLEMS: Final = 1000

#: kinds of pydantic's own errors
_OWN_KINDS: Final = frozenset(typing.get_args(ErrorType))
#: entries of their context that may quote the value
_QUOTING: Final = frozenset({"error", "encoding_error", "tag", "tz_actual", "attribute"})


def fail(value: Any, wanted: str) -> ConversionError:
    """Return the error of a value that does not become ``wanted``, a noun with its article."""
    return ConversionError("", f"{with_article(type(value))} that does not become {wanted}")


def with_article(type_: type[Any]) -> str:
    """Return the name of a class with its article."""
    return f"{'an' if type_.__name__[:1] in 'AEIOUaeiou' else 'a'} {type_.__name__}"


def located(place: str, error: Exception) -> ConversionError:
    """Return the error of a part as an error of its container, in which the part is at ``place``."""
    inner = problem_of(error)
    joint = "" if not inner.path or inner.path.startswith("[") else "."
    return ConversionError(f"{place}{joint}{inner.path}"[:_SHOWN_PATH], inner.reason)


def problem_of(error: Exception) -> ConversionError:
    """Return ``error`` as a conversion error without its text, which may contain the value."""
    if isinstance(error, ConversionError):
        return error
    if isinstance(error, ValidationError):
        return _validation_problem(error)
    if isinstance(error, RecursionError):
        return ConversionError("", "is nested too deeply, or a part of itself")
    return ConversionError("", f"converting it raised {type(error).__name__}")


def _validation_problem(error: ValidationError) -> ConversionError:
    count = error.error_count()
    if count > _MANY_PROBLEMS:
        return ConversionError("", f"{count} problems with {error.title}")
    try:
        problem = error.errors(include_url=False, include_input=False)[0]
    except Exception:  # noqa: BLE001  # pydantic cannot describe text that is no Unicode, for example
        return ConversionError("", f"is refused by {error.title}")
    reason = problem["msg"]
    if problem["type"] not in _OWN_KINDS or _QUOTING & problem.get("ctx", {}).keys():
        reason = f"is refused by a validator ({problem['type']})"
    path = ""
    for part in problem["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:SHOWN_KEY]}"
    more = f" (and {count - 1} more)" if count > 1 else ""
    return ConversionError(path.removeprefix(".")[:_SHOWN_PATH], reason + more)
