"""Recording of a typed event bus: its events become messages of a broker, for an archive (157.6).

Needs neither Spark nor the extra ``spark``, and imports nothing else of :mod:`adapters.spark`.
"""

from __future__ import annotations as annotations

from adapters.spark.recorder.event_publisher import RecorderDTO as RecorderDTO
from adapters.spark.recorder.event_recorder import EventRecorder as EventRecorder
from adapters.spark.recorder.recorded_event import RecordedEvent as RecordedEvent
