"""ReplyToManyPublisher (RFC 5.7.2.1): one request, a stream of replies.

Each such request has a reply channel of its own: a slow consumer holds back its own stream like any other, and no other
request. Markers beside the replies say where they end, see :mod:`messaging.replyto.markers`.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from messaging.adapter import REPLY_CHANNELS, SubscriptionSpec
from messaging.errors import StreamConsumedError
from messaging.model import Features, requested, subscribe_options
from messaging.receiving import Consumption, MessageStream, Subscription
from messaging.replyto.inboxes import RequestPublication
from messaging.replyto.reply_stream import OpenReplyStreams, ReplySubscription

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.model import Message, MessageContext, MessageContextProvider
    from messaging.publishing import MessagePublisher
    from messaging.replyto.publisher import ReplyToPublisher
    from messaging.replyto.requests import Requests
    from messaging.services import ServiceRegistry

logger = SafeLog(__name__)

#: how long a stream that nobody wants any more waits to hear where to say so, seconds
_LINGER: Final = 2.0


class ReplySubscription(Subscription):
    """The subscription to the replies of one request. See :class:`Subscription` for threads."""

    is_listed = False
    is_lasting = False
    is_stream = False

    def __init__(
        self,
        connection: Connection,
        services: ServiceRegistry,
        publisher: MessagePublisher,
        spec: SubscriptionSpec,
        consumption: Consumption,
        *,
        correlation_id: str,
        patience: float,
        cancel: Callable[[str, str, Mapping[str, Any]], object],
    ) -> None:
        super().__init__(connection, services, publisher.publish, spec, consumption)
        self._outbox = publisher.outbox
        self.publication: RequestPublication
        #: called once when it has ended, on the loop
        self.on_end: Callable[[], object] | None = None
        self._correlation_id = correlation_id
        #: how long a reply may be waited for, seconds
        self._patience = patience
        self._cancel = cancel
        #: where to say that no more is wanted
        self._control: str | None = None
        self._taken: Mapping[str, Any] = {}
        self._control_known: Promise[None] = Promise("where to cancel replies")
        #: tokens of what came after nobody wanted any more; acknowledged only while that is waited for
        self._unwanted: list[Any] = []
        self._lets_go = False
        #: how many items there were
        self._count = 0
        self._is_marked = False
        #: no more are taken; then ``_error`` is why, if there is a reason
        self._is_final = False
        #: the responder has said that there are no more
        self._is_over_there = False
        #: tokens of what was no item, and is not acknowledged yet
        self._marks: list[Any] = []
        self._error: MessagingError | None = None
        self._heard_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    # --- the request

    def start(self) -> None:
        """Subscribe, and send the request then. On the loop."""
        self._watch(self._patience)
        self.ready.listen(self.send)
        self._connection.subscriptions.start(self)

    def send(self) -> None:
        """Send the request: replies can arrive. On the loop."""
        if not self.ended:
            self._heard_at = time.monotonic()
            self._outbox.post(self.publication)

    def unsent(self, error: MessagingError) -> None:
        """The request failed."""
        if not self.ended:
            self.fail(error)

    # --- replies

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Sort replies from what travels beside them."""
        self._heard_at = time.monotonic()
        if self.leaving:
            if not self.ended:
                self._overhear(batch)
            return
        items: list[Incoming] = []
        for incoming in batch:
            if self._is_item(incoming):
                items.append(incoming)
            elif incoming.token is not None:
                self._marks.append(incoming.token)
        if items:
            super().deliver(items)
        self._settle_marks()
        if self._is_final and not self.ended and not self.buffered:
            self._conclude()

    def flush(self) -> None:
        """See ``Subscribed.flush``."""
        super().flush()
        self._settle_marks()

    def _settle_marks(self) -> None:
        """Acknowledge what was no item; not before the items ahead of it, for some brokers mind the order."""
        if self._marks and not self._buffer and self._handed_out == self.settled_count:
            marked, self._marks = self._marks, []
            self._adapter.acknowledge(marked)

    def _is_item(self, incoming: Incoming) -> bool:
        if incoming._correlation_id != self._correlation_id:
            logger.debug("a reply on %r belongs to another request", incoming._channel)
            return False
        mark = marks.read(incoming)
        if self._is_final:
            return False
        if mark is None:
            return True
        self._is_marked = True
        if mark.kind == marks.START:
            self._hear_control(incoming)
            return False
        if mark.kind == marks.ITEM:
            number = self._count if mark.number is None else mark.number
            if number < self._count:
                return False  # delivered again
            if number > self._count:
                self._finish(ConnectionLostError(f"replies {self._count} to {number - 1} were lost"), is_over=False)
                return False
            self._count += 1
            return True
        if mark.kind == marks.END and mark.number is not None and mark.number > self._count:
            self._finish(ConnectionLostError(f"replies {self._count} to {mark.number - 1} were lost"))
        elif mark.kind == marks.END:
            self._finish(None)
        elif mark.kind == marks.FAULT:
            self._finish(ReplyError(mark.error or "Error", incoming.payload.decode(errors="replace")))
        return False

    def _hear_control(self, start: Incoming) -> None:
        self._control = start._reply_to_channel
        taken = self._adapter.reply_extensions & start._extensions.keys()
        self._taken = {key: start._extensions[key] for key in taken}
        self._control_known.resolve(None)

    def _finish(self, error: MessagingError | None, *, is_over: bool = True) -> None:
        self._is_final = True
        self._is_over_there = is_over
        self._error = error

    def fetch(self) -> ReceivedMessage | None:
        """See ``Subscription.fetch``; the end comes after the last reply."""
        message = super().fetch()
        if message is None and self._is_final and not self._buffer:
            self._connection.engine.call(self._conclude)
        return message

    def _conclude(self) -> None:
        if self.ended or self.buffered:
            return
        if self._error is not None:
            self.fail(self._error)
            return
        if self._connection.state != "closed":
            self.flush()
        self._connection.subscriptions.discard(self)
        self._end(None)
        if self.handle is not None:
            self._connection.endings.end(self)

    # --- time

    def _watch(self, seconds: float) -> None:
        self._timer = self._connection.engine.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        if self.ended or self._is_final:
            return
        if self.paused or self.buffered or self._handed_out > self.settled_count:
            self._heard_at = time.monotonic()  # a slow consumer holds replies back
        left = self._heard_at + self._patience - time.monotonic()
        if left > 0:
            self._watch(left)
            return
        channel = self.publication.context._channel
        if self.counters.received and not self._is_marked:
            self._finish(None)  # of a responder that does not say where they end
            self._conclude()
        elif self.publication.may_have_arrived:
            why = f"no reply within {self._patience:g} s; it may have been handled, or will be"
            self.fail(OutcomeUnknownError(f"request to {channel!r}: {why}"))
        else:
            self.fail(DeadlineError(f"request to {channel!r}: not sent within {self._patience:g} s"))

    # --- ends

    def on_connection_lost(self) -> None:
        """Without a session, replies are lost with the connection."""
        if self.publication.may_have_arrived and not self._adapter.keeps_session:
            self._fail_lost()
        else:
            super().on_connection_lost()

    def reconnected(self, resumed: bool) -> None:
        """With a session, they were if it is not there any more."""
        if self.publication.may_have_arrived and not resumed:
            self._fail_lost()
        else:
            super().reconnected(resumed)

    def _fail_lost(self) -> None:
        channel = self.publication.context._channel
        if not self.ended and not self._is_final:
            why = "the connection was lost before all replies had come"
            self._connection.engine.loop.call_soon(self.unsent, ConnectionLostError(f"request to {channel!r}: {why}"))

    def stop(self) -> Promise[None] | None:
        """See ``Subscribed.stop``; a stream that ends early is to hear where to say so."""
        stopped = super().stop()
        if self._is_final or self.ended or self._control_known.done() or not self.publication.may_have_arrived:
            return stopped
        if Features.EXTENSION_MANDATORY in self._adapter.features:
            return stopped  # the responder finds out by itself
        both: Promise[None] = Promise("the end of replies")

        def listen() -> None:
            self._connection.engine.loop.call_later(_LINGER, self._control_known.resolve, None)
            self._control_known.listen(lambda: when_stopped(resolve))
            when_stopped(self._let_all_go)

        def when_stopped(call: Callable[[], object]) -> None:
            if stopped is not None:
                stopped.listen(call)
            else:
                call()

        def resolve() -> None:
            both.resolve(None)

        self._connection.engine.call(listen)
        return both

    def _overhear(self, batch: Sequence[Incoming]) -> None:
        """Of what nobody wants, listen only for where to say so, or that there is no more."""
        for incoming in batch:
            mark = marks.read(incoming) if incoming._correlation_id == self._correlation_id else None
            if mark is not None and mark.kind == marks.START:
                self._hear_control(incoming)
            elif mark is not None and mark.kind in (marks.END, marks.FAULT):
                self._is_over_there = True
                self._control_known.resolve(None)
        self._unwanted += [incoming.token for incoming in batch if incoming.token is not None]
        if self._lets_go:
            self._let_go()

    def _let_all_go(self) -> None:
        """Acknowledge what nobody wants: what is to be heard yet may be behind more than the broker's window."""
        if self.ended or self.handle is None or self._control_known.done():
            return
        self._lets_go = True
        self.flush()
        # in the order of their arrival, for some brokers mind it
        unsettled = self._withheld if self._auto else self._buffer
        before = [incoming.token for incoming in unsettled if incoming.token is not None]
        self._unwanted[:0] = [*before, *self._marks]
        self._buffer.clear()
        self._withheld.clear()
        self._marks.clear()
        self._let_go()
        self._crowd.disperse()
        if self.paused:
            self.paused = False
            self._adapter.resume(self.handle)

    def _let_go(self) -> None:
        tokens, self._unwanted = self._unwanted, []
        self._adapter.acknowledge(tokens)

    def _end(self, error: MessagingError | None) -> None:
        first = not self.ended
        super()._end(error)
        if not first:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self.on_end is not None:
            self.on_end()
        self._outbox.give_up(self.publication, error or StreamConsumedError("nobody waits any more"))
        if not self._is_over_there and self._control is not None:
            self._cancel(self._control, self._correlation_id, self._taken)


class ReplyToManyPublisher:
    """Publishes requests with many replies (RFC 5.7.2.1). Thread safe; get it as ``Messaging.reply_to_many``."""

    def __init__(
        self,
        connection: Connection,
        services: ServiceRegistry,
        publisher: MessagePublisher,
        single: ReplyToPublisher,
        requests: Requests,
    ) -> None:
        self._connection = connection
        self._services = services
        self._publisher = publisher
        self._single = single
        self._requests = requests
        self._streams = OpenReplyStreams(connection, publisher)

    def publish_with_reply_many(
        self,
        request_message: Message | MessageContextProvider,
        reply_to_context: MessageContext | MessageContextProvider | None = None,
        *,
        model: Any = None,
    ) -> MessageStream:
        """Publish a request, and stream its replies.

        Args:
            request_message, reply_to_context: as for ``ReplyToPublisher.publish_with_reply``.
            model: ``Message.value()`` of each reply is validated against it before the reply is emitted.

        Returns:
            The replies: an observable, an iterator, and so on, for one consumer. The request is sent at once. The
            stream completes behind the last reply. It fails with ``ReplyError`` if the handler failed,
            ``OutcomeUnknownError`` if no reply came for the extension ``timeout`` (or else the setting),
            ``OutboxFullError`` if there was no room for the request, and otherwise as the promise of
            ``publish_with_reply``. If the responder does not say where its replies end, the stream completes when none
            came for that long. Closing it early tells the responder to stop, as far as the protocol can.

        Raises:
            ArgumentError, UnsupportedFeatureError, ClosedError: as ``publish_with_reply``.
        """
        requests = self._requests
        payload, context, options, correlation_id = self._single.prepare_many(
            request_message, reply_to_context, f"{REPLY_CHANNELS}/{secrets.token_hex(16)}"
        )
        connection, adapter = self._connection, self._connection.adapter
        requests.refuse_closed()
        wanted = {key: value for key, value in requested(context, adapter).items() if key != Features.EXTENSION_QOS}
        if adapter.acknowledging_qos is not None:
            wanted[Features.EXTENSION_QOS] = adapter.acknowledging_qos
        spec = SubscriptionSpec(context.reply_to_channel or "", None, subscribe_options(wanted, adapter))
        patience = options.timeout if options.timeout is not None else adapter.settings.timeout
        subscription = ReplySubscription(
            connection,
            self._services,
            self._publisher,
            spec,
            Consumption(model),
            streams=self._streams,
            correlation_id=correlation_id,
            patience=patience,
        )
        publication = RequestPublication(self._publisher.outbox, payload, context, options, time.monotonic() + patience)
        publication.correlation_id = correlation_id
        publication.requester = subscription
        subscription.publication = publication
        unused = [subscription]
        # without effect on a generated reply channel: only this request names it
        requests.reserve(spec.channel, correlation_id, subscription)
        subscription.on_end = lambda: requests.release(spec.channel, correlation_id, subscription)

        def open_subscription() -> Subscription:
            if not unused:
                raise StreamConsumedError(
                    f"the replies of a request to {context.channel!r} have a consumer; publish it again for another one"
                )
            opened = unused.pop()
            connection.engine.call(opened.start)
            return opened

        try:
            return MessageStream(connection, open_subscription)
        except BaseException:
            requests.release(spec.channel, correlation_id, subscription)
            raise
