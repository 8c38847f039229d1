"""Dead letters: their way, the headers that tell what happened to a message, and messages that go round in circles.

Dead letters are published at the same virtual time, but after what happens now, as by RabbitMQ's queues, which are
processes of their own. A kill of the broker in between loses them.

RabbitMQ drops a message that reaches the same queue again without having been rejected by a consumer on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.simulation.brokers.amqp import properties, tables
from tests.simulation.brokers.amqp.messages import Message, derived
from tests.simulation.brokers.amqp.tables import Field, Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.brokers.amqp.broker import AmqpBroker
    from tests.simulation.brokers.amqp.queues import Queue
    from tests.simulation.brokers.host import Timer

REJECTED: Final = "rejected"
EXPIRED: Final = "expired"
MAXLEN: Final = "maxlen"
DELIVERY_LIMIT: Final = "delivery_limit"


class Letters:
    """The dead letters that are on their way."""

    def __init__(self, broker: AmqpBroker) -> None:
        self._broker = broker
        self._posted: list[tuple[Queue, Message, str, Callable[[bool], object] | None]] = []
        self._timer: Timer | None = None

    def __len__(self) -> int:
        return len(self._posted)

    def post(self, queue: Queue, message: Message, reason: str, done: Callable[[bool], object] | None = None) -> None:
        """Publish a message of ``queue`` that has died soon; ``done`` is told whether another queue has taken it."""
        self._posted.append((queue, message, reason, done))
        if self._timer is None:
            self._timer = self._broker.host.call_later(0.0, self.flush)

    def flush(self) -> None:
        """Publish the dead letters, and those that this makes."""
        while self._posted:
            posted, self._posted = self._posted, []
            for queue, message, reason, done in posted:
                taken = queue.vhost.dead_letter(queue, message, reason)
                if done is not None:
                    done(taken)
                if taken:
                    self._broker.counters.dead_lettered += 1
                elif done is None:
                    self._broker.dropped(reason, message)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lose(self) -> None:
        """Lose all: the broker was killed."""
        for _, message, reason, done in self._posted:
            if done is None:
                self._broker.dropped(reason, message)
        self._posted.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def letter(message: Message, reason: str, queue: str, exchange: str, key: str | None, seconds: int) -> Message:
    """Return the message that is published for a dead one.

    Args:
        reason: why it died.
        queue: name of the queue that it died in.
        exchange: dead-letter exchange.
        key: routing key of dead letters; ``None`` for the message's own keys.
        seconds: time of death since the epoch.
    """
    headers = message.headers
    copies = headers.get("CC")
    keys = [tables.text(message.keys[0]), *([] if copies is None else copies.value)]
    info: Table = {
        "reason": tables.text(reason),
        "queue": tables.text(queue),
        "time": Field("T", seconds),
        "exchange": tables.text(message.exchange),
        "routing-keys": Field("A", keys),
    }
    if message.expiration is not None:
        info["original-expiration"] = tables.text(str(message.expiration))
    headers = _with_death(headers, info)
    if key is not None:
        headers.pop("CC", None)
    raw = properties.with_headers(message.raw, headers, keep_expiration=False)
    return derived(exchange, message.keys if key is None else (key,), raw, message.body)


def _with_death(headers: Table, info: Table) -> Table:
    deaths = headers.get("x-death")
    if deaths is None or deaths.kind != "A":
        first = {f"x-first-death-{each}": info[each] for each in ("reason", "queue", "exchange")}
        death = Field("F", {"count": tables.long(1), **info})
        return tables.sort({**headers, **first, "x-death": Field("A", [death])})
    others, same = [], None
    for each in deaths.value:
        if each.kind == "F" and all(each.value.get(name) == info[name] for name in ("reason", "queue")):
            same = each.value
        else:
            others.append(each)
    if same is None:
        latest: Table = {"count": tables.long(1), **info}
    else:
        count = same.get("count", tables.long(1))
        latest = {**same, "count": Field(count.kind, count.value + 1)}
    return tables.sort({**headers, "x-death": Field("A", [Field("F", tables.sort(latest)), *others])})


def goes_in_circles(message: Message, queue: Queue) -> bool:
    """Return whether a dead letter was in ``queue`` before, and has not been rejected since."""
    deaths = message.headers.get("x-death")
    if deaths is None or deaths.kind != "A":
        return False
    for each in deaths.value:
        if each.kind != "F":
            continue
        if each.value.get("reason") == tables.text(REJECTED):
            return False
        if each.value.get("queue") == tables.text(queue.name):
            return True
    return False
