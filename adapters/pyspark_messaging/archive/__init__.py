"""The archive of events: the events of a typed event bus as Parquet, and any time range back onto a bus (157.6).

The history of a bus is bounded and ends with the process. An archive is neither::

    bus ──EventRecorder──> channel of a broker ──archive──> Parquet ──replay──> bus

>>> query = archive(spark, url="mqtt://localhost", path="/data/events",        # doctest: +SKIP
...     checkpoint="/data/events.checkpoint", journal_path="/data/events.journal")
>>> recorder = EventRecorder(bus.monitor, messaging.connect("mqtt://localhost"))  # doctest: +SKIP
>>> replay("/data/events", another, start=noon, end=evening, topics="orders/*", speed=10.0)  # doctest: +SKIP

**Columns.** One row is one recorded event:

===================  ==================  =============================================================================
``topic``            string              the topic of the event
``timestamp``        timestamp           publication time; microseconds, UTC
``data``             string              JSON: see :mod:`messaging.dispatch.eventdata.values`
``recorder``         string              identifies the event, together with ``sequence``. A missing number is an
``sequence``         long                event that was lost, or that has not arrived yet
``channel``          string              the channel of the message
``partition``        int                 partition of the journal
``offset``           long                offset in the journal
``_corrupt_record``  binary              the payload of a message that is no recorded event
``_error``           string              why that payload is no recorded event
``date``             date                of ``timestamp`` in UTC; the files are partitioned by it
===================  ==================  =============================================================================

A message that is no recorded event fails nothing. It becomes a row with ``_corrupt_record`` and the ``timestamp`` of
the message, and with neither topic nor data. A replay leaves such rows out.

**Guarantees.** From the recorder to Parquet every event comes at least once. The journal drops a redelivered
message if it can identify it. Other duplicates stay in the archive, since finding the first one takes a read of the
whole archive. Drop them when you read, as :func:`replay` does: ``frame.dropDuplicates(["recorder", "sequence"])``.
"""

from __future__ import annotations

from pyspark_messaging.archive.query import archive
from pyspark_messaging.archive.reader import (
    ArchiveError,
    ArchiveMissingError,
    ArchiveUnreadableError,
    InvalidRangeError,
    ReadRows,
    read_events,
)
from pyspark_messaging.archive.replaying import ReplayClock, Replayed, replay
from pyspark_messaging.recorder import EventRecorder, RecordedEvent, RecorderDTO

__all__ = [
    "ArchiveError",
    "ArchiveMissingError",
    "ArchiveUnreadableError",
    "EventRecorder",
    "InvalidRangeError",
    "ReadRows",
    "RecordedEvent",
    "RecorderDTO",
    "ReplayClock",
    "Replayed",
    "archive",
    "read_events",
    "replay",
]
