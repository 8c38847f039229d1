"""EventHandler: the interface of handlers in the service registry (RFC 97 5.1.2, 6.6).

::

    services.register(EventHandler, handler, {EventConstants.EVENT_TOPIC: ["org/osgi/topic", "com/isv/*"]})
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from messaging.eventadmin.event import Event


class EventHandler(abc.ABC):
    """Receives events. A function, or a coroutine function, may be registered in its place.

    Its service properties select the events: ``event.topics`` (topic filters; all events without it) and
    ``event.filter``. It receives posted events on a delivery thread and sent events on the sending thread; a coroutine
    function runs on the event loop that it was registered on. It should return quickly: other handlers wait for it.
    """

    @abc.abstractmethod
    def handle_event(self, event: Event) -> Any:
        """Handle an event (6.6.1). An exception is logged, and the next handler is called (5.3.1)."""
