"""Latency from when a message is due to when the application has it: at ease and under load, on both protocols.

Messages are published at a fixed rate, whatever the library is doing: what keeps one waiting counts for those behind
it, too. Idle is 100 a second; the load is the same for everybody (``--rate``), one that every contender can bear. Each
publish is awaited where that is the usual way, never gathered.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any, Final

from benchmarks import amqp, contenders, mqtt, report
from benchmarks.harness import Case, Metric, Plan, Run, measure

if TYPE_CHECKING:
    from collections.abc import Callable

IDLE: Final = 100.0


def _percentile(name: str) -> Callable[[Run], float]:
    return lambda run: float(run.said["subscribe"][name])


METRICS: Final = tuple(Metric(name, "us", _percentile(name)) for name in ("p50", "p99"))


def run(arguments: argparse.Namespace) -> None:
    """Run, print, save."""
    from messaging.testing.brokers import Mosquitto, RabbitMQ

    results = report.Results("latency", "Latency", "load", arguments)
    plan = Plan.of(arguments)
    plan = dataclasses.replace(plan, seconds=2 * plan.seconds)  # at a fixed rate, few messages in that time
    size = (arguments.payload or [100])[0]
    rates = {"idle": IDLE, f"{arguments.rate:g}/s": arguments.rate}

    def measure_at_all_rates(labels: dict[str, str], peers: list[contenders.Contender], **case: Any) -> None:
        options = case.pop("options")
        for load, rate in rates.items():
            one = Case(labels=labels | {"load": load}, options=options | {"rate": rate}, metrics=METRICS, **case)
            results.add(one, measure(one, peers, plan.paced(rate)))

    if "mqtt" in arguments.protocols:
        results.broker("mosquitto", mqtt.BROKER)
        peers = contenders.choose(contenders.MQTT, arguments.peers)
        for version in arguments.versions or ["5"]:
            for qos in arguments.qos or [0, 1]:
                with Mosquitto(mqtt.BROKER) as broker:
                    measure_at_all_rates(
                        {"protocol": f"MQTT {version}", "qos": str(qos)},
                        peers,
                        port=broker.port,
                        options={"version": version, "qos": qos, "size": size, "window": mqtt.WINDOW},
                        lossy=qos == 0,
                    )
    if "amqp" in arguments.protocols:
        results.broker("rabbitmq", amqp.BROKER)
        peers = contenders.choose(contenders.AMQP, arguments.peers)
        with RabbitMQ(amqp.BROKER) as rabbit:
            queue = amqp.Queue(rabbit.port, size)
            measure_at_all_rates(
                {"protocol": "AMQP", "qos": "1"},
                peers,
                port=rabbit.port,
                options={"qos": 1, "size": size, "window": amqp.WINDOW},
                before=queue.empty,
                after=queue.expect_empty,
            )
    results.finish()
