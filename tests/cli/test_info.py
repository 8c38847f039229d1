"""``messaging info``."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from typing import TYPE_CHECKING

import messaging
from messaging import Features
from messaging.codecs import registry
from tests.brokers import Mosquitto
from tests.cli.conftest import Run

if TYPE_CHECKING:
    import pytest


def test_without_a_url_it_lists_what_is_installed(run: Run) -> None:
    code, out, err = run("info")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    for scheme in ("memory", "mqtt", "mqtts", "amqp", "amqps"):
        assert [f"{scheme}://", "ok"] in [line[:2] for line in lines]
    assert ["rx-messaging", version("rx-messaging")] in lines
    assert ["application/json", "ok"] in lines


def test_what_is_installed_as_json(run: Run) -> None:
    code, out, _ = run("info", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["versions"]["reactivex"] == version("reactivex")
    assert found["adapters"]["memory"] == {"adapter": "adapters.memory:MemoryAdapter", "status": "ok"}


def test_every_built_in_codec_is_listed(run: Run) -> None:
    listed = json.loads(run("info", "--json")[1])["codecs"]
    served = {type(registry.Codecs().resolve(name)[0]) for name in listed}
    assert served >= set(registry._BUILT_IN.values())


def test_an_adapter_that_lacks_its_extra_says_which(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> None:
        raise messaging.MissingExtraError("memory", "memory://")

    monkeypatch.setattr("adapters.memory.MemoryAdapter.__init__", lacking)
    status = json.loads(run("info", "--json")[1])["adapters"]["memory"]["status"]
    assert status == "memory:// needs an optional package: pip install 'rx-messaging[memory]'"


def test_with_a_url_it_shows_the_runtime_dto(run: Run, mosquitto: Mosquitto) -> None:
    code, out, err = run("info", mosquitto.url, "--json", "--option", "name=shown")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [*found] == [field.name for field in dataclasses.fields(messaging.MessagingRuntimeDTO)]
    assert found["instance_id"] == "shown"
    assert found["connection"] == {"state": "connected", "cause": None}
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
