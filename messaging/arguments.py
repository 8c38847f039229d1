"""Refuses arguments of the wrong type where they come in, rather than where they are first used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from messaging.errors import ArgumentError


def check_instance(name: str, value: object, kind: type) -> None:
    """Refuse ``value``, the argument ``name``, unless it is a ``kind``.

    Raises:
        ArgumentError: it is not; says what it is.
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")


def check_mapping(name: str, value: Any) -> dict[Any, Any]:
    """Return the argument ``name`` as a dict of its own.

    Raises:
        ArgumentError: it is no mapping.
    """
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} must be a mapping, not {type(value).__name__}")
    return dict(value)
