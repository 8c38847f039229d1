"""Events between two processes over a broker, against publishing and subscribing on the same adapter, and iPOPO.

``ours`` is the distributed event admin, ``bus`` the connected typed event bus; ``raw`` publishes and subscribes to
messages of the same size, without events. QoS 1 and confirms; iPOPO's bridge publishes with QoS 2 and subscribes with
QoS 0, as it always does. The rate is that of the subscriber; latency is taken at a fixed rate.

Besides: publishing to a thousand topics of which another process wants ten, against publishing to ten; and delivering
on a bus with a connection whose topics nothing matches, against one without.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any, Final

import messaging
from benchmarks import amqp, contenders, mqtt, report
from benchmarks.harness import Case, Metric, Plan, measure
from messaging.dispatch.eventnetwork import EventNetwork
from messaging.distributedeventing import DistributedEventAdmin
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.typedevent import TypedEventBus

LATENCY: Final = (
    Metric("p50", "us", lambda run: float(run.said["subscribe"]["p50"])),
    Metric("p99", "us", lambda run: float(run.said["subscribe"]["p99"])),
)
_TOPICS: Final = 1_000
_WANTED: Final = 10


def run(arguments: argparse.Namespace) -> None:
    """Run, print, save."""
    results = report.Results("distributed", "Events between processes", "protocol", arguments)
    plan = Plan.of(arguments)
    size = (arguments.payload or [100])[0]
    rates: dict[str, float | None] = {"as fast as possible": None, f"{arguments.rate:g}/s": arguments.rate}
    if "mqtt" in arguments.protocols:
        results.broker("mosquitto", mqtt.BROKER)
        peers = contenders.choose(contenders.DISTRIBUTED_MQTT, arguments.peers)
        for version in arguments.versions or ["3.1.1", "5"]:
            with Mosquitto(mqtt.BROKER) as broker:
                options = {"version": version, "qos": 1, "size": size, "window": mqtt.WINDOW}
                _measure(results, plan, peers, f"MQTT {version}", broker.port, options, rates)
    if "amqp" in arguments.protocols:
        results.broker("rabbitmq", amqp.BROKER)
        peers = contenders.choose(contenders.DISTRIBUTED_AMQP, arguments.peers)
        with RabbitMQ(amqp.BROKER) as broker:
            options = {"qos": 1, "size": size, "window": mqtt.WINDOW}
            _measure(results, plan, peers, "AMQP", broker.port, options, rates)
    _many_topics(plan)
    _unmatched_connection(plan)
    results.finish()


def _measure(
    results: report.Results,
    plan: Plan,
    peers: list[contenders.Contender],
    protocol: str,
    port: int,
    options: dict[str, Any],
    rates: dict[str, float | None],
) -> None:
    for load, rate in rates.items():
        case = Case({"protocol": protocol, "load": load}, options, port=port)
        if rate is None:
            results.add(case, measure(case, peers, plan))
        else:
            paced = dataclasses.replace(case, options=options | {"rate": rate}, metrics=LATENCY)
            results.add(paced, measure(paced, peers, plan.paced(rate)))


def _many_topics(plan: Plan) -> None:
    """Print what publishing costs to a thousand topics of which ten are wanted, and to these ten only."""
    events = 2_000 if plan.warm_up < 1_000 else 20_000
    network = EventNetwork(last_will=False)
    with (
        Mosquitto(mqtt.BROKER) as broker,
        messaging.connect(broker.url) as m,
        messaging.connect(broker.url) as other,
        DistributedEventAdmin(ServiceRegistry(), other, network=network, queue_limit=10**6) as consumer,
        DistributedEventAdmin(ServiceRegistry(), m, network=network) as admin,
    ):
        for number in range(_WANTED):
            consumer.on(f"bench/topic{number}", handler=lambda _: None)
        consumer.announced(30).result()
        while not admin.get_dto().node.is_settled:  # type: ignore[union-attr]
            time.sleep(0.05)
        figures: dict[int, list[float]] = {_WANTED: [], _TOPICS: []}
        for _ in range(plan.runs):
            for topics in figures:
                names = [f"bench/topic{number}" for number in range(topics)]
                # as many wanted events in both: the others come in between
                start = time.process_time()
                for number in range(events):
                    admin.publish_event(names[number % _WANTED], {"n": number})
                    if topics == _TOPICS:
                        admin.publish_event(names[_WANTED + number % (_TOPICS - _WANTED)], {"n": number})
                figures[topics].append((time.process_time() - start) / events * 1e6)
        sent = admin.get_dto().node.sent  # type: ignore[union-attr]
    ten, thousand = (statistics.median(each) for each in figures.values())
    print(
        f"\n{_TOPICS} topics, {_WANTED} wanted: {thousand:.1f} us of processor time for a wanted event and another, "
        f"{ten:.1f} us for a wanted event; {sent} sent of {2 * events * plan.runs} wanted ones: {thousand / ten:.2f}"
    )


def _unmatched_connection(plan: Plan) -> None:
    """Print what ``deliver`` costs on a bus with a connection whose topics nothing matches, and on one without."""
    events = 5_000 if plan.warm_up < 1_000 else 100_000
    figures: dict[bool, list[float]] = {False: [], True: []}
    with messaging.connect("memory://bench-distributed") as m:
        for _ in range(max(5, plan.runs)):
            for is_connected in figures:
                with TypedEventBus(ServiceRegistry()) as bus:
                    bus.on("orders/placed", handler=lambda _: None, type=dict)
                    if is_connected:
                        bus.connect(m, "other/*").ready.result(10)
                    event = {"id": 7}
                    start = time.perf_counter()
                    for _ in range(events):
                        bus.deliver_untyped("orders/placed", event)
                    bus.flush().result(60)
                    figures[is_connected].append((time.perf_counter() - start) / events * 1e6)
    without, attached = (statistics.median(each) for each in figures.values())
    print(f"deliver with a connection that nothing matches: {attached:.2f} us, without: {without:.2f} us: "
          f"{attached / without:.2f}")  # fmt: skip
