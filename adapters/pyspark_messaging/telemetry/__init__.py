"""The telemetry pipeline: a working example of Spark jobs over MQTT, to run and to copy; ``messaging pipeline demo``.

::

    model       readings and alerts             anomaly     the rule for anomalies
    job         the streaming job               batch       the batch job over its tables
    bridge      alerts onto an event bus        session     the Spark session of a job
    fleet       simulated devices               processes   the fleet's process, a private mosquitto
    report      checks and figures of a run     plots       pictures of it
    run         all of it, once                 command     ``messaging pipeline``

``examples/telemetry_pipeline`` runs the jobs against your own broker. The package uses the public API of the data
source alone: :func:`pyspark_messaging.register` and the format ``messaging``.

The parameters of a simulated fleet are here: the list of commands loads them, and must not load more.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

#: between two readings of a device, simulated
INTERVAL: Final = timedelta(minutes=6)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The parameters of a simulation.

    Attributes:
        seconds: how long to publish, in real time.
        rate: messages per second, of all devices together.
    """

    seed: int = 1
    devices: int = 48
    seconds: float = 25.0
    rate: float = 320.0

    @property
    def readings(self) -> int:
        """Number of readings of each device."""
        return max(1, round(self.rate * self.seconds / self.devices))

    @property
    def span(self) -> timedelta:
        """The simulated time of the run."""
        return self.readings * INTERVAL
