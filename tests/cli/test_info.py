"""``messaging info``."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

import messaging
from messaging import Features
from messaging.testing.brokers import Mosquitto, require
from tests.cli.conftest import Run
from tests.cli.program import Program

if TYPE_CHECKING:
    import pytest


def test_without_a_url_it_lists_the_installation(run: Run) -> None:
    code, out, err = run("info")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    for scheme in ("memory", "mqtt", "mqtts", "amqp", "amqps"):
        assert [f"{scheme}://", "ok"] in [line[:2] for line in lines]
    assert ["rx-messaging", version("rx-messaging")] in lines
    assert ["application/json", "ok"] in lines


def test_the_installation_as_json_lists_adapters_and_codecs(run: Run) -> None:
    code, out, _ = run("info", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["versions"]["reactivex"] == version("reactivex")
    assert found["adapters"]["memory"] == {"adapter": "messaging_adapters.memory:MemoryAdapter", "status": "ok"}
    assert {*found["codecs"]} >= {f"application/{name}" for name in ("json", "cbor", "msgpack", "octet-stream")}
    assert "text/plain" in found["codecs"]


def test_an_adapter_without_its_extra_names_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> None:
        raise messaging.MissingExtraError("memory", "memory://")

    monkeypatch.setattr("messaging_adapters.memory.MemoryAdapter.__init__", lacking)
    status = json.loads(run("info", "--json")[1])["adapters"]["memory"]["status"]
    assert status == "memory:// needs an optional package: pip install 'rx-messaging[memory]'"


def test_with_a_url_it_shows_the_runtime_dto(run: Run, mosquitto: Mosquitto) -> None:
    code, out, err = run("info", mosquitto.url, "--json", "--option", "name=shown")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [*found] == [field.name for field in dataclasses.fields(messaging.MessagingRuntimeDTO)]
    assert found["instance_id"] == "shown"
    assert found["connection"] | {"since": 0, "client_id": ""} == {
        "state": "connected", "cause": None, "since": 0, "client_id": "", "connects": 1, "losses": 0,
        "host": mosquitto.url.removeprefix("mqtt://"),
    }  # fmt: skip
    assert found["connection"]["since"] > 0
    assert found["connection"]["client_id"].startswith("shown")
    assert found["protocols"] == ["mqtt", "mqtt5"]

    code, out, _ = run("info", mosquitto.url, "--option", "name=shown")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0
    assert lines["instance_id"] == "shown"
    assert lines["connection.state"] == "connected"
    assert lines["features"] == ", ".join(found["features"])


def test_the_url_may_come_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESSAGING_URL", "memory://of-the-environment")
    assert json.loads(run("info", "--json")[1])["connection_uri"] == "memory://of-the-environment"
    assert json.loads(run("info", "memory://given", "--json")[1])["connection_uri"] == "memory://given"
    assert json.loads(run("info", "-u", "memory://given", "--json")[1])["connection_uri"] == "memory://given"


def test_features_lists_them_all_and_which_are_announced(run: Run) -> None:
    found = json.loads(run("info", "memory://info", "--features", "--json")[1])
    with messaging.connect("memory://info") as m:
        assert {name for name, announced in found.items() if announced} == m.features
    assert {value for name, value in vars(Features).items() if name.isupper()} <= {*found}

    code, out, _ = run("info", "memory://info", "--features")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert code == 0
    assert rows["feature"] == ["kind", "announced"]
    assert rows["acknowledge"] == ["functional", "yes"]
    assert rows["retain"] == ["extension", "yes"]
    assert rows["replyTo"] == ["functional", "yes" if found["replyTo"] else "no"]


def test_features_of_a_protocol_that_lacks_some(run: Run, mosquitto: Mosquitto) -> None:
    found = json.loads(run("info", f"{mosquitto.url}?version=3.1.1", "--features", "--json")[1])
    assert found["retain"] is True
    assert found["headers"] is False


def test_watch_writes_each_state_until_interrupted() -> None:
    """It waits for a broker that is not there yet, and goes on when one is lost."""
    require("mosquitto")
    with Mosquitto() as broker:
        broker.stop()
        with Program("info", broker.url, "--watch", "--json", "--option", "reconnect_max=0.2") as program:
            states = (json.loads(program.out.until(lambda _: True)) for _ in itertools.count())

            def told(name: str) -> dict[str, object]:
                return next(state for state in states if state["state"] == name)

            # the first line may be from before the first attempt, or from after it
            assert next(state["error"] for state in states if state["cause"] is not None) == "ConnectFailedError"
            broker.start()
            told("connected")
            broker.kill()
            assert told("reconnecting")["error"] == "ConnectionLostError"
            broker.start()
            told("connected")
            program.signal(signal.SIGTERM)
            assert program.ended() == 130


def test_watch_shows_a_refusal_with_its_code() -> None:
    require("mosquitto")
    with Mosquitto(["allow_anonymous false"]) as broker, Program("info", broker.url, "--watch") as program:
        line = program.out.until(lambda line: b" refused: " in line).decode()
        assert "Not authorized" in line
        assert datetime.fromisoformat(line.split()[0]).tzinfo is not None


def test_watch_refuses_wrong_options(run: Run) -> None:
    code, out, err = run("info", "mqtt://localhost?versoin=5", "--watch")
    assert (code, out) == (2, "")
    assert "did you mean 'version'" in err
    code, _, err = run("info", "mqtt://localhost", "--watch", "--features")
    assert code == 2
    assert "give one of them" in err
