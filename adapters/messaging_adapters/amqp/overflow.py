"""The queues declared by this instance that refuse messages when they are full."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from messaging_adapters.amqp.declarations import Destination, Source

#: queues that are remembered
_MAX_QUEUES: Final = 1024


def refuses(overflow: object) -> bool:
    """Return whether a queue with this ``queueOverflow`` refuses messages when it is full."""
    return isinstance(overflow, str) and overflow.startswith("reject-publish")


def topic_pattern(binding: str) -> re.Pattern[str]:
    """Return a pattern of the routing keys, after a dot, that a binding of a topic exchange accepts."""
    words = {"*": r"\.[^.]*", "#": r"(?:\.[^.]*)*"}
    return re.compile("".join(words.get(word, rf"\.{re.escape(word)}") for word in binding.split(".")), re.DOTALL)


class RefusingQueues:
    """See the module."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}

    def declared(self, source: Source) -> None:
        """Remember a queue if it refuses messages when it is full."""
        arguments = source.queue.arguments
        if refuses(arguments.get("x-overflow")) and (len(self._sources) < _MAX_QUEUES):
            self._sources[f"{source.queue.name}\n{source.exchange.name}\n{source.bindings}"] = source

    def may_take(self, destination: Destination) -> bool:
        """Return whether a message to ``destination`` may go to one of these queues."""
        return any(_reaches(destination, source) for source in self._sources.values())


def _reaches(destination: Destination, source: Source) -> bool:
    exchange, key = destination.exchange.name, destination.routing_key
    if not exchange:
        return key == source.queue.name
    if exchange != source.exchange.name:
        return False
    kind = source.exchange.kind
    if kind == "direct":
        return key in source.bindings
    # exchanges of other types than topic may route any message to a queue that is bound to them
    return kind != "topic" or any(topic_pattern(binding).fullmatch(f".{key}") for binding in source.bindings)
