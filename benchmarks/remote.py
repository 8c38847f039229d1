"""Remote events from generator to listener: directly, and through a durable agent, a mailbox, or both.

In one process, and between two processes over a broker. Beside plain requests of the same size, 100 in flight, and
beside the appends of the journal that keeps the events. The rate is that of the listener.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Final

from benchmarks import amqp, contenders, mqtt, report
from benchmarks.harness import RATE, Case, Plan, measure
from messaging.testing.brokers import Mosquitto, RabbitMQ

BETWEEN: Final = ("nothing", "agent", "mailbox", "agent, mailbox")
#: requests in flight
_WINDOW: Final = 100
#: events of the warm-up
_WARM_UP: Final = 2_000


def run(arguments: argparse.Namespace) -> None:
    """Run, print, save."""
    results = report.Results("remote", "Remote events", "between", arguments)
    plan = Plan.of(arguments)
    plan = dataclasses.replace(plan, warm_up=min(plan.warm_up, _WARM_UP))
    # durable parties write to the disk of the results, because /tmp may be in memory
    arguments.results.mkdir(parents=True, exist_ok=True)
    options = {"size": (arguments.payload or [100])[0], "window": _WINDOW, "folder": str(arguments.results)}
    peers = contenders.choose(contenders.REMOTE_DURABLE, arguments.peers)
    _measure(results, plan, peers, "one process", 0, options, roles=("dispatch",))
    peers = contenders.choose(contenders.REMOTE, arguments.peers)
    if "mqtt" in arguments.protocols:
        results.broker("mosquitto", mqtt.BROKER)
        for version in arguments.versions or ["5"]:
            with Mosquitto(mqtt.BROKER) as broker:
                _measure(results, plan, peers, f"MQTT {version}", broker.port, options | {"version": version})
    if "amqp" in arguments.protocols:
        results.broker("rabbitmq", amqp.BROKER)
        with RabbitMQ(amqp.BROKER) as rabbit:
            _measure(results, plan, peers, "AMQP", rabbit.port, options | {"version": "amqp"})
    results.finish()


def _measure(
    results: report.Results,
    plan: Plan,
    peers: list[contenders.Contender],
    where: str,
    port: int,
    options: dict[str, Any],
    roles: tuple[str, ...] = ("publish", "subscribe"),
) -> None:
    for between in BETWEEN:
        taking_part = [each for each in peers if between != "nothing" or each.name != "journal"]
        case = Case(
            {"where": where, "between": between},
            options | {"between": between},
            port=port,
            roles=roles,
            metrics=(RATE,),
        )
        results.add(case, measure(case, taking_part, plan))
