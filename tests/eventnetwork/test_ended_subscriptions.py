"""A member whose subscriptions the broker ends while the connection goes on."""

from __future__ import annotations

import pytest

from messaging.dispatch import DISTRIBUTED_EVENTS
from messaging.errors import SubscriptionRefusedError
from messaging.eventnetwork import EventNetwork, EventNode, Interest
from messaging.testing.waiting import PATIENCE, eventually
from tests.doubles.fake import FakeBroker
from tests.doubles.fixtures import *  # noqa: F403
from tests.doubles.fixtures import Connect
from tests.eventnetwork.conftest import Service


@pytest.mark.usefixtures("virtual_clock")
def test_a_member_subscribes_again_to_what_the_broker_ended(broker: FakeBroker, connect: Connect) -> None:
    """As RabbitMQ does when it closes a channel: the connection goes on, so no reconnect subscribes again."""
    service = Service()
    service.topics = {"a"}
    node = EventNode("test", "test", service, connect(broker), DISTRIBUTED_EVENTS, Interest("**"), EventNetwork())
    try:
        node.refresh().result(PATIENCE)
        node.ready.result(PATIENCE)

        def channels() -> list[str]:
            return sorted(handle.spec.channel for handle in broker.live)

        before = channels()
        assert len(before) == 3
        for _ in before:
            broker.end_subscription(SubscriptionRefusedError("the broker closed the channel"), 0)
        eventually(lambda: any("no announcements" in each for each in node.problems()))
        eventually(lambda: channels() == before)
        eventually(lambda: not any("no announcements" in each for each in node.problems()))
    finally:
        node.close()
