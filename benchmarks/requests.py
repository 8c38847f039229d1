"""From a request to its reply, so many at a time: everybody with a requester and a responder of their own.

The responder answers with what it was asked. Requesters make the next request when a reply is there: with a concurrency
of 1 this is the time of a round trip, with 100 what the library and the broker can do.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Final

from benchmarks import amqp, contenders, mqtt, report
from benchmarks.harness import Case, Metric, Plan, measure

METRICS: Final = (
    Metric("rate", "requests/s", lambda run: run.rate, more_is_better=True),
    Metric("p50", "us", lambda run: float(run.said["request"]["p50"])),
    Metric("p99", "us", lambda run: float(run.said["request"]["p99"])),
)
#: requests of the warm-up: some clients manage no more than twenty a second, one at a time
_WARM_UP: Final = 500
ROLES: Final = ("request", "respond")


def run(arguments: argparse.Namespace) -> None:
    """Run, print, save."""
    from messaging.testing.brokers import Mosquitto, RabbitMQ

    results = report.Results("requests", "Request and reply", "concurrency", arguments)
    plan = Plan.of(arguments)
    size = (arguments.payload or [100])[0]

    def measure_all(labels: dict[str, str], peers: list[contenders.Contender], port: int, **options: Any) -> None:
        for concurrency in arguments.concurrency:
            case = Case(
                labels=labels | {"concurrency": str(concurrency)},
                options=options | {"size": size, "window": concurrency},
                port=port,
                roles=ROLES,
                metrics=METRICS,
            )
            results.add(case, measure(case, peers, dataclasses.replace(plan, warm_up=min(plan.warm_up, _WARM_UP))))

    if "mqtt" in arguments.protocols:
        results.broker("mosquitto", mqtt.BROKER)
        for qos in arguments.qos or [0, 1]:
            for version in arguments.versions or ["3.1.1", "5"]:
                peers = contenders.choose(contenders.REQUESTS_MQTT, arguments.peers)
                if version == "3.1.1":  # nobody else can, without properties
                    peers = [each for each in peers if each.module == "ours"]
                with Mosquitto(mqtt.BROKER) as broker:
                    measure_all(
                        {"protocol": f"MQTT {version}", "qos": str(qos)}, peers, broker.port, version=version, qos=qos
                    )
    if "amqp" in arguments.protocols:
        results.broker("rabbitmq", amqp.BROKER)
        peers = contenders.choose(contenders.REQUESTS_AMQP, arguments.peers)
        with RabbitMQ(amqp.BROKER) as rabbit:
            measure_all({"protocol": "AMQP", "qos": "1"}, peers, rabbit.port, qos=1)
    results.finish()
