"""One query for each group. Two queries with one group would share its messages; MQTT brokers disconnect one of them.

The query that starts later ends with :class:`~messaging.errors.TakenOverError`. It is detected on one machine by a lock
file, on AMQP by an exclusive queue beside the queue of the group, and on MQTT by
:mod:`pyspark_messaging.read.takeover`. If an MQTT 5 broker reports that it gave the session to another client, the
query that connected earlier ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from messaging.errors import MessagingError, SubscriptionRefusedError, TakenOverError
from messaging.execution import Flag, start_thread
from messaging.journal.folders import lock_file
from pyspark_messaging.journal.folders import LOCK_SECONDS

if TYPE_CHECKING:
    from messaging import Messaging

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
        self._closed = Flag()
        self._is_held = False

    def acquire(self, patience: float | None = None) -> None:
        """Declare the queue; wait up to ``patience`` seconds, by default 40, for a query that is stopping.

        Raises:
            TakenOverError: another query has the queue.
            MessagingError: the broker does not answer.
        """
        name = f"{self._group}.owner"
        deadline = time.monotonic() + (QUEUE_SECONDS if patience is None else patience)
        while not self._closed.is_set():
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
                self._closed.wait(_PAUSE)
            else:
                self._is_held = True
                return

    def _ended(self, _: Exception) -> None:
        """Declare the queue again, if it was held. The broker may not know yet that the old connection is dead."""
        if self._is_held and not self._closed.is_set():
            self._is_held = False
            start_thread(self._regain, "messaging-group")

    def _regain(self) -> None:
        try:
            self.acquire(REGAIN_SECONDS)
        except TakenOverError as error:
            self._lost(error)
        except MessagingError as error:  # lost again, or closed: the next reconnect declares the queue
            logger.info("group %s: cannot tell whether another query uses it: %s", self._group, error)

    def close(self) -> None:
        """Stop trying. The broker deletes the queue with the connection."""
        self._closed.set()
