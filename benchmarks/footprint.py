"""What a message costs: processor time of publisher, subscriber and broker, and memory, on both protocols.

Processor time is that of the whole process, all its threads, user and system, from when both sides were ready to the
last message; memory is resident, before the first message and at most. With ``--instructions`` further runs count the
instructions in user mode of one role at a time: by ``perf stat`` where the machine has counters, else by callgrind,
which slows the process down so much that it waits less, and does more at a time, than it would.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Final

from benchmarks import amqp, contenders, instructions, mqtt, report
from benchmarks.harness import Case, Metric, Plan, Run, measure

if TYPE_CHECKING:
    from collections.abc import Callable

ROLES: Final = {"publish": "pub", "subscribe": "sub"}


def _cpu(role: str) -> Callable[[Run], float]:
    return lambda run: run.said[role]["cpu_seconds"] / run.count * 1e6


def _memory(role: str, when: str) -> Callable[[Run], float]:
    return lambda run: run.said[role][when] / 2**20


METRICS: Final = (
    *(Metric(f"{name} CPU", "us", _cpu(role)) for role, name in ROLES.items()),
    Metric("broker CPU", "us", lambda run: run.broker_seconds / run.count * 1e6),
    *(
        Metric(f"{name} {what}", "MiB", _memory(role, when))
        for role, name in ROLES.items()
        for what, when in (("ready", "rss_ready"), ("peak", "rss_peak"))
    ),
)


def run(arguments: argparse.Namespace) -> None:
    """Run, print, save."""
    from messaging.testing.brokers import Mosquitto, RabbitMQ

    results = report.Results("footprint", "Processor time of a message, and memory", "", arguments)
    plan = Plan.of(arguments)
    size = (arguments.payload or [100])[0]
    counter = instructions.find() if arguments.instructions else None
    if arguments.instructions and counter is None:
        print("no instructions: neither perf with hardware counters nor valgrind is there", file=sys.stderr)

    def measure_case(labels: dict[str, str], peers: list[contenders.Contender], **rest: Any) -> None:
        case = Case(labels=labels, metrics=METRICS, **rest)
        results.add(case, measure(case, peers, plan))
        if counter is not None:
            results.add(*instructions.measure(counter, case, peers))

    if "mqtt" in arguments.protocols:
        results.broker("mosquitto", mqtt.BROKER)
        peers = contenders.choose(contenders.MQTT, arguments.peers)
        for version in arguments.versions or ["5"]:
            for qos in arguments.qos or [0, 1]:
                with Mosquitto(mqtt.BROKER) as broker:
                    measure_case(
                        {"protocol": f"MQTT {version}", "qos": str(qos)},
                        peers,
                        port=broker.port,
                        broker=broker.pid,
                        options={"version": version, "qos": qos, "size": size, "window": mqtt.WINDOW},
                        lossy=qos == 0,
                    )
    if "amqp" in arguments.protocols:
        results.broker("rabbitmq", amqp.BROKER)
        peers = contenders.choose(contenders.AMQP, arguments.peers)
        with RabbitMQ(amqp.BROKER) as rabbit:
            queue = amqp.Queue(rabbit.port, size)
            measure_case(
                {"protocol": "AMQP", "qos": "1"},
                peers,
                port=rabbit.port,
                broker=rabbit.pid,
                options={"qos": 1, "size": size, "window": amqp.WINDOW},
                before=queue.empty,
                after=queue.expect_empty,
            )
    results.finish()
