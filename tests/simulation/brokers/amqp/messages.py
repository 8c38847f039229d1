"""Messages as a broker keeps them, and their places in queues."""

from __future__ import annotations

import re
from typing import Final

from tests.simulation.brokers.amqp import properties
from tests.simulation.brokers.amqp.errors import precondition_failed
from tests.simulation.brokers.amqp.frames import short
from tests.simulation.brokers.amqp.tables import TYPE_NAMES, Table

_PERSISTENT: Final = 2
#: the longest time that a queue may ask for, ms
MAX_MILLISECONDS: Final = 4_294_967_295
_INTEGER: Final = re.compile("[+-]?[0-9]+")


class Message:
    """A message, shared by the queues that it is in, and never changed.

    Args:
        exchange: that it was published to.
        key: routing key of the publish.
        raw: properties, flags and values as on the wire.
        user: that has published it; ``None`` for the broker itself.

    Attributes:
        keys: the routing key, and those of the headers CC and BCC.
        route: exchange and routing key as on the wire.
        expiration: its own time to live, ms; ``None`` if it has none.

    Raises:
        ValueError, IndexError, struct.error: the properties are malformed.
        AmqpError: a property has a value that the broker refuses.
    """

    __slots__ = ("body", "exchange", "expiration", "keys", "persistent", "priority", "raw", "reply_to", "route")

    def __init__(self, exchange: str, key: str, route: bytes, raw: bytes, body: bytes, user: bytes | None) -> None:
        mode, self.priority, self.reply_to, expiration, user_id, at = properties.scan(raw)
        if user_id is not None and user is not None and user_id != user:
            names = [each.decode("utf-8", "replace") for each in (user_id, user)]
            raise precondition_failed(f"user_id property set to '{names[0]}' but authenticated user was '{names[1]}'")
        self.exchange = exchange
        self.route = route
        self.raw = raw
        self.body = body
        self.persistent = mode == _PERSISTENT
        self.expiration = None if expiration is None else _milliseconds(expiration)
        self.keys: tuple[str, ...] = (key,)
        if at and b"CC" in raw:
            self._route_copies(key)

    def _route_copies(self, key: str) -> None:
        """Take the routing keys of the headers CC and BCC, and remove the latter."""
        headers = properties.headers(self.raw)
        keys = [key]
        for name in ("CC", "BCC"):
            field = headers.get(name)
            if field is None:
                continue
            if field.kind != "A":
                kind = TYPE_NAMES[field.kind]
                raise precondition_failed(f'invalid message: {{unacceptable_type_in_header,"{name}",{kind}}}')
            keys += [each.value.decode("utf-8", "surrogateescape") for each in field.value if each.kind == "S"]
        self.keys = tuple(keys)
        if headers.pop("BCC", None) is not None:
            self.raw = properties.with_headers(self.raw, headers)

    @property
    def headers(self) -> Table:
        """Return the headers, decoded anew at each call."""
        return properties.headers(self.raw)


def derived(exchange: str, keys: tuple[str, ...], raw: bytes, body: bytes) -> Message:
    """Return the message that the broker publishes itself when it dead-letters one."""
    message = Message(exchange, keys[0], short(exchange) + short(keys[0]), raw, body, None)
    message.keys = keys
    return message


def _milliseconds(expiration: bytes) -> int:
    text = expiration.decode("latin-1")
    found = _INTEGER.match(text)
    if found is None:
        raise precondition_failed(f"invalid expiration '{text}': no_integer")
    if found.end() < len(text):
        raise precondition_failed(f"invalid expiration '{text}': {{leftover_string,\"{text[found.end() :]}\"}}")
    value = int(text)
    if value < 0:
        raise precondition_failed(f"invalid expiration '{text}': {{value_negative,{value}}}")
    return value


class Entry:
    """The place of a message in a queue, ready or unacknowledged.

    Attributes:
        position: rises in the order of the queue.
        redelivered: whether it was delivered before.
        count: earlier deliveries that a quorum queue counts.
        expires: virtual time, seconds; ``None`` for never.
        is_synced: whether it survives a kill of the broker.
    """

    __slots__ = ("count", "expires", "is_synced", "message", "position", "redelivered")

    def __init__(self, message: Message, position: int, expires: float | None) -> None:
        self.message = message
        self.position = position
        self.redelivered = False
        self.count = 0
        self.expires = expires
        self.is_synced = False
