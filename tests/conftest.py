"""Brokers for the tests that need them, and certificates. Made on first use, shared by the whole run, private to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.brokers import Mosquitto, RabbitMQ, require
from tests.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long an example takes depends on what else the machine does, so it decides nothing here.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(scope="session")
def mosquitto() -> Iterator[Mosquitto]:
    """A shared Mosquitto. Tests that stop, reconfigure or flood it start one of their own."""
    require("mosquitto")
    with Mosquitto() as broker:
        yield broker


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """A shared RabbitMQ. Tests that stop, reconfigure or flood it start one of their own."""
    require("rabbitmq")
    with RabbitMQ() as broker:
        yield broker


@pytest.fixture(scope="session")
def rabbitmq_mqtt(rabbitmq: RabbitMQ) -> RabbitMQ:
    """The same RabbitMQ, speaking MQTT too. Not from the start: enabling MQTT takes longer than all the rest."""
    rabbitmq.enable("rabbitmq_mqtt")
    return rabbitmq


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Signs certificates. Its own has to be trusted by whoever is to trust them."""
    return Authority(tmp_path_factory.mktemp("authority"))
