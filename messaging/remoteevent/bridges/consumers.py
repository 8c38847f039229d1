"""Distributed events (RFC 214) as remote events, for a mailbox or any other listener."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from messaging.distributedeventing import CONTINUE, PushEvent
from messaging.remoteevent.bridges.feed import Bridge
from messaging.remoteevent.event import RemoteEvent

if TYPE_CHECKING:
    from messaging.distributedeventing import DistributedEventAdmin
    from messaging.remoteevent.event import EventId
    from messaging.remoteevent.generator import EventGenerator


@dataclass(frozen=True, kw_only=True)
class DistributedEvent(RemoteEvent):
    """A distributed event as a remote event. Immutable.

    Attributes:
        topic: of the event.
        content: its payload, as nested maps.
        reply_to: topic for replies, or ``None``.
        correlation_id: relates a reply to its event, or ``None``.
        framework: id of the process that sent it, as text; ``None`` if unknown.
    """

    topic: str
    content: Any = None
    reply_to: str | None = None
    correlation_id: str | None = None
    framework: str | None = None


def from_distributed(
    admin: DistributedEventAdmin,
    *topics: str,
    generator: EventGenerator | None = None,
    listener: Any = None,
    event_id: EventId | Callable[[str], EventId] | None = None,
) -> Bridge:
    """Consume distributed events, and make them remote events, :class:`DistributedEvent`.

    Args:
        admin: the admin.
        *topics: topic filters, at least one.
        generator, listener, event_id: see :func:`~messaging.remoteevent.bridges.from_typed`.

    Raises:
        ArgumentError, InvalidTopicError, InvalidEventError: an argument is not as described.
        ClosedError: the admin is closed.
    """
    bridge = Bridge(generator, listener, event_id)

    def consume(push: PushEvent[Any]) -> int:
        event = push.value
        framework = event.originating_framework
        bridge.generate(
            event.topic, DistributedEvent, topic=event.topic, content=event.data, reply_to=event.reply_to,
            correlation_id=event.correlation_id, framework=None if framework is None else str(framework),
        )  # fmt: skip
        return CONTINUE

    bridge.open(
        lambda: admin.on(*topics, handler=consume, is_whole=True), lambda registration: registration.unregister()
    )
    return bridge
