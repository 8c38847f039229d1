"""Instances at one broker, and listeners."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import messaging
from tests.leases.conftest import channel as channel
from tests.leases.conftest import connect as connect
from tests.leases.conftest import url_of
from tests.remoteevent.helpers import Recorder


@pytest.fixture
def m(request: pytest.FixtureRequest) -> Iterator[messaging.Messaging]:
    """An instance at a broker of its own in this process."""
    with messaging.connect(url_of("memory", request)) as made:
        yield made


@pytest.fixture
def target() -> Recorder:
    return Recorder()


@pytest.fixture
def other() -> Recorder:
    return Recorder()
