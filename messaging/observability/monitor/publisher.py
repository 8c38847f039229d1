"""Snapshots at a broker: those of this process are published, so that a monitor elsewhere receives and shows them.

One thread takes a snapshot and publishes it, every few seconds; no message of the application costs anything.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from messaging.errors import ArgumentError, ClosedError, DecodeError, MessagingError
from messaging.errors.checks import check_instance, check_optional
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Closeable, Flag, Promise, clock, seconds, start_thread
from messaging.instance import Messaging
from messaging.model import ANY_LEVEL, ANY_LEVELS, SEPARATOR, Features, MessageContextBuilder, check_name, check_pattern
from messaging.observability.monitor.plain import Masking
from messaging.observability.monitor.snapshot import FORGET, MAX_BYTES, NAME, Snapshot, SnapshotSampler, decoded
from messaging.services import ServiceRegistry

if TYPE_CHECKING:
    from messaging.model import Message

logger = SafeLog(__name__)

#: first levels of the channels of snapshots; the last level is the name of the process
CHANNEL: Final = "messaging/monitor"
#: bounds of the time between two snapshots, seconds
MIN_INTERVAL: Final = 0.1
MAX_INTERVAL: Final = 3600.0
#: a stored snapshot expires after so many intervals, where the broker can do that
_EXPIRY_INTERVALS: Final = 10.0
#: how long closing waits for the thread, and for the broker, seconds
_CLOSE_SECONDS: Final = 2.0
#: messages that the subscription holds
_BUFFER: Final = 256
#: processes with a snapshot that has not been taken
_MAX_WAITING: Final = 256


class SnapshotPublisher(Closeable):
    """Publishes the snapshots of this process to ``CHANNEL/PROCESS``. A context manager, which starts and ends it.

    ``messaging monitor URL`` shows the processes that publish at a broker. A snapshot is published at once, and
    then in intervals. Where the broker retains messages, it keeps the newest one, so that a monitor shows the process
    as soon as it starts; elsewhere the monitor shows it after ``interval``. Leaving the block removes the process from
    the monitors.

    A snapshot that cannot be published is skipped. At most one waits for the broker.

    Args:
        m: the instance that publishes.
        interval: seconds between two snapshots, 0.1 to 3600.
        services: where the reporters are; by default the registry of ``m``.
        process: name of the process: one level of a channel. By default the name of the machine and the process id.
        channel: first levels of the channel; by default ``messaging/monitor``.
        mask: further names of fields whose values are masked, see ``docs/monitor.md``.

    Raises:
        ArgumentError: an argument is not as described.

    Example::

        with messaging.connect("mqtt://broker") as m, SnapshotPublisher(m, interval=5.0):
            ...
    """

    def __init__(
        self,
        m: Messaging,
        *,
        interval: float = 5.0,
        services: ServiceRegistry | None = None,
        process: str | None = None,
        channel: str = CHANNEL,
        mask: Iterable[str] = (),
    ) -> None:
        check_instance("m", m, Messaging)
        check_optional("services", services, ServiceRegistry)
        self._m = m
        self._interval = checked_interval(interval)
        #: of the snapshots
        self.channel = checked_channel(channel, process_name() if process is None else process)
        name = self.channel.rpartition(SEPARATOR)[2]
        self._sampler = SnapshotSampler(
            m.services if services is None else services, name, self._interval, Masking(mask)
        )
        self._stop = Flag()
        self._ended = Flag()
        self._thread: threading.Thread | None = None
        self._pending: Promise[None] | None = None
        self._has_failed = False
        #: number of snapshots that were published, and that were not, because the broker took none
        self.published = 0
        self.skipped = 0

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise ClosedError("a SnapshotPublisher is entered once; make another one")
        self._thread = start_thread(self._run, "messaging-snapshots")
        return self

    def close(self) -> None:
        """Publish no more, and remove the process from the monitors; waits for at most 4 seconds. Idempotent."""
        is_first = not self._stop.is_set()
        self._stop.set()
        if self._thread is None or not is_first:
            return
        self._ended.wait(_CLOSE_SECONDS)
        try:
            self._m.publisher.publish(self._message(b"")).exception(_CLOSE_SECONDS)
        except MessagingError as error:  # closed, no connection, or on a thread that runs an event loop
            logger.debug("monitor: the last snapshot of %s was not removed: %s", self.channel, error)

    @tolerant
    def __repr__(self) -> str:
        return f"<SnapshotPublisher {self.channel!r} every {self._interval:g} s>"

    # --- on the thread

    def _run(self) -> None:
        delay = 0.0
        try:
            while not self._stop.wait(delay):
                delay = self._interval
                try:
                    self._publish()
                    self._has_failed = False
                except ClosedError:
                    return  # the instance
                except Exception as error:  # noqa: BLE001  # the thread must survive a fault of one snapshot
                    self._note_failure(error)
        finally:
            self._ended.set()

    def _publish(self) -> None:
        if self._pending is not None:
            if not self._pending.done():
                self.skipped += 1
                return
            failure, self._pending = self._pending.exception(), None
            if failure is not None:
                self.published -= 1
                self._note_failure(failure)
        most = self._m.runtime.get_runtime_dto().max_message_size
        payload = self._sampler.encode(MAX_BYTES if most is None else min(most, MAX_BYTES))
        self._pending = self._m.publisher.publish(self._message(payload))
        self._pending.add_done_callback(_note_retrieved)
        self.published += 1

    def _note_failure(self, error: Exception) -> None:
        self.skipped += 1
        report = logger.debug if self._has_failed else logger.warning
        self._has_failed = True
        report("monitor: cannot publish a snapshot to %s: %s; trying again every %g s",
               self.channel, error, self._interval)  # fmt: skip

    def _message(self, payload: bytes) -> Message:
        features = self._m.features
        wanted: dict[str, Any] = {
            Features.EXTENSION_QOS: "0",  # a lost snapshot is replaced by the next one
            Features.EXTENSION_RETAIN: True,
            Features.EXTENSION_TIME_TO_LIVE: max(60.0, _EXPIRY_INTERVALS * self._interval),
        }
        extensions = {key: value for key, value in wanted.items() if key in features}
        builder = MessageContextBuilder().channel(self.channel).content(payload).extensions(extensions)
        if Features.MESSAGE_PROPERTIES in features and payload:
            builder.content_type("application/json")
        return builder.build_message()


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


def _note_retrieved(_: object) -> None:
    """Mark the outcome of a promise as known: the publisher looks at it before the next snapshot."""


def process_name() -> str:
    """Return a name for this process: its machine and its id."""
    host = "".join(
        each if each.isascii() and (each.isalnum() or each in "-_.") else "-" for each in socket.gethostname()
    )
    return f"{host[: NAME - 20] or 'process'}-{os.getpid()}"


def checked_channel(channel: str, process: str) -> str:
    """Return the channel of the snapshots of a process.

    Raises:
        ArgumentError: the channel is no channel name, or the process is not one level of one.
    """
    check_instance("process", process, str)
    if not process or len(process) > NAME or any(each in process for each in (SEPARATOR, ANY_LEVEL, ANY_LEVELS)):
        raise ArgumentError(
            f"process must be one level of a channel, of 1 to {NAME} characters, such as 'press-1', not {process!r:.80}"
        )
    if channel == "" or not isinstance(channel, str):
        raise ArgumentError(f"channel must be the first levels of a channel, such as {CHANNEL!r}")
    return check_name(f"{channel}{SEPARATOR}{process}")


def checked_interval(interval: float) -> float:
    """Return the seconds between two snapshots; an ``ArgumentError`` says that they are no number in range."""
    found = seconds(interval, "interval")
    if not MIN_INTERVAL <= found <= MAX_INTERVAL:
        raise ArgumentError(f"interval must be {MIN_INTERVAL:g} to {MAX_INTERVAL:g} seconds, not {found:g}")
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
