"""The rule for anomalies: a robust z-score against earlier readings of the same device.

The score is the distance from the median, in units of 1.4826 times the median absolute deviation (MAD), which for
normally distributed values is the standard deviation. Mean and standard deviation would not work: one spike moves the
mean towards itself and widens the deviation, and so hides itself and the next spikes. Median and MAD do not move until
half of the values are different. By then a lasting change is the new normal.

A limit on the rate of change would be simpler. It would report each spike twice, up and down, and would miss the second
reading of a burst.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Final, NamedTuple

from pyspark_messaging.telemetry.model import METRICS

#: a reading is compared with so many earlier readings of the device, and none older than REACH
WINDOW: Final = 24
REACH: Final = timedelta(hours=4)
#: with fewer earlier readings, none is an anomaly
ENOUGH: Final = 8
#: scores above it are anomalies: less than one in 10^8 values of normal noise
THRESHOLD: Final = 6.0

_MAD_TO_DEVIATION: Final = 1.4826


class Anomaly(NamedTuple):
    """A value that differs from the earlier ones."""

    metric: str
    value: float
    usual: float
    score: float
    reason: str


class Measurement(NamedTuple):
    """The part of a reading that the rule needs; values in the order of ``METRICS``."""

    measured_at: datetime
    values: tuple[float, ...]


def score(value: float, usual: Sequence[float], floor: float) -> tuple[float, float]:
    """Return the median of ``usual``, and the distance of ``value`` in robust deviations, at least ``floor`` each."""
    middle = median(usual)
    deviation = _MAD_TO_DEVIATION * median([abs(each - middle) for each in usual])
    return middle, abs(value - middle) / max(deviation, floor)


class History:
    """The last readings of one device, in the order of their event time."""

    def __init__(self, readings: Iterable[Measurement] = ()) -> None:
        self.readings = sorted(readings)

    def judge(self, reading: Measurement) -> list[Anomaly]:
        """Return the anomalies of ``reading``, and add it to the history.

        A late reading is compared with readings that were measured, not received, before it.
        """
        place = bisect.bisect(self.readings, reading)
        before = [each for each in self.readings[:place][-WINDOW:] if reading.measured_at - each.measured_at <= REACH]
        self.readings.insert(place, reading)
        del self.readings[: -2 * WINDOW]  # twice the window, for late readings
        found = []
        if len(before) >= ENOUGH:
            for number, metric in enumerate(METRICS):
                value = reading.values[number]
                usual, distance = score(value, [each.values[number] for each in before], metric.floor)
                if distance > THRESHOLD:
                    reason = (
                        f"{metric.name} {value:.1f} {metric.unit}: {distance:.1f} robust deviations from {usual:.1f}, "
                        f"the median of the {len(before)} readings before"
                    )
                    found.append(Anomaly(metric.name, value, usual, distance, reason))
        return found

    def dump(self) -> str:
        """Return the history as text, for the state of a query."""
        return json.dumps([(each.measured_at.timestamp(), each.values) for each in self.readings])

    @classmethod
    def load(cls, text: str) -> History:
        """Return the history that :meth:`dump` has written."""
        readings = json.loads(text)
        return cls(Measurement(datetime.fromtimestamp(seconds, UTC), tuple(values)) for seconds, values in readings)
