"""Alerts from the broker, as events for the typed handlers of this process."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import messaging
from messaging import Message
from messaging.environment.signals import on_failure
from messaging.execution import Closeable
from messaging.typedevent import TypedEventBus
from pyspark_messaging.telemetry.model import ALERT_CHANNEL, Alert

#: how long closing waits for handlers, in seconds
_PATIENCE = 10.0
#: lowest score of a severe alert
SEVERE = 30


class AlertBridge(Closeable):
    """Delivers the messages of ``alerts/#`` as :class:`Alert` events, and counts them.

    Attributes:
        bus: the event bus; add handlers to it.
        delays: id of an alert -> seconds from the arrival of its reading to this handler. Duplicates are ignored.
        severe: ids of the alerts with a score of at least ``SEVERE``.
        last: the latest alert.
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
        with on_failure(self.close):
            alerts = self._messaging.subscribe(f"{ALERT_CHANNEL}/#", Alert, qos=1)
            alerts.subscribe(self._arrived)

    def close(self) -> None:
        """Disconnect, after the handlers have processed the alerts."""
        self._messaging.close()
        self.bus.close()

    def flush(self) -> None:
        """Wait until the handlers have processed all alerts."""
        self.bus.flush().result(_PATIENCE)

    def _arrived(self, message: Message) -> None:
        channel = message.context.channel
        if channel is not None:  # a channel is a valid topic
            self.bus.deliver(message.value(Alert), channel)

    def _alert(self, alert: Alert) -> None:
        """Handle every alert: the bus converts the event to an ``Alert``."""
        with self._lock:
            if alert.id not in self.delays:
                self.delays[alert.id] = (datetime.now(UTC) - alert.received_at).total_seconds()
                self.last = alert

    def _severe(self, alert: Alert) -> None:
        """Handle severe alerts: the bus applies the filter."""
        with self._lock:
            self.severe.add(alert.id)
