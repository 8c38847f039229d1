"""A broker of these tests' own: they leave retained messages behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers import Mosquitto, require


@pytest.fixture(scope="session")
def needs_mosquitto() -> None:
    require("mosquitto")


@pytest.fixture(scope="module")
def mosquitto(needs_mosquitto: None) -> Iterator[Mosquitto]:
    with Mosquitto() as broker:
        yield broker


@pytest.fixture(params=["5", "3.1.1"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)
