"""The requests of an instance that wait for their replies (RFC 5.7.2).

::

    request() --pending, outbox--> broker --> responder
    (caller)                                     |
    promise  <--inbox.deliver()-- broker  <------+
    (anywhere)  (loop)

**Threads.** ``request`` runs on the caller: it enters the request into an inbox, then its message into the outbox.
Everything else runs on the engine's loop. ``OpenRequests.open`` is written by both, without a lock, one atomic
operation of a dict at a time. The side that removes a request from ``open`` settles it, and no other side does.

See :mod:`messaging.replyto.inboxes` for lost connections.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from messaging.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    MessagingError,
    OutcomeUnknownError,
    ReplyError,
    TooManyRequestsError,
)
from messaging.errors.text import SafeLog
from messaging.execution import Deadlines, clock
from messaging.replyto.inboxes import ReplyInbox, ReplyInboxes, Request, RequestPublication

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.model import Incoming, Message, PublishPlan
    from messaging.publishing import MessagePublisher

logger = SafeLog(__name__)

#: settled requests remembered, to tell late and duplicate replies from foreign ones
_REMEMBERED: Final = 4096
#: bytes of a generated correlation id: unguessable and unique
_CORRELATION_BYTES: Final = 16


class RequestPlan(NamedTuple):
    """The values that all requests with one context share; kept in the publish plan of the context."""

    #: its reply channel is replaced if each request has one of its own
    message: PublishPlan
    #: named by the request; ``None`` if one is generated
    correlation_id: str | None
    #: whether the request names its reply channel, instead of using the instance's own inbox
    is_given: bool
    #: first levels of the generated reply channels, if each request has one of its own
    individual: str | None


def new_correlation_id() -> str:
    """Return a correlation id that no other request has, and that no other client can guess."""
    return secrets.token_hex(_CORRELATION_BYTES)


@dataclass(slots=True)
class RequestCounters:
    """Outcomes of an instance's requests, and of the messages on its reply channels. Written on the loop."""

    answered: int = 0
    #: replies that report a failure of the handler
    faults: int = 0
    #: requests that failed otherwise
    failed: int = 0
    #: replies that came after their request had failed
    late: int = 0
    #: replies beyond the first
    duplicate: int = 0
    #: messages on a reply channel that belong to no request of this instance
    foreign: int = 0


class OpenRequests:
    """All requests of one instance. See the module for threads."""

    def __init__(self, connection: Connection, publisher: MessagePublisher) -> None:
        self.connection = connection
        self.counters = RequestCounters()
        #: requests that are not settled, the oldest first; see the module
        self.open: dict[Request[Any], None] = {}
        self.inboxes = ReplyInboxes(self, connection, publisher)
        self._outbox = publisher.outbox
        self._timeout = connection.settings.timeout
        self._limit = connection.settings.max_pending_requests
        #: guards the limit; reentrant for signal handlers. The loop does not take it.
        self._lock = threading.RLock()
        #: (reply channel that a request names, correlation id) -> the request; written by any thread, one operation at
        #: a time
        self._reserved: dict[tuple[str, str], object] = {}
        self._deadlines = Deadlines(connection.engine, connection.settings.timeout, self._expire)
        #: correlation id of settled requests, the oldest first -> whether by a reply; on the loop
        self._past: dict[str, bool] = {}

    @property
    def pending(self) -> int:
        """The number of requests that wait for their replies."""
        return len(self.open)

    # --- on the caller

    def request(self, payload: bytes, plan: RequestPlan, model: Any = None) -> Request[Any]:
        """Send a request.

        Args:
            payload: of its message.
            plan: of its context.
            model: for ``Request.result``.

        Raises:
            TooManyRequestsError, ClosedError, OutboxFullError: it was not sent.
            ArgumentError: a request with this correlation id waits on this reply channel.
        """
        connection = self.connection
        self.refuse_closed()
        message, correlation_id, given, individual = plan
        if correlation_id is None:
            correlation_id = new_correlation_id()
        if individual is not None:
            message = message.replace(reply_to_channel=f"{individual}/{correlation_id}")
        timeout = message.options.timeout
        if timeout is None:
            timeout = self._timeout
        request: Request[Any] = Request(self, correlation_id, clock.monotonic() + timeout, model)
        publication = RequestPublication(self._outbox, payload, message, request.deadline)
        publication.correlation_id = correlation_id
        publication.requester = request
        request.publication = publication
        try:
            with self._lock:
                if len(self.open) >= self._limit:
                    raise TooManyRequestsError(
                        f"{request.what}: {self._limit} requests wait for their replies already; "
                        f"await earlier ones first, or raise max_pending_requests"
                    )
                self.open[request] = None
            self._deadlines.watch(timeout)
            if given:
                self.reserve(message.reply_to_channel or "", correlation_id, request)
                connection.engine.call(self.inboxes.start_given, request)
            else:
                while not self._start(request, self.inboxes.own_inbox()):
                    self.refuse_closed()
        except BaseException:
            if self._claim(request):  # otherwise it was settled meanwhile, and removed
                self._remove(request)
            request.was_retrieved = True
            if given:  # an interrupt may have come after it was entered
                connection.engine.call(self.inboxes.end_unused, request)
            raise
        return request

    def refuse_closed(self) -> None:
        """Refuse requests of a closed instance. From any thread.

        Raises:
            ClosedError: the instance is closed, or closing.
        """
        connection = self.connection
        if connection.endings.is_closing or connection.states.is_closed:
            raise ClosedError(f"the instance {connection.adapter.name!r} is closed")

    def _claim(self, request: Request[Any]) -> bool:
        """Remove a request from the open ones; return ``False`` if it was removed before. From any thread."""
        try:
            del self.open[request]
        except KeyError:
            return False
        return True

    def reserve(self, reply_channel: str, correlation_id: str, owner: object) -> None:
        """Reserve a correlation id on a reply channel that requests name, for ``owner`` alone.

        From any thread; :meth:`release` ends it.

        Raises:
            ArgumentError: another request waits there with this id.
        """
        if self._reserved.setdefault((reply_channel, correlation_id), owner) is not owner:
            raise ArgumentError(
                f"correlation id {correlation_id!r}: another request waits for its reply on {reply_channel!r} with it; "
                f"give each request an id of its own, or await the other one first"
            )

    def release(self, reply_channel: str, correlation_id: str, owner: object) -> None:
        """Undo :meth:`reserve`, if ``owner`` did it. From any thread; idempotent."""
        if self._reserved.get((reply_channel, correlation_id)) is owner:
            self._reserved.pop((reply_channel, correlation_id), None)

    def _remove(self, request: Request[Any]) -> None:
        """Remove a request from its inbox. From any thread."""
        inbox = request.inbox
        if inbox is not None:
            inbox.early.pop(request, None)
            if inbox.pending.get(request.correlation_id) is request:
                del inbox.pending[request.correlation_id]
        if self._reserved:  # last: the next request with this id finds its place in the inbox free
            self.release(request.publication.plan.reply_to_channel or "", request.correlation_id, request)

    def _start(self, request: Request[Any], inbox: ReplyInbox) -> bool:
        """Enter a request and publish it, or have it published once its inbox is subscribed to. On the caller.

        Returns:
            ``False`` if the inbox has ended meanwhile: the request needs another one.
        """
        self.inboxes.enter(request, inbox)
        if inbox.ended:
            self._remove(request)
            return request not in self.open
        if inbox.is_open and not inbox.early and not self._outbox.is_accepting:
            self._outbox.put(request.publication)
        else:
            inbox.early[request] = None
            self.connection.engine.call(self.inboxes.publish_early, inbox)
        if request not in self.open:  # settled before it was entered: it is still in the inbox
            self._remove(request)
        return True

    # --- on the loop

    def answered(self, request: Request[Any], message: Message) -> None:
        """Resolve a request with its reply."""
        if self._claim(request):
            self.counters.answered += 1
            self._leave(request, answered=True)
            self._confirm(request)
            request.resolve(message)

    def faulted(self, request: Request[Any], error: ReplyError) -> None:
        """Fail a request: its reply says that the handler failed."""
        if self._claim(request):
            self.counters.faults += 1
            self._leave(request, answered=True)
            self._confirm(request)
            request.reject(error)

    @staticmethod
    def _confirm(request: Request[Any]) -> None:
        """Confirm the message of an answered request: the broker has it, and it must not be sent again."""
        publication = request.publication
        if publication.was_sent:
            publication.confirm()
        if publication.settled:
            # It cannot fail any more. Without this reference no garbage collection is needed to free the two.
            del publication.requester

    def fail(self, request: Request[Any], error: MessagingError) -> None:
        """Fail a request, unless it is settled; its message is not sent any more."""
        if self._claim(request):
            self.counters.failed += 1
            self._leave(request, answered=False)
            request.reject(error)
            self._outbox.fail(request.publication, error)

    def _leave(self, request: Request[Any], *, answered: bool) -> None:
        past = self._past
        past[request.correlation_id] = answered
        if len(past) > _REMEMBERED:
            del past[next(iter(past))]
        self._remove(request)
        if self.inboxes.given:
            self.inboxes.end_unused(request)

    def unmatched(self, incoming: Incoming, correlation_id: str | None) -> None:
        """Count and drop a message on a reply channel that belongs to no open request."""
        answered = self._past.get(correlation_id) if correlation_id is not None else None
        if answered is None:
            self.counters.foreign += 1
            what = "belongs to no request"
        elif answered:
            self.counters.duplicate += 1
            what = "is not the first"
        else:
            self.counters.late += 1
            what = "is late"
        logger.debug("a reply on %r %s and is dropped", incoming.channel, what)

    def _expire(self, now: float) -> float | None:
        """Fail the requests whose deadline has passed; see ``Deadlines``."""
        earliest = inf
        for request in [*self.open]:
            left = request.deadline - now
            if left > 0:
                earliest = min(earliest, left)
            elif request.publication.may_have_arrived:
                why = "no reply before its deadline; it may have been handled, or will be"
                self.fail(request, OutcomeUnknownError(f"{request.what}: {why}"))
            else:
                is_up = self.connection.states.value.is_up
                why = "too much was waiting" if is_up else "there was no connection"
                self.fail(request, DeadlineError(f"{request.what}: not sent before its deadline: {why}"))
        return earliest if self.open else None
