"""The simulated AMQP broker: it agrees with a real RabbitMQ, and does under virtual time what that shows slowly."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from pamqp import commands

from tests.simulation.brokers.amqp import AmqpBroker, AmqpFaults, frames, methods, tables
from tests.simulation.brokers.amqp.compare import Comparison, seeds
from tests.simulation.brokers.amqp.fake_host import (
    PERSISTENT,
    FakeClient,
    FakeHost,
    Received,
    arguments,
    expiring,
    publish,
)
from tests.simulation.brokers.amqp.programs import Program
from tests.simulation.brokers.amqp.replay import SimulatedSide
from tests.simulation.brokers.amqp.views import confirmed

if TYPE_CHECKING:
    from messaging.testing.brokers import RabbitMQ

#: longer than a sync takes, seconds
SYNC = 0.02


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def broker(host: FakeHost) -> AmqpBroker:
    return AmqpBroker(host)


@pytest.fixture
def client(broker: AmqpBroker) -> FakeClient:
    client = FakeClient(broker)
    client.open(1, 2)
    return client


def declare(client: FakeClient, name: str, *, durable: bool = True, channel: int = 1, **given: Any) -> Received:
    client.call(channel, commands.Queue.Declare, queue=name, durable=durable, arguments=arguments(**given))
    return client.only("Queue.DeclareOk")


def counts(client: FakeClient, name: str) -> tuple[int, int]:
    """Messages and consumers of a queue."""
    client.call(1, commands.Queue.Declare, queue=name, passive=True)
    (found,) = client.take("Queue.DeclareOk")
    return found.message_count, found.consumer_count


def consume(client: FakeClient, queue: str, tag: str = "t", *, channel: int = 1, **values: Any) -> None:
    client.call(channel, commands.Basic.Consume, queue=queue, consumer_tag=tag, **values)
    assert client.take("Basic.ConsumeOk")


def select(client: FakeClient, channel: int = 1) -> None:
    client.call(channel, commands.Confirm.Select)
    client.only("Confirm.SelectOk")


def bodies(client: FakeClient) -> list[bytes | None]:
    return [event.body for event in client.take("Basic.Deliver")]


def get(client: FakeClient, queue: str, *, no_ack: bool = True) -> Received:
    client.call(1, commands.Basic.Get, queue=queue, no_ack=no_ack)
    (found,) = client.take()
    return found


def again(broker: AmqpBroker) -> FakeClient:
    client = FakeClient(broker, "client-2")
    client.open(1, 2)
    return client


# --- beside the real broker


def test_random_programs_have_the_same_effects_as_at_rabbitmq(rabbitmq: RabbitMQ) -> None:
    # others leave queues behind that are bound to the exchanges of their virtual host
    rabbitmq.add_virtual_host("simulated")
    comparisons = [
        Comparison(f"amqp://guest:guest@{rabbitmq.host}:{rabbitmq.port}/simulated", seed) for seed in seeds(1, 25)
    ]
    for comparison in comparisons:
        comparison.run()
    assert sum(comparison.is_abandoned for comparison in comparisons) < 5


# --- connections


def test_frames_are_taken_byte_by_byte(broker: AmqpBroker) -> None:
    whole, pieces = FakeClient(broker, "whole"), FakeClient(broker, "pieces")
    for each in (whole, pieces):
        each.open(1)
        declare(each, "q")
    data = publish(1, "", "q", b"x" * 300, PERSISTENT) + methods.encode(commands.Basic.Get, 1, queue="q", no_ack=True)
    whole.write(data)
    for at in range(len(data)):
        pieces.write(data[at : at + 1])
    assert whole.only("Basic.GetOk").body == pieces.only("Basic.GetOk").body == b"x" * 300


def test_a_large_body_is_split_into_frames_of_the_agreed_size(client: FakeClient) -> None:
    declare(client, "q")
    body = bytes(range(256)) * 2_000
    client.publish(1, "", "q", body)
    sizes: list[int] = []
    send = client.send

    def watched(data: bytes) -> None:
        at = 0
        while at < len(data):
            sizes.append(frames.PREFIX.unpack_from(data, at)[2])
            at += 8 + sizes[-1]
        send(data)

    client.send = watched  # type: ignore[method-assign]
    assert get(client, "q").body == body
    assert max(sizes) == 131_072 - 8


def test_a_refused_login_is_told_and_ends_the_connection(broker: AmqpBroker) -> None:
    broker.login = lambda user, password: (user, password) == ("me", "secret")
    refused, quiet, taken = (FakeClient(broker, name) for name in ("refused", "quiet", "taken"))
    refused.open(user="me", password="wrong")
    quiet.open(user="me", password="wrong", capabilities=())
    taken.open(1, user="me", password="secret")
    assert refused.take("Connection.Close")[0].reply_code == 403
    assert not quiet.take("Connection.Close")
    assert (refused.ended, quiet.ended, taken.ended) == ("closed", "closed", "")


def test_a_client_logs_in_with_amqplain(broker: AmqpBroker) -> None:
    broker.login = lambda user, password: (user, password) == ("me", "secret")
    client = FakeClient(broker)
    client.write(b"AMQP\0\0\t\1")
    client.take()
    response = tables.write_table({"LOGIN": tables.text("me"), "PASSWORD": tables.text("secret")})[4:]
    client.call(0, commands.Connection.StartOk, mechanism="AMQPLAIN", response=response, locale="en_US")
    client.only("Connection.Tune")


def test_an_unknown_virtual_host_is_refused(broker: AmqpBroker) -> None:
    client = FakeClient(broker)
    client.write(b"AMQP\0\0\t\1")
    client.call(0, commands.Connection.StartOk, mechanism="PLAIN", response=b"\0guest\0guest", locale="en_US")
    client.call(0, commands.Connection.TuneOk, channel_max=10, frame_max=4096, heartbeat=0)
    client.take()
    client.call(0, commands.Connection.Open, virtual_host="none")
    assert client.only("Connection.Close").reply_text == "NOT_ALLOWED - vhost none not found"


def test_a_new_secret_is_checked(broker: AmqpBroker, client: FakeClient) -> None:
    client.call(0, commands.Connection.UpdateSecret, new_secret=b"new", reason="because")
    client.only("Connection.UpdateSecretOk")
    assert [each.secret for each in broker.connections] == ["new"]
    broker.login = lambda _user, _password: False
    client.call(0, commands.Connection.UpdateSecret, new_secret=b"new", reason="because")
    assert client.only("Connection.Close").reply_code == 530


def test_a_client_that_is_silent_for_two_heartbeats_is_lost(host: FakeHost, broker: AmqpBroker) -> None:
    silent, alive = FakeClient(broker, "silent"), FakeClient(broker, "alive")
    for each in (silent, alive):
        each.open(1, heartbeat=10)
    for _ in range(6):
        host.advance(5)
        alive.write(frames.HEARTBEAT_FRAME)
    assert silent.take("Heartbeat")
    assert (silent.ended, alive.ended) == ("closed", "")


def test_a_method_that_is_not_simulated_is_refused_and_noted(host: FakeHost, client: FakeClient) -> None:
    client.call(1, commands.Tx.Select)
    assert client.only("Connection.Close").reply_code == 540
    assert any("Tx.Select" in note for note in host.notes)


def test_a_broker_that_takes_no_messages_reads_nothing_from_its_publishers(
    broker: AmqpBroker, client: FakeClient
) -> None:
    other = again(broker)
    declare(client, "q")
    client.publish(1, "", "q", b"1")
    broker.block("no memory")
    assert client.only("Connection.Blocked").reason == "no memory"
    client.publish(1, "", "q", b"2")
    assert counts(other, "q") == (1, 0)
    broker.unblock()
    client.only("Connection.Unblocked")
    assert counts(other, "q") == (2, 0)


def test_a_slow_reader_leaves_messages_to_others(host: FakeHost, broker: AmqpBroker, client: FakeClient) -> None:
    declare(client, "q")
    consume(client, "q")
    client.backlog = 2 << 20
    client.publish(1, "", "q", b"1")
    host.advance(1)
    assert not client.take()
    assert counts(client, "q") == (1, 1)
    client.backlog = 0
    host.advance(1)
    assert bodies(client) == [b"1"]
    assert not host.pending


def test_acknowledgements_to_a_closed_channel_are_ignored(client: FakeClient) -> None:
    client.call(1, commands.Basic.Ack, delivery_tag=5)
    client.only("Channel.Close")
    client.call(1, commands.Basic.Ack, delivery_tag=6)
    client.call(1, commands.Channel.CloseOk)
    client.call(1, commands.Channel.Open)
    client.only("Channel.OpenOk")


# --- confirms and storage


def test_a_stored_message_is_confirmed_after_the_sync(host: FakeHost, client: FakeClient) -> None:
    declare(client, "q")
    select(client)
    client.publish(1, "", "q", b"1", PERSISTENT)
    assert not client.take()
    host.advance(SYNC)
    assert client.only("Basic.Ack").delivery_tag == 1
    client.publish(1, "", "q", b"2")  # transient
    assert client.only("Basic.Ack").delivery_tag == 2


def test_confirms_of_one_sync_are_sent_as_one(host: FakeHost, client: FakeClient) -> None:
    declare(client, "q")
    select(client)
    for _ in range(3):
        client.publish(1, "", "q", b"", PERSISTENT)
    host.advance(SYNC)
    found = client.only("Basic.Ack")
    assert (found.delivery_tag, found.multiple) == (3, True)


def test_a_mandatory_message_is_returned_before_it_is_confirmed(client: FakeClient) -> None:
    select(client)
    client.publish(1, "", "none", b"x", mandatory=True)
    assert [event.name for event in client.take()] == ["Basic.Return", "Basic.Ack"]


def test_a_full_queue_that_refuses_answers_with_nack(client: FakeClient) -> None:
    declare(client, "q", x_max_length=1, x_overflow="reject-publish")
    select(client)
    client.publish(1, "", "q", b"1")
    client.only("Basic.Ack")
    client.publish(1, "", "q", b"2")
    assert client.only("Basic.Nack").delivery_tag == 2


def test_a_kill_loses_what_is_not_synced(host: FakeHost, broker: AmqpBroker, client: FakeClient) -> None:
    lost: list[tuple[str, bytes]] = []
    broker.on_dropped = lambda reason, _exchange, _key, body: lost.append((reason, body))
    declare(client, "q")
    declare(client, "transient", durable=False)
    client.call(1, commands.Exchange.Declare, exchange="x", exchange_type="fanout", durable=True)
    client.call(1, commands.Queue.Bind, queue="q", exchange="x")
    client.publish(1, "", "q", b"synced", PERSISTENT)
    client.publish(1, "", "q", b"not persistent")
    host.advance(SYNC)
    client.publish(1, "", "q", b"too late", PERSISTENT)
    broker.kill()
    assert client.ended == "aborted"
    assert sorted(lost) == [("lost in a restart", b"not persistent"), ("lost in a restart", b"too late")]
    broker.start()
    client = again(broker)
    assert get(client, "q").body == b"synced"
    client.publish(1, "x", "", b"by the binding")
    assert get(client, "q").body == b"by the binding"
    client.call(1, commands.Queue.Declare, queue="transient", passive=True)
    assert client.only("Channel.Close").reply_code == 404


def test_a_stop_keeps_what_is_persistent(broker: AmqpBroker, client: FakeClient) -> None:
    declare(client, "q")
    client.publish(1, "", "q", b"kept", PERSISTENT)
    client.publish(1, "", "q", b"not persistent")
    broker.stop()
    (closed,) = client.take("Connection.Close")
    assert (closed.reply_code, client.ended) == (320, "closed")
    assert FakeClient(broker, "late").ended == "aborted"
    broker.start()
    client = again(broker)
    assert get(client, "q").body == b"kept"
    assert get(client, "q").name == "Basic.GetEmpty"


@pytest.mark.parametrize("is_synced", [True, False])
def test_an_acknowledged_message_is_back_after_a_kill_unless_that_was_synced(
    host: FakeHost, broker: AmqpBroker, client: FakeClient, is_synced: bool
) -> None:
    declare(client, "q")
    client.publish(1, "", "q", b"1", PERSISTENT)
    host.advance(SYNC)
    consume(client, "q")
    client.take()
    client.call(1, commands.Basic.Ack, delivery_tag=1)
    if is_synced:
        host.advance(SYNC)
    broker.kill()
    broker.start()
    found = get(again(broker), "q")
    assert found.name == ("Basic.GetEmpty" if is_synced else "Basic.GetOk")
    assert is_synced or found.redelivered


def test_unacknowledged_messages_keep_their_positions_over_a_kill(
    host: FakeHost, broker: AmqpBroker, client: FakeClient
) -> None:
    declare(client, "q")
    for body in (b"1", b"2", b"3"):
        client.publish(1, "", "q", body, PERSISTENT)
    host.advance(SYNC)
    client.call(1, commands.Basic.Qos, prefetch_count=2)
    consume(client, "q")
    client.take()
    broker.kill()
    broker.start()
    client = again(broker)
    found = [get(client, "q") for _ in range(3)]
    assert [(each.body, each.redelivered) for each in found] == [(b"1", True), (b"2", True), (b"3", False)]


def test_a_quorum_queue_counts_deliveries_over_a_kill(host: FakeHost, broker: AmqpBroker, client: FakeClient) -> None:
    declare(client, "q", x_queue_type="quorum", x_delivery_limit=1)
    client.publish(1, "", "q", b"1")  # not persistent: a quorum queue stores it all the same
    host.advance(SYNC)
    for expected in (0, 1):
        consume(client, "q")
        (found,) = client.take("Basic.Deliver")
        count = found.headers.get("x-delivery-count")
        assert (0 if count is None else count.value) == expected
        broker.kill()
        broker.start()
        client = again(broker)
    assert get(client, "q").name == "Basic.GetEmpty"


# --- expiry


def test_the_message_at_the_head_expires(host: FakeHost, client: FakeClient) -> None:
    declare(client, "dead")
    declare(client, "q", x_message_ttl=5_000, x_dead_letter_exchange="", x_dead_letter_routing_key="dead")
    client.publish(1, "", "q", b"1", expiring(2_000))
    client.publish(1, "", "q", b"2")
    host.advance(1.999)
    assert counts(client, "q") == (2, 0)
    host.advance(0.002)
    assert counts(client, "q") == (1, 0)
    host.advance(3)
    assert counts(client, "q") == (0, 0)
    first, second = get(client, "dead"), get(client, "dead")
    (death,) = first.headers["x-death"].value
    assert death.value["reason"].value == b"expired"
    assert death.value["original-expiration"].value == b"2000"
    assert "original-expiration" not in second.headers["x-death"].value[0].value
    assert [first.body, second.body] == [b"1", b"2"]


def test_a_message_expires_while_the_broker_is_down(host: FakeHost, broker: AmqpBroker, client: FakeClient) -> None:
    declare(client, "q", x_message_ttl=1_000)
    client.publish(1, "", "q", b"1", PERSISTENT)
    broker.stop()
    host.advance(2)
    broker.start()
    assert get(again(broker), "q").name == "Basic.GetEmpty"


def test_an_unused_queue_expires(host: FakeHost, broker: AmqpBroker, client: FakeClient) -> None:
    declare(client, "q", x_expires=10_000)
    consume(client, "q")
    host.advance(30)
    client.call(1, commands.Basic.Cancel, consumer_tag="t")
    client.take()
    host.advance(9)
    assert counts(client, "q") == (0, 0)  # which uses it
    host.advance(9)
    assert get(client, "q").name == "Basic.GetEmpty"  # and so does this
    client.publish(1, "", "q", b"does not use it")
    host.advance(10.1)
    assert not broker.vhosts["/"].queues


def test_a_message_that_expires_in_circles_is_dropped(host: FakeHost, broker: AmqpBroker, client: FakeClient) -> None:
    dropped: list[str] = []
    broker.on_dropped = lambda reason, *_: dropped.append(reason)
    declare(client, "a", x_message_ttl=1_000, x_dead_letter_exchange="", x_dead_letter_routing_key="b")
    declare(client, "b", x_message_ttl=1_000, x_dead_letter_exchange="", x_dead_letter_routing_key="a")
    client.publish(1, "", "a", b"1")
    host.advance(10)
    assert dropped == ["expired"]
    assert (counts(client, "a"), counts(client, "b")) == ((0, 0), (0, 0))


def test_a_sure_quorum_queue_keeps_a_dead_letter_until_a_queue_takes_it(
    host: FakeHost, broker: AmqpBroker, client: FakeClient
) -> None:
    declare(
        client, "q", x_queue_type="quorum", x_message_ttl=1_000, x_dead_letter_exchange="", x_overflow="reject-publish",
        x_dead_letter_routing_key="dead", x_dead_letter_strategy="at-least-once",
    )  # fmt: skip
    client.publish(1, "", "q", b"1")
    host.advance(2)
    assert counts(client, "q") == (0, 0)
    broker.kill()
    broker.start()
    client = again(broker)
    declare(client, "dead")
    host.advance(200)
    assert get(client, "dead").body == b"1"
    assert "letters" not in str(broker.vhosts["/"].describe()["queues"])


# --- faults


def test_faults_are_off_by_default(broker: AmqpBroker) -> None:
    switched = [broker.is_faulty]
    for faults in (AmqpFaults(nack=0.1), AmqpFaults()):
        broker.faults = faults
        switched.append(broker.is_faulty)
    assert switched == [False, True, False]


def test_a_late_confirm_comes_within_its_time(host: FakeHost, broker: AmqpBroker, client: FakeClient) -> None:
    broker.faults = AmqpFaults(late_confirm=1, late_confirm_max=5)
    declare(client, "q")
    select(client)
    for _ in range(20):
        client.publish(1, "", "q", b"", PERSISTENT)
    host.advance(SYNC)
    missing = {*range(1, 21)}
    missing -= {*confirmed(client.take(), missing)}
    assert missing
    host.advance(5)
    missing -= {*confirmed(client.take(), missing)}
    assert not missing


def test_shuffled_confirms_answer_each_message_once(host: FakeHost, broker: AmqpBroker, client: FakeClient) -> None:
    broker.faults = AmqpFaults(shuffle_confirms=1)
    declare(client, "q")
    select(client)
    for _ in range(10):
        client.publish(1, "", "q", b"", PERSISTENT)
    host.advance(SYNC)
    tags = [event.delivery_tag for event in client.take("Basic.Ack")]
    assert sorted(tags) == [*range(1, 11)] != tags


def test_a_refused_message_reaches_no_queue(broker: AmqpBroker, client: FakeClient) -> None:
    broker.faults = AmqpFaults(nack=1)
    declare(client, "q")
    select(client)
    client.publish(1, "", "q", b"1")
    client.only("Basic.Nack")
    assert counts(client, "q") == (0, 0)


def test_the_broker_closes_a_channel_and_requeues_its_messages(broker: AmqpBroker, client: FakeClient) -> None:
    declare(client, "q")
    client.publish(1, "", "q", b"1")
    consume(client, "q", channel=2)
    client.take()
    broker.faults = AmqpFaults(close_channel=1)
    client.call(2, commands.Basic.Ack, delivery_tag=1)
    found = client.only("Channel.Close")
    assert (found.channel, found.reply_code) == (2, 406)
    assert "timed out" in found.reply_text
    broker.faults = AmqpFaults()
    assert counts(client, "q") == (1, 0)


@pytest.mark.parametrize(("faults", "code"), [({"internal_error": 1}, 541), ({"force_close": 1}, 320)])
def test_the_broker_closes_a_connection(broker: AmqpBroker, client: FakeClient, faults: Any, code: int) -> None:
    other = again(broker)
    broker.faults = AmqpFaults(**faults)
    client.call(1, commands.Queue.Declare, queue="q")
    assert client.take("Connection.Close")[0].reply_code == code
    client.call(0, commands.Connection.CloseOk)
    assert client.ended == "closed"
    broker.faults = AmqpFaults()
    assert ("q" in broker.vhosts["/"].queues) == (code == 320)
    assert not other.ended


def test_a_connection_that_the_broker_closes_is_told_before_its_messages_are_requeued(
    broker: AmqpBroker, client: FakeClient
) -> None:
    declare(client, "q")
    client.publish(1, "", "q", b"1")
    consume(client, "q", channel=2)
    client.take()
    told = []
    broker.on_closing = lambda _: told.append(counts(again(broker), "q"))
    [connection, *_] = broker.connections
    connection.close_by_error({"reply_code": 530, "reply_text": "NOT_ALLOWED - credentials expired"})
    assert told == [(0, 1)]
    assert counts(again(broker), "q") == (1, 0)
    assert not client.ended


@pytest.mark.parametrize("is_after", [False, True])
def test_a_connection_is_reset_before_or_after_the_effect(
    broker: AmqpBroker, client: FakeClient, is_after: bool
) -> None:
    declare(client, "q")
    broker.faults = AmqpFaults(drop_after=1) if is_after else AmqpFaults(drop_before=1)
    client.publish(1, "", "q", b"1")
    assert client.ended == "aborted"
    broker.faults = AmqpFaults()
    assert counts(again(broker), "q") == (int(is_after), 0)


def test_a_connection_is_blocked_for_a_time(host: FakeHost, broker: AmqpBroker, client: FakeClient) -> None:
    declare(client, "q")
    broker.faults = AmqpFaults(block=1, block_max=5)
    client.publish(1, "", "q", b"1")
    client.only("Connection.Blocked")
    broker.faults = AmqpFaults()
    client.publish(1, "", "q", b"2")
    assert counts(again(broker), "q") == (1, 0)
    host.advance(5)
    client.only("Connection.Unblocked")
    assert counts(client, "q") == (2, 0)


def test_the_broker_cancels_a_consumer(host: FakeHost, broker: AmqpBroker, client: FakeClient) -> None:
    declare(client, "q")
    consume(client, "q")
    broker.faults = AmqpFaults(cancel_consumer=1)
    client.publish(1, "", "q", b"1")
    host.advance(0)
    assert [event.name for event in client.take()] == ["Basic.Deliver", "Basic.Cancel"]
    assert counts(client, "q") == (0, 0)
    client.call(1, commands.Basic.Ack, delivery_tag=1)
    assert not client.take()


def test_slow_deliveries_keep_their_order(host: FakeHost, broker: AmqpBroker, client: FakeClient) -> None:
    declare(client, "q")
    consume(client, "q")
    broker.faults = AmqpFaults(slow_delivery=0.5, slow_delivery_max=1)
    sent = [b"%d" % number for number in range(30)]
    for body in sent:
        client.publish(1, "", "q", body)
    found = bodies(client)
    assert len(found) < 30
    host.advance(60)
    assert found + bodies(client) == sent


def test_a_queue_whose_node_is_down_keeps_its_messages(broker: AmqpBroker, client: FakeClient) -> None:
    declare(client, "q")
    client.publish(1, "", "q", b"1")
    consume(client, "q", channel=2)
    client.take()
    broker.take_away("q")
    client.only("Basic.Cancel")
    client.call(2, commands.Basic.Ack, delivery_tag=1)
    client.publish(1, "", "q", b"2", mandatory=True)
    client.only("Basic.Return")
    client.call(2, commands.Queue.Declare, queue="q", passive=True)
    found = client.only("Channel.Close")
    assert found.reply_code == 404
    assert found.reply_text.endswith("queue 'q' in vhost '/' is down or inaccessible")
    broker.bring_back("q")
    assert (get(client, "q").body, counts(client, "q")) == (b"1", (0, 0))


# --- what is left


def test_nothing_is_left_after_clients_have_gone(host: FakeHost, broker: AmqpBroker, client: FakeClient) -> None:
    client.call(1, commands.Queue.Declare, queue="", exclusive=True)
    client.call(1, commands.Queue.Bind, queue="", exchange="amq.topic", routing_key="#")
    client.call(1, commands.Queue.Declare, queue="auto", auto_delete=True)
    consume(client, "auto")
    client.call(2, commands.Basic.Consume, queue="amq.rabbitmq.reply-to", consumer_tag="r", no_ack=True)
    client.publish(1, "amq.topic", "a", b"1", PERSISTENT)
    client.lose()
    host.advance(1)
    assert broker.describe() == {
        "connections": [],
        "vhosts": {"/": {"queues": {}, "exchanges": [], "bindings": []}},
        "letters": 0,
        "synced": True,
    }
    assert not broker.replies
    assert not host.pending


ALL_FAULTS = AmqpFaults(
    late_confirm=0.05, shuffle_confirms=0.1, nack=0.02, close_channel=0.01, internal_error=0.005, force_close=0.005,
    drop_before=0.005, drop_after=0.005, cancel_consumer=0.02, slow_delivery=0.1,
)  # fmt: skip


def random_history(seed: int) -> str:
    """Run a random program with all faults, and a restart or kill of the broker; return what happened."""
    side, program = SimulatedSide(seed, "/"), Program(random.Random(seed), "p.")
    broker, view, found = side.broker, program.view, []
    broker.faults = ALL_FAULTS
    for number in range(100):
        if number == 60 and seed % 3:
            (broker.stop if seed % 3 == 1 else broker.kill)()
            side.take()
            broker.start()
        view.connections = {each: view.connections[each] for each in view.connections if each in side.clients}
        step = program.step()
        side.execute(step)
        events = side.take()
        view.update(step, events)
        found.append(
            [(where, [(event[:3], event.properties, event.body) for event in events[where]]) for where in events]
        )
    broker.faults = AmqpFaults()
    for client in [*side.clients.values()]:
        client.lose()
    side.host.advance(60)
    described: Any = broker.describe()
    assert (described["connections"], described["letters"], described["synced"]) == ([], 0, True)
    for name, queue in described["vhosts"]["/"]["queues"].items():
        assert (queue["unacked"], queue["consumers"]) == (0, []), name
        assert broker.vhosts["/"].queues[name].owner is None
    assert not broker.replies
    return repr((found, side.host.notes, described))


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_with_faults_leave_no_client_behind(seed: int) -> None:
    assert random_history(seed) == random_history(seed)


def test_histories_do_not_depend_on_hashes() -> None:
    code = "from tests.simulation.test_amqp_broker import *; print(*[random_history(seed) for seed in range(10)])"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, check=True,
        ).stdout
        for hashes in ("1", "2")
    ]  # fmt: skip
    assert outputs[0] == outputs[1]
    assert outputs[0]


def test_a_reply_reaches_the_channel_that_asked(broker: AmqpBroker, client: FakeClient) -> None:
    server = again(broker)
    declare(server, "requests")
    consume(server, "requests", no_ack=True)
    client.call(2, commands.Basic.Consume, queue="amq.rabbitmq.reply-to", consumer_tag="r", no_ack=True)
    client.take()
    raw = b"\x02\x00\x15amq.rabbitmq.reply-to"
    client.publish(2, "", "requests", b"?", raw)
    (request,) = server.take("Basic.Deliver")
    assert request.properties is not None
    address = request.properties[3:].decode()
    server.publish(1, "", address, b"!")
    found = client.only("Basic.Deliver")
    assert (found.channel, found.consumer_tag, found.body) == (2, "r", b"!")


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_bytes(seed: int) -> None:
    def history() -> list[object]:
        host = FakeHost(seed)
        broker = AmqpBroker(host)
        client = FakeClient(broker)
        client.open(1)
        broker.faults = AmqpFaults(late_confirm=0.3, nack=0.1, slow_delivery=0.3, cancel_consumer=0.05)
        client.call(1, commands.Confirm.Select)
        client.call(1, commands.Queue.Declare, queue="", exclusive=True)
        client.call(1, commands.Basic.Consume, queue="")
        name = next(iter(broker.vhosts["/"].queues))
        for _ in range(50):
            client.publish(1, "", name, b"", PERSISTENT)
            host.advance(0.1)
        host.advance(10)
        return [host.notes, [(event[:3], event.properties, event.body) for event in client.take()]]

    assert history() == history()
