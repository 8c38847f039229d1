"""The fixture ``backend``, its options, and the rule that nothing an announced feature covers is skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import pytest

from tests.brokers import Mosquitto, RabbitMQ, require
from tests.conformance.backends import Backend, MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from messaging import Messaging
    from tests.brokers import Broker

    Maker = Callable[[pytest.FixtureRequest], Backend]

#: id -> its broker, and the options that follow its URL
_NETWORKED: Final[dict[str, tuple[type[Broker], str]]] = {
    "mqtt311": (Mosquitto, "?version=3.1.1"),
    "mqtt311-envelope": (Mosquitto, "?version=3.1.1&envelope=true"),
    "mqtt5": (Mosquitto, "?version=5"),
    "amqp": (RabbitMQ, ""),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--backend", action="append", metavar="NAME", help="run against this backend only; repeatable")
    group.addoption("--backend-url", action="append", metavar="URL", help="run against this broker too; repeatable")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "feature(*names): covers these features; for backends that announce them all")
    config.addinivalue_line("markers", "wire: needs a network that can be held back")
    config.addinivalue_line("markers", "restart: needs a broker that can be restarted, and gets one of its own")


def _managed(name: str) -> Maker:
    kind, options = _NETWORKED[name]

    def make(request: pytest.FixtureRequest) -> Backend:
        if request.node.get_closest_marker("restart"):
            require(kind.name)
            own = kind()
            own.start()
            return Backend(name, own.url + options, own)
        broker: Broker = request.getfixturevalue(kind.name)
        return Backend(name, broker.url + options)

    return make


def _outside(name: str, url: str) -> Maker:
    return lambda _: Backend(name, url)


def _backends(config: pytest.Config) -> dict[str, Maker]:
    # without the options when this directory is not named on the command line: pytest read it too late for that
    urls: list[str] = config.getoption("--backend-url", None) or []
    chosen: list[str] | None = config.getoption("--backend", None)
    found: dict[str, Maker] = {"memory": lambda _: MemoryBackend("memory")}
    found |= {name: _managed(name) for name in _NETWORKED}
    if chosen:
        if unknown := set(chosen) - set(found):
            raise pytest.UsageError(f"no backend {', '.join(sorted(unknown))}; there are {', '.join(found)}")
        found = {name: found[name] for name in found if name in chosen}
    elif urls:
        found.clear()
    for number, url in enumerate(urls, 1):
        name = f"{urlsplit(url).scheme}-{number}"
        found[name] = _outside(name, url)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        names = list(_backends(metafunc.config))
        if metafunc.definition.get_closest_marker("wire"):
            names = [name for name in names if name != "memory"]
        if metafunc.definition.get_closest_marker("restart"):
            names = [name for name in names if name in _NETWORKED]
        metafunc.parametrize("backend", names, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The broker a test runs against."""
    made = _backends(request.config)[request.param](request)
    try:
        missing = _claimed(request.node) - made.features
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
