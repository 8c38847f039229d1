"""``repr`` answers for every object, also for one whose constructor has failed."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

import messaging
import messaging_adapters
import pyspark_messaging
from messaging.errors import InvalidOptionError
from messaging.eventadmin import Event
from messaging.execution import Promise
from messaging.model import MessageContext
from messaging.services import ServiceRegistry
from messaging.testing.tables import table


def classes() -> Iterator[type[Any]]:
    """The classes with a ``__repr__`` that was written rather than generated."""
    for package in (messaging, messaging_adapters, pyspark_messaging):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if module.name.endswith("__main__") or ".telemetry" in module.name or ".testing" in module.name:
                continue
            imported = importlib.import_module(module.name)
            for found in vars(imported).values():
                if isinstance(found, type) and found.__module__ == module.name and "__repr__" in vars(found):
                    code = getattr(inspect.unwrap(vars(found)["__repr__"]), "__code__", None)
                    if code is not None and code.co_filename == imported.__file__:
                        yield found


def concrete(kind: type[Any]) -> Iterator[type[Any]]:
    """The class itself, or what inherits from an abstract one: only these have objects."""
    if inspect.isabstract(kind):
        for heir in kind.__subclasses__():
            yield from concrete(heir)
    else:
        yield kind


WRITTEN = {f"{kind.__module__}.{kind.__qualname__}": kind for found in [*classes()] for kind in concrete(found)}


def test_the_search_finds_classes() -> None:
    assert "messaging.instance.messaging.Messaging" in WRITTEN
    assert "messaging.execution.promise.Promise" in WRITTEN


@table("name", [*WRITTEN])
def test_an_object_whose_constructor_never_ran_has_a_repr(name: str) -> None:
    kind = WRITTEN[name]
    assert kind.__name__ in repr(kind.__new__(kind))


def test_a_report_with_locals_shows_an_instance_whose_constructor_failed() -> None:
    with pytest.raises(InvalidOptionError) as caught:
        messaging.connect("memory://x", services=ServiceRegistry(), timeout="soon")
    report = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "<Messaging, whose constructor failed>" in report
    assert "repr() failed" not in report


def test_reprs_show_names_that_cannot_be_printed_in_one_line() -> None:
    registry = ServiceRegistry()
    registration = registry.register("a\nb\ud800", object(), {"c\nd": 1})
    event = Event("a/b", {"e\nf": 1})
    context = MessageContext(extensions={"g\nh": 1})
    for shown in (registration, registration.reference.properties, event, context, Promise("i\nj")):
        assert repr(shown).isprintable()
    assert repr(registry.register("a.B", object()).reference).endswith(": a.B>")
