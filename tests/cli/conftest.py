"""Fixtures of the tests of the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
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


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the program in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    return run
