"""Drivers of a query on MQTT that are killed with -9 at random moments, and checks of their table.

Messages are published all the while. What the journal holds is noted after each kill. In the end, every confirmed
message is in the table once, and each row is that of the journal. A killed receiver: ``test_read.py``.

``SPARK_KILLS=20 python -m pytest tests/spark/test_killed_drivers.py`` kills more often: each kill takes about 20 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from messaging import MessagingError
from messaging.testing.waiting import eventually
from pyspark_messaging.errors import JournalUnreadableError
from pyspark_messaging.journal import RowJournal
from pyspark_messaging.journal.log import read
from tests.spark.conftest import require_java
from tests.spark.harness import QUERY_PATIENCE, Publisher, table

if TYPE_CHECKING:
    from messaging.testing.brokers import Mosquitto

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("SPARK_KILLS", "2"))

#: a broker's channel to a Parquet table, until its input closes. It says when the query runs, or why it does not
PROGRAM = """\
import json, sys, time
from pathlib import Path
from tests.spark.harness import session
folder = Path(sys.argv[1])
spark = session(folder, "local[2]")
frame = spark.readStream.format("messaging").options(journalPath=str(folder / "journal"), **json.loads(sys.argv[2]))
sink = frame.load().writeStream.format("parquet")
query = sink.options(path=str(folder / "table"), checkpointLocation=str(folder / "checkpoint")).start()
while query.isActive and query.lastProgress is None:
    time.sleep(0.05)  # sleeps: a query tells nobody of its progress
print("running" if query.isActive else query.exception(), flush=True)
sys.stdin.read()
failed = query.exception()
query.stop()
spark.stop()
sys.exit(failed is not None)
"""


class Driver:
    """A process that runs the query, and all it starts."""

    def __init__(self, folder: Path, **options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def started(self) -> None:
        """Wait until the query runs."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "running\n"

    def processes(self) -> dict[int, str]:
        """Everything of its session that is alive, with the command line."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                stat = (path / "stat").read_text().rpartition(")")[2].split()
                if int(stat[3]) == self._process.pid and stat[0] != "Z":
                    found[int(path.name)] = (path / "cmdline").read_text().replace("\x00", " ")
        return found

    def kill(self, kind: str) -> None:
        """Kill the driver with its JVM, or the machine: everything that the driver has started."""
        for pid, line in self.processes().items():
            if kind == "machine" or pid == self._process.pid or "java" in line.split(" ")[0]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._close()

    def stop(self) -> None:
        """End it in order."""
        self._close()
        assert self._process.returncode == 0

    def _close(self) -> None:
        """Close its input, which ends it, and wait for its processes."""
        self._process.communicate(timeout=QUERY_PATIENCE)
        eventually(lambda: not self.processes(), "the processes of the driver to end", patience=QUERY_PATIENCE)


def note(journal: Path, seen: dict[int, bytes]) -> None:
    """Add the rows of the journal to those ``seen``, by offset; fail if one has changed."""
    try:
        opened = RowJournal.view(str(journal))
    except JournalUnreadableError:
        return
    (log,) = opened.logs
    for batch in read(opened.folder, log.spans(log.begin, log.end)):
        for offset, value in zip(batch.column("offset").to_pylist(), batch.column("value").to_pylist(), strict=True):
            assert seen.setdefault(offset, value) == value, f"offset {offset} was {seen[offset]!r}"


def has_all(folder: Path, count: int) -> bool:
    return {b"%d" % number for number in range(count)} <= {value for _, value in table(folder)}


@pytest.mark.timeout(200 + 100 * KILLS)
def test_killed_drivers_lose_nothing_and_repeat_nothing(broker: Mosquitto, tmp_path: Path) -> None:
    """Between journal, offset log, sink and commit: wherever the moment falls."""
    require_java()
    seen: dict[int, bytes] = {}
    publisher: Publisher | None = None
    for kind in (*islice(cycle(("driver", "machine")), KILLS), None):
        driver = Driver(tmp_path, url=broker.url, channel="readings/#")
        try:
            driver.started()
            if publisher is None:  # the first round has made the session
                publisher = Publisher(broker.url, "readings/a")
            if kind is not None:
                time.sleep(random.uniform(0, 2.5))  # sleeps: the kill comes at a random moment
                driver.kill(kind)
            else:
                confirmed = publisher.stop()
                eventually(
                    partial(has_all, tmp_path / "table", confirmed), f"{confirmed} messages", patience=QUERY_PATIENCE
                )
                driver.stop()
        except BaseException:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired, MessagingError):
                driver.kill("machine")
            raise
        note(tmp_path / "journal", seen)
    rows = table(tmp_path / "table")
    assert len({offset for offset, _ in rows}) == len(rows), "an offset is in the table twice"
    twice = [value for value, count in Counter(value for _, value in rows).items() if count > 1]
    assert not twice, f"{len(twice)} messages are in the table twice: {twice[:3]} ... {twice[-3:]}"
    for offset, value in rows:
        assert seen.get(offset, value) == value, f"row {offset} is not that of the journal"
    assert len(rows) == confirmed > 0
