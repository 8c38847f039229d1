"""OpenRequests, and their inboxes: the subscriptions that receive replies (RFC 5.7.2).

Each instance has one inbox of its own, subscribed with the first request and kept. A reply is matched with its request
by its correlation id. A request that names its reply channel uses the inbox of that channel, which is subscribed as
long as requests wait for replies on it.

**Threads.** ``own_inbox`` and ``enter`` run on the caller of a request; everything else runs on the engine's loop.
``ReplyInbox.pending`` and ``ReplyInbox.early`` are written by both, one atomic operation of a dict at a time, without a
lock.

**Losses.** Replies that are sent while the instance is disconnected are lost, unless the broker keeps its session.
Every request that was sent fails with the connection, at once or as soon as the session turns out to be lost, so that
the requester need not wait for the deadline. A request that was not sent waits for the next connection.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.connection import Subscribed
from messaging.errors import (
    ArgumentError,
    ClosedError,
    ConnectionLostError,
    MessagingError,
    ReplyError,
    RequestCancelledError,
)
from messaging.execution import Promise
from messaging.model import AcknowledgeType, Features, Message, SubscriptionSpec, V, maker, subscribe_options
from messaging.publishing.publication import SpecialPublication
from messaging.replyto import markers

if TYPE_CHECKING:
    from collections.abc import Callable

    from messaging.connection import Connection
    from messaging.model import Incoming
    from messaging.publishing import MessagePublisher

_UNSUPPORTED: Final = AcknowledgeType.UNSUPPORTED
_ACKNOWLEDGED: Final = AcknowledgeType.ACKNOWLEDGED


class Requester(Protocol):
    """The side that waits for the reply, or the replies, to a request."""

    def unsent(self, error: MessagingError) -> None:
        """Fail: the message of the request failed. On the loop."""


class RequestOwner(Protocol):
    """The requests that inboxes receive replies for. Everything on the engine's loop."""

    connection: Connection
    #: open requests; written by any thread
    open: dict[Request[Any], None]

    def answered(self, request: Request[Any], message: Message) -> None:
        """Resolve ``request`` with its reply."""

    def faulted(self, request: Request[Any], error: ReplyError) -> None:
        """Fail ``request``: its reply says that the handler failed."""

    def fail(self, request: Request[Any], error: MessagingError) -> None:
        """Fail ``request`` for another reason, unless it is settled."""

    def unmatched(self, incoming: Incoming, correlation_id: str | None) -> None:
        """Count and drop a message that belongs to no open request."""


class RequestPublication(SpecialPublication):
    """The message of a request: its requester is told if it fails. Its time to live counts from the request."""

    __slots__ = ("requester",)

    requester: Requester

    def reject(self, error: MessagingError, cause: BaseException | None = None) -> bool:
        """See ``Promise``."""
        self.was_retrieved = True
        first = super().reject(error, cause)
        self.requester.unsent(error)
        return first


class Request(Promise[V]):
    """A request that was published: the promise of its reply.

    :meth:`cancel` cancels it; so does cancelling the task that awaits it.
    """

    __slots__ = ("correlation_id", "deadline", "inbox", "model", "publication", "requests")

    def __init__(self, requests: RequestOwner, correlation_id: str, deadline: float, model: Any) -> None:
        super().__init__()
        self.requests = requests
        self.correlation_id = correlation_id
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

    def unsent(self, error: MessagingError) -> None:
        """See ``Requester``."""
        self.requests.fail(self, error)


class ReplyInbox(Subscribed):
    """A subscription to a reply channel.

    Args:
        inboxes: the inboxes of its instance.
        spec: the subscription.
        reply_to: the reply channel that requests name.
        individual: requests name this channel with their correlation id as a further level.
    """

    is_lasting = False

    def __init__(
        self, inboxes: ReplyInboxes, spec: SubscriptionSpec, reply_to: str, *, individual: bool = False
    ) -> None:
        super().__init__(spec)
        self.reply_to = reply_to
        self.individual = individual
        #: whether it is subscribed to, or about to be; on the loop
        self.is_started = False
        #: whether requests may be published directly: earlier requests have been published
        self.is_open = False
        #: correlation id -> the request that waits; see the module
        self.pending: dict[str, Request[Any]] = {}
        #: requests to be published, in order, when this is subscribed to; see the module
        self.early: dict[Request[Any], None] = {}
        self._inboxes = inboxes
        self._owner = inboxes.owner
        self._connection = inboxes.connection
        self._adapter = inboxes.connection.adapter
        self._make = maker(self._adapter.settings.default_content_type)
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
        owner = self._owner
        if marker is not None and marker.kind == markers.CANCEL and self is self._inboxes.own:
            self._inboxes.on_cancel(correlation_id or "")
            return
        request = self.pending.get(correlation_id) if correlation_id is not None else None
        if request is None:
            owner.unmatched(incoming, correlation_id)
        elif marker is None:
            owner.answered(request, self._make(incoming.payload, incoming, request.model))
        elif marker.kind == markers.FAULT:
            owner.faulted(request, ReplyError(marker.error or "Error", incoming.payload.decode(errors="replace")))
        else:
            owner.unmatched(incoming, None)  # part of a stream of replies to another requester

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
        for request in [*self.pending.values()]:
            if request.publication.may_have_arrived:
                why = "the connection was lost before the reply came; it may have been handled"
                self._owner.fail(request, ConnectionLostError(f"{request.what}: {why}"))

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
        for request in [*self.pending.values()]:
            request.was_retrieved = True  # the application has closed the instance itself
        self._end(ClosedError(f"the instance {self._adapter.name!r} is closed"))

    def _end(self, error: MessagingError) -> None:
        # first: a caller that enters a request from now on sees it
        self.ended = True
        self._inboxes.forget(self)
        self.ready.reject(error)
        self.ready.exception()  # the requests have promises of their own
        for request in [*self.pending.values()]:
            self._owner.fail(request, error)


class ReplyInboxes:
    """The inboxes of one instance. See the module for threads."""

    def __init__(self, owner: RequestOwner, connection: Connection, publisher: MessagePublisher) -> None:
        self.owner = owner
        self.connection = connection
        self._publisher = publisher
        #: unguessable, so that no other client can send a forged reply
        self._token = secrets.token_hex(16)
        #: guards the making of ``own``; reentrant for signal handlers. The loop does not take it.
        self._lock = threading.RLock()
        #: the inbox of this instance, once there is one
        self.own: ReplyInbox | None = None
        #: by reply channel, the inboxes of channels that requests name; on the loop
        self.given: dict[str, ReplyInbox] = {}
        #: called with the correlation id of a stream of replies whose requester wants no more
        self.on_cancel: Callable[[str], object] = lambda _: None

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
                own = ReplyInbox(self, self._spec(address.pattern), address.channel, individual=address.individual)
                self.own = own
                self.connection.engine.call(self.start, own)
            return own  # the loop may have ended it: then ``self.own`` is None already

    def _spec(self, pattern: str) -> SubscriptionSpec:
        adapter = self.connection.adapter
        # replies arrive with the guarantee they were sent with
        level = adapter.capabilities.acknowledging_qos
        wanted = {Features.EXTENSION_QOS: level} if level is not None else {}
        return SubscriptionSpec(pattern, None, subscribe_options(wanted, adapter.capabilities, adapter.settings))

    @staticmethod
    def enter(request: Request[Any], inbox: ReplyInbox) -> None:
        """Have ``request`` wait in ``inbox``. From any thread.

        Raises:
            ArgumentError: another request with this correlation id waits there.
        """
        request.inbox = inbox
        if inbox.pending.setdefault(request.correlation_id, request) is not request:
            raise ArgumentError(
                f"{request.what}: another one with the correlation id {request.correlation_id!r} waits for its reply "
                f"on {inbox.reply_to!r}"
            )

    # --- on the loop

    def start(self, inbox: ReplyInbox) -> None:
        """Subscribe to ``inbox``, once, and publish the requests that waited for it."""
        if not inbox.is_started:
            inbox.is_started = True
            inbox.ready.listen(lambda: self.publish_early(inbox))
            self.connection.subscriptions.start(inbox)

    def start_given(self, request: Request[Any]) -> None:
        """Enter a request that names its reply channel, and publish it."""
        if request not in self.owner.open:
            return
        channel = request.publication.plan.reply_to_channel or ""
        inbox = self.given.get(channel)
        if inbox is None:
            inbox = self.given[channel] = ReplyInbox(self, self._spec(channel), channel)
            self.start(inbox)
        self.enter(request, inbox)  # its correlation id was reserved
        inbox.early[request] = None
        self.publish_early(inbox)

    def publish_early(self, inbox: ReplyInbox) -> None:
        """Publish the requests that waited until ``inbox`` was subscribed to."""
        if not inbox.ready.done():
            self.start(inbox)  # unless own_inbox() has: an interrupt may have come before that
            return
        for request in [*inbox.early]:
            if request in self.owner.open and not inbox.ended:
                self._publisher.outbox.post(request.publication)
            # not before: the next request of the same thread must not overtake it
            inbox.early.pop(request, None)
        inbox.is_open = True

    def end_unused(self, request: Request[Any]) -> None:
        """Unsubscribe from the reply channel that ``request`` names, if no other request waits there."""
        inbox = request.inbox
        if inbox is not None and not inbox.pending and self.given.get(inbox.reply_to) is inbox:
            del self.given[inbox.reply_to]
            self.connection.subscriptions.end(inbox)

    def forget(self, inbox: ReplyInbox) -> None:
        """Forget an inbox that has ended: the next request makes another one."""
        if self.own is inbox:
            self.own = None
        if self.given.get(inbox.reply_to) is inbox:
            del self.given[inbox.reply_to]
