"""Durable appends: from so many threads, each of which waits until the disk has its record before the next one."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import job
from benchmarks.peers.job import TOPIC, Job

Append = Callable[[bytes], object]


@contextlib.contextmanager
def ours(folder: Path) -> Iterator[Append]:
    """A journal with ``fsync="always"``."""
    from messaging.journal import Journal

    with Journal.open(folder / "journal") as journal:
        yield lambda payload: journal.append(TOPIC, payload)


_TABLE: Final = "CREATE TABLE messages (id INTEGER PRIMARY KEY, channel TEXT, payload BLOB, at REAL)"
_INSERT: Final = "INSERT INTO messages (channel, payload, at) VALUES (?, ?, ?)"


def _connect(folder: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(folder / "queue.db", isolation_level=None, check_same_thread=False, timeout=60)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    return connection


@contextlib.contextmanager
def sqlite(folder: Path) -> Iterator[Append]:
    """SQLite, one connection and a lock: threads that wait for SQLite's own lock poll it."""
    connection = _connect(folder)
    connection.execute(_TABLE)
    lock = threading.Lock()

    def append(payload: bytes) -> None:
        with lock:
            connection.execute(_INSERT, (TOPIC, payload, time.time()))

    yield append
    connection.close()


@contextlib.contextmanager
def sqlite_connections(folder: Path) -> Iterator[Append]:
    """SQLite, a connection for each thread."""
    first = _connect(folder)
    first.execute(_TABLE)
    local = threading.local()

    def append(payload: bytes) -> None:
        connection = getattr(local, "connection", None)
        if connection is None:
            connection = local.connection = _connect(folder)
        connection.execute(_INSERT, (TOPIC, payload, time.time()))

    yield append
    first.close()


@contextlib.contextmanager
def persist_queue(folder: Path) -> Iterator[Append]:
    """persist-queue in its durable form: its file queue does not wait for the disk with each record."""
    import persistqueue

    queue: Any = persistqueue.SQLiteQueue(str(folder), multithreading=True, auto_commit=True)
    yield queue.put
    queue.close()


STYLES: Final = {
    "ours": ours,
    "sqlite": sqlite,
    "sqlite-connections": sqlite_connections,
    "persist-queue": persist_queue,
}


#: distributions of each style
_LIBRARIES: Final = {
    "ours": ("rx-messaging",),
    "sqlite": (),
    "sqlite-connections": (),
    "persist-queue": ("persist-queue",),
}


def append(job: Job) -> None:
    """Append ``count`` records from ``window`` threads."""
    payload = b"x" * job.size
    with tempfile.TemporaryDirectory(dir=job.folder or None) as folder, STYLES[job.style](Path(folder)) as put:
        put(payload)
        # each thread appends its share: who counts what is left would take turns
        shares = [job.count // job.window + (number < job.count % job.window) for number in range(job.window)]
        begin = threading.Barrier(job.window + 1)

        def work(share: int) -> None:
            begin.wait()
            for _ in range(share):
                put(payload)

        threads = [threading.Thread(target=work, args=(share,)) for share in shares]
        for thread in threads:
            thread.start()
        job.ready()
        job.wait_for_go()
        start = time.monotonic()
        begin.wait()
        for thread in threads:
            thread.join()
        end = time.monotonic()
        libraries = {"SQLite": sqlite3.sqlite_version} | {name: version(name) for name in _LIBRARIES[job.style]}
        job.finish(start=start, end=end, libraries=libraries)


if __name__ == "__main__":
    job.run({"append": append})
