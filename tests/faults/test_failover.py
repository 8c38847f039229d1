"""Brokers behind one name: two mosquittos, and a cluster of RabbitMQ. Many kills are a command: see ``failover``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import messaging
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto, RabbitCluster, require
from messaging.testing.waiting import PATIENCE, eventually, subscribed
from tests.faults.failover import RECONNECT_MAX, ClusterTraffic, PairTraffic, pair
from tests.faults.scenario import OUTAGE


def test_nothing_is_lost_when_the_connected_one_of_two_mosquittos_is_killed(tmp_path: Path) -> None:
    require("mosquitto")
    with pair(tmp_path) as traffic:
        traffic.progress()
        for _ in range(3):
            traffic.kill()
        verdict = traffic.finish().check()
        assert verdict.confirmed > 500
        assert len(traffic.figures.back) == 9  # three instances, three times
        assert max(traffic.figures.back) < RECONNECT_MAX


def test_a_name_with_two_addresses_leads_to_the_broker_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("mosquitto")

    async def addresses_of(name: str) -> list[str]:
        assert name == "brokers.invalid"
        return ["127.0.0.1", "127.0.0.2"]

    monkeypatch.setattr("messaging.connection.opening.addresses_of", addresses_of)
    with Mosquitto() as one, Mosquitto(host="127.0.0.2", port=one.port) as other:
        name = f"brokers.invalid:{one.port}"
        brokers = {f"{name} at {broker.host}": broker for broker in (one, other)}
        with PairTraffic(brokers, f"mqtt://{name}", tmp_path) as traffic:
            traffic.progress()
            for _ in range(2):
                traffic.kill()
            traffic.finish().check()
            assert {m.connection_state.value.host for m in traffic.instances} <= {*brokers}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RabbitCluster]:
    require("rabbitmq")
    with RabbitCluster() as nodes:
        yield nodes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_lost_when_the_connected_node_of_a_cluster_is_killed_or_drained(
    cluster: RabbitCluster, tmp_path: Path
) -> None:
    """The queue is a quorum queue, whose first leader is the first node that goes."""
    with ClusterTraffic(cluster, tmp_path) as traffic:
        traffic.progress()
        traffic.kill()
        traffic.outlive(lambda node: node.drain(), restart=lambda node: node.revive())  # type: ignore[attr-defined]
        verdict = traffic.finish().check(ordered=False)
        assert verdict.confirmed > 200
        assert max(traffic.figures.back) < RECONNECT_MAX
        # the broker's own election takes about a second; a channel that refused messages for ever would take longer
        assert max(traffic.figures.flowing) < OUTAGE


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_subscription_waits_for_the_node_of_its_classic_queue(cluster: RabbitCluster) -> None:
    """RabbitMQ cancels the consumer, and refuses it until the node is back."""
    here, home = cluster.nodes[0], cluster.nodes[2]
    with contextlib.ExitStack() as stack:
        for node in (home, here):
            m = stack.enter_context(
                messaging.connect(node.url, services=ServiceRegistry(), reconnect_min=0.1, connect_timeout=1.0)
            )
            if node is home:  # a queue lives where it is declared
                with m.subscribe("home", queue="home", qos=1):
                    pass
        received = subscribed(m, "home", queue="home", qos=1)
        home.kill()
        try:
            eventually(
                lambda: m.connection_state.value.name == "degraded", "the subscription is not restored", patience=OUTAGE
            )
        finally:
            home.start()
        eventually(
            lambda: m.connection_state.value.name == "connected", "the subscription is restored", patience=OUTAGE
        )

        def is_received() -> bool:
            m.publish("home", b"x", guaranteed_delivery=True).result(PATIENCE)
            return bool(received)

        eventually(is_received)
        assert received.error is None
