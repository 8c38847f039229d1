"""Interoperation with kombu, and so with Celery: queues, content types, encodings, compression, headers."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import kombu
import pytest

from messaging.errors import UnknownContentEncodingError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, subscribed
from tests.amqp.harness import unique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pika.adapters.blocking_connection import BlockingChannel

    from messaging.testing.brokers import RabbitMQ
    from tests.amqp.conftest import Connect


@pytest.fixture
def connection(rabbitmq: RabbitMQ) -> Iterator[kombu.Connection]:
    with kombu.Connection(rabbitmq.url.rstrip("/")) as opened:
        yield opened


@table("is_first", [True, False])
def test_a_plain_queue_is_declared_by_pika_and_kombu_before_and_after(
    connect: Connect, foreign: BlockingChannel, connection: kombu.Connection, is_first: bool
) -> None:
    queue = unique("plain")

    def declare() -> None:
        foreign.queue_declare(queue, durable=True)
        kombu.Queue(queue, channel=connection.default_channel).queue_declare()

    if not is_first:
        declare()
    m = connect()
    stream = subscribed(m, "plain", queue=queue)
    if is_first:
        declare()
    kombu.Producer(connection.default_channel).publish({"x": 1}, routing_key=queue)
    assert stream.wait_for(1)[-1].value() == {"x": 1}
    foreign.queue_delete(queue)


def receive(connection: kombu.Connection, queue: str, accept: list[str]) -> kombu.Message:
    """The next message of ``queue``, as a kombu consumer that accepts these content types gets it."""
    found: list[kombu.Message] = []
    take = [lambda _, message: found.append(message)]
    with kombu.Consumer(connection, [kombu.Queue(queue)], callbacks=take, accept=accept, no_ack=True):
        connection.drain_events(timeout=PATIENCE)
    [message] = found
    return message


@pytest.fixture
def queue(foreign: BlockingChannel) -> Iterator[str]:
    """A queue that is bound to the channels ``<queue>`` and below it."""
    name = unique("kombu")
    foreign.queue_declare(name, durable=True)
    foreign.queue_bind(name, "amq.topic", f"{name}.#")
    yield name
    foreign.queue_delete(name)


@table("compression", [None, "gzip", "zlib"])
@table(
    "body, serializer, encoding",
    [({"x": [1, "ü"]}, "json", "utf-8"), ("text ü", None, "utf-8"), (b"\xff\x00", None, "binary")],
)
def test_a_value_that_kombu_publishes_is_received_unchanged(
    connect: Connect, connection: kombu.Connection, body: Any, serializer: str | None, encoding: str,
    compression: str | None,
) -> None:  # fmt: skip
    """With content encodings ``utf-8`` and ``binary``, and with its header for compression."""
    content_type = {"json": None, None: "text/plain" if isinstance(body, str) else "application/octet-stream"}[
        serializer
    ]
    m = connect()
    stream = subscribed(m, "from/kombu")
    kombu.Producer(connection.default_channel).publish(
        body, exchange="amq.topic", routing_key="from.kombu", serializer=serializer, content_type=content_type,
        compression=compression, headers={"n": 5},
    )  # fmt: skip
    message = stream.wait_for(1)[-1]
    assert message.value() == body
    assert message.context.content_encoding == (f"{encoding}, zlib" if compression else encoding)
    assert message.context.extensions["headers"] == {"n": 5}


def test_a_compression_of_kombus_that_is_unknown_here_is_named(connect: Connect, connection: kombu.Connection) -> None:
    m = connect()
    stream = subscribed(m, "from/kombu/bz2")
    kombu.Producer(connection.default_channel).publish(
        {"x": 1}, exchange="amq.topic", routing_key="from.kombu.bz2", compression="bzip2"
    )
    message = stream.wait_for(1)[-1]
    with pytest.raises(UnknownContentEncodingError, match="bzip2"):
        message.value()


@table("encoding", [None, "zlib", "utf-8, zlib", "binary"])
@table("content, content_type", [({"x": [1, "ü"]}, "application/json"), ("text ü", "text/plain")])
def test_kombu_receives_the_value_that_is_published(
    connect: Connect, connection: kombu.Connection, queue: str, content: Any, content_type: str, encoding: str | None
) -> None:
    """Text as well, by a consumer that accepts ``text/plain``."""
    more = {} if encoding is None else {"content_encoding": encoding}
    m = connect()
    m.publish(f"{queue}/out", content, **more).result(PATIENCE)
    message = receive(connection, queue, [content_type])
    # kombu does not decode text of these content encodings
    value = message.payload.decode() if isinstance(message.payload, bytes) else message.payload
    assert (message.content_type, value) == (content_type, content)


def test_headers_keep_their_types_to_kombu_and_back(connect: Connect, connection: kombu.Connection, queue: str) -> None:
    headers = {
        "text": "ü", "n": 5, "large": 2**40, "negative": -1, "half": 0.5, "yes": True, "no": False, "nothing": None,
        "bytes": b"\xff", "at": datetime(2026, 11, 22, 12, tzinfo=UTC), "list": ("a", 1, (2,)),
        "table": {"a": {"b": 1}}, "price": Decimal("1.25"),
    }  # fmt: skip
    m = connect()
    stream = subscribed(m, "back/from/kombu")
    m.publish(f"{queue}/out", b"1", headers=headers).result(PATIENCE)
    message = receive(connection, queue, ["application/octet-stream"])
    theirs = message.headers
    assert theirs | {"at": 0, "list": 0} == headers | {"at": 0, "list": 0}
    assert (theirs["list"], theirs["at"].replace(tzinfo=UTC)) == (["a", 1, [2]], headers["at"])
    kombu.Producer(connection.default_channel).publish(
        b"2", exchange="amq.topic", routing_key="back.from.kombu", content_type="application/octet-stream",
        headers=theirs, app_id="celery", type="task", user_id="guest",
    )  # fmt: skip
    context = stream.wait_for(1)[-1].context
    told = context.extensions["headers"]
    assert told | {"bytes": 0} == headers | {"bytes": 0}
    assert told["bytes"] in (b"\xff", "ff")  # kombu may write bytes as text
    assert {key: context.extensions[key] for key in ("appId", "type", "userId")} == {
        "appId": "celery", "type": "task", "userId": "guest",
    }  # fmt: skip


def test_a_message_of_kombu_is_passed_on_as_it_is(connect: Connect, connection: kombu.Connection, queue: str) -> None:
    m = connect()
    stream = subscribed(m, "pass/on")
    kombu.Producer(connection.default_channel).publish(
        {"x": 1}, exchange="amq.topic", routing_key="pass.on", compression="gzip", headers={"n": (1, {"a": None})},
        type="task", app_id="celery", user_id="guest",
    )  # fmt: skip
    m.publisher.publish(stream.wait_for(1)[-1], f"{queue}/out").result(PATIENCE)
    message = receive(connection, queue, ["json"])
    assert message.payload == {"x": 1}
    assert message.content_encoding == "utf-8"
    assert message.headers == {"n": [1, {"a": None}], "compression": "application/x-gzip"}
    assert (message.properties["type"], message.properties["app_id"]) == ("task", "celery")
    assert "user_id" not in message.properties
