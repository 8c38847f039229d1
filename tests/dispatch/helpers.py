"""Service properties of handlers, the log, and indexes under change, for the tests of the event services."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import pytest

from messaging.dispatch import TopicIndex

#: texts that are topics (157.3.1)
TOPICS: Final = [
    *("a", "A", "A/a", "-", "_", "$", "0/1/2", "foo-bar/x", "a-b/c_d/$e", "Outer$Inner/_private/1st", "a/" * 500 + "a"),
    *("org/osgi/example/ExampleEvent", "fully/qualified/package/ClassName/ACTION", "über/Straße/日本語", "क्षेत्र/ไทย"),
    *("é/Ωmega/日本", "a/é́", "€", "€/Ⅷ"),
]
#: texts that are topic filters, and no topics (157.4.3)
FILTERS: Final = ["*", "+", "a/*", "a/+", "+/*", "+/+", "+/a", "a/+/b", "a/+/b/*", "foo/+/x", "com/+/*", "日本/+/*"]
#: texts that are neither
NEITHER: Final = [
    *("", "/", "/a", "a/", "é/", "a//b", "a b", "a/b ", " a", "a\n", "a/b\n", "a.b", "org.osgi/service/upnp", "a:b"),
    *("a#", "#", "a/#", "a\\b", "a\0b", "a\u200bb", "a/\u200b", "a\u00adb", "a\ud800", "a/\ud800", "a·b", "²", "a…b"),
    *("a/b,c", "a/😀", "a/**", "**", "foo*", "foo*/bar", "foo+", "foo+/bar", "foo/+bar", "++", "+*", "a/+*", "*/a"),
    *("a/*/b", "*/*", "*+", "*/", "/*", "/+", "a/*\n", "*\n", "+\n", "pkg/mod/function/<locals>/Inner"),
]

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


def look_while_it_changes(index: TopicIndex[Any, int], filters: Sequence[Any], topic: str) -> None:
    """Add and remove ``filters`` while other threads look ``topic`` up, which has the value -1 all the time."""
    failures: list[BaseException] = []
    is_over = threading.Event()

    def look() -> None:
        try:
            while not is_over.is_set():
                assert -1 in index.match(topic)
                assert index.preferred(topic) is not None
                assert len(index) > 0
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        ends = time.monotonic() + 0.4
        while time.monotonic() < ends and not failures:
            for value in range(50):
                for each in filters:
                    index.add(each, value)
            for value in range(50):
                for each in filters:
                    index.remove(each, value)
    finally:
        is_over.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert failures == []
