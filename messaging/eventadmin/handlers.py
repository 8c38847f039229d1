"""EventHandler: what is registered to get events (RFC 97 5.1.2, 6.6).

::

    services.register(EventHandler, handler, {EventConstants.EVENT_TOPIC: ["org/osgi/topic", "com/isv/*"]})
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from messaging.eventadmin.event import Event


class EventHandler(abc.ABC):
    """Gets events. A function, or a coroutine function, may be registered in its place.

    Which events, its properties say: ``event.topics`` (topic filters; all events without it) and ``event.filter``.
    Events that were posted it gets on a delivery thread, those that were sent on the thread of whoever sent them; if it
    is a coroutine function, on the event loop that it was registered on. It should be quick: others wait for it.
    """

    @abc.abstractmethod
    def handle_event(self, event: Event) -> Any:
        """Handle an event (6.6.1). What it raises is logged, and the next handler is called (5.3.1)."""
