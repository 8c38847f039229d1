"""Handlers, service properties, the log, and indexes under change, for the tests of the event services."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import pytest

from messaging.dispatch import TopicIndex
from messaging.testing.waiting import PATIENCE, Recorder
from tests.threads import in_background, in_threads

F = TypeVar("F", bound=Callable[..., Any])

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


class Gated:
    """A handler that records its events, and returns when a test has opened it."""

    events: Recorder[Any]

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self._seen = 0

    def wait(self) -> None:
        """Wait until it has another event."""
        self._seen += 1
        self.events.wait_for(self._seen)

    def stay(self) -> None:
        """Wait until it is opened."""
        assert self.opened.wait(PATIENCE)


class Stubborn:
    """A coroutine function that records its events, ignores that it is cancelled, and returns when it was opened."""

    def __init__(self) -> None:
        self.events: Recorder[Any] = Recorder()
        self.ended: Recorder[Any] = Recorder()
        self._is_open = False

    async def __call__(self, event: Any) -> None:
        self._loop, self._opened = asyncio.get_running_loop(), asyncio.Event()
        self.events.append(event)
        while not self._is_open:
            with contextlib.suppress(asyncio.CancelledError):
                await self._opened.wait()
        self.ended.append(event)

    def open(self) -> None:
        self._is_open = True
        self._loop.call_soon_threadsafe(self._opened.set)


def renewed(name: str, make: Callable[..., AbstractContextManager[Any]], *fixtures: str) -> Callable[[F], F]:
    """Return a decorator that gives each row of a table an object of its own, in the place of the fixture ``name``.

    Args:
        name: the parameter of the test.
        make: called for each row.
        fixtures: names of the fixtures that ``make`` takes as keyword arguments.
    """

    def decorate(test: F) -> F:
        parameters = inspect.signature(test).parameters
        more = [each for each in fixtures if each not in parameters]

        @functools.wraps(test)
        def run(**given: Any) -> Any:
            options = {each: given[each] for each in fixtures}
            for each in more:
                del given[each]
            with make(**options) as value:
                return test(**given, **{name: value})

        kept = [each for each in parameters.values() if each.name != name]
        kept += [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in more]
        run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        del run.__wrapped__
        return run  # type: ignore[return-value]

    return decorate


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


@contextlib.contextmanager
def meanwhile(change: Callable[[Any], object], values: Sequence[Any]) -> Iterator[None]:
    """On another thread, call ``change`` with one value after the other, at least once, until the block ends."""
    is_over = threading.Event()

    def run() -> None:
        for value in itertools.cycle(values):
            change(value)
            if is_over.is_set():
                return

    join = in_background(run)
    try:
        yield
    finally:
        is_over.set()
        join()


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Have the interpreter switch threads after a microsecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def look_while_it_changes(index: TopicIndex[Any, int], filters: Sequence[Any], topic: str) -> None:
    """Add and remove ``filters`` while other threads look ``topic`` up, which has the value -1 all the time."""
    is_over = threading.Event()
    looks = [0] * 3

    def look(thread: int) -> None:
        try:
            while not is_over.is_set():
                assert -1 in index.match(topic)
                assert index.preferred(topic) is not None
                assert len(index) > 0
                looks[thread] += 1
        finally:
            is_over.set()

    def change() -> None:
        while min(looks) < 300 and not is_over.is_set():
            for change in (index.add, index.remove):
                for value in range(50):
                    for each in filters:
                        change(each, value)
        is_over.set()

    with switching_often():
        in_threads(4, lambda thread: look(thread) if thread < 3 else change())
    assert min(looks) >= 300
