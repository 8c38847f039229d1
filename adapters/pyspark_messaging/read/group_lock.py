"""One query for each group. Two queries with one group would share its messages; MQTT brokers disconnect one of them.

The query that starts later ends with :class:`~messaging.errors.TakenOverError`. It is detected on one machine by a lock
file, and on AMQP by an exclusive queue beside the queue of the group.

MQTT: a broker closes the older of two connections with one client id. If an MQTT 5 broker gives the reason (0x8E), the
query that connected earlier ends. mosquitto 2.0.11 and all MQTT 3.1.1 brokers just close. A query that is disconnected
three times in a row, each time soon after it connected, opens a second connection and asks on the channel
``rx-messaging/spark/GROUP`` whether another query has its group. Each query publishes its start time, and the query
that started later ends. Nothing is published as long as connections last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import messaging
from messaging.errors import (
    ConnectFailedError,
    ConnectionLostError,
    MessagingError,
    SubscriptionRefusedError,
    TakenOverError,
)
from messaging.execution import Flag, start_thread
from messaging.journal.folders import lock_file
from pyspark_messaging.journal.folders import LOCK_SECONDS

if TYPE_CHECKING:
    from messaging import Message, Messaging
    from messaging.connection import ConnectionState

logger = logging.getLogger(__name__)

#: how long a query waits for the queue of another query, in seconds. The other machine may have failed: RabbitMQ
#: detects that after two or three heartbeats of 10 seconds
QUEUE_SECONDS: Final = 40.0
#: how long a broker may take to detect that an earlier connection of this query is dead, in seconds
REGAIN_SECONDS: Final = 120.0
#: pause between two attempts to declare the queue, in seconds
_PAUSE: Final = 0.1
#: AMQP reply code: another connection has the exclusive queue
_RESOURCE_LOCKED: Final = 405
#: number of losses in a row after which a query asks
_MAX_LOSSES: Final = 3
#: a loss counts if the connection was shorter, in seconds
_SHORT_SECONDS: Final = 60.0
#: how long a query asks, in seconds: the other query asks while it is disconnected
_ASK_SECONDS: Final = 40.0
#: pause between two questions, in seconds
_ASK_PAUSE: Final = 0.25


def taken_over(group: str, how: str) -> TakenOverError:
    """Return the error of a query that loses its group to another query."""
    return TakenOverError(
        f"option 'group' ({group}): {how}: two queries with one group share its messages; set another group for each "
        "query"
    )


def lock_group(address: str, group: str) -> contextlib.ExitStack:
    """Keep other queries on this machine from using ``group`` of the broker at ``address`` until the result is closed.

    The kernel releases the lock when the process ends. Wait up to 15 seconds for a query that is stopping.

    Raises:
        TakenOverError: another query on this machine uses the group.
    """
    held = contextlib.ExitStack()
    folder = lock_folder()
    if folder is None:
        return held
    path = folder / (hashlib.sha256(f"{address}\0{group}".encode()).hexdigest()[:32] + ".lock")
    error = taken_over(group, "another query on this machine uses the group")
    held.enter_context(lock_file(path, LOCK_SECONDS, error, flags=os.O_NOFOLLOW))
    held.callback(path.unlink, missing_ok=True)  # while it is locked
    return held


def lock_folder() -> Path | None:
    """Return the folder of this user's lock files, or ``None`` where there cannot be one."""
    folder = Path(tempfile.gettempdir()) / f"rx-messaging-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(f"{folder} is not a directory of this user")
    except OSError as error:
        logger.warning("no lock files of groups: %s; queries with one group on this machine are not detected", error)
        return None
    return folder


class QueueLock:
    """An exclusive AMQP queue ``GROUP.owner``, which one connection at a time can have.

    The broker deletes the queue with the connection of ``instance``. It is declared again after a reconnect. ``lost``
    is called from another thread when another query has the queue.
    """

    def __init__(
        self, instance: Messaging, group: str, lost: Callable[[TakenOverError], None], timeout: float = 30.0
    ) -> None:
        self._instance = instance
        self._timeout = timeout
        self._group = group
        self._lost = lost
        #: set to stop trying; the broker deletes the queue with the connection
        self.closed = Flag()
        self._is_held = False

    def acquire(self, patience: float | None = None) -> None:
        """Declare the queue; wait up to ``patience`` seconds, by default 40, for a query that is stopping.

        Raises:
            TakenOverError: another query has the queue.
            MessagingError: the broker does not answer.
        """
        name = f"{self._group}.owner"
        deadline = time.monotonic() + (QUEUE_SECONDS if patience is None else patience)
        while not self.closed.is_set():
            # bound to no channel
            stream = self._instance.subscribe("amq.default", channel_extension=name, queue=name, exclusive=True)
            stream.subscribe(lambda _: None, self._ended)
            try:
                stream.ready.result(self._timeout)
            except SubscriptionRefusedError as error:
                if error.code != _RESOURCE_LOCKED:
                    logger.warning("group %s: cannot tell whether another query uses it: %s", self._group, error)
                    return
                if time.monotonic() > deadline:
                    raise taken_over(self._group, "another query consumes the queue of the group") from None
                self.closed.wait(_PAUSE)
            else:
                self._is_held = True
                return

    def _ended(self, _: Exception) -> None:
        """Declare the queue again, if it was held. The broker may not know yet that the old connection is dead."""
        if self._is_held and not self.closed.is_set():
            self._is_held = False
            start_thread(self._regain, "messaging-group")

    def _regain(self) -> None:
        try:
            self.acquire(REGAIN_SECONDS)
        except TakenOverError as error:
            self._lost(error)
        except MessagingError as error:  # lost again, or closed: the next reconnect declares the queue
            logger.info("group %s: cannot tell whether another query uses it: %s", self._group, error)


class TakeoverWatch:
    """Watches one connection for repeated short connections, the pattern of two clients with one id.

    ``lost`` is called from another thread when a query that started earlier has the group.
    """

    def __init__(
        self, url: str, settings: Mapping[str, Any], group: str, lost: Callable[[TakenOverError], None]
    ) -> None:
        self._url = url
        self._settings = settings
        self._group = group
        self._lost = lost
        #: set to stop asking
        self.closed = Flag()
        #: the start time of this query, and a token for queries that started at the same time
        self._mine = (time.time(), secrets.token_hex(8))
        # used by the observer of states, one call at a time
        self._connected_at: float | None = None
        self._losses = 0
        self._asking: threading.Thread | None = None

    def state_changed(self, state: ConnectionState) -> None:
        """Count connections that are lost soon after they were made; ask after several in a row."""
        if state.is_up:
            self._connected_at = time.monotonic()
        elif isinstance(state.cause, ConnectFailedError):
            self._losses = 0  # the broker is unreachable
        elif isinstance(state.cause, ConnectionLostError) and self._connected_at is not None:
            lasted = time.monotonic() - self._connected_at
            self._connected_at = None
            self._losses = self._losses + 1 if lasted < _SHORT_SECONDS else 0
            is_asking = self._asking is not None and self._asking.is_alive()
            if self._losses >= _MAX_LOSSES and not is_asking and not self.closed.is_set():
                self._asking = threading.Thread(target=self._ask, name="messaging-takeover", daemon=True)
                self._asking.start()

    def _ask(self) -> None:
        own = {"client_id": f"{self._group}-{self._mine[1]}", "clean_start": True, "session_expiry": 0}
        try:
            with messaging.connect(self._url, **{**self._settings, **own, "retry_connect": False}) as instance:
                if self._other_started_earlier(instance):
                    self._lost(taken_over(self._group, "a query that started earlier uses the group"))
        except MessagingError as error:
            logger.info("group %s: cannot ask whether another query uses it: %s", self._group, error)
        except Exception:
            logger.exception("group %s: cannot ask whether another query uses it", self._group)

    def _other_started_earlier(self, instance: Messaging) -> bool:
        """Return whether a query that started earlier answers."""
        channel = f"rx-messaging/spark/{self._group}"
        is_later = Flag()

        def heard(message: Message) -> None:
            if started_earlier(message.payload, self._mine):
                is_later.set()

        stream = instance.subscribe(channel)
        stream.subscribe(heard)
        stream.ready.result(_ASK_SECONDS)
        until = time.monotonic() + _ASK_SECONDS
        while time.monotonic() < until and not self.closed.is_set():
            instance.publish(channel, json.dumps(self._mine)).result(_ASK_SECONDS)
            if is_later.wait(_ASK_PAUSE):
                return True
        return False


def started_earlier(payload: bytes, mine: tuple[float, str]) -> bool:
    """Return whether ``payload`` is the start time of a query that started before ``mine``."""
    try:
        started, token = json.loads(payload)
        return isinstance(started, float) and isinstance(token, str) and (started, token) < mine
    except (ValueError, TypeError, RecursionError):
        return False
