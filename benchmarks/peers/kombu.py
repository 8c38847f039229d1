"""kombu, over py-amqp: ``confirm_publish``, so each publish waits for its confirm; a consumer that acknowledges."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import kombu

from benchmarks.peers.job import EXCHANGE, QUEUE, ROUTING_KEY, Job, Tally, run

_EXCHANGE = kombu.Exchange(EXCHANGE, type="topic", passive=True)


def _connection(job: Job) -> Any:
    return kombu.Connection(
        hostname=job.host, port=job.port, transport="pyamqp", transport_options={"confirm_publish": True}
    )


def publish(job: Job) -> None:
    with _connection(job) as connection:
        producer = connection.Producer(connection.default_channel, exchange=_EXCHANGE, auto_declare=False)
        job.ready()
        job.wait_for_go()
        start = time.monotonic()
        for payload in job.blocking_payloads():
            producer.publish(
                payload,
                routing_key=ROUTING_KEY,
                content_type="application/octet-stream",
                content_encoding="binary",
                delivery_mode="transient",
            )
        job.finish(start=start, end=time.monotonic())


def subscribe(job: Job) -> None:
    tally = Tally(job)
    received = tally.received

    def on_message(message: Any) -> None:
        message.ack()
        received(message.body)

    queue = kombu.Queue(QUEUE, _EXCHANGE, routing_key=ROUTING_KEY, no_declare=True)
    with _connection(job) as connection:
        consumer = connection.Consumer(
            [queue], on_message=on_message, prefetch_count=job.window, auto_declare=False, accept=None
        )
        if job.role == "consume":
            job.ready()
            job.wait_for_go()
            tally.start()
        with consumer:
            if job.role == "subscribe":
                job.ready()
            waiting = threading.Thread(target=tally.wait, daemon=True)
            waiting.start()
            while waiting.is_alive():
                try:
                    connection.drain_events(timeout=0.5)
                except socket.timeout:  # noqa: UP041  # what it raises
                    continue
        tally.finish()


if __name__ == "__main__":
    run({"publish": publish, "subscribe": subscribe, "consume": subscribe}, "kombu", "amqp")
