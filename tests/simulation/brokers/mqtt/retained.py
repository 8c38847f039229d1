"""Retained messages, in a tree by the levels of their topics (MQTT 5, 3.3.1.3)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.simulation.brokers.mqtt.messages import Message


class _Node:
    __slots__ = ("children", "message")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.message: Message | None = None


class Retained:
    """The last retained message of each topic.

    The order in which a new subscription gets them is that of Mosquitto: level by level, and topics in the order in
    which they were first retained.
    """

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root = _Node()

    def __iter__(self) -> Iterator[Message]:
        """Iterate over all messages."""
        return _below(self._root)

    def put(self, message: Message) -> None:
        """Keep ``message`` instead of the one of the same topic."""
        node = self._root
        for level in message.topic.split("/"):
            child = node.children.get(level)
            if child is None:
                child = node.children[level] = _Node()
            node = child
        node.message = message

    def discard(self, topic: str) -> None:
        """Forget the message of ``topic``, if there is one. The place of the topic in the order is kept."""
        node = self._root
        for level in topic.split("/"):
            if level not in node.children:
                return
            node = node.children[level]
        node.message = None

    def match(self, topic_filter: str) -> list[Message]:
        """Return the messages whose topics match ``topic_filter``."""
        found: list[Message] = []
        levels = topic_filter.split("/")

        def visit(node: _Node, index: int) -> None:
            level = levels[index]
            if level == "#":
                found.extend(_below(node, is_first=not index))
                return
            if level == "+":
                chosen = [child for name, child in node.children.items() if index or not name.startswith("$")]
            else:
                chosen = [node.children[level]] if level in node.children else []
            for child in chosen:
                is_last = index == len(levels) - 1
                if not is_last:
                    visit(child, index + 1)
                if child.message is not None and (is_last or levels[index + 1 :] == ["#"]):
                    found.append(child.message)  # "a/#" matches "a", too

        visit(self._root, 0)
        return found


def _below(node: _Node, is_first: bool = False) -> Iterator[Message]:
    """Iterate over the messages below ``node``; at the first level of a filter without ``$`` topics [MQTT-4.7.2-1]."""
    for name, child in node.children.items():
        if is_first and name.startswith("$"):
            continue
        if child.message is not None:
            yield child.message
        yield from _below(child)
