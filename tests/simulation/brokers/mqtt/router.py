"""Routing: from a published message to the sessions that get it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.simulation.brokers.mqtt.messages import Message, Outgoing
from tests.simulation.brokers.mqtt.packets import V5
from tests.simulation.brokers.mqtt.topics import SharedGroup, Subscription, SubscriptionTree

if TYPE_CHECKING:
    from tests.simulation.brokers.mqtt.settings import MqttSettings

#: Subscriptions and groups of shared subscriptions that match a topic, and whether a client may be among them twice.
_Route = tuple[tuple[Subscription | SharedGroup, ...], bool]
#: Topics whose routes are remembered.
_MAX_ROUTES: Final = 1024


class Router:
    """All subscriptions, and the routes of the topics that were published to since the last change.

    Args:
        settings: how overlapping and shared subscriptions are served.
    """

    __slots__ = ("_routes", "_settings", "_tree")

    def __init__(self, settings: MqttSettings) -> None:
        self._settings = settings
        self._tree = SubscriptionTree()
        self._routes: dict[str, _Route] = {}

    def add(self, subscription: Subscription) -> None:
        """Add a subscription, or replace the one of the same client and filter."""
        self._tree.add(subscription)
        self._routes.clear()

    def remove(self, subscription: Subscription) -> None:
        """Remove a subscription."""
        self._tree.remove(subscription)
        self._routes.clear()

    def receivers(self, topic: str) -> tuple[Subscription | SharedGroup, ...]:
        """Return the subscriptions and groups of shared subscriptions that ``topic`` matches."""
        return self._route(topic)[0]

    def deliver(self, message: Message) -> bool:
        """Offer a message to the sessions of all subscribers; return whether there are any."""
        receivers, has_duplicates = self._routes.get(message.topic) or self._route(message.topic)
        if has_duplicates:
            self._deliver_once(message, receivers)
            return True
        qos = message.qos
        for each in receivers:
            if isinstance(each, SharedGroup):
                self._offer_shared(each, message)
            elif not (each.no_local and each.session.client_id == message.source):  # [MQTT-3.8.3-3]
                retain = message.retain and each.retain_as_published
                each.session.offer(message, qos if qos < each.qos else each.qos, retain, each.identifiers)
        return bool(receivers)

    def _deliver_once(self, message: Message, receivers: tuple[Subscription | SharedGroup, ...]) -> None:
        """Give a message to subscribers; to those of MQTT 3.1.1 for the first subscription that takes it."""
        served: dict[str, None] = {}
        for each in receivers:
            member = None
            if isinstance(each, SharedGroup):
                each = member = each.next(self._settings.share_to_connected)
            session = each.session
            retain = message.retain and each.retain_as_published
            if each.no_local and session.client_id == message.source:
                continue
            if session.version != V5 and session.client_id in served and not retain:
                continue
            if session.offer(message, min(message.qos, each.qos), retain, each.identifiers, member) and not retain:
                served[session.client_id] = None

    def _offer_shared(self, group: SharedGroup, message: Message) -> None:
        member = group.next(self._settings.share_to_connected)
        retain = message.retain and member.retain_as_published
        member.session.offer(message, min(message.qos, member.qos), retain, member.identifiers, member)

    def redistribute(self, outgoing: Outgoing) -> bool:
        """Give a message of a shared subscription to another member; return whether there is one."""
        shared = outgoing.shared
        if shared is None or outgoing.qos == 0:
            return False
        for group in self._tree.match(outgoing.message.topic):
            if not isinstance(group, SharedGroup):
                continue
            first = group.members[0]
            if (first.group, first.topic_filter) == (shared.group, shared.topic_filter):
                self._offer_shared(group, outgoing.message)
                return True
        return False

    def _route(self, topic: str) -> _Route:
        """Find the subscribers of a topic, and remember them until a subscription changes."""
        found = self._tree.match(topic)
        overlapping = self._settings.overlapping
        if overlapping == "once":
            found = _merge(found)
        sessions: dict[str, None] = {}
        count = 0
        for each in found:
            for member in each.members if isinstance(each, SharedGroup) else (each,):
                sessions[member.session.client_id] = None
                count += 1
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        route = self._routes[topic] = tuple(found), overlapping == "mosquitto" and len(sessions) < count
        return route


def _merge(receivers: list[Subscription | SharedGroup]) -> list[Subscription | SharedGroup]:
    """Make one subscription of those of the same session that are not shared: highest QoS, all identifiers."""
    merged: dict[str, Subscription] = {}
    groups: list[Subscription | SharedGroup] = []
    for each in receivers:
        if isinstance(each, SharedGroup):
            groups.append(each)
            continue
        known = merged.get(each.session.client_id)
        if known is None:
            merged[each.session.client_id] = each
            continue
        merged[each.session.client_id] = Subscription(
            each.session,
            known.filter,
            max(known.qos, each.qos),
            known.no_local and each.no_local,
            known.retain_as_published or each.retain_as_published,
            known.identifiers + each.identifiers,
        )
    return groups + list(merged.values())
