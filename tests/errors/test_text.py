"""The log raises nothing that logging handlers raise, and is otherwise as any."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from messaging.errors.text import SafeLog
from messaging.testing.tables import table
from tests.raising import raising_log


@pytest.fixture
def raising() -> Iterator[str]:
    """The name of a log with a defect."""
    name = "messaging.test_safelog"
    with raising_log(name):
        yield name


@table("loudly", [True, False])
def test_an_error_of_a_handler_is_written_as_logging_does_it(
    raising: str, loudly: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", loudly)
    log = SafeLog(raising)
    log.warning("the %s", "first")
    try:
        raise ValueError
    except ValueError:
        log.exception("the second")
    written = capsys.readouterr().err
    for text in ("cannot write the first", "cannot write the second"):
        assert (f"LookupError: {text}" in written) is loudly


def test_without_stderr_it_raises_nothing_either(raising: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    SafeLog(raising).error("the first")


def test_a_record_names_its_caller_and_the_error(caplog: pytest.LogCaptureFixture) -> None:
    log = SafeLog(__name__)
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("%s failed", "it")
    log.warning("beware")
    for record in caplog.records:
        assert (record.name, record.module) == (__name__, "test_text")
        assert record.funcName == "test_a_record_names_its_caller_and_the_error"
    failed, beware = caplog.records
    assert failed.getMessage() == "it failed"
    assert failed.exc_info is not None
    assert failed.exc_info[0] is ValueError
    assert (beware.levelno, beware.exc_info) == (logging.WARNING, None)
