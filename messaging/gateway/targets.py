"""Targets: the instances that routes publish to, and the messages in flight that the routes of one share.

Routes of higher priority publish first: a route of lower priority gets no place in flight while one of higher priority
waits for a place.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Protocol

from messaging.model import Features, Message

if TYPE_CHECKING:
    from messaging import Messaging, Promise
    from messaging.gateway.stored import Stored

#: the protocol whose messages carry an id in an envelope
_ENVELOPED: Final = "mqtt3.1.1"


class Waiter(Protocol):
    """A route that waits for places in flight."""

    priority: int

    def wake(self) -> object:
        """Publish: there are places again. From any thread."""


class Target:
    """An instance that routes publish to. Thread safe.

    Args:
        messaging: the instance.
        places: messages in flight of all routes together.
    """

    def __init__(self, messaging: Messaging, places: int) -> None:
        self.messaging = messaging
        self._publisher = messaging.publisher
        self._carries_ids = Features.EXTENSION_MESSAGE_ID in messaging.features
        self._has_envelope = self._carries_ids and _ENVELOPED in messaging.runtime.get_runtime_dto().protocols
        self._lock = threading.Lock()  # guards the following three
        self._places = places
        self._free = places
        self._waiting: list[Waiter] = []

    # --- places in flight

    def widen(self, places: int) -> None:
        """Have at least so many places: those of the route that has most."""
        with self._lock:
            if places > self._places:
                self._free += places - self._places
                self._places = places

    def take(self, route: Waiter, wanted: int) -> int:
        """Return how many messages a route may publish now; if fewer than it wants, it is woken when there are more."""
        with self._lock:
            is_behind = any(each.priority > route.priority for each in self._waiting)
            granted = 0 if is_behind else min(wanted, self._free)
            self._free -= granted
            if granted < wanted:
                if route not in self._waiting:
                    self._wait(route)
            elif route in self._waiting:
                self._waiting.remove(route)
        return granted

    def _wait(self, route: Waiter) -> None:
        self._waiting.append(route)
        self._waiting.sort(key=lambda each: -each.priority)

    def give_back(self, route: Waiter, places: int, *, is_idle: bool) -> None:
        """Return places: messages are settled, or were not published.

        Args:
            route: the route that had them.
            places: their number.
            is_idle: whether the route wants no more now.
        """
        with self._lock:
            self._free += places
            if is_idle:
                if route in self._waiting:
                    self._waiting.remove(route)
            elif route not in self._waiting:  # routes of lower priority must not take what it is about to take again
                self._wait(route)
            first = self._waiting[0] if self._waiting and self._free > 0 else None
        if first is not None and first is not route:  # it is at work, and looks for itself
            first.wake()

    # --- publishing

    @property
    def is_up(self) -> bool:
        """Return whether the instance is connected."""
        return self.messaging.connection_state.value.is_up

    def publish(self, stored: Stored) -> Promise[None]:
        """Publish a message; the promise resolves when the target has taken it.

        Raises:
            ArgumentError, UnsupportedFeatureError: the target cannot carry it.
            OutboxFullError: the instance has no room. ClosedError: it is closed.
        """
        context, publisher = stored.destination.publishing, self._publisher
        if self._has_envelope or publisher.chain is not None:
            if self._carries_ids:  # as a part of the context: it is in the envelope, and interceptors see it
                context = context.replace(
                    extensions={**context.extensions, Features.EXTENSION_MESSAGE_ID: stored.message_id}
                )
            return publisher.publish(Message(stored.payload, context))
        plan = publisher.compile(context)
        message_id = stored.message_id if self._carries_ids else None
        return publisher.publish_checked(stored.payload, plan, plan.correlation_id, message_id=message_id)
