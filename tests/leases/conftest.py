"""Instances at one broker."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

import messaging
from messaging.execution import clock

Connect = Callable[..., messaging.Messaging]


def url_of(transport: str, request: pytest.FixtureRequest) -> str:
    """Return the URL of a broker of the run: ``memory``, ``mqtt`` or ``amqp``."""
    if transport == "memory":
        return f"memory://{uuid.uuid4().hex}"
    if transport == "mqtt":
        return f"{request.getfixturevalue('mosquitto').url}?version=5"
    return str(request.getfixturevalue("rabbitmq").url)


@contextmanager
def connecting(url: str) -> Iterator[Connect]:
    """Connect instances to one broker, each with further options of its URL; close them at the end."""
    with ExitStack() as stack:
        yield lambda options="": stack.enter_context(messaging.connect(url + options))


@pytest.fixture(params=["memory", "mqtt", "amqp"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects instances to one broker, for each adapter."""
    with connecting(url_of(request.param, request)) as make:
        yield make


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects instances to one broker in this process."""
    with connecting(url_of("memory", request)) as make:
        yield make


@pytest.fixture
def channel() -> str:
    """A channel that no other test uses."""
    return f"parties/{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def real_time() -> Iterator[None]:
    """Ends the fake clock of a test."""
    before = clock.boot
    yield
    clock.boot = before
