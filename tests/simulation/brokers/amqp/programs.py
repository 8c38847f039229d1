"""Random programs of clients, step by step: the grammar of the comparison with a real RabbitMQ.

A step is chosen from what the clients know so far: their channels, consumers and unacknowledged deliveries. Some steps
are wrong on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from pamqp import commands
from pamqp.base import Frame

from tests.simulation.brokers.amqp import properties, tables
from tests.simulation.brokers.amqp.frames import short
from tests.simulation.brokers.amqp.tables import Field, Table, text
from tests.simulation.brokers.amqp.views import ChannelView, Publish, Step, View
from tests.simulation.brokers.amqp.virtual_host import REPLY_TO

_KEYS: Final = ("a", "a.b", "a.b.c", "b", "", "a..b")
_BINDING_KEYS: Final = ("a", "a.*", "a.#", "#", "*.b", "#.c", "b", "", "*", "a.b")
_TAGS: Final = ("t0", "t1", "t2", "t3")
_KINDS: Final = ("direct", "fanout", "topic", "headers")
_HEADERS: Final[tuple[Table, ...]] = (
    {"h": text("1")},
    {"h": text("2"), "g": Field("I", 5)},
    {"g": Field("I", 5)},
    {"g": Field("l", 5), "x-h": text("1")},
    {"d": Field("d", 1.5), "n": Field("V", None), "t": Field("t", True)},
)


class Program:
    """Chooses the steps of one program.

    Args:
        prefix: of the names of queues and exchanges.
    """

    def __init__(self, chance: random.Random, prefix: str) -> None:
        self._chance = chance
        #: those that the clients have named
        self._named = [f"{prefix}q{index}" for index in range(chance.randint(2, 4))]
        self.view = View(queues=[*self._named])
        self.exchanges = [f"{prefix}x{index}" for index in range(chance.randint(1, 3))]
        self._connection_count = chance.choice((1, 2, 2, 3))
        self._next_connection = 0
        self._count = 0
        #: the declarations of queues so far
        self._declared: list[dict[str, Any]] = []
        #: programs about quorum queues have few of the other kinds
        self._quorum = chance.choice((0.1, 0.1, 0.6))
        #: see :meth:`_declare` about the time to live in quorum queues
        self._soon = chance.choice(("0", "60000"))
        if self._soon == "0":
            self._quorum = 0.0
        #: what a program begins with, mostly
        self._setup: list[Callable[[int, int], Step]] = [
            *(lambda connection, channel, name=name: self._declare(connection, channel, name) for name in self._named),
            *(lambda connection, channel, name=name: self._exchange_declare(connection, channel, name)
              for name in self.exchanges),
            *[self._bind] * chance.randint(0, 4),
        ]  # fmt: skip
        self._choices: list[tuple[float, Callable[[int, int], Step | None]]] = [
            (9.0, self._publish),
            (1.5, self._declare_queue),
            (0.8, self._declare_exchange),
            (2.5, self._bind),
            (3.5, self._consume),
            (7.0, self._settle),
            (1.5, self._get),
            (1.0, self._qos),
            (1.0, self._cancel),
            (0.7, self._unbind),
            (0.7, self._exchange_bind),
            (0.4, self._purge),
            (0.5, self._delete_queue),
            (0.3, self._delete_exchange),
            (0.8, self._select),
            (0.4, self._recover),
            (0.6, self._close_channel),
            (0.3, self._close_connection),
            (0.4, self._drop),
            (0.4, self._replies),
            (0.3, self._passive),
            (0.12, self._wrong),
        ]

    def step(self) -> Step:
        """Return the next step."""
        chance, view = self._chance, self.view
        if not view.connections or (len(view.connections) < self._connection_count and chance.random() < 0.3):
            number = self._next_connection
            self._next_connection += 1
            return Step("connect", number)
        connection = chance.choice([*view.connections])
        channels = view.connections[connection]
        if not channels or (len(channels) < 3 and chance.random() < 0.1):
            number = next(number for number in range(1, 9) if number not in channels)
            return self._call(connection, number, commands.Channel.Open)
        if self._setup and self._is(0.9):
            return self._setup.pop(0)(connection, chance.choice([*channels]))
        while True:
            (_, choose), = chance.choices(self._choices, [weight for weight, _ in self._choices])  # fmt: skip
            found = choose(connection, chance.choice([*channels]))
            if found is not None:
                return found

    def _call(self, connection: int, channel: int, method: type[Frame], **values: Any) -> Step:
        is_nameless = method is commands.Queue.Declare and not values["queue"]
        if (
            not is_nameless
            and "nowait" in method.__slots__
            and method not in (commands.Basic.Consume, commands.Confirm.Select)
            and self._is(0.03)
        ):
            values["nowait"] = True
        return Step("call", connection, channel, method, values)

    def _channel(self, connection: int, channel: int) -> ChannelView:
        return self.view.connections[connection][channel]

    def _is(self, probability: float) -> bool:
        return self._chance.random() < probability

    def _queue(self) -> str:
        return "" if self._is(0.05) else self._chance.choice(self.view.queues)

    def _exchange(self) -> str:
        if self._is(0.15):
            return self._chance.choice(("amq.topic", "amq.direct", "amq.fanout", "amq.headers", "amq.match", ""))
        return self._chance.choice(self.exchanges)

    # --- messages

    def _publish(self, connection: int, channel: int) -> Step:
        messages = [self._message(connection, channel) for _ in range(self._chance.choice((1, 1, 1, 2, 4)))]
        return Step("publish", connection, channel, messages=messages)

    def _message(self, connection: int, channel: int) -> Publish:
        chance = self._chance
        self._count += 1
        values: dict[int, bytes] = {}
        if self._is(0.5):
            values[properties.DELIVERY_MODE] = bytes([chance.choice((1, 2, 2))])
        if self._is(0.2):
            values[properties.PRIORITY] = bytes([chance.choice((0, 1, 3, 9, 200))])
        if self._is(0.12):
            values[properties.EXPIRATION] = short(chance.choice((self._soon, "60000", "60000", "x")))
        if self._is(0.3):
            values[properties.CORRELATION_ID] = short("some id")
        if self._is(0.05):
            values[properties.USER_ID] = short(chance.choice(("guest", "guest", "other")))
        table: Table = dict(chance.choice(_HEADERS)) if self._is(0.3) else {}
        if self._is(0.06):
            table[chance.choice(("CC", "BCC"))] = Field("A", [text(chance.choice((*_KEYS, *self._named)))])
        if table:
            values[properties.HEADERS] = tables.write_table(table)
        if self._is(0.05) and self._channel(connection, channel).has_replies:
            values[properties.REPLY_TO] = short(REPLY_TO)
        raw = properties.join(values)
        body = f"m{self._count}".encode()
        if self.view.addresses and self._is(0.15):
            return Publish("", chance.choice(self.view.addresses), raw, body, self._is(0.2))
        if self._is(0.5):
            return Publish("", chance.choice(self.view.queues), raw, body, self._is(0.2))
        return Publish(self._exchange(), chance.choice(_KEYS), raw, body, self._is(0.2))

    def _settle(self, connection: int, channel: int) -> Step | None:
        chance, view = self._chance, self._channel(connection, channel)
        if not view.unacked:
            if not self._is(0.02):
                return None
            tag = chance.choice((0, 1, 99))
        else:
            tag = chance.choice((view.unacked[0], view.unacked[0], chance.choice(view.unacked)))
            if self._is(0.02):
                tag = chance.choice((0, 99))
        multiple = self._is(0.25)
        if multiple and self._is(0.2):
            tag = 0
        how = chance.choice(("ack", "ack", "nack", "nack", "reject"))
        if how == "ack":
            return self._call(connection, channel, commands.Basic.Ack, delivery_tag=tag, multiple=multiple)
        requeue = self._is(0.6)
        if how == "reject":
            return self._call(connection, channel, commands.Basic.Reject, delivery_tag=tag, requeue=requeue)
        return self._call(
            connection, channel, commands.Basic.Nack, delivery_tag=tag, multiple=multiple, requeue=requeue
        )

    def _get(self, connection: int, channel: int) -> Step:
        return self._call(connection, channel, commands.Basic.Get, queue=self._queue(), no_ack=self._is(0.3))

    def _recover(self, connection: int, channel: int) -> Step:
        return self._call(connection, channel, commands.Basic.Recover, requeue=self._is(0.97))

    def _select(self, connection: int, channel: int) -> Step:
        return self._call(connection, channel, commands.Confirm.Select)

    # --- consumers

    def _qos(self, connection: int, channel: int) -> Step:
        count = self._chance.choice((0, 1, 2, 3, 10))
        return self._call(connection, channel, commands.Basic.Qos, prefetch_count=count, global_=self._is(0.2))

    def _consume(self, connection: int, channel: int) -> Step | None:
        view = self._channel(connection, channel)
        tag = self._chance.choice(_TAGS)
        if tag in view.consumers and not self._is(0.03):
            return None
        given: Table = {"x-priority": Field("I", self._chance.choice((-1, 1, 5)))} if self._is(0.2) else {}
        return self._call(
            connection, channel, commands.Basic.Consume, queue=self._queue(), consumer_tag=tag,
            no_ack=self._is(0.25), exclusive=self._is(0.08), arguments=given,
        )  # fmt: skip

    def _cancel(self, connection: int, channel: int) -> Step:
        view = self._channel(connection, channel)
        tag = self._chance.choice(view.consumers) if view.consumers and self._is(0.9) else "none"
        return self._call(connection, channel, commands.Basic.Cancel, consumer_tag=tag)

    def _replies(self, connection: int, channel: int) -> Step:
        view = self._channel(connection, channel)
        if view.has_replies and self._is(0.5):
            return self._call(connection, channel, commands.Basic.Cancel, consumer_tag="replies")
        return self._call(
            connection, channel, commands.Basic.Consume, queue=REPLY_TO, consumer_tag="replies", no_ack=self._is(0.95)
        )

    # --- declarations

    def _declare_queue(self, connection: int, channel: int) -> Step:
        if self._declared and self._is(0.5):
            values = self._chance.choice(self._declared)
            return self._call(connection, channel, commands.Queue.Declare, **values)
        return self._declare(connection, channel, self._chance.choice(self.view.queues))

    def _declare(self, connection: int, channel: int, name: str) -> Step:
        chance = self._chance
        given: Table = {}
        durable, exclusive, auto_delete = self._is(0.5), self._is(0.1), self._is(0.15)
        if self._is(self._quorum):
            given["x-queue-type"] = text("quorum")
            if self._is(0.97):
                durable, exclusive, auto_delete = True, False, False
            if self._is(0.3):
                given["x-delivery-limit"] = Field("I", chance.choice((0, 1, 2)))
        elif self._is(0.05):
            name = ""
        if self._is(0.25):
            given["x-max-length"] = Field("I", chance.choice((0, 1, 2, 3, 6)))
            if self._is(0.4):
                ways = ("drop-head", "reject-publish", "reject-publish-dlx")
                given["x-overflow"] = text(chance.choice(ways[:2] if "x-queue-type" in given else ways))
        if self._is(0.05):
            given["x-max-length-bytes"] = Field("I", chance.choice((3, 5, 8)))
        if self._is(0.15):
            # a quorum queue applies its commands later, when a message may have expired or not
            times = (60_000, 600_000) if "x-queue-type" in given else (0, 60_000, 600_000)
            given["x-message-ttl"] = Field("I", chance.choice(times))
        if self._is(0.35):
            given["x-dead-letter-exchange"] = text(chance.choice((*self.exchanges, "", "amq.fanout")))
            if self._is(0.5):
                given["x-dead-letter-routing-key"] = text(chance.choice((*self._named, "a", "a.b")))
        if self._is(0.15):
            given["x-max-priority"] = Field("I", chance.choice((0, 3, 9)))
        if self._is(0.1):
            given["x-single-active-consumer"] = Field("t", self._is(0.9))
        if self._is(0.02):
            given["x-expires"] = Field("I", chance.choice((0, -1)))
        if self._is(0.02):
            given["x-overflow"] = chance.choice((text("nonsense"), Field("I", 1)))
        step = self._call(
            connection, channel, commands.Queue.Declare, queue=name, durable=durable, exclusive=exclusive,
            auto_delete=auto_delete, arguments=given,
        )  # fmt: skip
        self._declared.append(step.values)
        return step

    def _passive(self, connection: int, channel: int) -> Step:
        if self._is(0.3):
            return self._call(
                connection, channel, commands.Exchange.Declare, exchange=self._exchange(), exchange_type="direct",
                passive=True,
            )  # fmt: skip
        return self._call(connection, channel, commands.Queue.Declare, queue=self._queue(), passive=True)

    def _declare_exchange(self, connection: int, channel: int) -> Step:
        return self._exchange_declare(connection, channel, self._chance.choice(self.exchanges))

    def _exchange_declare(self, connection: int, channel: int, name: str) -> Step:
        chance = self._chance
        given: Table = {"alternate-exchange": text(chance.choice(self.exchanges))} if self._is(0.2) else {}
        if self._is(0.03):
            name = chance.choice(("amq.topic", "amq.new", ""))
        return self._call(
            connection, channel, commands.Exchange.Declare, exchange=name, exchange_type=chance.choice(_KINDS),
            durable=self._is(0.3), auto_delete=self._is(0.15), internal=self._is(0.08), arguments=given,
        )  # fmt: skip

    def _binding(self) -> dict[str, Any]:
        given: Table = {}
        if self._is(0.3):
            given = dict(self._chance.choice(_HEADERS))
            if self._is(0.8):
                matches = ("all", "any", "all-with-x", "any-with-x", "nonsense" if self._is(0.1) else "any")
                given["x-match"] = text(self._chance.choice(matches))
        return {"routing_key": self._chance.choice(_BINDING_KEYS), "arguments": given}

    def _bind(self, connection: int, channel: int) -> Step:
        queue, exchange = self._queue(), self._exchange()
        return self._call(connection, channel, commands.Queue.Bind, queue=queue, exchange=exchange, **self._binding())

    def _unbind(self, connection: int, channel: int) -> Step:
        queue, exchange = self._queue(), self._exchange()
        return self._call(connection, channel, commands.Queue.Unbind, queue=queue, exchange=exchange, **self._binding())

    def _exchange_bind(self, connection: int, channel: int) -> Step:
        method = commands.Exchange.Bind if self._is(0.7) else commands.Exchange.Unbind
        source, destination = self._exchange(), self._exchange()
        if source.startswith("amq.") and destination.startswith("amq."):
            source = self._chance.choice(self.exchanges)  # nothing would end the binding
        return self._call(connection, channel, method, source=source, destination=destination, **self._binding())

    def _purge(self, connection: int, channel: int) -> Step:
        return self._call(connection, channel, commands.Queue.Purge, queue=self._queue())

    def _delete_queue(self, connection: int, channel: int) -> Step:
        return self._call(
            connection, channel, commands.Queue.Delete, queue=self._queue(), if_unused=self._is(0.3),
            if_empty=self._is(0.3),
        )  # fmt: skip

    def _delete_exchange(self, connection: int, channel: int) -> Step:
        return self._call(
            connection, channel, commands.Exchange.Delete, exchange=self._exchange(), if_unused=self._is(0.4)
        )

    # --- ends

    def _close_channel(self, connection: int, channel: int) -> Step:
        return self._call(connection, channel, commands.Channel.Close, reply_code=200, reply_text="done")

    def _close_connection(self, connection: int, _: int) -> Step:
        return self._call(connection, 0, commands.Connection.Close, reply_code=200, reply_text="done")

    def _drop(self, connection: int, _: int) -> Step:
        return Step("drop", connection)

    def _wrong(self, connection: int, channel: int) -> Step:
        chance = self._chance
        call = self._call
        return chance.choice(
            (
                call(connection, channel, commands.Channel.Flow, active=self._is(0.5)),
                call(connection, channel, commands.Channel.Open),
                call(connection, 7, commands.Basic.Qos, prefetch_count=1),
                call(connection, channel, commands.Basic.Qos, prefetch_size=1),
                call(
                    connection, channel, commands.Exchange.Declare, exchange=self.exchanges[0], exchange_type="nonsense"
                ),
                call(connection, channel, commands.Queue.Declare, queue="amq.mine"),
                Step("publish", connection, channel, messages=[Publish("", "a", b"\0\0", b"now", immediate=True)]),
            )
        )
