"""What the devices send, and what the pipeline answers with.

The fields of :class:`Telemetry` are the columns of the stream, by the option ``model``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pydantic import AwareDatetime, BaseModel, Field

#: for the option ``model``
TELEMETRY: Final = f"{__name__}:Telemetry"
#: channels: ``telemetry/SITE/DEVICE`` and ``alerts/SITE/DEVICE``
TELEMETRY_CHANNEL: Final = "telemetry"
ALERT_CHANNEL: Final = "alerts"


class Telemetry(BaseModel):
    """One reading of a device. What does not fit is no reading: it is rejected, and kept as it came.

    Attributes:
        sequence: counts the readings of a device from 0: with ``device`` it names a reading.
        measured_at: by the clock of the device, which may be wrong: the event time.
        sent_at: by the clock of the gateway of its site, which is right: later, after an outage of the network.
        temperature: °C.
        vibration: mm/s.
        battery: percent.
    """

    device: str = Field(pattern=r"^[a-z]+-[0-9]+$")
    site: str = Field(pattern=r"^[a-z]+$")
    sequence: int = Field(ge=0)
    measured_at: AwareDatetime
    sent_at: AwareDatetime
    temperature: float = Field(ge=-60, le=150)
    vibration: float = Field(ge=0, le=200)
    battery: float = Field(ge=0, le=100)


class Alert(BaseModel):
    """A reading that is not like those before it.

    Attributes:
        id: ``DEVICE/SEQUENCE/METRIC``: the same when it is published again.
        usual: the median of what it was compared with.
        score: how many robust standard deviations ``value`` is away from that.
        received_at: when its reading came to the pipeline, in real time.
    """

    id: str
    device: str
    site: str
    sequence: int
    metric: str
    value: float
    usual: float
    score: float
    reason: str
    measured_at: AwareDatetime
    received_at: AwareDatetime


class Metric(NamedTuple):
    """A measured quantity.

    Attributes:
        floor: the least that counts as one standard deviation, so that a quiet sensor does not raise an alarm over
            nothing.
    """

    name: str
    unit: str
    floor: float


METRICS: Final = (
    Metric("temperature", "°C", 0.5),
    Metric("vibration", "mm/s", 0.25),
    Metric("battery", "%", 1.0),
)
