"""Which readings are anomalies: a robust z-score against what the same device measured shortly before.

The score is the distance from the median, in units of 1.4826 times the median absolute deviation (MAD), which for
normally distributed values is the standard deviation. Mean and standard deviation would not do: one spike moves the
mean towards itself and widens the deviation, and so hides itself and those that follow. Median and MAD do not move
until half of the values are different. By then a lasting change is the new normal.

A limit on the rate of change would be simpler. It would see each spike twice, up and down, and would miss the second
reading of a burst.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Final, NamedTuple

from adapters.spark.telemetry.model import METRICS

#: readings of the device that a reading is compared with: the last ones before it, no older than that
WINDOW: Final = 24
REACH: Final = timedelta(hours=4)
#: with fewer there is no judgement
ENOUGH: Final = 8
#: scores above it are anomalies: in normal noise that is less than one in 10^8
THRESHOLD: Final = 6.0

_MAD_TO_DEVIATION: Final = 1.4826


class Anomaly(NamedTuple):
    """A value that is unlike those before."""

    metric: str
    value: float
    usual: float
    score: float
    reason: str


class Reading(NamedTuple):
    """What the rule needs of a reading; values in the order of ``METRICS``."""

    measured_at: datetime
    values: tuple[float, ...]


def score(value: float, usual: Sequence[float], floor: float) -> tuple[float, float]:
    """The median of ``usual``, and how far ``value`` is from it in robust standard deviations, at least ``floor``."""
    middle = median(usual)
    deviation = _MAD_TO_DEVIATION * median([abs(each - middle) for each in usual])
    return middle, abs(value - middle) / max(deviation, floor)


class History:
    """The last readings of one device, in the order of their event time.

    Args:
        readings: what :attr:`readings` was.
    """

    def __init__(self, readings: Iterable[Reading] = ()) -> None:
        self.readings = sorted(readings)

    def judge(self, reading: Reading) -> list[Anomaly]:
        """The metrics of ``reading`` that are anomalies. It belongs to the history from now on.

        A late one is compared with what was measured before it, not with what arrived before it.
        """
        place = bisect.bisect(self.readings, reading)
        before = [each for each in self.readings[:place][-WINDOW:] if reading.measured_at - each.measured_at <= REACH]
        self.readings.insert(place, reading)
        del self.readings[: -2 * WINDOW]  # twice, so that late ones still find what was before them
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
        """As text, for the state of a query."""
        return json.dumps([(each.measured_at.timestamp(), each.values) for each in self.readings])

    @classmethod
    def load(cls, text: str) -> History:
        """What :meth:`dump` made."""
        readings = json.loads(text)
        return cls(Reading(datetime.fromtimestamp(seconds, UTC), tuple(values)) for seconds, values in readings)
