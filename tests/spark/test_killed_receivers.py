"""A killed receiver of a query on an AMQP queue.

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

    from messaging.testing.brokers import RabbitMQ

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_a_killed_receiver_of_a_queue_loses_nothing_and_repeats_nothing(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    require_java()
    counted = kills.run(rabbitmq, tmp_path, ["receiver"], random.Random(), rate=1000)
    assert counted["rows"] == counted["messages"] > 0
