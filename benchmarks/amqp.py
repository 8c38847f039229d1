"""AMQP: publishing with confirms, consuming with acknowledgements, and both end to end, against other clients.

``publish``: from the first publish to the last confirm; nobody consumes. ``consume``: a queue that is full already,
from the start of consuming to the last message, each acknowledged by itself; afterwards the queue must be empty.
``both``: from the first publish to the last message received. Messages are transient, the queue is durable and
classic, and bound to ``amq.topic``; it is made anew for each run.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final

from benchmarks import contenders, report
from benchmarks.harness import Case, Plan, RunError, measure
from benchmarks.peers.job import EXCHANGE, QUEUE, ROUTING_KEY

#: messages that may be unconfirmed, where applications keep count, and prefetch
WINDOW: Final = 1000
#: what the broker is told, beside its ports
BROKER: Final = ()
OPERATIONS: Final = {"publish": ("publish",), "consume": ("consume",), "both": ("publish", "subscribe")}


class Queue:
    """The queue all runs use; on a connection of its own, made when needed."""

    def __init__(self, port: int, size: int) -> None:
        try:
            import pika
        except ImportError:
            raise SystemExit("pika is needed to make the queues: pip install '.[bench]'") from None

        self._parameters: Any = pika.ConnectionParameters("127.0.0.1", port)
        self._size = size

    @contextlib.contextmanager
    def _channel(self) -> Iterator[Any]:
        import pika

        with pika.BlockingConnection(self._parameters) as connection:
            yield connection.channel()

    def fill(self, count: int) -> None:
        """An empty queue, then ``count`` messages in it."""
        with self._channel() as channel:
            channel.queue_delete(QUEUE)
            channel.queue_declare(QUEUE, durable=True)
            channel.queue_bind(QUEUE, EXCHANGE, ROUTING_KEY)
            filler = b"x" * (self._size - 8)
            for number in range(count):
                channel.basic_publish(EXCHANGE, ROUTING_KEY, number.to_bytes(8, "big") + filler)
        if count:
            self.expect(count)

    def empty(self, _: int) -> None:
        """An empty queue."""
        self.fill(0)

    def expect_empty(self, _: int) -> None:
        """Wait until it is empty: everything was acknowledged."""
        self.expect(0)

    def expect(self, count: int) -> None:
        """Wait until it holds ``count`` messages that nobody has."""
        with self._channel() as channel:
            deadline = time.monotonic() + 30
            while (there := channel.queue_declare(QUEUE, passive=True).method.message_count) != count:
                if time.monotonic() > deadline:
                    raise RunError(f"the queue holds {there} messages rather than {count}")
                time.sleep(0.05)


def run(arguments: argparse.Namespace) -> None:
    """Run, print, save."""
    from messaging.testing.brokers import RabbitMQ

    results = report.Results("amqp", "AMQP, confirmed and acknowledged", "operation", arguments)
    results.broker("rabbitmq", BROKER)
    plan = Plan.of(arguments)
    peers = contenders.choose(contenders.AMQP, arguments.peers)
    for size in arguments.payload or [100, 1024]:
        for operation in arguments.operations or OPERATIONS:
            with RabbitMQ(BROKER) as broker:
                queue = Queue(broker.port, size)
                case = Case(
                    labels={"operation": operation, "payload": str(size)},
                    options={"qos": 1, "size": size, "window": WINDOW},
                    port=broker.port,
                    roles=OPERATIONS[operation],
                    before=queue.fill if operation == "consume" else queue.empty,
                    after=queue.expect if operation == "publish" else queue.expect_empty,
                )
                results.add(case, measure(case, peers, plan))
    results.finish()
