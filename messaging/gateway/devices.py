"""The states of bridged devices: mirrored at the target, and ``offline`` there while their source is unreachable.

The will of a device reaches its own broker only, and one connection has one will: that of the gateway. So the gateway
publishes the state of each device that it knows, retained, and publishes that the devices are offline when their source
has been disconnected for a time, and when it stops. When the source is back, the last known states are published again.

The states are kept in memory; a restarted gateway knows a device from its next state on. Brokers deliver retained
states at once.

**Threads.** States arrive on worker threads, one at a time; timers run on the engine's loop and only start a worker.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import DeadlineError, MessagingError
from messaging.execution import engine, workers
from messaging.gateway.pipeline import ChannelPattern, ChannelTemplate
from messaging.gateway.reports import DeviceStateDTO
from messaging.model import Features
from messaging.text import SafeLog

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from messaging import HandlerRegistration, Message, Messaging, Promise
    from messaging.gateway.settings import DeviceStateSettings

logger = SafeLog(__name__)

#: how long a stop waits until the last states are published, seconds
_CLOSE_TIMEOUT: Final = 3.0


class DeviceStates:
    """The states of the devices of one pattern. Thread safe.

    Args:
        name: of this part of the configuration.
        settings: channels, payload and time.
        gateway: name of the gateway.
        instances: by name.
    """

    def __init__(
        self, name: str, settings: DeviceStateSettings, gateway: str, instances: Mapping[str, Messaging]
    ) -> None:
        self.name = name
        self._settings = settings
        self._gateway = gateway
        self._source = instances[settings.source.instance]
        self._target = instances[settings.target.instance]
        self._pattern = ChannelPattern(settings.source.channel)
        self._template = ChannelTemplate(settings.target.channel)
        self._offline = settings.offline.encode()
        self._lock = threading.Lock()  # guards the following three
        #: the last state of each device by its channel at the target, the one that reported last at the end
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._is_offline = self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._registration: HandlerRegistration | None = None

    def start(self) -> None:
        """Take states, from when the source is connected on."""
        workers().submit(self._subscribe)

    def _subscribe(self) -> None:
        options: dict[str, Any] = {}
        if Features.EXTENSION_QOS in self._source.features:
            options["qos"] = self._settings.source.qos if self._settings.source.qos is not None else 1
        try:
            self._registration = self._source.on(self._pattern.pattern, self._note_device, **options)
            if self._is_closed:
                self._registration.close()
        except MessagingError as error:
            if not self._is_closed:
                logger.error("devices '%s': not subscribed: %s", self.name, error)

    def _note_device(self, message: Message) -> None:
        source = message.context.channel or ""
        values = {"channel": source, "gateway": self._gateway, **(self._pattern.match(source) or {})}
        channel = self._template.render(values)
        with self._lock:
            self._known[channel] = message.payload
            self._known.move_to_end(channel)
            while len(self._known) > self._settings.max_devices:
                self._known.popitem(last=False)
        self._publish(channel, message.payload)

    def _publish(self, channel: str, payload: bytes) -> Promise[None] | None:
        settings, features = self._settings.target, self._target.features
        options: dict[str, Any] = {}
        if Features.EXTENSION_RETAIN in features:
            options["retain"] = True
        if Features.EXTENSION_QOS in features:
            options["qos"] = settings.qos if settings.qos is not None else 1
        try:
            promise = self._target.publish(channel, payload, **options)
        except MessagingError as error:
            logger.error("devices '%s': the state at %r is not published: %s", self.name, channel, error)
            return None
        promise.add_done_callback(self._note_outcome)
        return promise

    def _note_outcome(self, promise: Promise[None]) -> None:
        error = promise.exception(0)
        if error is not None:
            logger.warning("devices '%s': a state is not published: %s", self.name, error)

    # --- the connection of the source

    def note_state(self, instance: str, *, is_up: bool) -> None:
        """Note whether an instance is connected. On a worker thread, one call at a time."""
        if instance == self._settings.source.instance and not self._is_closed:
            engine().call(self._arm, is_up)

    def _arm(self, is_up: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if is_up and self._is_offline:
            workers().submit(self._come_back)
        elif not is_up and not self._is_offline:
            self._timer = engine().loop.call_later(self._settings.after, workers().submit, self._go_offline)

    def _go_offline(self) -> None:
        with self._lock:
            if self._is_offline or self._is_closed:
                return
            self._is_offline = True
            channels = [*self._known]
        logger.warning("devices '%s': the source is away; %d devices are offline", self.name, len(channels))
        for channel in channels:
            self._publish(channel, self._offline)

    def _come_back(self) -> None:
        with self._lock:
            self._is_offline = False
            known = [*self._known.items()]
        for channel, payload in known:
            self._publish(channel, payload)

    def close(self) -> None:
        """Publish that the devices are offline, and take no more states."""
        with self._lock:
            was_offline, self._is_closed = self._is_offline, True
            channels = [*self._known]
        if self._registration is not None:
            self._registration.close()
        if was_offline or not self._target.connection_state.value.is_up:
            return
        promises = [self._publish(channel, self._offline) for channel in channels]
        last = next((each for each in reversed(promises) if each is not None), None)
        if last is not None:
            with contextlib.suppress(DeadlineError):
                last.exception(_CLOSE_TIMEOUT)

    # --- state

    def report(self) -> DeviceStateDTO:
        """Return the number of devices, and whether they are offline."""
        return DeviceStateDTO(name=self.name, known=len(self._known), is_offline=self._is_offline)
