"""Service properties of handlers, and the log, for the tests of both event services."""

from __future__ import annotations

import logging
from typing import Any, Final

import pytest

_PROPERTIES: Final = {"ranking": "service.ranking"}
#: parts of log records about a defect of this project
_DEFECTS: Final = (
    *("worker job failed", "the receiver of", "the callback after an event raised"),
    *("the supervisor of the delivery threads failed", "service registry: a listener failed"),
)


def no_defects(caplog: pytest.LogCaptureFixture) -> None:
    """Fail if the log has a record about a defect of this project."""
    texts = [each.getMessage() for each in [*caplog.records] if each.name.startswith("messaging.")]
    assert not [text for text in texts if any(part in text for part in _DEFECTS)]


def named(topics: Any = None, **properties: Any) -> dict[str, Any]:
    """Return service properties: ``filter="(a=1)"`` for ``event.filter``."""
    found = {_PROPERTIES.get(name, f"event.{name}"): value for name, value in properties.items()}
    return found if topics is None else {"event.topics": topics, **found}


def logged(caplog: pytest.LogCaptureFixture, *parts: str, level: int = logging.WARNING) -> list[str]:
    """Return the log records of this project from ``level`` on that contain all ``parts``."""
    return [
        text
        for each in [*caplog.records]
        if each.name.startswith("messaging.") and each.levelno >= level
        for text in [each.getMessage() + (f"\n{each.exc_text}" if each.exc_text else "")]
        if all(part in text for part in parts)
    ]
