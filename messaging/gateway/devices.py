"""The states of bridged devices: mirrored at the target, and ``offline`` there while their source is unreachable.

The will of a device reaches its own broker only, and one connection has one will: that of the gateway. So the gateway
publishes the state of each device that it knows, retained, and publishes that the devices are offline when their source
has been disconnected for a time, and when it stops. When the source is back, the last known states are published again.

An empty state is how MQTT deletes a retained message: it is passed on, and the device is forgotten. A state that does
not reach the target is published again, as it is then, when the target is back.

The states are kept in memory; a restarted gateway knows a device from its next state on. Brokers deliver retained
states at once.

**Threads.** States arrive on worker threads, one at a time, and are published on worker threads, one at a time and in
order. Timers run on the engine's loop and only wake a worker.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from messaging import HandlerRegistration, Messaging, Promise
from messaging.errors import ClosedError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Flag, Serial, clock, engine, workers
from messaging.gateway.destinations import Destinations, MessageTraits
from messaging.gateway.extensions import of_source, with_prefetch
from messaging.gateway.patterns import ChannelPattern, filled
from messaging.gateway.reports import DeviceStateDTO
from messaging.gateway.settings import DeviceStateSettings
from messaging.gateway.subscriptions import Subscribing
from messaging.model import Features, Message

logger = SafeLog(__name__)

#: how long a stop waits until the last states are published, seconds
_CLOSE_TIMEOUT: Final = 3.0
#: states that wait to be published, at most; of further ones, the last of each device is published later
_WAITING: Final = 10_000
#: pause before states are published again that a connected target did not take, seconds
_RETRY: Final = 5.0


class _Device(NamedTuple):
    """A device: its last state, and how its states are published."""

    state: bytes
    offline: bytes
    traits: MessageTraits
    values: Mapping[str, str]


class DeviceStates:
    """The states of the devices of one pattern. Thread safe.

    Args:
        name: of this part of the configuration.
        settings: channels, payload and time.
        gateway: name of the gateway.
        max_hops: gateways that a state may pass.
        instances: by name.

    Attributes:
        name, settings, max_hops: see the arguments.
        subscribing: makes the subscription at the source.
    """

    def __init__(
        self,
        name: str,
        settings: DeviceStateSettings,
        gateway: str,
        max_hops: int,
        instances: Mapping[str, Messaging],
    ) -> None:
        self.name = name
        self.settings = settings
        self.max_hops = max_hops
        self.subscribing = Subscribing(f"devices '{name}'", self._subscribe)
        self._source = instances[settings.source.instance]
        self._target = target = instances[settings.target.instance]
        is_retained = Features.EXTENSION_RETAIN in target.features
        kept = settings.target.model_copy(update={"retain": "always"}) if is_retained else settings.target
        #: finds destinations on the worker that publishes, and values on that of the subscription
        self._destinations = Destinations(settings.source, kept, gateway, max_hops, target)
        self._lock = threading.Lock()  # guards the following five
        #: the devices by their channels at the target, the one that reported last at the end
        self._known: OrderedDict[str, _Device] = OrderedDict()
        #: what is to be published: a state, or with ``None`` that of the device as it is then
        self._queue: deque[tuple[str, _Device | None]] = deque()
        #: channels whose states have not reached the target
        self._unsent: set[str] = set()
        self._is_offline = self._is_closed = False
        self._has_looped = False
        self._timer: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._registration: HandlerRegistration | None = None
        self._serial = Serial(self._publish_all, lambda: self._queue)
        #: the last promise, and whether everything is published that was to be before the end
        self._last: Promise[None] | None = None
        self._emptied = Flag()

    def start(self) -> None:
        """Take states, from when the source is connected on."""
        self.subscribing.start()
        engine().call(self._arm, self._source.connection_state.value.is_up)

    def _subscribe(self) -> None:
        source, features = self.settings.source, self._source.features
        self._registration = registration = self._source.on(
            ChannelPattern(source.channel).pattern,
            self._note_device,
            **with_prefetch(of_source(source, features), source.prefetch),
        )
        self.subscribing.note_success()
        registration.closed.add_done_callback(self._note_end)
        if self._is_closed:
            registration.close()

    def _note_end(self, closed: Promise[None]) -> None:
        error = closed.exception(0)
        if error is not None:
            self.subscribing.note_failure(error)

    # --- states of devices, on a worker thread, one at a time

    def _note_device(self, message: Message) -> None:
        context = message.context
        traits = MessageTraits.of(context)._replace(correlation_id=None, retain=False, priority=None)
        if self._destinations.is_loop(traits.passed):
            if not self._has_looped:
                logger.warning(
                    "devices '%s': dropped a state of %r that has passed the gateways %s: there is a loop",
                    self.name, context.channel, ", ".join(traits.passed),
                )  # fmt: skip
            self._has_looped = True
            return
        source = context.channel or ""
        values = self._destinations.values(source)
        try:
            channel = self._destinations.template.render(values)
        except MessagingError as error:
            logger.error("devices '%s': a state of %r is dropped: %s", self.name, source, error)
            return
        device = _Device(message.payload, filled(self.settings.offline, values).encode(), traits, values)
        with self._lock:
            if self._is_closed:
                return
            if device.state:
                self._known[channel] = device
                self._known.move_to_end(channel)
                while len(self._known) > self.settings.max_devices:
                    self._unsent.discard(self._known.popitem(last=False)[0])
            else:
                self._known.pop(channel, None)
                self._unsent.discard(channel)
            if self._is_offline or len(self._queue) >= _WAITING:
                self._unsent.add(channel)  # the source has just come back, or the target is slow
                return
            self._queue.append((channel, device))
        self._serial.wake()

    # --- publishing, on a worker thread, one at a time

    def _publish_all(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    if self._is_closed:
                        self._emptied.set()
                    return
                channel, device = self._queue.popleft()
                payload = b"" if device is None else device.state
                if device is None:
                    device = self._known.get(channel)
                    if device is None:
                        continue  # forgotten meanwhile
                    payload = device.offline if self._is_offline or self._is_closed else device.state
                self._unsent.discard(channel)
            self._publish(channel, payload, device)

    def _publish(self, channel: str, payload: bytes, device: _Device) -> None:
        try:
            destination = self._destinations.find(channel, device.traits, device.values)
            promise = self._target.publisher.publish(Message(payload, destination.publishing))
        except ClosedError:
            return
        except MessagingError as error:
            self._note_failure(channel, error)
            return
        except Exception:
            logger.exception("devices '%s': the state at %r is not published", self.name, channel)
            return
        self._last = promise
        promise.add_done_callback(lambda done: self._note_outcome(channel, done))

    def _note_outcome(self, channel: str, promise: Promise[None]) -> None:
        error = promise.exception(0)
        if error is not None and not isinstance(error, ClosedError):
            self._note_failure(channel, error)

    def _note_failure(self, channel: str, error: MessagingError) -> None:
        with self._lock:
            is_repeated = not self._is_closed and channel in self._known
            if is_repeated:
                self._unsent.add(channel)
        logger.warning(
            "devices '%s': the state at %r is not published: %s%s", self.name, channel, error,
            "; trying again" if is_repeated else "",
        )  # fmt: skip
        if is_repeated:
            engine().call(self._arm_retry)

    def _arm_retry(self) -> None:
        if self._retry is None and not self._is_closed:
            self._retry = clock.call_later(engine().loop, _RETRY, workers().submit, self._retry_unsent)

    def _retry_unsent(self) -> None:
        self._retry = None
        if self._target.connection_state.value.is_up:
            self._publish_unsent()

    def _publish_unsent(self) -> None:
        with self._lock:
            self._queue.extend((channel, None) for channel in self._unsent)
        self._serial.wake()

    # --- the connections

    def note_state(self, instance: str, *, is_up: bool) -> None:
        """Note whether an instance is connected. On a worker thread, one call at a time for each instance."""
        if self._is_closed:
            return
        if instance == self.settings.source.instance:
            engine().call(self._arm, is_up)
        if instance == self.settings.target.instance and is_up:
            self._publish_unsent()

    def _arm(self, is_up: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_closed:
            return
        if is_up:
            workers().submit(self._come_back)
        elif not self._is_offline:
            self._timer = clock.call_later(engine().loop, self.settings.after, workers().submit, self._go_offline)

    def _go_offline(self) -> None:
        if self._source.connection_state.value.is_up:
            return  # it has come back this moment
        with self._lock:
            if self._is_offline or self._is_closed:
                return
            self._is_offline = True
            known = len(self._known)
            self._queue.extend((channel, None) for channel in self._known)
        logger.warning("devices '%s': the source is disconnected; %d devices are offline", self.name, known)
        self._serial.wake()

    def _come_back(self) -> None:
        with self._lock:
            if not self._is_offline or self._is_closed:
                return
            self._is_offline = False
            self._queue.extend((channel, None) for channel in self._known)
        self._serial.wake()

    def close(self) -> None:
        """Publish that the devices are offline, and take no more states. Waits for the target, for a bounded time."""
        deadline = clock.monotonic() + _CLOSE_TIMEOUT
        is_up = self._target.connection_state.value.is_up
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = self.subscribing.is_stopped = True
            if is_up and not self._is_offline:
                self._queue.extend((channel, None) for channel in self._known)
            elif not is_up:
                self._queue.clear()
        if self._registration is not None:
            self._registration.close()
        for timer in (self._timer, self._retry):
            if timer is not None:
                engine().call(timer.cancel)
        if not is_up:
            return
        self._serial.wake()
        while not self._emptied.wait(0.1) and clock.monotonic() < deadline:
            self._serial.wake()  # it was about to end when it was woken
        if self._last is not None:
            confirmed = Flag()
            self._last.listen(confirmed.set)
            confirmed.wait(max(0.0, deadline - clock.monotonic()))

    # --- state

    def report(self) -> DeviceStateDTO:
        """Return the number of devices, and whether they are offline."""
        return DeviceStateDTO(name=self.name, known=len(self._known), is_offline=self._is_offline)
