"""The state of a gateway at a broker: retained, ``offline`` by its last will, and renewed as a heartbeat.

The payload is a JSON object: ``state`` (``online``, ``offline``), ``gateway``, and while online ``time`` (seconds since
the epoch), ``started``, and for each route the messages in its buffer, their age in seconds, bytes, and dead letters.
It is published when the connection is there, each time: the broker has published the last will after a loss. The will
goes with the first connection of the instance, see :func:`last_will`.

**Threads.** States are published on worker threads, one at a time; timers run on the engine's loop and only wake one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from messaging import Messaging, Promise
from messaging.connection import ConnectionState
from messaging.errors import MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Flag, Serial, clock, engine
from messaging.gateway.patterns import ChannelTemplate
from messaging.gateway.reports import GatewayDTO
from messaging.gateway.settings import StatusSettings
from messaging.model import Features

if TYPE_CHECKING:
    from reactivex.abc import DisposableBase


logger = SafeLog(__name__)

#: how long closing waits for the last state, seconds
_CLOSE_TIMEOUT: Final = 2.0


def last_will(settings: StatusSettings, gateway: str, features: frozenset[str]) -> dict[str, Any] | None:
    """Return the last will of an instance with these features, for ``connect``; ``None``: it has no wills."""
    if Features.EXTENSION_LAST_WILL not in features:
        return None
    content = json.dumps(_offline(gateway)).encode()
    return {"channel": _channel(settings, gateway), "content": content, **_options(features)}


def _channel(settings: StatusSettings, gateway: str) -> str:
    return ChannelTemplate(settings.channel).render({"gateway": gateway})


def _offline(gateway: str) -> dict[str, Any]:
    return {"state": "offline", "gateway": gateway}


def _options(features: frozenset[str]) -> dict[str, Any]:
    """Return the keywords with which states are published."""
    options: dict[str, Any] = {}
    if Features.EXTENSION_RETAIN in features:
        options["retain"] = True
    if Features.EXTENSION_QOS in features:
        options["qos"] = 1
    if Features.MESSAGE_PROPERTIES in features:
        options["content_type"] = "application/json"
    return options


class Status:
    """Publishes the state of one gateway. Thread safe.

    Args:
        settings: channel and interval.
        messaging: the instance.
        report: returns the state of the gateway.

    Attributes:
        settings: see the arguments.
    """

    def __init__(self, settings: StatusSettings, messaging: Messaging, report: Callable[[], GatewayDTO]) -> None:
        self.settings = settings
        self._messaging = messaging
        self._report = report
        self._name = report().name
        self._channel = _channel(settings, self._name)
        self._timer: asyncio.TimerHandle | None = None
        self._states: DisposableBase | None = None
        #: whether a heartbeat is due, and whether ``offline`` is
        self._is_due = self._is_closing = False
        self._ended = Flag()
        self._last: Promise[None] | None = None
        self._serial = Serial(self._work, lambda: self._is_due)

    def start(self) -> None:
        """Publish a heartbeat as soon as the instance is connected."""
        self._states = self._messaging.connection_state.subscribe(self._note_state)
        running = engine()
        running.call(self._arm)

    def _note_state(self, state: ConnectionState) -> None:
        if state.is_up:
            self._wake()

    def _arm(self) -> None:
        if not self._is_closing:
            self._timer = clock.call_later(engine().loop, self.settings.interval, self._note_time)

    def _note_time(self) -> None:
        self._arm()
        self._wake()

    def _wake(self) -> None:
        self._is_due = True
        self._serial.wake()

    # --- on a worker

    def _work(self) -> None:
        self._is_due, is_closing = False, self._is_closing
        if self._ended.is_set():
            return
        try:
            if self._messaging.connection_state.value.is_up:  # a state would be old when it arrives
                state = _offline(self._name) if is_closing else online_state(self._report())
                self._last = self._publish(state)
                self._last.add_done_callback(self._note_outcome)
        except MessagingError as error:
            logger.warning("gateway '%s': its state is not published: %s", self._name, error)
        except Exception:
            logger.exception("gateway '%s': its state is not published", self._name)
        if is_closing:
            self._ended.set()

    def _publish(self, state: dict[str, Any]) -> Promise[None]:
        options = _options(self._messaging.features)
        return self._messaging.publish(self._channel, json.dumps(state).encode(), **options)

    def _note_outcome(self, promise: Promise[None]) -> None:
        error = promise.exception(0)
        if error is not None:
            logger.warning("gateway '%s': its state is not published: %s", self._name, error)

    # --- end

    def close(self) -> None:
        """Publish that the gateway is offline, and stop. Idempotent; waits for the broker, for a bounded time."""
        if self._is_closing:
            return
        deadline = clock.monotonic() + _CLOSE_TIMEOUT
        self._is_closing = True
        if self._states is not None:
            self._states.dispose()
        if self._timer is not None:
            engine().call(self._timer.cancel)
        self._wake()
        if self._ended.wait(_CLOSE_TIMEOUT) and self._last is not None:
            confirmed = Flag()
            self._last.listen(confirmed.set)
            confirmed.wait(max(0.0, deadline - clock.monotonic()))


def online_state(report: GatewayDTO) -> dict[str, Any]:
    """Return the payload of a heartbeat."""
    return {
        "state": "online",
        "gateway": report.name,
        "time": round(clock.wall(), 3),
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
