"""The readings that devices send, and the alerts of the pipeline.

The fields of :class:`Telemetry` are the columns of the stream, by the option ``model``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pydantic import AwareDatetime, BaseModel, Field

#: value of the option ``model``
TELEMETRY: Final = f"{__name__}:Telemetry"
#: channels: ``telemetry/SITE/DEVICE`` and ``alerts/SITE/DEVICE``
TELEMETRY_CHANNEL: Final = "telemetry"
ALERT_CHANNEL: Final = "alerts"


class Telemetry(BaseModel):
    """One reading of a device. A payload that does not fit is rejected, and stored as it was sent.

    Attributes:
        sequence: number of the reading of its device, from 0; with ``device`` it identifies a reading.
        measured_at: event time, by the clock of the device, which may be wrong.
        sent_at: by the correct clock of the gateway of its site; later after an outage of the network.
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
    """An anomaly of a reading.

    Attributes:
        id: ``DEVICE/SEQUENCE/METRIC``: the same when it is published again.
        usual: the median of the earlier readings.
        score: distance of ``value`` from the median, in robust standard deviations.
        received_at: arrival of its reading at the pipeline, in real time.
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


class Quantity(NamedTuple):
    """A measured quantity.

    Attributes:
        floor: lower limit of the standard deviation, so that a quiet sensor raises no false alarms.
    """

    name: str
    unit: str
    floor: float


METRICS: Final = (
    Quantity("temperature", "°C", 0.5),
    Quantity("vibration", "mm/s", 0.25),
    Quantity("battery", "%", 1.0),
)
