"""Detection of two queries that take one MQTT session from each other, on brokers that do not report it.

A broker closes the older of two connections with one client id. An MQTT 5 broker may give the reason (0x8E); mosquitto
2.0.11 and all MQTT 3.1.1 brokers just close. A query that is disconnected three times in a row, each time soon after it
connected, opens a second connection and asks on the channel ``rx-messaging/spark/GROUP`` whether another query has its
group. Each query publishes its start time, and the query that started later ends. Nothing is published as long as
connections last.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import messaging
from messaging.errors import ConnectFailedError, ConnectionLostError, MessagingError
from messaging.execution import Flag
from pyspark_messaging.read.group_lock import taken_over

if TYPE_CHECKING:
    from messaging import Message, TakenOverError
    from messaging.connection import ConnectionState

logger = logging.getLogger(__name__)

#: number of losses in a row after which a query asks
_MAX_LOSSES: Final = 3
#: a loss counts if the connection was shorter, in seconds
_SHORT_SECONDS: Final = 60.0
#: how long a query asks, in seconds: the other query asks while it is disconnected
_ASK_SECONDS: Final = 40.0
#: pause between two questions, in seconds
_PAUSE: Final = 0.25


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
        self._closed = Flag()
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
            if self._losses >= _MAX_LOSSES and not is_asking and not self._closed.is_set():
                self._asking = threading.Thread(target=self._ask, name="messaging-takeover", daemon=True)
                self._asking.start()

    def close(self) -> None:
        """Stop asking."""
        self._closed.set()

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

    def _other_started_earlier(self, instance: messaging.Messaging) -> bool:
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
        while time.monotonic() < until and not self._closed.is_set():
            instance.publish(channel, json.dumps(self._mine)).result(_ASK_SECONDS)
            if is_later.wait(_PAUSE):
                return True
        return False


def started_earlier(payload: bytes, mine: tuple[float, str]) -> bool:
    """Return whether ``payload`` is the start time of a query that started before ``mine``."""
    try:
        started, token = json.loads(payload)
        return isinstance(started, float) and isinstance(token, str) and (started, token) < mine
    except (ValueError, TypeError, RecursionError):
        return False
