"""The fixture ``backend``, and the rule that no test of an announced feature is skipped."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import pytest

from messaging.errors import MessagingError
from messaging.testing.brokers import Mosquitto, RabbitMQ, require
from messaging.testing.conformance import LACKING, NETWORKED
from messaging.testing.conformance.backends import Backend, MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from messaging import Messaging
    from messaging.testing.brokers import Broker

    Maker = Callable[[pytest.FixtureRequest], Backend]

_KINDS: Final[dict[str, type[Broker]]] = {kind.name: kind for kind in (Mosquitto, RabbitMQ)}


def pytest_configure(config: pytest.Config) -> None:
    """Load the plugin, if it is not named on the command line."""
    config.pluginmanager.import_plugin("messaging.testing.plugin")


def _managed(name: str) -> Maker:
    kind, options = NETWORKED[name]

    def make(request: pytest.FixtureRequest) -> Backend:
        if request.node.get_closest_marker("restart"):
            require(kind)
            stack = contextlib.ExitStack()
            request.addfinalizer(stack.close)
            own: Broker = stack.enter_context(request.getfixturevalue("servers").borrow(_KINDS[kind]))
            return Backend(name, own.url + options, own)
        broker: Broker = request.getfixturevalue(kind)
        return Backend(name, broker.url + options)

    return make


def _outside(name: str, url: str) -> Maker:
    return lambda _: Backend(name, url)


def _backends(config: pytest.Config) -> dict[str, Maker]:
    # without the options unless the plugin is named on the command line: pytest loaded it too late for that
    urls: list[str] = config.getoption("--backend-url", None) or []
    chosen: list[str] | None = config.getoption("--backend", None)
    found: dict[str, Maker] = {"memory": lambda _: MemoryBackend("memory")}
    found |= {name: _managed(name) for name in NETWORKED}
    if chosen:
        found = {name: found[name] for name in found if name in chosen}
    elif urls:
        found.clear()
    for number, url in enumerate(urls, 1):
        name = f"{urlsplit(url).scheme}-{number}"
        found[name] = _outside(name, url)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        marks = {mark.name for mark in metafunc.definition.iter_markers()}
        names = list(_backends(metafunc.config))
        if "wire" in marks:
            names = [name for name in names if name != "memory"]
        if "restart" in marks:
            names = [name for name in names if name in NETWORKED]
        if "envelope" not in marks:
            names = [name for name in names if name != "mqtt311-envelope"]
        claimed = _claimed(metafunc.definition)
        names = [name for name in names if not claimed & LACKING.get(name, frozenset())]
        # RabbitMQ takes more than five seconds to start, and again to start anew
        slow = [name for name in names if "restart" in marks and NETWORKED[name][0] == RabbitMQ.name]
        params = [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]
        metafunc.parametrize("backend", params, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The broker a test runs against."""
    made = _backends(request.config)[request.param](request)
    try:
        missing = _claimed(request.node) - _features(made, request.config)
        if missing:
            pytest.skip(f"{made.name} does not announce {', '.join(sorted(missing))}")
        yield made
    finally:
        made.close()


@pytest.fixture
def m(backend: Backend) -> Messaging:
    """An instance."""
    return backend.connect()


@pytest.fixture
def responder(backend: Backend) -> Messaging:
    """Another instance."""
    return backend.connect()


@pytest.fixture
def channel(backend: Backend) -> str:
    """A channel of this test alone."""
    return backend.channel()


def _features(backend: Backend, config: pytest.Config) -> frozenset[str]:
    """Return the features of a backend. A broker of ``--backend-url`` that refuses ends the run."""
    try:
        return backend.features
    except MessagingError as error:
        if config.getoption("--backend-url", None):
            pytest.exit(f"--backend-url: {error}", pytest.ExitCode.USAGE_ERROR)
        raise


def _claimed(node: pytest.Item) -> set[str]:
    return {str(name) for mark in node.iter_markers("feature") for name in mark.args}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skipped test whose features are announced is a failed one."""
    report = yield
    name: Any = getattr(item, "callspec", None) and item.callspec.params.get("backend")  # type: ignore[attr-defined]
    announced = Backend.announced.get(name)
    if report.skipped and announced is not None and _claimed(item) <= announced:
        report.outcome = "failed"
        report.longrepr = f"skipped, although {name} announces everything it covers: {report.longrepr}"
    return report
