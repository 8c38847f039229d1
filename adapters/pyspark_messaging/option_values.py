"""The values of options: Spark hands them over as text, and each check returns what the text means.

A check raises :class:`ValueError` without the name of the option.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from messaging.model import MAX_MESSAGE_ID, check_name, check_pattern, check_text, forbidden_character

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
#: bytes of a message id that the prefix may use; the rest is for epoch, partition, row and checksum
_MAX_PREFIX: Final = MAX_MESSAGE_ID - 75
_UNITS: Final = {"": 1, "b": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30, "gb": 2**30}


def nonblank(text: str) -> str:
    """Return ``text``, which must not be blank."""
    if not text.strip():
        raise ValueError("is empty")
    return text


def flag(text: str) -> bool:
    """Return the bool that ``true`` or ``false`` stands for."""
    if text.lower() not in ("true", "false"):
        raise ValueError(f"must be true or false, not {text!r}")
    return text.lower() == "true"


def one_of(*values: str) -> Callable[[str], str]:
    """Return a check that accepts one of ``values``."""

    def check(text: str) -> str:
        if text not in values:
            raise ValueError(f"must be one of {', '.join(values)}, not {text!r}")
        return text

    return check


def integer(low: int, high: int | None) -> Callable[[str], int]:
    """Return a check for an integer of at least ``low`` and, unless it is ``None``, at most ``high``."""
    wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def check(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low or (high is not None and number > high):
            raise ValueError(f"must be {wanted}, not {text!r}")
        return number

    return check


def size(text: str) -> int:
    """Return a number of bytes, which may have a unit: ``64m``."""
    match = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or not int(match[1]):
        raise ValueError(f"must be a number of bytes above 0, such as 1048576 or 64m, not {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def seconds(text: str) -> float:
    """Return a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number <= 1e9:
        raise ValueError(f"must be a number of seconds above 0, not {text!r}")
    return number


def _list(text: str) -> list[str]:
    values: list[str]
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("begins with '[' and is no JSON list") from None
        if not all(isinstance(value, str) for value in values):
            raise ValueError("must be a JSON list of texts")
    else:
        values = [value.strip() for value in text.split(",")]
    if not values or len(set(values)) != len(values):
        raise ValueError("names nothing, or something twice")
    return values


def channels(text: str) -> tuple[str, ...]:
    """Return channel patterns, see :func:`names`."""
    return tuple(map(check_pattern, _list(text)))


def names(text: str) -> tuple[str, ...]:
    """Return names that are separated by commas, or in a JSON list; none of them twice."""
    return tuple(map(check_name, _list(text)))


def content_type(text: str) -> str:
    """Return a content type that a message can carry."""
    check_text("it", nonblank(text))
    return text


def id_prefix(text: str) -> str:
    """Return a prefix of message ids that leaves room for the rest of the id."""
    bad = forbidden_character(nonblank(text))
    if bad is not None:
        raise ValueError(f"holds {bad}")
    size = len(text.encode())
    if size > _MAX_PREFIX:
        raise ValueError(f"must have at most {_MAX_PREFIX} bytes in UTF-8, not {size}")
    return text


def group(text: str) -> str:
    """Return a group: an MQTT client id and an AMQP queue name on every broker."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text) is None:
        raise ValueError(f"must be letters, digits, '.', '_' and '-', at most 100 of them, not {text!r}")
    return text


def offsets(text: str) -> Any:
    """Return ``earliest``, ``latest``, or the offsets of partitions or streams, from JSON: ``{"0": 17}``."""
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    wanted = f'must be {EARLIEST}, {LATEST}, or JSON such as {{"0": 17}}, not {text!r}'
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(wanted) from None
    if not isinstance(values, dict) or not values:
        raise ValueError(wanted)
    for value in values.values():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(wanted)
    return values
