"""The pytest plugin: options and marks of the conformance suite, and fixtures of private servers.

It is not loaded by itself. Name it in a ``conftest.py`` in the root of your tests::

    pytest_plugins = ["messaging.testing.plugin"]

or on the command line: ``pytest -p messaging.testing.plugin``. The brokers start on first use, are shared by the whole
run and private to it. Tests that use a broker that is not installed are skipped, and fail where the environment
variable ``CI`` is ``true``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import pytest

from messaging.testing.conformance import NETWORKED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from messaging import Messaging
    from messaging.testing.brokers import Mosquitto, RabbitMQ
    from messaging.testing.postgresql import PostgreSQL
    from messaging.testing.waiting import Recorder


#: the choices of ``--backend``
BACKENDS: Final = ("memory", *NETWORKED)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select the backends of the conformance suite."""
    group = parser.getgroup("conformance")
    group.addoption("--backend", action="append", choices=BACKENDS, help="run against this backend only; repeatable")
    group.addoption("--backend-url", action="append", metavar="URL", help="run against this broker; repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks of the conformance suite, and check its options.

    Raises:
        pytest.UsageError: a URL without a port: tests of lost connections put a proxy in between.
    """
    for url in config.getoption("--backend-url", None) or ():
        if not re.search(r":\d+(/|\?|$)", url):
            raise pytest.UsageError(f"--backend-url {url.rpartition('@')[2]}: no port; name it, as in nats://host:4222")
    config.addinivalue_line("markers", "feature(*names): covers these features; for backends that announce them all")
    config.addinivalue_line("markers", "wire: needs a network that can be held back")
    config.addinivalue_line(
        "markers", "envelope: of what the envelope of MQTT 3.1.1 adds or carries; it runs these only"
    )
    config.addinivalue_line("markers", "restart: needs a broker that can be restarted, and gets one of its own")
    config.addinivalue_line("markers", "slow: seconds rather than milliseconds")


@pytest.fixture
def subscribe() -> Iterator[Callable[..., Recorder[Any]]]:
    """Provide ``subscribe(m, channel, **context)``: a recorder of the messages, once the broker has confirmed.

    The subscriptions end with the test.
    """
    from messaging.testing.waiting import subscribed

    made: list[Recorder[Any]] = []

    def make(m: Messaging, channel: Any, *args: Any, **context: Any) -> Recorder[Any]:
        made.append(subscribed(m, channel, *args, **context))
        return made[-1]

    yield make
    for recorder in reversed(made):
        recorder.dispose()


@pytest.fixture(scope="session")
def mosquitto() -> Iterator[Mosquitto]:
    """Provide a shared Mosquitto. Tests that stop, reconfigure or flood it start one of their own."""
    from messaging.testing.brokers import Mosquitto, require

    require("mosquitto")
    with Mosquitto() as broker:
        yield broker


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """Provide a shared RabbitMQ. Tests that stop, reconfigure or flood it start one of their own."""
    from messaging.testing.brokers import RabbitMQ, require

    require("rabbitmq")
    with RabbitMQ() as broker:
        yield broker


@pytest.fixture(scope="session")
def rabbitmq_mqtt(rabbitmq: RabbitMQ) -> RabbitMQ:
    """Provide the same RabbitMQ with MQTT, which it does not enable at its start: that takes several seconds."""
    rabbitmq.enable("rabbitmq_mqtt")
    return rabbitmq


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """Provide a shared PostgreSQL that does not sync its files; ``create_database`` makes databases for tests."""
    from messaging.testing.brokers import require
    from messaging.testing.postgresql import PostgreSQL

    require("postgresql")
    with PostgreSQL() as server:
        yield server
