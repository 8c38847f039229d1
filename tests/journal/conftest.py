"""Fixtures of the tests of the journal."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from messaging.journal import Journal

Open = Callable[..., Journal]


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open a log thousands of times."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


@pytest.fixture
def tmp_path(in_memory: str) -> Path:
    """A folder in memory: tests look at what is synced, and need not wait for a disk."""
    return Path(in_memory)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


@pytest.fixture
def in_memory() -> Iterator[str]:
    """A folder that syncs at once: a kill takes nothing from the system, only from the process."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    # errors: a party whose target hangs for longer than its close waits may still be at its files
    with tempfile.TemporaryDirectory(dir=where, ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.fixture
def opened(path: str) -> Iterator[Open]:
    """Open the journal at ``path``; it is closed at the end of the test."""
    found: list[Journal] = []

    def opened(where: str = path, **more: Any) -> Journal:
        found.append(Journal.open(where, **more))
        return found[-1]

    yield opened
    for each in found:
        each.close()


@pytest.fixture
def small_disk(disk_of: Callable[[str], Path]) -> Path:
    """A file system of 1 MiB."""
    return disk_of("1m")
