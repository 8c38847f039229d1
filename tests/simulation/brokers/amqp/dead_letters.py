"""Dead letters: the headers that tell what happened to a message, and messages that go round in circles.

RabbitMQ drops a message that reaches the same queue again without having been rejected by a consumer on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.simulation.brokers.amqp import properties, tables
from tests.simulation.brokers.amqp.messages import Message, derived
from tests.simulation.brokers.amqp.tables import Field, Table

if TYPE_CHECKING:
    from tests.simulation.brokers.amqp.queues import Queue

REJECTED: Final = "rejected"
EXPIRED: Final = "expired"
MAXLEN: Final = "maxlen"
DELIVERY_LIMIT: Final = "delivery_limit"


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
