"""MQTT: one publisher process through mosquitto to one subscriber process, against other clients.

The rate is that of the subscriber: messages received, over the time from the first publish to the last of them.
"""

from __future__ import annotations

import argparse
from typing import Final

from benchmarks import contenders, report
from benchmarks.harness import Case, Plan, measure

#: unconfirmed messages that the broker takes from a client, and gives it
INFLIGHT: Final = 100
#: those that applications allow themselves where they keep count: gmqtt raises at one less than the broker takes
WINDOW: Final = INFLIGHT - 2
#: what the broker is told, beside its port. Queues are unlimited: nothing is dropped for a slow subscriber. Without
#: ``set_tcp_nodelay`` small packets wait for acknowledgements that clients delay, by up to 40 ms
BROKER: Final = (
    f"max_inflight_messages {INFLIGHT}",
    "max_queued_messages 0",
    "max_queued_bytes 0",
    "set_tcp_nodelay true",
)


def run(arguments: argparse.Namespace) -> None:
    """Run, print, save."""
    from messaging.testing.brokers import Mosquitto

    results = report.Results("mqtt", "MQTT, one process to one process", "qos", arguments)
    results.broker("mosquitto", BROKER)
    plan = Plan.of(arguments)
    peers = contenders.choose(contenders.MQTT, arguments.peers)
    for version in arguments.versions or ["3.1.1", "5"]:
        for size in arguments.payload or [100, 1024]:
            for qos in arguments.qos or [0, 1, 2]:
                with Mosquitto(BROKER) as broker:
                    case = Case(
                        labels={"version": version, "qos": str(qos), "payload": str(size)},
                        options={"version": version, "qos": qos, "size": size, "window": WINDOW},
                        port=broker.port,
                        lossy=qos == 0,
                    )
                    results.add(case, measure(case, peers, plan))
    results.finish()
