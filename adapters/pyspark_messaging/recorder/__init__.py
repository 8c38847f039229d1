"""Recording of a typed event bus: its events become messages of a broker, for an archive (157.6).

Needs neither Spark nor the extra ``spark``, and imports nothing else of :mod:`pyspark_messaging`.
"""

from __future__ import annotations as annotations

from pyspark_messaging.recorder.event_publisher import RecorderDTO as RecorderDTO
from pyspark_messaging.recorder.event_recorder import EventRecorder as EventRecorder
from pyspark_messaging.recorder.recorded_event import RecordedEvent as RecordedEvent
