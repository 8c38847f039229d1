"""Brokers that may be killed, stopped and starved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from messaging.testing.brokers import Broker, Mosquitto, require
from tests.doubles.core import pytest_pyfunc_call as pytest_pyfunc_call
from tests.faults.scenario import Profile
from tests.mqtt.conftest import needs_mosquitto as needs_mosquitto
from tests.mqtt.conftest import strict_mosquitto as strict_mosquitto


@pytest.fixture
def broker() -> Iterator[Mosquitto]:
    """A Mosquitto of the test's own: it starts within a tenth of a second."""
    require("mosquitto")
    with Mosquitto() as broker:
        yield broker


@pytest.fixture
def any_broker(request: pytest.FixtureRequest, profile: Profile) -> Broker:
    """The broker that the profile is for."""
    broker: Broker = request.getfixturevalue("rabbitmq" if profile.name.startswith("amqp") else "broker")
    return broker
