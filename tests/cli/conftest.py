"""Fixtures of the tests of the command line."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from messaging.cli import main

Run = Callable[..., tuple[int, str, str]]

#: which thread of the program takes the signal
any_thread = pytest.mark.parametrize("elsewhere", [False, True], ids=["main_thread", "another_thread"])


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))  # not the contexts of the user
    for name in [*os.environ]:
        if name.startswith("MESSAGING_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Programs inherit an ignored SIGINT, which is how a shell starts this one in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the program in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    return run
