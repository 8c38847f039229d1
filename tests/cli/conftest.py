"""Fixtures of the tests of the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import messaging
from messaging import Messaging
from messaging.cli import main
from messaging.testing.brokers import Mosquitto, require

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # not the contexts of the user
    for name in [*os.environ]:
        if name.startswith("MESSAGING_"):
            monkeypatch.delenv(name)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the program in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    return run


def refused(run: Run, *arguments: str, code: int = 2) -> str:
    """Run a command line that is refused with one line and nothing on stdout; return the text of the line."""
    found, out, err = run(*arguments)
    assert (found, out, err.count("\n")) == (code, "", 1), err
    assert err.startswith("messaging: error: ")
    return err.removeprefix("messaging: error: ").rstrip("\n")


@pytest.fixture
def topic() -> str:
    """A channel that no other test uses."""
    return f"cli/{uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def url(mosquitto: Mosquitto) -> str:
    return mosquitto.url


@pytest.fixture
def m(url: str) -> Iterator[Messaging]:
    """An instance in this process, as the other side of a command."""
    with messaging.connect(url) as m:
        yield m


@pytest.fixture
def own() -> Iterator[Mosquitto]:
    """A broker that the test may stop."""
    require("mosquitto")
    with Mosquitto() as broker:
        yield broker
