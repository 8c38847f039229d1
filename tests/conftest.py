"""The order of the test files, and fixtures that all of them share; those of brokers are ``messaging.testing``'s."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import HealthCheck, settings

from messaging.testing.brokers import require
from tests.certificates import Authority, TlsRabbitMQ

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How long an example takes depends on what else the machine does, so it decides nothing here.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


#: files that take longest, in the order in which they begin: a file runs as a whole on one worker, and a long one that
#: begins last runs alone. Files with Java and files that wait take turns, so that they share the processor.
LONGEST: Final = (
    "spark/test_killed_drivers.py",
    "faults/test_soak.py",
    "spark/test_pipeline.py",
    "spark/test_read.py",
    "faults/test_mqtt_faults.py",
    "faults/test_network_faults.py",
    "spark/test_session.py",
    "spark/test_archive.py",
    "faults/test_amqp_faults.py",
    "spark/test_write.py",
    "spark/test_reader.py",
    "spark/test_receiver.py",
    "spark/test_journal.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.fixture(scope="session", autouse=True)
def _interrupts() -> Iterator[None]:
    """A shell starts programs in the background with an ignored SIGINT, and those that they start inherit it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def own_rabbitmq() -> Iterator[TlsRabbitMQ]:
    """A RabbitMQ that may be killed, stopped and starved. A test that breaks it repairs it.

    It listens with TLS, too, and takes messages of up to 500,000 bytes.
    """
    require("rabbitmq")
    with TlsRabbitMQ(["max_message_size = 500000"]) as broker:
        yield broker


@pytest.fixture
def disk_of(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes small file systems: ``disk_of("4m")``."""
    folders: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk{len(folders)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("only root can mount a small disk")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def refusing_port() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections, and that no other program gets: it is bound, and nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield unused.getsockname()[1]


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Signs certificates. Clients that verify them need its own as ``cafile``."""
    return Authority(tmp_path_factory.mktemp("authority"))
