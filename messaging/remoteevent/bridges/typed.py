"""Typed events of a ``TypedEventBus`` and remote events, both ways (EV.4).

**Threads.** A bus calls its handlers on its own threads, one event of a handler at a time and in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from messaging.errors import ArgumentError
from messaging.errors.checks import plain_function
from messaging.remoteevent.bridges.feed import Bridge
from messaging.remoteevent.bridges.forms import as_map
from messaging.remoteevent.bridges.topics import topic_of
from messaging.remoteevent.event import RemoteEvent

if TYPE_CHECKING:
    from messaging.remoteevent.event import EventId
    from messaging.remoteevent.generator import EventGenerator
    from messaging.typedevent import TypedEventBus


@dataclass(frozen=True, kw_only=True)
class BusEvent(RemoteEvent):
    """A typed event as a remote event. Immutable.

    Attributes:
        topic: of the typed event.
        content: the typed event as nested maps.
    """

    topic: str
    content: Any = None


class TypedListener:
    """Publishes the events that it is notified of to a bus. A listener; thread safe.

    A :class:`BusEvent` becomes the typed event that it was made of. Any other event becomes the untyped event that
    :func:`~messaging.remoteevent.bridges.as_map` returns, with a topic made of source and id.

    Args:
        bus: the bus.
        topic: returns the topic of an event; ``None``: see :mod:`messaging.remoteevent.bridges.topics`.

    Raises:
        ArgumentError: ``topic`` cannot be called.
    """

    def __init__(self, bus: TypedEventBus, topic: Callable[[RemoteEvent], str] | None = None) -> None:
        if not callable(getattr(bus, "deliver_untyped", None)):
            raise ArgumentError(f"a TypedEventBus is needed, not {type(bus).__name__}")
        self._bus = bus
        self._topic = None if topic is None else plain_function(topic, "topic")

    def notify(self, event: RemoteEvent) -> None:
        """Publish an event.

        Raises:
            InvalidTopicError, InvalidEventError: it cannot be a typed event.
            PermissionDeniedError, ClosedError: the bus does not take it.
        """
        if isinstance(event, BusEvent) and isinstance(event.content, Mapping):
            topic = event.topic if self._topic is None else self._topic(event)
            self._bus.deliver_untyped(topic, event.content)
            return
        topic = topic_of(event.source, event.id) if self._topic is None else self._topic(event)
        self._bus.deliver_untyped(topic, as_map(event))


def to_typed(bus: TypedEventBus, topic: Callable[[RemoteEvent], str] | None = None) -> TypedListener:
    """Return a listener that publishes remote events to a bus; see :class:`TypedListener`."""
    return TypedListener(bus, topic)


def from_typed(
    bus: TypedEventBus,
    *topics: str,
    generator: EventGenerator | None = None,
    listener: Any = None,
    event_id: EventId | Callable[[str], EventId] | None = None,
) -> Bridge:
    """Make the typed events of a bus remote events, :class:`BusEvent`.

    Args:
        bus: the bus; also one that is connected to an event network.
        *topics: topic filters, at least one.
        generator: numbers the events and notifies its listeners; ``None``: one of the bridge itself.
        listener: gets all of these events, such as the listener of a mailbox; needed without a generator.
        event_id: id of all events, or a function that returns the id for a topic; ``None``: the topic is the id. A kind
            is declared at its first event; a generator may declare it before, so that others can register.

    Returns:
        The bridge; closing it ends it.

    Raises:
        ArgumentError, InvalidTopicError, InvalidEventError: an argument is not as described.
        ClosedError: the bus is closed.
    """
    if not topics:
        raise ArgumentError("at least one topic filter is needed")
    bridge = Bridge(generator, listener, event_id)

    def handle(topic: str, event: dict[str, Any]) -> None:
        bridge.generate(topic, BusEvent, topic=topic, content=event)

    bridge.open(lambda: bus.on(*topics, handler=handle), lambda registration: registration.unregister())
    return bridge
