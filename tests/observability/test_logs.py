"""Structured logs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider

from messaging.errors import ArgumentError
from messaging.observability.logs import JsonFormatter, configure_logging, formatter, level_number
from messaging.testing.tables import table


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    found = io.StringIO()
    configure_logging("debug", "json", found)
    yield found
    for each in [*root.handlers]:
        root.removeHandler(each)
    for each in handlers:
        root.addHandler(each)
    root.setLevel(level)


def last(stream: io.StringIO) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stream.getvalue().splitlines()[-1])
    return found


def test_a_record_is_one_line_of_json(stream: io.StringIO) -> None:
    logging.getLogger("messaging.x").warning("route '%s': %d messages\nlost", "data", 3, extra={"count": 3})
    found = last(stream)
    assert len(stream.getvalue().splitlines()) == 1
    assert found["level"] == "warning"
    assert found["logger"] == "messaging.x"
    assert found["message"] == "route 'data': 3 messages\nlost"
    assert (found["component"], found["name"]) == ("route", "data")
    assert found["count"] == 3
    assert found["time"].endswith("Z")
    assert found["thread"] == "MainThread"


def test_a_component_with_an_address_is_recognised(stream: io.StringIO) -> None:
    logging.getLogger("x").info("mqtt 'plant' (broker:1883): connection lost: reset")
    assert (last(stream)["component"], last(stream)["name"]) == ("mqtt", "plant")
    logging.getLogger("x").info("no component here")
    assert "component" not in last(stream)


def test_an_exception_has_class_text_and_traceback(stream: io.StringIO) -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("x").exception("failed")
    found = last(stream)["exception"]
    assert (found["class"], found["message"]) == ("ValueError", "wrong")
    assert "test_logs.py" in found["traceback"]


def test_the_current_span_is_named(stream: io.StringIO) -> None:
    tracer = TracerProvider().get_tracer("t")
    with tracer.start_as_current_span("work") as span:
        logging.getLogger("x").info("inside")
    assert last(stream)["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    logging.getLogger("x").info("outside")
    assert "trace_id" not in last(stream)


def test_a_record_that_cannot_be_formatted_says_so() -> None:
    record = logging.LogRecord("x", logging.INFO, "f.py", 1, "%d", ("no number",), None)
    assert "cannot be formatted: TypeError" in json.loads(JsonFormatter().format(record))["message"]


@given(
    message=st.text(max_size=200),
    extra=st.recursive(
        st.none() | st.integers() | st.floats() | st.binary() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    ),
)
def test_any_record_is_one_line_of_json(message: str, extra: object) -> None:  # fmt: skip
    record = logging.LogRecord("x", logging.INFO, "f.py", 1, "%s", (message,), None)
    record.given = extra
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert isinstance(json.loads(line), dict)


def test_a_long_text_is_cut() -> None:
    record = logging.LogRecord("x", logging.INFO, "f.py", 1, "y" * 10**6, (), None)
    assert len(JsonFormatter().format(record)) < 20_000


@table("level", ["", "loud", 10, None])
def test_other_levels_are_refused(level: Any) -> None:
    with pytest.raises(ArgumentError, match="log level must be one of debug, info, warning, error, critical"):
        level_number(level)


def test_other_formats_are_refused() -> None:
    with pytest.raises(ArgumentError, match="log format must be one of text, json"):
        formatter("xml")
    assert "%(message)s" in (formatter("text")._fmt or "")
