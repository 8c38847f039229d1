"""Fixtures of the rooms: no settings from the environment, a registry of its own, instances that are closed.

A room takes them by ``from tests.doubles.fixtures import *`` in its ``conftest.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

import messaging
from messaging.services import ServiceRegistry
from messaging.testing.waiting import PATIENCE
from tests.doubles.consumers import slow
from tests.doubles.fake import ENTRY_POINTS, FakeBroker, brokers

__all__ = [
    "bare",
    "broker",
    "clean_environment",
    "connect",
    "fake_distribution",
    "m",
    "no_brokers",
    "no_defects",
    "registry",
    "slow",
]

#: settings that make trouble come and go quickly
QUICK = {"timeout": PATIENCE, "close_timeout": 2.0, "reconnect_min": 0.001, "reconnect_max": 0.01}


class Connect(Protocol):
    def __call__(self, url: str | FakeBroker = ..., **settings: Any) -> messaging.Messaging: ...


@pytest.fixture(scope="module", autouse=True)
def fake_distribution(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Installs ``fake://`` and ``bare://`` as a distribution outside of the project would."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, "fake-messaging", ENTRY_POINTS)
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))


def install(folder: Path, name: str, entry_points: str) -> None:
    """Write the metadata of an installed distribution into ``folder``."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [*os.environ]:
        if variable.upper().startswith("MESSAGING_"):
            monkeypatch.delenv(variable)


@pytest.fixture(autouse=True)
def no_defects(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing may die behind the scenes: neither a task of the engine nor a job of a worker.

    A test in which something is meant to clears ``caplog`` after it looked.
    """
    caplog.set_level(logging.INFO, logger="messaging")
    yield
    died = [
        record.getMessage() + (f": {record.exc_info[1]!r}" if record.exc_info else "")
        for when in ("setup", "call")
        for record in caplog.get_records(when)
        if (
            record.name in ("messaging.execution.loop", "messaging.execution.threads", "asyncio")
            and record.levelno >= logging.ERROR
        )
        or "was never retrieved" in record.getMessage()
    ]
    assert not died, died


@pytest.fixture
def registry() -> ServiceRegistry:
    return ServiceRegistry()


@pytest.fixture(autouse=True)
def no_brokers() -> Iterator[None]:
    """Forget the brokers that a test made."""
    before = {*brokers}
    yield
    for name in {*brokers} - before:
        del brokers[name]


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
def bare() -> FakeBroker:
    return FakeBroker("bare")


_names = iter(range(1, 2**31))


@pytest.fixture
def connect(registry: ServiceRegistry) -> Iterator[Callable[..., messaging.Messaging]]:
    """``messaging.connect`` with quick settings; a ``memory://`` of its own unless told otherwise."""
    with contextlib.ExitStack() as stack:

        def connect(url: str | FakeBroker = "", **settings: Any) -> messaging.Messaging:
            if isinstance(url, FakeBroker):
                url = url.url
            settings = {"services": registry, **QUICK, **settings}
            m = messaging.connect(url or f"memory://test{next(_names)}", **settings)
            stack.callback(m.close)
            return m

        yield connect


@pytest.fixture
def m(broker: FakeBroker, connect: Connect) -> messaging.Messaging:
    """An instance at ``broker``."""
    return connect(broker)
