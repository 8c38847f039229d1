"""Fixtures that all tests share; those of brokers are ``messaging.testing``'s."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from messaging.testing.brokers import require
from tests import thorough
from tests.certificates import Authority, TlsRabbitMQ

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from messaging.testing.servers import Servers

thorough.load_profile()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before tests are selected by their marks."""
    thorough.mark(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what collection makes out of garbage collections: each would go through a million objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _interrupts() -> Iterator[None]:
    """A shell starts programs in the background with an ignored SIGINT, and those that they start inherit it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def own_rabbitmq(servers: Servers) -> Iterator[TlsRabbitMQ]:
    """A RabbitMQ that may be killed, stopped and starved, of a pool. A test that changes its settings restores them.

    It listens with TLS, too, and takes messages of up to 500,000 bytes.
    """
    require("rabbitmq")
    with servers.borrow(TlsRabbitMQ, ["max_message_size = 500000"]) as broker:
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
