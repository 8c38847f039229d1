"""``messaging demo``: it runs at any broker, and reports wrong results."""

from __future__ import annotations

import time

import pytest

import messaging
from messaging import ClosedError, Features
from messaging.cli import demo
from tests.cli.conftest import Run
from tests.cli.program import Program
from tests.doubles.memory import change_capabilities


def is_right(out: str, skipped: str = "") -> bool:
    summary = out.splitlines()[-1]
    return "WRONG" not in out and "checks, all right; " + (f"skipped: {skipped}; " if skipped else "") in summary


def test_it_runs_by_itself_on_a_broker_of_its_own() -> None:
    started = time.monotonic()
    # the broker of the environment is not used
    with Program("demo", variables={"MESSAGING_URL": "mqtt://127.0.0.1:1"}) as program:
        assert program.ended() == 0
        out = program.out.rest().decode()
        assert program.err.rest() == b""
    assert time.monotonic() - started < 10
    assert out.startswith("connected to memory://demo")
    assert is_right(out)
    for number, act in enumerate(demo.ACTS, 1):
        assert f"\n{number}  {act.title}\n" in out
    assert "skipped" not in out


@pytest.mark.parametrize(
    ("server", "query", "skipped"),
    [("mosquitto", "", ""), ("mosquitto", "?version=3.1.1", ""), ("rabbitmq", "", "Retained messages")],
)
def test_it_runs_again_and_again_at_one_broker_without_the_acts_whose_features_it_lacks(
    run: Run, request: pytest.FixtureRequest, server: str, query: str, skipped: str
) -> None:
    for _ in range(2):
        code, out, err = run("demo", request.getfixturevalue(server).url + query)
        assert (code, err) == (0, ""), out
        assert is_right(out, skipped)
        assert ("   skipped: this instance does not announce retain\n" in out) == bool(skipped)


def test_an_act_is_skipped_for_each_feature_it_needs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with messaging.connect("memory://demo") as m:
        less = m.features - {Features.POINT_TO_POINT, Features.EXTENSION_MAX_DELIVERIES}
    change_capabilities(monkeypatch, features=less)
    code, out, _ = run("demo")
    assert code == 0
    assert is_right(out, skipped="Point to point: a work queue, Redelivery and dead letters")


def test_a_wrong_result_is_shown_and_is_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(stage: demo.Stage) -> None:
        """Adds up."""
        stage.check("two and two", 4, 5)
        stage.check("one and one", 2, 2)

    monkeypatch.setattr(demo, "ACTS", (demo.Act("Arithmetic", act, ()),))
    code, out, _ = run("demo")
    assert code == 1
    assert "two and two  4         5      WRONG" in out
    assert "2 checks, 1 wrong; " in out


def test_an_act_that_does_not_get_to_its_end_is_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(stage: demo.Stage) -> None:
        """Waits in vain."""
        raise ClosedError("gone")

    monkeypatch.setattr(demo, "ACTS", (demo.Act("Vanity", act, ()), *demo.ACTS[:1]))
    code, out, _ = run("demo")
    assert code == 1
    assert "ClosedError: gone" in out
    assert "4 checks, 1 wrong" in out
