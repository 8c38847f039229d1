"""Replies that come later than their handlers return.

**Closing.** A deferred request is acknowledged, so no other responder gets it: an instance that closes answers it. It
waits for the reply for half of the time that is left for closing, and reports :class:`~messaging.errors.ClosedError`
then. If no time is left it reports that at once, and takes the time to send it.

**Threads.** Any thread adds requests and sends replies. The lock guards the requests; no code of the application runs
under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from messaging.errors import ArgumentError
from messaging.execution import Promise, clock, engine, workers
from messaging.functions import check_procedure

#: part of the time that is left for closing that is waited for replies: the rest is for sending them
_PART: Final = 0.5


class DeferredReply:
    """The result of a request handler that replies later, and takes further requests meanwhile.

    The request is acknowledged at once, so it occupies neither the concurrency of the handler nor the credit of its
    subscription while it waits. It is lost if the responder dies before it has replied. For waits that may be long:
    a promise that a handler returns by itself keeps its place until the reply is confirmed.

    Args:
        promise: its result is the reply.
        read: returns the reply of the settled promise; it raises what is reported to the requester. ``None``: the
            result of the promise. It is called on a worker thread.

    Raises:
        ArgumentError: an argument is not as described.
    """

    __slots__ = ("_read", "promise")

    def __init__(self, promise: Promise[Any], read: Callable[[Promise[Any]], Any] | None = None) -> None:
        if not isinstance(promise, Promise):
            raise ArgumentError(f"a promise of the reply is needed, not {type(promise).__name__}")
        if read is not None:
            check_procedure(read, "what reads the promise")
        self.promise = promise
        self._read = read

    def reply(self) -> Any:
        """Return the reply of the settled promise; raise what is reported to the requester."""
        return self.promise.result(0) if self._read is None else self._read(self.promise)


class Deferred(Protocol):
    """A request whose reply comes later."""

    def abandon(self) -> None:
        """Report that the reply was not ready when the instance closed. On a thread, or the loop if there is none."""


class DeferredRequests:
    """The requests of one instance whose replies come later. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        self._waiting: dict[Deferred, None] = {}  # the oldest first
        #: replies that are being put into the outbox
        self._sending = 0
        #: promise that no request is left; while the instance closes
        self._settled: Promise[None] | None = None
        #: the time to wait for replies is over
        self._is_over = False

    def __len__(self) -> int:
        """Return the number of requests without a reply."""
        return len(self._waiting)

    def add(self, request: Deferred) -> None:
        """Note a request whose reply comes later."""
        with self._lock:
            self._waiting[request] = None
            is_late = self._is_over
        if is_late:  # its handler returned while the instance closed
            engine().call(self._abandon)

    def take(self, request: Deferred) -> bool:
        """Return whether the reply of a request is to be sent now. Call :meth:`sent` after that."""
        with self._lock:
            if request not in self._waiting:
                return False
            del self._waiting[request]
            self._sending += 1
            return True

    def sent(self) -> None:
        """Note that a reply is in the outbox, or failed."""
        with self._lock:
            self._sending -= 1
        self._note_settled()

    def _note_settled(self) -> None:
        settled = self._settled
        if settled is not None and not self._waiting and not self._sending:
            settled.resolve(None)

    def finish(self, left: float) -> Promise[None] | None:
        """Have all requests answered, because the instance closes.

        Args:
            left: seconds that are left for closing.

        Returns:
            The promise that the answers are in the outbox; ``None`` if there are none.
        """
        with self._lock:
            if not self._waiting and not self._sending:
                return None
            self._settled = Promise("answer deferred requests")
        clock.call_later(engine().loop, left * _PART, self._abandon)
        self._note_settled()
        return self._settled

    def _abandon(self) -> None:
        """Answer the requests whose replies are not ready. On the loop of the engine."""
        with self._lock:
            self._is_over = True
            waiting = [*self._waiting]
        for each in waiting:
            if self.take(each):
                try:
                    workers().submit(partial(self._report, each))
                except RuntimeError:  # no thread can be started
                    self._report(each)

    def _report(self, request: Deferred) -> None:
        try:
            request.abandon()
        finally:
            self.sent()
