"""Requests that wait for their replies, and the inboxes where these arrive (RFC 5.7.2).

::

    request() --pending, outbox--> broker --> responder
    (caller)                                     |
    promise  <--inbox.deliver()-- broker  <------+
    (anywhere)  (loop)

An *inbox* is a subscription to a reply channel. Each instance has one of its own, made with the first request and kept:
the correlation id says which request a reply belongs to. A request that names its reply channel has the inbox of that
channel, which exists as long as requests wait for it.

**Threads.** ``request`` runs on the caller: it enters the request into the pending ones, then its message into the
outbox. Everything else runs on the engine's loop. ``Requests.open`` and ``Inbox.pending`` are written by both: one
operation of a set or dict at a time, which is atomic; nobody waits for anybody. Whoever takes a request out of
``open`` settles it, and nobody else.

**Losses.** Replies that were sent while the instance was away are gone, unless the broker keeps its session. So with a
lost connection every request that was sent fails, at once or as soon as the session turns out to be lost: whoever made
it does not have to wait for a deadline. What was not sent waits for the next connection.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.adapter import SubscriptionSpec
from messaging.connection import Subscribed
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
from messaging.execution import Promise
from messaging.model import AcknowledgeType, Features, Message, MessageContext, V, maker, subscribe_options
from messaging.publishing import Publication, step_of
from messaging.replyto import marks
from messaging.text import SafeLog

if TYPE_CHECKING:
    import asyncio

    from messaging.connection import Connection
    from messaging.model import Incoming, PublishOptions
    from messaging.publishing import MessagePublisher

logger = SafeLog(__name__)

#: requests remembered after they were settled, to tell what is late or double from what is foreign
_REMEMBERED: Final = 4096
_UNSUPPORTED: Final = AcknowledgeType.UNSUPPORTED
_ACKNOWLEDGED: Final = AcknowledgeType.ACKNOWLEDGED


@dataclass(slots=True)
class RequestCounters:
    """What became of an instance's requests and of what arrived for them. Written on the loop."""

    answered: int = 0
    #: replies that said that the handler failed
    faults: int = 0
    #: requests that failed otherwise
    failed: int = 0
    #: replies that came after their request was given up
    late: int = 0
    #: replies beyond the first
    duplicate: int = 0
    #: messages on a reply channel that belong to no request of this instance
    foreign: int = 0


class Request(Promise[V]):
    """A request that was made: the promise of its reply.

    Cancelling whoever awaits it cancels the request; so does :meth:`cancel`.
    """

    __slots__ = ("correlation_id", "deadline", "inbox", "model", "publication", "requests")

    def __init__(self, requests: Requests, correlation_id: str, deadline: float, model: Any) -> None:
        super().__init__()
        self.requests = requests
        self.correlation_id = correlation_id
        #: monotonic seconds
        self.deadline = deadline
        self.model = model
        #: where its reply is to arrive; set before it is published
        self.inbox: Inbox | None = None
        self.publication: RequestPublication

    @property
    def what(self) -> str:
        """See ``Promise``."""
        return f"request to {self.publication.context._channel!r}"

    def result(self, timeout: float | None = None) -> V:
        """As ``Promise.result``: the reply, or its value if the request was made with a model.

        Raises:
            DecodeError: the reply does not fit the model.
        """
        message: Any = super().result(timeout)
        found: V = message if self.model is None else message.value(self.model)
        return found

    def cancel(self) -> None:
        """Want the reply no more: the request fails with ``RequestCancelledError``, unless it is settled."""
        self._looked_at = True
        self.requests.connection.engine.call(
            self.requests.give_up, self, RequestCancelledError(f"{self.what} was cancelled")
        )

    def __await__(self) -> Generator[Any, None, V]:
        try:
            return (yield from super().__await__())
        except BaseException:
            if not self.done():
                self.cancel()
            raise

    def unsent(self, error: MessagingError) -> None:
        """Its message failed. On the loop."""
        self.requests.give_up(self, error)


class Requester(Protocol):
    """Who waits for the reply, or replies, to a request."""

    def unsent(self, error: MessagingError) -> None:
        """The message of the request failed. On the loop."""
        ...


class RequestPublication(Publication):
    """The message of a request: if it fails, its requester is told."""

    __slots__ = ("requester",)

    requester: Requester

    def reject(self, error: MessagingError, cause: BaseException | None = None) -> bool:
        """See ``Promise``."""
        self._looked_at = True
        first = super().reject(error, cause)
        self.requester.unsent(error)
        return first


class Inbox(Subscribed):
    """A subscription to a reply channel.

    Args:
        requests: whose.
        spec: what is subscribed to.
        reply_to: the reply channel that requests name.
        individual: they name this, with their correlation id as a further level.
    """

    is_lasting = False

    def __init__(self, requests: Requests, spec: SubscriptionSpec, reply_to: str, *, individual: bool = False) -> None:
        super().__init__(spec)
        self.reply_to = reply_to
        self.individual = individual
        #: it is subscribed to, or about to be; on the loop
        self.is_started = False
        #: requests may be published: what came too early for that is under way
        self.is_open = False
        #: correlation id -> who waits; written by any thread, see the module
        self.pending: dict[str, Request] = {}
        #: what is to be published when this is subscribed to, in order; written by any thread
        self.early: dict[Request, None] = {}
        self._requests = requests
        self._adapter = requests.connection.adapter
        self._make = maker(self._adapter.settings.default_content_type)
        self._level = len(reply_to) + 1

    # --- replies

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Match replies with requests."""
        tokens = []
        for incoming in batch:
            if incoming.token is None:
                incoming._state = _UNSUPPORTED
            else:
                tokens.append(incoming.token)
                incoming._state = _ACKNOWLEDGED
            incoming._settler = None
            self._match(incoming)
        if tokens:
            self._adapter.acknowledge(tokens)

    def _match(self, incoming: Incoming) -> None:
        correlation_id = incoming._correlation_id
        if self.individual:
            named = (incoming._channel or "")[self._level :]
            if correlation_id is None:
                correlation_id = named  # of a responder that has nowhere to put it
            elif correlation_id != named:
                correlation_id = None
        mark = marks.read(incoming)
        requests = self._requests
        if mark is not None and mark.kind == marks.CANCEL and self is requests.own:
            requests.cancelled(correlation_id or "")
            return
        request = self.pending.get(correlation_id) if correlation_id is not None else None
        if request is None:
            requests.unmatched(incoming, correlation_id)
        elif mark is None:
            requests.answered(request, self._make(incoming.payload, incoming, request.model))
        elif mark.kind == marks.FAULT:
            requests.failed(request, ReplyError(mark.error or "Error", incoming.payload.decode(errors="replace")))
        else:
            requests.unmatched(incoming, None)  # of somebody else's stream

    # --- from the connection

    def lost(self) -> None:
        """Without a session, replies are lost with the connection."""
        if not self._adapter.keeps_session:
            self._give_up_sent()

    def reconnected(self, resumed: bool) -> None:
        """With a session, they were if it is not there any more."""
        if not resumed:
            self._give_up_sent()

    def _give_up_sent(self) -> None:
        for request in [*self.pending.values()]:
            if request.publication.may_have_arrived:
                why = "the connection was lost before the reply came; it may have been handled"
                self._requests.give_up(request, ConnectionLostError(f"{request.what}: {why}"))

    def fail(self, error: MessagingError) -> None:
        """There are no replies to be had."""
        self._requests.connection.subscriptions.discard(self)
        self._end(error)
        if self.handle is not None:
            self._requests.connection.endings.end(self)

    def stop(self) -> None:
        """Nothing is in progress here."""

    def flush(self) -> None:
        """Replies are acknowledged as they arrive."""

    def complete(self) -> None:
        """The instance is closed, or nobody waits any more."""
        for request in [*self.pending.values()]:
            request._looked_at = True  # whoever closed it knows
        self._end(ClosedError(f"the instance {self._adapter.name!r} is closed"))

    def _end(self, error: MessagingError) -> None:
        # first: whoever enters a request from now on sees it
        self.ended = True
        self._requests.forget(self)
        self.ready.reject(error)
        self.ready.exception()  # those who wait have promises of their own
        for request in [*self.pending.values()]:
            self._requests.give_up(request, error)


class Requests:
    """All requests of one instance. See the module for threads."""

    def __init__(self, connection: Connection, publisher: MessagePublisher) -> None:
        self.connection = connection
        self.publisher = publisher
        self.counters = RequestCounters()
        #: those that are not settled; see the module
        self.open: set[Request] = set()
        self._limit = connection.settings.max_pending_requests
        #: unguessable, so that nobody else can send what looks like a reply
        self._token = secrets.token_hex(16)
        #: guards the limit, and the making of ``own``; reentrant for signal handlers. The loop does not take it.
        self._lock = threading.RLock()
        #: the inbox of this instance, once there is one
        self.own: Inbox | None = None
        #: by channel, those that requests name; on the loop
        self._given: dict[str, Inbox] = {}
        #: (reply channel that requests name, correlation id) -> which request waits there; written by any thread,
        #: one operation at a time
        self._waiting: dict[tuple[str, str], object] = {}
        self._shortest = connection.settings.timeout
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_watching = False
        #: told of those who want no more replies from here, by correlation id
        self.cancelled: Callable[[str], object] = lambda _: None
        #: correlation ids that were settled, the oldest first, and whether by a reply; on the loop
        self._past: dict[str, bool] = {}

    @property
    def pending(self) -> int:
        """Requests that wait for their replies."""
        return len(self.open)

    # --- on the caller

    def is_own(self, channel: str) -> bool:
        """Whether that is where replies arrive to requests that name no reply channel."""
        return channel == self.connection.adapter.reply_address(self._token).channel

    def own_inbox(self) -> Inbox:
        """The inbox of this instance, made and subscribed on first use."""
        own = self.own
        if own is not None:
            return own
        with self._lock:
            if self.own is None:
                address = self.connection.adapter.reply_address(self._token)
                own = Inbox(self, self._spec(address.pattern), address.channel, individual=address.individual)
                self.own = own
                self.connection.engine.call(self._start_own, own)
            return self.own

    def _start_own(self, inbox: Inbox) -> None:
        if not inbox.is_started:
            inbox.is_started = True
            inbox.ready.listen(lambda: self._publish_early(inbox))
            self.connection.subscriptions.start(inbox)

    def _spec(self, pattern: str) -> SubscriptionSpec:
        adapter = self.connection.adapter
        # replies come with the guarantee they were sent with
        level = adapter.acknowledging_qos
        wanted = {Features.EXTENSION_QOS: level} if level is not None else {}
        return SubscriptionSpec(pattern, None, subscribe_options(wanted, adapter))

    def request(
        self,
        payload: bytes,
        context: MessageContext,
        options: PublishOptions,
        correlation_id: str,
        *,
        given: bool,
        timeout: float,
        model: Any = None,
    ) -> Request:
        """Send a request.

        Args:
            payload: of its message.
            context: that of its message, checked, with the reply channel.
            options: what it was checked to.
            correlation_id: of the message.
            given: the reply channel is the request's own idea, rather than that of :meth:`own_inbox`.
            timeout: seconds for all of it.
            model: for ``Request.result``.

        Raises:
            TooManyRequestsError, ClosedError, OutboxFullError: it was not sent.
            ArgumentError: a request with this correlation id waits on this reply channel.
        """
        connection = self.connection
        self.refuse_closed()
        request = Request(self, correlation_id, time.monotonic() + timeout, model)
        publication = RequestPublication(self.publisher.outbox, payload, context, options, request.deadline)
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
                self.open.add(request)
            self._watch(timeout)
            if given:
                self.reserve(context._reply_to_channel or "", correlation_id, request)
                connection.engine.call(self._start_given, request)
            else:
                while not self._start(request, self.own_inbox()):
                    self.refuse_closed()
        except BaseException:
            # unless it was settled meanwhile, it never was
            if self._claim(request):
                self._remove(request)
            request._looked_at = True
            if given:  # an interrupt may have come when it was entered
                connection.engine.call(self._end_unused, request)
            raise
        return request

    def refuse_closed(self) -> None:
        """Refuse requests of an instance that is closed; raises ``ClosedError``. From any thread."""
        connection = self.connection
        if connection.endings.is_closing or connection.states.is_closed:
            raise ClosedError(f"the instance {connection.adapter.name!r} is closed")

    def _claim(self, request: Request) -> bool:
        """Take a request out of the open ones; ``False`` if somebody else has. From any thread."""
        try:
            self.open.remove(request)
        except KeyError:
            return False
        return True

    def reserve(self, reply_channel: str, correlation_id: str, owner: object) -> None:
        """Have ``owner`` be the only one that waits for this id on a reply channel that requests name.

        From any thread; :meth:`release` ends it.

        Raises:
            ArgumentError: another request waits there with this id.
        """
        if self._waiting.setdefault((reply_channel, correlation_id), owner) is not owner:
            raise ArgumentError(
                f"correlation id {correlation_id!r}: another request waits for its reply on {reply_channel!r} with it; "
                f"give each request an id of its own, or await the other one first"
            )

    def release(self, reply_channel: str, correlation_id: str, owner: object) -> None:
        """Undo :meth:`reserve`, if ``owner`` did it. From any thread; idempotent."""
        if self._waiting.get((reply_channel, correlation_id)) is owner:
            self._waiting.pop((reply_channel, correlation_id), None)

    def _remove(self, request: Request) -> None:
        """Take a request out of its inbox. From any thread."""
        inbox = request.inbox
        if inbox is not None:
            inbox.early.pop(request, None)
            if inbox.pending.get(request.correlation_id) is request:
                del inbox.pending[request.correlation_id]
        if self._waiting:  # last: the next request with this id finds its place in the inbox free
            self.release(request.publication.context._reply_to_channel or "", request.correlation_id, request)

    def _start(self, request: Request, inbox: Inbox) -> bool:
        """Enter a request and publish it, or have it published when its inbox is there. On the caller.

        Returns:
            ``False`` if the inbox has ended meanwhile, and another one is to be taken.
        """
        self._enter(request, inbox)
        if inbox.ended:
            self._remove(request)
            return request not in self.open
        outbox = self.publisher.outbox
        if inbox.is_open and not inbox.early and not outbox.is_accepting:
            outbox.put(request.publication)
        else:
            inbox.early[request] = None
            self.connection.engine.call(self._publish_early, inbox)
        if request not in self.open:  # settled before it was entered: nobody else will take it out
            self._remove(request)
        return True

    @staticmethod
    def _enter(request: Request, inbox: Inbox) -> None:
        request.inbox = inbox
        if inbox.pending.setdefault(request.correlation_id, request) is not request:
            raise ArgumentError(
                f"{request.what}: another one with the correlation id {request.correlation_id!r} waits for its reply "
                f"on {inbox.reply_to!r}"
            )

    def _watch(self, timeout: float) -> None:
        """See to it that deadlines are looked at."""
        if timeout < self._shortest or not self._is_watching:
            try:
                self._shortest = min(timeout, self._shortest)
                self._is_watching = True
                self.connection.engine.call(self._arm)
            except BaseException:  # an interrupt: the next request sees to it
                self._is_watching = False
                raise

    # --- on the loop

    def _start_given(self, request: Request) -> None:
        """Enter a request with a reply channel of its own."""
        if request not in self.open:
            return
        channel = request.publication.context._reply_to_channel or ""
        inbox = self._given.get(channel)
        if inbox is None:
            inbox = self._given[channel] = Inbox(self, self._spec(channel), channel)
            self._start_own(inbox)
        self._enter(request, inbox)  # its correlation id was reserved
        inbox.early[request] = None
        self._publish_early(inbox)

    def _publish_early(self, inbox: Inbox) -> None:
        if not inbox.ready.done():
            self._start_own(inbox)  # unless own_inbox() has: an interrupt may have kept it from that
            return
        for request in [*inbox.early]:
            if request in self.open and not inbox.ended:
                self.publisher.outbox.post(request.publication)
            # not before: the next one of the same thread is not to overtake it
            inbox.early.pop(request, None)
        inbox.is_open = True

    def answered(self, request: Request, message: Message) -> None:
        """Its reply has come."""
        if self._claim(request):
            self.counters.answered += 1
            self._leave(request, answered=True)
            self._was_taken(request)
            request.resolve(message)

    def failed(self, request: Request, error: ReplyError) -> None:
        """Its reply has come, and says that the handler failed."""
        if self._claim(request):
            self.counters.faults += 1
            self._leave(request, answered=True)
            self._was_taken(request)
            request.reject(error)

    @staticmethod
    def _was_taken(request: Request) -> None:
        """The broker has taken it, whether its confirm has come or not: it must not be sent again."""
        publication = request.publication
        if publication.was_sent:
            publication.confirm()
        if publication.settled:
            # It cannot fail any more. Without this reference no garbage collection is needed to free the two.
            del publication.requester

    def give_up(self, request: Request, error: MessagingError) -> None:
        """Fail a request, unless it is settled; its message is not sent any more."""
        if self._claim(request):
            self.counters.failed += 1
            self._leave(request, answered=False)
            request.reject(error)
            self.publisher.outbox.give_up(request.publication, error)

    def _leave(self, request: Request, *, answered: bool) -> None:
        past = self._past
        past[request.correlation_id] = answered
        if len(past) > _REMEMBERED:
            del past[next(iter(past))]
        self._remove(request)
        if self._given:
            self._end_unused(request)

    def _end_unused(self, request: Request) -> None:
        """Unsubscribe from a reply channel that a request named, if no other one waits there."""
        inbox = request.inbox
        if inbox is not None and not inbox.pending and self._given.get(inbox.reply_to) is inbox:
            del self._given[inbox.reply_to]
            self.connection.subscriptions.end(inbox)

    def unmatched(self, incoming: Incoming, correlation_id: str | None) -> None:
        """A message on a reply channel that nobody waits for."""
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
        logger.debug("a reply on %r %s and is dropped", incoming._channel, what)

    def cancel_replies(self, channel: str, correlation_id: str, taken: Mapping[str, Any]) -> None:
        """Tell a responder that nobody wants its replies any more, in its own way. On the loop.

        Args:
            channel, correlation_id: what it gave for that.
            taken: extensions that it uses itself.
        """
        route = self.connection.adapter.reply_routes(channel)[0]
        extensions = {**taken, Features.EXTENSION_HEADERS: marks.Mark(marks.CANCEL).headers()}
        context = MessageContext(route.channel, route.channel_extension, extensions=extensions)
        try:
            options = self.publisher.check(context)
            promise = self.publisher.publish_checked(b"", context, options, correlation_id, on_loop=True)
        except MessagingError as error:
            logger.debug("the responder at %r cannot be told to stop: %s", channel, error)
        else:
            promise._looked_at = True

    def forget(self, inbox: Inbox) -> None:
        """It has ended: the next request makes another one."""
        if self.own is inbox:
            self.own = None
        if self._given.get(inbox.reply_to) is inbox:
            del self._given[inbox.reply_to]

    # --- deadlines

    def _arm(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._sweeper = self.connection.engine.loop.call_later(step_of(self._shortest), self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        now = time.monotonic()
        shortest = self.connection.settings.timeout
        for request in [*self.open]:
            left = request.deadline - now
            if left > 0:
                shortest = min(shortest, left)
            elif request.publication.may_have_arrived:
                why = "no reply before its deadline; it may have been handled, or will be"
                self.give_up(request, OutcomeUnknownError(f"{request.what}: {why}"))
            else:
                is_up = self.connection.states.value.is_up
                why = "too much was waiting" if is_up else "there was no connection"
                self.give_up(request, DeadlineError(f"{request.what}: not sent before its deadline: {why}"))
        self._shortest = shortest
        # cleared before the last look: whoever enters a request after this line arms again
        self._is_watching = False
        if self.open:
            self._is_watching = True
            self._arm()

    # --- in a forked child

    def forsake(self) -> None:
        """Nobody waits here: requests are the parent's."""
        self._lock = threading.RLock()
        for request in self.open:
            request.forsake(ClosedError(f"{request.what}: made by the parent of this process"))
        self.open.clear()
        self._waiting.clear()
