"""What is told of data that cannot be converted: where, and what is wrong, but never the value."""

from __future__ import annotations

import typing
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core.core_schema import ErrorType

from messaging.errors import ConversionError

#: characters that errors show: of a path, of a key in it, of a type
_SHOWN_PATH: Final = 300
SHOWN_KEY: Final = 80
SHOWN_TYPE: Final = 80
#: of pydantic's errors with more problems than this, only their number is told: describing each costs memory
_MANY_PROBLEMS: Final = 1000


def fail(value: Any, wanted: str) -> ConversionError:
    """The error of a value that does not become what is wanted, which is told in words."""
    return ConversionError("", f"{with_article(type(value))} that does not become {wanted}")


def with_article(type_: type[Any]) -> str:
    """The name of a class in a sentence."""
    return f"{'an' if type_.__name__[:1] in 'AEIOUaeiou' else 'a'} {type_.__name__}"


def located(place: str, error: Exception) -> ConversionError:
    """The same error, seen from the container."""
    seen = error if isinstance(error, ConversionError) else problem_of(error)
    joint = "" if not seen.path or seen.path.startswith("[") else "."
    return ConversionError(f"{place}{joint}{seen.path}"[:_SHOWN_PATH], seen.reason)


def problem_of(error: Exception) -> ConversionError:
    """What is told of an error: not its text, which may have the value in it."""
    if isinstance(error, ValidationError):
        return _refused(error)
    if isinstance(error, RecursionError):
        return ConversionError("", "is nested too deeply, or a part of itself")
    return ConversionError("", f"converting it raised {type(error).__name__}")


def _refused(error: ValidationError) -> ConversionError:
    count = error.error_count()
    if count > _MANY_PROBLEMS:
        return ConversionError("", f"{count} problems with {error.title}")
    try:
        problem = error.errors(include_url=False, include_input=False)[0]
    except Exception:  # noqa: BLE001  # what is said of text that is no Unicode, say
        return ConversionError("", f"is refused by {error.title}")
    reason = problem["msg"]
    if problem["type"] not in _TELLING or _QUOTES & problem.get("ctx", {}).keys():
        reason = f"is refused by a validator ({problem['type']})"
    path = ""
    for part in problem["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:SHOWN_KEY]}"
    more = f" (and {count - 1} more)" if count > 1 else ""
    return ConversionError(path.removeprefix(".")[:_SHOWN_PATH], reason + more)


#: kinds of pydantic's own errors, and what in them may quote the value
_TELLING: Final = frozenset(typing.get_args(ErrorType))
_QUOTES: Final = frozenset({"error", "encoding_error", "tag", "tz_actual", "attribute"})
