"""A program that publishes and ends without closing; run by test_shutdown.

``python -m tests.faults.program URL CHANNEL RUN LOG COUNT`` publishes ``COUNT`` messages, writes them into ``LOG``, and
a line to its output once half of them are on their way. Then it ends; with ``COUNT`` 0 it continues until it is
killed.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Final

import messaging
from messaging import Promise
from tests.faults.ledger import PublisherLog, Stamp, encode

_BATCH: Final = 50


def _settled(log: PublisherLog, sequence: int, promise: Promise[None]) -> None:
    error = promise.exception()
    if error is None:
        log.confirm(sequence)
    else:
        log.fail(sequence, error)
    log.sync()


def main(url: str, channel: str, run: str, path: str, count: int) -> None:
    """See the module."""
    log = PublisherLog(Path(path))
    m = messaging.connect(url)
    for first in itertools.count(0, _BATCH):
        if count and first >= count:
            return  # neither m nor log is closed
        sequences = range(first, first + _BATCH)
        log.attempt(sequences)
        for sequence in sequences:
            promise = m.publish(channel, encode(Stamp(run, "program", sequence)), guaranteed_delivery=True)
            promise.add_done_callback(partial(_settled, log, sequence))
        if first == (count or 10 * _BATCH) // 2:
            sys.stdout.write("half\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _, url, channel, run, path, count = sys.argv
    main(url, channel, run, path, int(count))
