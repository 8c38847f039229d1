"""Killed drivers of a query on MQTT.

A file of its own, so that it runs beside the other tests of Spark.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.spark import kills
from tests.spark.conftest import require_java

if TYPE_CHECKING:
    from pathlib import Path

    from messaging.testing.brokers import Mosquitto

pytestmark = pytest.mark.slow


@pytest.mark.timeout(400)
def test_killed_drivers_lose_nothing_and_repeat_nothing(broker: Mosquitto, tmp_path: Path) -> None:
    """Between journal, offset log, sink and commit: wherever the moment falls."""
    require_java()
    counted = kills.run(broker, tmp_path, ["driver", "machine"], random.Random(), rate=1000)
    assert counted["rows"] == counted["messages"] > 0
