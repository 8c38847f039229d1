"""MQTT: one publisher process through mosquitto to one subscriber process, against other clients.

The rate is that of the subscriber: messages received, over the time from the first publish to the last of them.
"""

from __future__ import annotations

import argparse
from typing import Final

from benchmarks import contenders, report
from benchmarks.harness import Case, Plan, measure

#: unconfirmed messages that the broker allows each client, and gives each at most
INFLIGHT: Final = 100
#: those that applications allow themselves where they keep count: gmqtt raises at one less than the broker allows
WINDOW: Final = 98
BROKER: Final = ("set_tcp_nodelay true", f"max_inflight_messages {INFLIGHT}")


def run(arguments: argparse.Namespace) -> None:
    """Run, print, save."""
    from tests.brokers import Mosquitto

    results = report.Results("mqtt", "messages/s from publisher to subscriber", arguments)
    results.broker = {"name": "mosquitto", "configuration": [*BROKER, "max_queued_messages 0", "max_queued_bytes 0"]}
    plan = Plan.of(arguments)
    for version in arguments.versions:
        for qos in arguments.qos:
            for size in arguments.payload:
                with Mosquitto(BROKER) as broker:
                    case = Case(
                        labels={"version": version, "qos": str(qos), "payload": str(size)},
                        options={"version": version, "qos": qos, "size": size, "window": WINDOW},
                        port=broker.port,
                        lossy=qos == 0,
                    )
                    peers = contenders.choose(contenders.MQTT, arguments.peers)
                    results.add(case, measure(case, peers, plan))
    results.finish()
