"""The state of a gateway at a broker: retained, ``offline`` by its last will, and renewed as a heartbeat.

The payload is a JSON object: ``state`` (``online``, ``offline``), ``gateway``, and while online ``time`` (seconds since
the epoch), ``started``, and for each route the messages in its buffer, their age in seconds and bytes.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import MessagingError
from messaging.execution import engine, workers
from messaging.gateway.pipeline import ChannelTemplate
from messaging.model import Features
from messaging.text import SafeLog

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from messaging import Messaging, Promise
    from messaging.gateway.reports import GatewayDTO
    from messaging.gateway.settings import StatusSettings

logger = SafeLog(__name__)

#: how long closing waits for the last state, seconds
_CLOSE_TIMEOUT: Final = 2.0


class Status:
    """Publishes the state of one gateway. Heartbeats are published on worker threads.

    Args:
        settings: channel and interval.
        messaging: the instance.
        report: returns the state of the gateway.
    """

    def __init__(self, settings: StatusSettings, messaging: Messaging, report: Callable[[], GatewayDTO]) -> None:
        self._settings = settings
        self._messaging = messaging
        self._report = report
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._channel = ""

    def start(self) -> None:
        """Set the last will, and publish the first heartbeat."""
        name = self._report().name
        self._channel = ChannelTemplate(self._settings.channel).render({"gateway": name})
        features = self._messaging.features
        if Features.EXTENSION_LAST_WILL in features:
            try:
                self._publish({"state": "offline", "gateway": name}, last_will=True).add_done_callback(_note_failure)
            except MessagingError as error:  # a reload: the instance has its will
                logger.debug("gateway '%s': the last will stays as it is: %s", name, error)
        self._beat()

    def _publish(self, state: dict[str, Any], *, last_will: bool = False) -> Promise[None]:
        features = self._messaging.features
        options: dict[str, Any] = {}
        if Features.EXTENSION_RETAIN in features:
            options["retain"] = True
        if Features.EXTENSION_QOS in features:
            options["qos"] = 1
        if last_will:
            options["last_will"] = True
        if Features.MESSAGE_PROPERTIES in features:
            options["content_type"] = "application/json"
        return self._messaging.publish(self._channel, json.dumps(state).encode(), **options)

    def _beat(self) -> None:
        running = engine()

        def arm() -> None:
            if not self._is_closed:
                self._timer = running.loop.call_later(self._settings.interval, workers().submit, self._beat)

        if self._is_closed:
            return
        running.call(arm)
        if not self._messaging.connection_state.value.is_up:
            return  # it would be old when it arrives
        try:
            self._publish(online_state(self._report())).add_done_callback(_note_failure)
        except MessagingError as error:
            logger.warning("the state of the gateway is not published: %s", error)

    def close(self) -> None:
        """Publish that the gateway is offline, and stop."""
        self._is_closed = True
        if self._timer is not None:
            engine().call(self._timer.cancel)
        if not self._messaging.connection_state.value.is_up:
            return
        try:
            self._publish({"state": "offline", "gateway": self._report().name}).result(_CLOSE_TIMEOUT)
        except MessagingError as error:
            logger.warning("the last state of the gateway is not published: %s", error)


def online_state(report: GatewayDTO) -> dict[str, Any]:
    """Return the payload of a heartbeat."""
    return {
        "state": "online",
        "gateway": report.name,
        "time": round(time.time(), 3),
        "started": round(report.started, 3),
        "routes": {
            each.name: {
                "depth": each.buffer.depth,
                "age": round(each.buffer.age, 3),
                "bytes": each.buffer.bytes,
                "dead_letters": each.buffer.dead_letters,
            }
            for each in report.routes
        },
    }


def _note_failure(promise: Promise[None]) -> None:
    error = promise.exception(0)
    if error is not None:
        logger.warning("the state of the gateway is not published: %s", error)
