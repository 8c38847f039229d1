"""The requests of an instance that wait for their replies, and the subscriptions that receive these (RFC 5.7.2).

::

    request() --open, outbox--> broker --> responder
    (caller)                                  |
    promise  <--inbox.deliver()-- broker  <---+
    (anywhere)  (loop)

Each instance has one inbox of its own, subscribed with the first request and kept. A request that names its reply
channel uses the inbox of that channel, which is subscribed as long as requests wait for replies on it. A reply is
matched with its request by its correlation id.

**Threads.** ``request`` and ``own_inbox`` run on the caller of a request; everything else runs on the engine's loop.
``OpenRequests.open``, ``OpenRequests.awaited`` and ``ReplyInbox.early`` are written by both, without a lock, one atomic
operation of a dict at a time. The side that removes a request from ``open`` settles it, and no other side does.

**Losses.** Replies that are sent while the instance is disconnected are lost, unless the broker keeps its session.
Every request that was sent fails with the connection, at once or as soon as the session turns out to be lost, so that
the requester need not wait for the deadline. A request that was not sent waits for the next connection.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from messaging.connection import Connection, Subscribed
from messaging.errors import (
    ArgumentError,
    ClosedError,
    ConnectionLostError,
    DeadlineError,
    MessagingError,
    OutcomeUnknownError,
    ReplyError,
    RequestCancelledError,
    TooManyRequestsError,
)
from messaging.errors.text import SafeLog
from messaging.execution import Deadlines, Promise, clock
from messaging.model import AcknowledgeType, Features, SubscriptionSpec, V, maker, subscribe_options
from messaging.publishing import MessagePublisher
from messaging.publishing.publication import SpecialPublication
from messaging.replyto import markers

if TYPE_CHECKING:
    from messaging.model import Incoming, Message, PublishPlan

logger = SafeLog(__name__)

#: settled requests remembered, to tell late and duplicate replies from foreign ones
_REMEMBERED: Final = 4096
#: bytes of a generated correlation id: unguessable and unique
_CORRELATION_BYTES: Final = 16
_UNSUPPORTED: Final = AcknowledgeType.UNSUPPORTED
_ACKNOWLEDGED: Final = AcknowledgeType.ACKNOWLEDGED

#: correlation id of a request; beside its reply channel, if the request names that
Key: TypeAlias = "str | tuple[str, str | None] | None"


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


class RequestPublication(SpecialPublication):
    """The message of a request, which fails with it. Its time to live counts from the request."""

    __slots__ = ("on_failed",)

    #: fails the request; on the loop
    on_failed: Callable[[MessagingError], object]

    def reject(self, error: MessagingError, cause: BaseException | None = None) -> bool:
        """See ``Promise``."""
        self.was_retrieved = True
        first = super().reject(error, cause)
        self.on_failed(error)
        return first


class Request(Promise[V]):
    """A request that was published: the promise of its reply.

    :meth:`cancel` cancels it; so does cancelling the task that awaits it.
    """

    __slots__ = ("correlation_id", "deadline", "inbox", "key", "model", "publication", "requests")

    def __init__(self, requests: OpenRequests, correlation_id: str, deadline: float, model: Any) -> None:
        super().__init__()
        self.requests = requests
        self.correlation_id = correlation_id
        #: in ``OpenRequests.awaited``
        self.key: Key = correlation_id
        #: monotonic seconds
        self.deadline = deadline
        self.model = model
        #: where its reply arrives; set before the request is published
        self.inbox: ReplyInbox | None = None
        self.publication: RequestPublication

    @property
    def what(self) -> str:
        """See ``Promise``."""
        return f"request to {self.publication.plan.channel!r}"

    def result(self, timeout: float | None = None) -> V:
        """Wait as ``Promise.result``, and return the reply, or its value if the request was made with a model.

        Raises:
            DecodeError: the reply does not fit the model.
        """
        message: Any = super().result(timeout)
        found: V = message if self.model is None else message.value(self.model)
        return found

    def cancel(self) -> None:
        """Fail the request with ``RequestCancelledError``, unless it is settled."""
        self.was_retrieved = True
        self.requests.connection.engine.call(
            self.requests.fail, self, RequestCancelledError(f"{self.what} was cancelled")
        )

    def __await__(self) -> Generator[Any, None, V]:
        try:
            return (yield from super().__await__())
        except BaseException:
            if not self.done():
                self.cancel()
            raise


class ReplyInbox(Subscribed):
    """A subscription to a reply channel.

    Args:
        requests: the requests of its instance.
        pattern: what is subscribed to.
        reply_to: the reply channel that requests name.
        is_own: requests that name no reply channel use it.
        individual: requests name this channel with their correlation id as a further level.
    """

    is_lasting = False

    def __init__(
        self, requests: OpenRequests, pattern: str, reply_to: str, *, is_own: bool = False, individual: bool = False
    ) -> None:
        self._connection = requests.connection
        self._adapter = adapter = requests.connection.adapter
        # replies arrive with the guarantee they were sent with
        level = adapter.capabilities.acknowledging_qos
        wanted = {Features.EXTENSION_QOS: level} if level is not None else {}
        options = subscribe_options(wanted, adapter.capabilities, adapter.settings)
        super().__init__(SubscriptionSpec(pattern, None, options))
        self.reply_to = reply_to
        self.is_own = is_own
        self.individual = individual
        #: whether it is subscribed to, or about to be; on the loop
        self.is_started = False
        #: whether requests may be published directly: earlier requests have been published
        self.is_open = False
        #: requests to be published, in order, when this is subscribed to; see the module
        self.early: dict[Request[Any], None] = {}
        #: open requests that name this reply channel, the oldest first, unless it is the own one; on the loop
        self.named_by: dict[Request[Any], None] = {}
        self._requests = requests
        self._make = maker(adapter.settings.default_content_type)
        self._level = len(reply_to) + 1

    # --- replies

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Match replies with requests."""
        tokens = []
        for incoming in batch:
            if incoming.token is None:
                incoming.state = _UNSUPPORTED
            else:
                tokens.append(incoming.token)
                incoming.state = _ACKNOWLEDGED
            incoming.settler = None
            self._match(incoming)
        if tokens:
            self._adapter.acknowledge(tokens)

    def _match(self, incoming: Incoming) -> None:
        correlation_id = incoming.correlation_id
        if self.individual:
            named = (incoming.channel or "")[self._level :]
            if correlation_id is None:
                correlation_id = named  # the responder has no correlation id to set: the channel names the request
            elif correlation_id != named:
                correlation_id = None
        marker = markers.read(incoming)
        requests = self._requests
        if marker is not None and marker.kind == markers.CANCEL and self.is_own:
            requests.on_cancel(correlation_id or "")
            return
        request = requests.awaited.get(correlation_id if self.is_own else (self.reply_to, correlation_id))
        if not isinstance(request, Request):
            requests.unmatched(incoming, correlation_id)
        elif marker is None:
            requests.answered(request, self._make(incoming.payload, incoming, request.model))
        elif marker.kind == markers.FAULT:
            requests.answered(request, None, marker.fault(incoming.payload))
        else:
            requests.unmatched(incoming, None)  # part of a stream of replies to another requester

    # --- from the connection

    def on_connection_lost(self) -> None:
        """Fail the requests that were sent, if no session keeps their replies."""
        if not self._adapter.capabilities.keeps_session:
            self._fail_sent()

    def reconnected(self, resumed: bool) -> None:
        """Fail the requests that were sent, if the session that kept their replies is gone."""
        if not resumed:
            self._fail_sent()

    def _fail_sent(self) -> None:
        for request in self._open():
            if request.publication.may_have_arrived:
                why = "the connection was lost before the reply came; it may have been handled"
                self._requests.fail(request, ConnectionLostError(f"{request.what}: {why}"))

    def fail(self, error: MessagingError) -> None:
        """Fail the requests that wait here: the broker refused or ended the subscription."""
        self._connection.subscriptions.discard(self)
        self._end(error)
        if self.handle is not None:
            self._connection.endings.end(self)

    def stop(self) -> None:
        """See ``Subscribed.stop``: nothing is in progress here."""

    def flush(self) -> None:
        """See ``Subscribed.flush``: replies are acknowledged as they arrive."""

    def complete(self) -> None:
        """Fail the requests that wait here: the instance was closed, or none is left."""
        for request in self._open():
            request.was_retrieved = True  # the application has closed the instance itself
        self._end(ClosedError(f"the instance {self._adapter.name!r} is closed"))

    def _end(self, error: MessagingError) -> None:
        # first: a caller that enters a request from now on sees it
        self.ended = True
        self._requests.forget(self)
        self.ready.reject(error)
        self.ready.exception()  # the requests have promises of their own
        for request in self._open():
            self._requests.fail(request, error)

    def _open(self) -> list[Request[Any]]:
        """Return the open requests whose replies arrive here, the oldest first."""
        # a channel that requests name ends with the last of them, which must not cost a look at all requests
        return [each for each in [*(self._requests.open if self.is_own else self.named_by)] if each.inbox is self]


class OpenRequests:
    """The requests of one instance, and its inboxes. See the module for threads."""

    def __init__(self, connection: Connection, publisher: MessagePublisher) -> None:
        self.connection = connection
        self.counters = RequestCounters()
        #: requests that are not settled, the oldest first -> ``True``; see the module
        self.open: dict[Request[Any], bool] = {}
        #: the open requests, and streams of replies, by their correlation ids; see the module
        self.awaited: dict[Key, object] = {}
        #: open streams of replies -> a check of the deadline, which returns the seconds left; on the loop
        self.streams: dict[object, Callable[[float], float]] = {}
        self.deadlines = Deadlines(connection.engine, connection.settings.timeout, self._expire)
        #: the inbox of this instance, once there is one
        self.own: ReplyInbox | None = None
        #: by reply channel, the inboxes of channels that requests name; on the loop
        self.given: dict[str, ReplyInbox] = {}
        #: called with the correlation id of a stream of replies whose requester wants no more
        self.on_cancel: Callable[[str], object] = lambda _: None
        self._outbox = publisher.outbox
        self._timeout = connection.settings.timeout
        self._limit = connection.settings.max_pending_requests
        #: guards the limit, and the making of ``own``; reentrant for signal handlers. The loop does not take it.
        self._lock = threading.RLock()
        #: unguessable, so that no other client can send a forged reply
        self._token = secrets.token_hex(16)
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
        self.connection.refuse_closed()
        message, correlation_id, is_given, individual = plan
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
        publication.on_failed = partial(self.fail, request)
        request.publication = publication
        if is_given:
            request.key = message.reply_to_channel or "", correlation_id
        try:
            with self._lock:
                if len(self.open) >= self._limit:
                    raise TooManyRequestsError(
                        f"{request.what}: {self._limit} requests wait for their replies already; "
                        f"await earlier ones first, or raise max_pending_requests"
                    )
                self.open[request] = True
            self.deadlines.watch(timeout)
            if self.awaited.setdefault(request.key, request) is not request:
                if is_given:
                    raise _reserved(message.reply_to_channel, correlation_id)
                raise ArgumentError(
                    f"{request.what}: another one with the correlation id {correlation_id!r} waits for its reply on "
                    f"{individual or message.reply_to_channel!r}"
                )
            if is_given:
                self.connection.engine.call(self._start_given, request)
            else:
                while not self._start(request, self.own_inbox()):
                    self.connection.refuse_closed()
        except BaseException:
            if self.open.pop(request, False):  # otherwise it was settled meanwhile, and removed
                self._remove(request)
            request.was_retrieved = True
            if is_given:  # an interrupt may have come after it was entered
                self.connection.engine.call(self._end_unused, request)
            raise
        return request

    def reserve(self, key: tuple[str, str], stream: object) -> None:
        """Await the replies with a correlation id on a reply channel, for a stream alone.

        From any thread; :meth:`release` ends it.

        Raises:
            ArgumentError: a request, or another stream, waits there with this id.
        """
        if self.awaited.setdefault(key, stream) is not stream:
            raise _reserved(*key)

    def release(self, key: tuple[str, str], stream: object) -> None:
        """Undo :meth:`reserve`, if ``stream`` did it. From any thread; idempotent."""
        if self.awaited.get(key) is stream:
            self.awaited.pop(key, None)

    def _remove(self, request: Request[Any]) -> None:
        """Await no reply to a request any more. From any thread."""
        inbox = request.inbox
        if inbox is not None and inbox.early:
            inbox.early.pop(request, None)
        if self.awaited.get(request.key) is request:  # last: the next request with this id may be made from now on
            del self.awaited[request.key]

    def is_own(self, channel: str) -> bool:
        """Return whether ``channel`` is the reply channel of requests that name none."""
        return channel == self.connection.adapter.addressing.reply_address(self._token).channel

    def own_inbox(self) -> ReplyInbox:
        """Return the inbox of this instance, made and subscribed on first use. From any thread."""
        own = self.own
        if own is not None:
            return own
        with self._lock:
            own = self.own
            if own is None:
                address = self.connection.adapter.addressing.reply_address(self._token)
                own = ReplyInbox(self, address.pattern, address.channel, is_own=True, individual=address.individual)
                self.own = own
                self.connection.engine.call(self.start, own)
            return own  # the loop may have ended it: then ``self.own`` is None already

    def _start(self, request: Request[Any], inbox: ReplyInbox) -> bool:
        """Publish a request, or have it published once its inbox is subscribed to. On the caller.

        Returns:
            ``False`` if the inbox has ended meanwhile: the request needs another one.
        """
        request.inbox = inbox
        if inbox.ended:
            return request not in self.open
        if inbox.is_open and not inbox.early and not self._outbox.is_accepting:
            self._outbox.put(request.publication)
        else:
            inbox.early[request] = None
            self.connection.engine.call(self._publish_early, inbox)
        if request not in self.open:  # settled before its reply was awaited
            self._remove(request)
        return True

    # --- inboxes, on the loop

    def start(self, inbox: ReplyInbox) -> None:
        """Subscribe to ``inbox``, once, and publish the requests that waited for it."""
        if not inbox.is_started:
            inbox.is_started = True
            inbox.ready.listen(lambda: self._publish_early(inbox))
            self.connection.subscriptions.start(inbox)

    def _start_given(self, request: Request[Any]) -> None:
        """Publish a request that names its reply channel, once that is subscribed to."""
        if request not in self.open:
            return
        channel = request.publication.plan.reply_to_channel or ""
        inbox = self.given.get(channel)
        if inbox is None:
            inbox = self.given[channel] = ReplyInbox(self, channel, channel)
            self.start(inbox)
        request.inbox = inbox
        inbox.named_by[request] = None
        inbox.early[request] = None
        self._publish_early(inbox)

    def _publish_early(self, inbox: ReplyInbox) -> None:
        """Publish the requests that waited until ``inbox`` was subscribed to."""
        if not inbox.ready.done():
            self.start(inbox)  # unless own_inbox() has: an interrupt may have come before that
            return
        for request in [*inbox.early]:
            if request in self.open and not inbox.ended:
                self._outbox.post(request.publication)
            # not before: the next request of the same thread must not overtake it
            inbox.early.pop(request, None)
        inbox.is_open = True

    def _end_unused(self, request: Request[Any]) -> None:
        """Unsubscribe from the reply channel that ``request`` names, if no other request waits there."""
        inbox = request.inbox
        if inbox is not None and not inbox.is_own:
            inbox.named_by.pop(request, None)
            if not inbox.named_by and self.given.get(inbox.reply_to) is inbox:
                del self.given[inbox.reply_to]
                self.connection.subscriptions.end(inbox)

    def forget(self, inbox: ReplyInbox) -> None:
        """Forget an inbox that has ended: the next request makes another one."""
        if self.own is inbox:
            self.own = None
        if self.given.get(inbox.reply_to) is inbox:
            del self.given[inbox.reply_to]

    # --- outcomes, on the loop

    def answered(self, request: Request[Any], message: Message | None, fault: ReplyError | None = None) -> None:
        """Settle a request with its reply, or with the ``fault`` of the handler that the reply reports."""
        if not self._settle(request, answered=True):
            return
        publication = request.publication
        if publication.was_sent:
            publication.confirm()  # the broker has it, and it must not be sent again
        if publication.settled:
            # It cannot fail any more. Without this reference no garbage collection is needed to free the two.
            del publication.on_failed
        if fault is None:
            self.counters.answered += 1
            request.resolve(message)
        else:
            self.counters.faults += 1
            request.reject(fault)

    def fail(self, request: Request[Any], error: MessagingError) -> None:
        """Fail a request, unless it is settled; its message is not sent any more."""
        if self._settle(request, answered=False):
            self.counters.failed += 1
            request.reject(error)
            self._outbox.fail(request.publication, error)

    def _settle(self, request: Request[Any], *, answered: bool) -> bool:
        """Close a request that has an outcome; return ``False`` if it had one before."""
        if not self.open.pop(request, False):
            return False
        self._remove(request)
        past = self._past
        past[request.correlation_id] = answered
        if len(past) > _REMEMBERED:
            del past[next(iter(past))]
        if self.given:
            self._end_unused(request)
        return True

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
        """Fail the requests, and the streams of replies, whose deadline has passed; see ``Deadlines``."""
        earliest = min([expire(now) for expire in [*self.streams.values()]], default=inf)
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
        return earliest if self.open or earliest < inf else None


def _reserved(reply_channel: str | None, correlation_id: str) -> ArgumentError:
    return ArgumentError(
        f"correlation id {correlation_id!r}: another request waits for its reply on {reply_channel!r} with it; "
        f"give each request an id of its own, or await the other one first"
    )
