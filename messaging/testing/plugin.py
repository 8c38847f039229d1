"""The pytest plugin: options and marks of the conformance suite, and fixtures of private servers.

It is not loaded by itself. Name it in a ``conftest.py`` in the root of your tests::

    pytest_plugins = ["messaging.testing.plugin"]

or on the command line: ``pytest -p messaging.testing.plugin``. The brokers start on first use, are shared by the whole
run, with pytest-xdist by all of its workers, and are private to it. Tests that use a broker that is not installed are
skipped, and fail where the environment variable ``CI`` is ``true``. The summary counts the brokers that were started.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, Final

import pytest

from messaging.testing.conformance import NETWORKED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from messaging import Messaging
    from messaging.testing.brokers import Mosquitto, RabbitMQ
    from messaging.testing.clock import VirtualClock
    from messaging.testing.postgresql import PostgreSQL
    from messaging.testing.servers import Servers, Starts, Steward
    from messaging.testing.waiting import Recorder


#: the choices of ``--backend``
BACKENDS: Final = ("memory", *NETWORKED)

#: of the process that controls the run: the other processes have neither
_STEWARD: Final[pytest.StashKey[Steward]] = pytest.StashKey()
_STARTS: Final[pytest.StashKey[Starts]] = pytest.StashKey()
#: in the input of a worker of pytest-xdist: address and key of the steward
_SERVERS: Final = "rx_messaging_servers"


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
    config.addinivalue_line("markers", "slow: takes many seconds; run it apart from the others")
    if not hasattr(config, "workerinput"):
        from messaging.testing.servers import Starts, Steward

        config.stash[_STEWARD] = Steward()
        config.stash[_STARTS] = starts = Starts()
        starts.begin()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist, before it starts, where the servers of the run are."""
    steward = node.config.stash[_STEWARD]
    node.workerinput[_SERVERS] = [*steward.listen()]
    steward.workers.append(node.workerinput["workerid"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell how many brokers were started, by their kind."""
    if _STARTS in config.stash:
        told = str(config.stash[_STARTS])
        if told:
            terminalreporter.write_line(told)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the servers of the run."""
    if _STEWARD in config.stash:
        config.stash[_STEWARD].close()
        config.stash[_STARTS].end()


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


@pytest.fixture
def virtual_clock() -> Iterator[VirtualClock]:
    """Provide a virtual clock; connect after asking for it, and close before the test ends."""
    from messaging.testing.clock import VirtualClock

    with VirtualClock() as found:
        yield found


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """Provide the servers of the run: ``with servers.borrow(Mosquitto) as broker`` lends one that may be killed."""
    from messaging.testing.servers import RemoteServers, Servers, Steward

    config: Any = request.config
    given = getattr(config, "workerinput", {})
    with contextlib.ExitStack() as stack:
        if _SERVERS in given:
            address, key = given[_SERVERS]
            found: Servers = RemoteServers(address, key, given["workerid"])
        elif _STEWARD in config.stash:
            found = Servers(config.stash[_STEWARD])
        else:  # a worker whose controller has not loaded this plugin
            steward = Steward()
            stack.callback(steward.close)
            found = Servers(steward)
        stack.callback(found.close)
        yield found


@pytest.fixture(scope="session")
def mosquitto(servers: Servers) -> Mosquitto:
    """Provide a shared Mosquitto. Tests that stop, reconfigure or flood it start one of their own."""
    from messaging.testing.brokers import require

    require("mosquitto")
    return servers.mosquitto()


@pytest.fixture(scope="session")
def rabbitmq(servers: Servers) -> RabbitMQ:
    """Provide a shared RabbitMQ. Tests that stop, reconfigure or flood it borrow one of :func:`servers`.

    A worker of pytest-xdist has a virtual host of its own there, which is part of the URL: ``rabbitmq.url_at`` gives
    the URL of a proxy.
    """
    from messaging.testing.brokers import require

    require("rabbitmq")
    return servers.rabbitmq()


@pytest.fixture(scope="session")
def rabbitmq_mqtt(rabbitmq: RabbitMQ) -> RabbitMQ:
    """Provide the same RabbitMQ with MQTT, which it does not enable at its start: that takes several seconds."""
    rabbitmq.enable("rabbitmq_mqtt")
    return rabbitmq


@pytest.fixture(scope="session")
def postgresql(servers: Servers) -> PostgreSQL:
    """Provide a shared PostgreSQL that does not sync its files; ``create_database`` makes databases for tests."""
    from messaging.testing.brokers import require

    require("postgresql")
    return servers.postgresql()
