"""The queue of outbound events of a connection: publishers never wait for it, and a worker thread sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from messaging.errors import ClosedError, InvalidEventError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Serial, Waiters, clock, workers
from messaging.typedevent.connection_terms import RelayOverflow
from messaging.typedevent.event import PublishedEvent

logger = SafeLog(__name__)

#: interval of the log for events that are not sent, seconds
_LOG_INTERVAL: Final = 1.0


class OutboundQueue:
    """The queue of outbound events, and the worker thread that sends them. Thread safe.

    Args:
        title: of the bus, for the log.
        limit: bound of the queue, events.
        overflow: policy of the full queue.
        send: sends one event.
    """

    def __init__(
        self, title: str, limit: int, overflow: RelayOverflow, send: Callable[[PublishedEvent], object]
    ) -> None:
        self._title = title
        self._limit = limit
        self._drops_oldest = overflow == "drop_oldest"
        self._send = send
        self._events: deque[PublishedEvent] = deque()
        self._serial = Serial(self._drain, lambda: self._events)
        self._is_sending = False
        self._is_dropping = False
        self._idle = Waiters()
        self._next_log = 0.0
        self.dropped = self.unfit = self.failed = 0

    def __len__(self) -> int:
        return len(self._events) + self._is_sending

    def put(self, event: PublishedEvent) -> None:
        """Queue an event; a full queue drops one. Never waits."""
        events = self._events
        if len(events) >= self._limit:
            self.dropped += 1
            if not self._is_dropping:
                self._is_dropping = True
                workers().submit(self._log_dropping)  # not here: log handlers may take any lock
            if not self._drops_oldest:
                return
            try:
                events.popleft()
            except IndexError:  # the worker took all of them just now
                self.dropped -= 1
        events.append(event)
        self._serial.wake()

    def _log_dropping(self) -> None:
        logger.error(
            "%s: %d events wait to be sent to other processes: dropping the %s until half of them are sent",
            self._title, self._limit, "oldest ones" if self._drops_oldest else "new ones",
        )  # fmt: skip

    def _drain(self) -> None:
        events = self._events
        self._is_sending = True
        try:
            while events:
                event = events.popleft()
                try:
                    self._send(event)
                except InvalidEventError as error:
                    self.unfit += 1
                    self._log(event.topic, error)
                except ClosedError:
                    self.failed += 1
                except MessagingError as error:
                    self.failed += 1
                    self._log(event.topic, error)
                except Exception:
                    self.unfit += 1
                    logger.exception("%s: cannot send an event on %r; it is dropped", self._title, event.topic)
                if self._is_dropping and len(events) <= self._limit // 2:
                    self._is_dropping = False
        finally:
            self._is_sending = False
            self._idle.wake()

    def _log(self, topic: str, error: Exception) -> None:
        now = clock.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_INTERVAL
            logger.error("%s: an event on %r is not sent to other processes: %s", self._title, topic, error)

    def wait(self, timeout: float) -> bool:
        """Wait until every event is sent; return whether that is so after ``timeout`` seconds."""
        return self._idle.wait_for(lambda: not len(self), timeout)

    def clear(self) -> int:
        """Drop the events that wait; return how many."""
        lost = len(self._events)
        self._events.clear()
        self.dropped += lost
        return lost
