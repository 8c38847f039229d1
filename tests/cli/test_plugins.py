"""Commands of other packages, by their entry points; one that does not load affects no other command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.doubles.fixtures import install

PLUGIN = """
import typer
from messaging.errors import ArgumentError

app = typer.Typer()

@app.command()
def third() -> int:
    "Third party's own."
    print("it runs")
    return 3

@app.command()
def fails() -> None:
    raise ArgumentError("not like this")
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = ["parties = third_party_commands:app", "broken = third_party_broken:app", "pub = third_party_commands:app"]
    install(tmp_path, "third-party-commands", "\n".join(["[messaging.commands]", *points, ""]))
    (tmp_path / "third_party_commands.py").write_text(PLUGIN)
    (tmp_path / "third_party_broken.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_package_outside_the_project_adds_a_command(run: Run) -> None:
    assert run("parties", "third") == (3, "it runs\n", "")
    assert run("parties", "fails") == (2, "", "messaging: error: not like this\n")


def test_a_command_of_this_project_is_not_replaced(run: Run) -> None:
    assert "Publish a message" in run("pub", "--help")[1]


def test_help_lists_commands_that_load_and_warns_of_the_others(run: Run) -> None:
    code, out, err = run("--help")
    assert code == 0
    for command in ("pub", "demo", "parties", "pipeline"):
        assert f" {command} " in out
    assert " broken " not in out
    assert err.startswith("messaging: warning: the command broken = third_party_broken:app does not load")
    assert err.count("\n") == 1


def test_a_command_that_does_not_load_says_so_when_it_is_run(run: Run) -> None:
    code, out, err = run("broken")
    assert (code, out) == (2, "")
    assert "does not load: RuntimeError: not today" in err


def test_other_commands_do_not_load_it(run: Run) -> None:
    assert run("info", "memory://plugins")[2] == ""
