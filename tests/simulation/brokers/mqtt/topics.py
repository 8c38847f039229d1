"""Topic names, topic filters, and the tree that finds the subscriptions of a topic (MQTT 5, 4.7 and 4.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.simulation.brokers.mqtt.session import Session

_SHARE: Final = "$share/"


class Subscription:
    """One topic filter of one session.

    Attributes:
        filter: as the client wrote it, ``$share/GROUP/`` included.
        topic_filter: without ``$share/GROUP/``.
        group: name of the group of a shared subscription, or ``None``.
        identifiers: the subscription identifier of MQTT 5, or nothing.
    """

    __slots__ = ("filter", "group", "identifiers", "no_local", "qos", "retain_as_published", "session", "topic_filter")

    def __init__(
        self,
        session: Session,
        name: str,
        qos: int,
        no_local: bool = False,
        retain_as_published: bool = False,
        identifiers: tuple[int, ...] = (),
    ) -> None:
        self.session = session
        self.filter = name
        self.group, self.topic_filter = split_shared(name)
        self.qos = qos
        self.no_local = no_local
        self.retain_as_published = retain_as_published
        self.identifiers = identifiers


class SharedGroup:
    """The members of a shared subscription: one topic filter, one group name.

    Attributes:
        members: the first one receives the next message, and then goes to the end.
    """

    __slots__ = ("members",)

    def __init__(self) -> None:
        self.members: list[Subscription] = []

    def next(self, prefer_connected: bool) -> Subscription:
        """Return the member whose turn it is, and move it to the end.

        Args:
            prefer_connected: pass over members without a connection while another one has one.
        """
        members = self.members
        index = 0
        if prefer_connected:
            for position, each in enumerate(members):
                if each.session.connection is not None:
                    index = position
                    break
        member = members.pop(index)
        members.append(member)
        return member


class _Node:
    __slots__ = ("children", "groups", "subscriptions")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.subscriptions: dict[str, Subscription] = {}
        self.groups: dict[str, SharedGroup] = {}


class SubscriptionTree:
    """All subscriptions, by the levels of their topic filters. Iterates in the order of subscribing."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, subscription: Subscription) -> None:
        """Add a subscription, or replace the one of the same client and filter."""
        node = self._root
        for level in subscription.topic_filter.split("/"):
            child = node.children.get(level)
            if child is None:
                child = node.children[level] = _Node()
            node = child
        client_id = subscription.session.client_id
        if subscription.group is None:
            node.subscriptions[client_id] = subscription
            return
        group = node.groups.get(subscription.group)
        if group is None:
            group = node.groups[subscription.group] = SharedGroup()
        for index, member in enumerate(group.members):
            if member.session.client_id == client_id:
                group.members[index] = subscription
                return
        group.members.append(subscription)

    def remove(self, subscription: Subscription) -> None:
        """Remove a subscription, and the parts of the tree that only it used."""
        path: list[tuple[_Node, str]] = []
        node = self._root
        for level in subscription.topic_filter.split("/"):
            path.append((node, level))
            node = node.children[level]
        if subscription.group is None:
            del node.subscriptions[subscription.session.client_id]
        else:
            group = node.groups[subscription.group]
            group.members.remove(subscription)
            if not group.members:
                del node.groups[subscription.group]
        for parent, level in reversed(path):
            child = parent.children[level]
            if child.children or child.subscriptions or child.groups:
                return
            del parent.children[level]

    def match(self, topic: str) -> list[Subscription | SharedGroup]:
        """Return the subscriptions that ``topic`` matches, then the groups of shared subscriptions.

        The order of each is that of Mosquitto: exact levels before ``+`` before ``#``, longer filters first.
        """
        found: list[_Node] = []
        levels = topic.split("/")
        last = len(levels)

        def visit(node: _Node, index: int) -> None:
            has_wildcards = index or not topic.startswith("$")  # [MQTT-4.7.2-1]
            if index < last:
                exact = node.children.get(levels[index])
                if exact is not None:
                    visit(exact, index + 1)
                if has_wildcards and (single := node.children.get("+")) is not None:
                    visit(single, index + 1)
            if has_wildcards and (rest := node.children.get("#")) is not None:
                found.append(rest)  # "a/#" matches "a", too
            if index == last:
                found.append(node)

        visit(self._root, 0)
        receivers: list[Subscription | SharedGroup] = []
        for node in found:
            receivers.extend(node.subscriptions.values())
        for node in found:
            receivers.extend(node.groups.values())
        return receivers


def split_shared(name: str) -> tuple[str | None, str]:
    """Return the group of a shared subscription, or ``None``, and the topic filter."""
    if name.startswith(_SHARE):
        group, _, topic_filter = name[len(_SHARE) :].partition("/")
        return group, topic_filter
    return None, name


def is_topic(name: str) -> bool:
    """Return whether ``name`` can be published to [MQTT-3.3.2-2], [MQTT-4.7.3-1]."""
    return bool(name) and "+" not in name and "#" not in name


def is_filter(name: str) -> bool:
    """Return whether ``name`` can be subscribed to (MQTT 5, 4.7.1 and 4.8.2)."""
    group, topic_filter = split_shared(name)
    if not topic_filter or (group is not None and (not group or "+" in group or "#" in group)):
        return False
    levels = topic_filter.split("/")
    for index, level in enumerate(levels):
        if ("#" in level and (level != "#" or index != len(levels) - 1)) or ("+" in level and level != "+"):
            return False
    return True
