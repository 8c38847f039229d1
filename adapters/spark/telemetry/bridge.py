"""Alerts, from the broker onto the event bus of this process: whoever wants them is a typed handler."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Self

import messaging
from adapters.spark.telemetry.model import ALERT_CHANNEL, Alert
from messaging import Message
from messaging.typedevent import TypedEventBus

#: how long closing waits for handlers, seconds
_PATIENCE = 10.0
#: with such a score it is worth a handler of its own
SEVERE = 30


class AlertBridge:
    """Delivers what comes at ``alerts/#`` as :class:`Alert` events, and keeps account of them.

    Attributes:
        bus: the event bus; anybody may add handlers.
        delays: id of an alert -> seconds from its reading's arrival to this handler. Once for each: alerts may come
            twice.
        severe: ids of those with a score of at least ``SEVERE``.
        last: the one that came last.
    """

    def __init__(self, url: str) -> None:
        self.delays: dict[str, float] = {}
        self.severe: set[str] = set()
        self.last: Alert | None = None
        self._lock = threading.Lock()
        self.bus = TypedEventBus()
        self.bus.on(f"{ALERT_CHANNEL}/*", handler=self._alert, type=Alert)
        self.bus.on(f"{ALERT_CHANNEL}/*", handler=self._severe, type=Alert, filter=f"(score>={SEVERE})")
        self._messaging = messaging.connect(url)
        try:
            alerts = self._messaging.subscribe(f"{ALERT_CHANNEL}/#", Alert, qos=1)
            alerts.subscribe(self._arrived)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; what came is handled."""
        self._messaging.close()
        self.bus.close()

    def flush(self) -> None:
        """Wait until everything that came is handled."""
        self.bus.flush().result(_PATIENCE)

    def _arrived(self, message: Message) -> None:
        channel = message.context.channel
        if channel is not None:  # channels are topics: the grammar is the same
            self.bus.deliver(message.value(Alert), channel)

    def _alert(self, alert: Alert) -> None:
        """A typed handler: of whatever is published as an alert, it gets an ``Alert``."""
        with self._lock:
            if alert.id not in self.delays:
                self.delays[alert.id] = (datetime.now(UTC) - alert.received_at).total_seconds()
                self.last = alert

    def _severe(self, alert: Alert) -> None:
        """A typed handler with a filter: the bus looks into the event, so that the handler need not."""
        with self._lock:
            self.severe.add(alert.id)
