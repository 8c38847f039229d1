"""Brokers of these tests' own, since they leave retained messages behind. A test that is a coroutine is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto, require
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from tests.doubles.core import loop_factory as loop_factory
from tests.doubles.core import pytest_pyfunc_call as pytest_pyfunc_call
from tests.doubles.timers import long_timers as long_timers
from tests.mqtt.peer import Peer

Connect = Callable[..., messaging.Messaging]

#: one row for each version of the protocol
both_versions = table("version", ["5", "3.1.1"])

#: reconnecting in the time a test has
QUICK = {"reconnect_min": 0.02, "reconnect_max": 0.1}


@pytest.fixture(scope="session")
def needs_mosquitto() -> None:
    require("mosquitto")


@pytest.fixture(scope="session")
def mosquitto(needs_mosquitto: None) -> Iterator[Mosquitto]:
    with Mosquitto() as broker:
        yield broker


@pytest.fixture
def strict_mosquitto(needs_mosquitto: None, tmp_path: Path) -> Iterator[Mosquitto]:
    """A broker that refuses SUBSCRIBE and UNSUBSCRIBE for all topics but ``open/#``."""
    plugin = next(Path("/usr/lib").glob("*/mosquitto_dynamic_security.so"), None)
    if plugin is None:
        pytest.skip("this mosquitto comes without its dynamic security plugin")
    allowed = [
        {"acltype": f"{what}Pattern", "topic": "open/#", "priority": 0, "allow": True}
        for what in ("subscribe", "unsubscribe")
    ]
    rules = tmp_path / "rules.json"
    rules.write_text(
        json.dumps(
            {
                "defaultACLAccess": {
                    "publishClientSend": True, "publishClientReceive": True, "subscribe": False, "unsubscribe": False,
                },
                "clients": [],
                "groups": [{"groupname": "all", "roles": [{"rolename": "role"}], "clients": []}],
                "anonymousGroup": "all",
                "roles": [{"rolename": "role", "acls": allowed}],
            }
        )
    )  # fmt: skip
    with Mosquitto([f"plugin {plugin}", f"plugin_opt_config_file {rules}", "log_type all"]) as broker:
        yield broker


@pytest.fixture
def proxy(mosquitto: Mosquitto) -> Iterator[Proxy]:
    """A proxy before ``mosquitto``; see ``harness.url_of``."""
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        yield proxy


@pytest.fixture
def peer() -> Peer:
    """A broker that is scripted byte by byte."""
    return Peer()


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """``connect(url, **settings)``: an instance, by default at ``mosquitto``, that is closed when the test ends."""
    with ExitStack() as stack:
        services = ServiceRegistry()

        def make(url: str = "", **settings: Any) -> messaging.Messaging:
            url = url or request.getfixturevalue("mosquitto").url
            instance = messaging.connect(url, services=services, **{**QUICK, **settings})
            stack.callback(instance.close)
            return instance

        yield make
