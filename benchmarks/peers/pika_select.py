"""pika: ``SelectConnection``, publishing whenever the window has room, ``on_message`` with ``basic_ack``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pika

from benchmarks.peers.job import EXCHANGE, QUEUE, ROUTING_KEY, Job, Tally, run


def _with_channel(job: Job, use: Callable[[Any, Any], object]) -> None:
    """Connect, hand connection and channel to ``use``, and run the loop until the connection is closed."""

    def opened(connection: Any) -> None:
        connection.channel(on_open_callback=lambda channel: use(connection, channel))

    def failed(_connection: Any, error: BaseException) -> None:
        raise SystemExit(f"no connection: {error!r}")

    connection = pika.SelectConnection(
        pika.ConnectionParameters(job.host, job.port),
        on_open_callback=opened,
        on_open_error_callback=failed,
        on_close_callback=lambda connection, _: connection.ioloop.stop(),
    )
    connection.ioloop.start()


class _Publisher:
    def __init__(self, job: Job, connection: Any, channel: Any) -> None:
        self._job = job
        self._connection = connection
        self._channel = channel
        self._payloads = job.payloads()
        self._sent = self._confirmed = 0
        self._is_waiting = False
        self._start = 0.0
        channel.confirm_delivery(self._on_confirm, callback=self._go)

    def _go(self, _frame: Any) -> None:
        self._job.ready()
        self._job.wait_for_go()
        self._start = time.monotonic()
        self._fill()

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        if not isinstance(method, pika.spec.Basic.Ack):
            raise SystemExit("a message was refused")
        # tags are confirmed in order, or several at a time
        self._confirmed = method.delivery_tag if method.multiple else self._confirmed + 1
        if self._confirmed == self._job.count:
            self._job.finish(start=self._start, end=time.monotonic())
            self._connection.close()
        elif not self._is_waiting:
            self._fill()

    def _fill(self) -> None:
        self._is_waiting = False
        while self._sent < self._job.count and self._sent - self._confirmed < self._job.window:
            payload = next(self._payloads)
            if payload is None:
                self._is_waiting = True
                self._connection.ioloop.call_later(self._job.delay, self._fill)
                return
            self._channel.basic_publish(EXCHANGE, ROUTING_KEY, payload)
            self._sent += 1


def publish(job: Job) -> None:
    _with_channel(job, lambda connection, channel: _Publisher(job, connection, channel))


class _Consumer:
    def __init__(self, job: Job, connection: Any, channel: Any) -> None:
        self._job = job
        self._connection = connection
        self._channel = channel
        self._tally = Tally(job)
        self._received = self._tally.received
        channel.basic_qos(prefetch_count=job.window, callback=self._consume)

    def _consume(self, _frame: Any) -> None:
        if self._job.role == "consume":
            self._job.ready()
            self._job.wait_for_go()
            self._tally.start()
        self._channel.basic_consume(QUEUE, self._on_message, callback=self._consuming)

    def _consuming(self, _frame: Any) -> None:
        if self._job.role == "subscribe":
            self._job.ready()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self._tally.wait()
        self._connection.ioloop.add_callback_threadsafe(self._end)

    def _end(self) -> None:
        self._tally.finish()
        self._connection.close()

    def _on_message(self, channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        channel.basic_ack(method.delivery_tag)
        self._received(body)


def subscribe(job: Job) -> None:
    _with_channel(job, lambda connection, channel: _Consumer(job, connection, channel))


if __name__ == "__main__":
    run({"publish": publish, "subscribe": subscribe, "consume": subscribe}, "pika")
