"""The snapshots that other processes publish at a broker."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from messaging.errors import DecodeError
from messaging.errors.text import SafeLog
from messaging.execution import clock
from messaging.model import ANY_LEVEL, SEPARATOR, Features, MessageContextBuilder, check_pattern
from messaging.observability.monitor.board import FORGET
from messaging.observability.monitor.snapshot import MAX_BYTES, Snapshot, decoded

if TYPE_CHECKING:
    from collections.abc import Collection

    from messaging.instance import Messaging
    from messaging.model import Message
    from messaging.observability.monitor.plain import Masking

logger = SafeLog(__name__)

#: messages that the subscription holds
_BUFFER: Final = 256
#: processes with a snapshot that has not been taken
_MAX_WAITING: Final = 256


class Published(NamedTuple):
    """A snapshot of another process, or its end."""

    #: the channel, which identifies the process
    key: str
    #: ``None``: the process has ended
    snapshot: Snapshot | None
    #: how long ago it was taken, seconds
    age: float


class PublishedSnapshots:
    """Subscribes to the snapshots of other processes, and keeps the newest of each until it is taken. Thread safe.

    Args:
        m: the instance that subscribes.
        channel: first levels of the channels.
        masking: masks secrets once more.

    Attributes:
        invalid: number of messages that were no snapshot.
        failure: why no more snapshots arrive; ``None``: they do.
        stream: of the snapshots; its end is that of the subscription.

    Raises:
        MessagingError: the subscription is impossible.
    """

    def __init__(self, m: Messaging, channel: str, masking: Masking) -> None:
        self._masking = masking
        self._lock = threading.Lock()  # guards the following
        self._newest: dict[str, tuple[bytes, bool, float]] = {}
        self.invalid = 0
        self.failure: Exception | None = None
        pattern = check_pattern(f"{channel}{SEPARATOR}{ANY_LEVEL}")
        context = MessageContextBuilder().channel(pattern).extensions(observing(m.features, _BUFFER)).build_context()
        self.stream = m.subscription.subscribe(context)
        self.stream.subscribe(self._receive, self._fail)

    def _receive(self, message: Message) -> None:
        payload, context = message.payload, message.context
        key = context.channel or ""
        with self._lock:
            if len(payload) > MAX_BYTES or (key not in self._newest and len(self._newest) >= _MAX_WAITING):
                self.invalid += 1
                return
            is_retained = bool(context.extensions.get(Features.EXTENSION_RETAIN))
            self._newest[key] = (payload, is_retained, clock.monotonic())

    def _fail(self, error: Exception) -> None:
        self.failure = error
        logger.warning("monitor: no snapshots of other processes arrive any more: %s", error)

    def take(self) -> list[Published]:
        """Return the newest snapshot of each process that has published since the last call."""
        with self._lock:
            newest, self._newest = self._newest, {}
        found: list[Published] = []
        for key, (payload, is_retained, at) in newest.items():
            age = clock.monotonic() - at
            if not payload:
                found.append(Published(key, None, age))
                continue
            try:
                snapshot = decoded(payload, self._masking)
            except DecodeError as error:
                with self._lock:
                    self.invalid += 1
                logger.debug("monitor: a message on %r is no snapshot: %s", key, error)
                continue
            if is_retained:  # stored at some time before; the clocks of both machines may differ
                age = max(age, clock.wall() - snapshot.time)
            if age < FORGET:
                found.append(Published(key, snapshot, age))
        return found


def observing(features: Collection[str], size: int, qos: str = "0") -> dict[str, Any]:
    """Return the extensions of a subscription that only looks: it holds ``size`` messages, and holds nothing back.

    Args:
        features: of the instance.
        size: messages between the broker and the observer; older ones are dropped.
        qos: of the subscription; ``"1"`` for an instance of the application: with MQTT 3.1.1 a broker sends one packet
            for overlapping subscriptions, and QoS 0 would take the guarantee from those of the application.
    """
    wanted: dict[str, Any] = {
        Features.EXTENSION_OVERFLOW: "drop_oldest",
        Features.EXTENSION_BUFFER_SIZE: size,
        Features.EXTENSION_QOS: qos,
    }
    if qos != "0" or Features.EXTENSION_QOS not in features:
        wanted[Features.EXTENSION_AUTO_ACKNOWLEDGE] = True
    return {key: value for key, value in wanted.items() if key in features}
