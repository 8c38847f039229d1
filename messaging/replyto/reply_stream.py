"""The stream of replies to one request: its subscription, its markers, and its deadline (RFC 5.7.2.1).

Everything runs on the engine's loop, unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Final

from messaging.errors import (
    ConnectionLostError,
    DeadlineError,
    MessagingError,
    OutcomeUnknownError,
    StreamConsumedError,
)
from messaging.errors.text import SafeLog
from messaging.execution import Promise, clock
from messaging.model import Features, Incoming, MessageContext, SubscriptionSpec
from messaging.publishing import MessagePublisher
from messaging.receiving import Consumption, Subscription
from messaging.replyto import markers
from messaging.replyto.requests import OpenRequests, RequestPublication
from messaging.services import ServiceRegistry

logger = SafeLog(__name__)

#: how long a stream that was closed early waits for the channel of its cancellation, seconds
_LINGER: Final = 2.0


@dataclass(slots=True, eq=False)
class ReplySequence:
    """Sorts the messages of one stream by their markers, and finds gaps and the end."""

    #: of the request
    correlation_id: str
    #: names of the extensions that a cancellation takes over from the start marker
    reply_extensions: frozenset[str]
    #: the channel that takes a cancellation; ``None`` until the start marker has arrived
    control: str | None = None
    #: extensions of a cancellation
    extensions: Mapping[str, Any] = field(default_factory=dict)
    #: resolves when the channel is known, or not needed any more
    control_known: Promise[None] = field(
        default_factory=partial(Promise, "the channel that takes the cancellation of replies")
    )
    #: whether the responder uses markers
    is_marked: bool = False
    #: whether no more items are taken
    is_final: bool = False
    #: why, if the stream failed
    error: MessagingError | None = None
    #: whether the responder has ended the stream
    has_ended: bool = False
    #: items so far
    _count: int = 0

    def is_item(self, incoming: Incoming) -> bool:
        """Return whether a message is the next reply; otherwise, take what its marker says."""
        if incoming.correlation_id != self.correlation_id:
            logger.debug("a reply on %r belongs to another request", incoming.channel)
            return False
        marker = markers.read(incoming)
        if self.is_final:
            return False
        if marker is None:
            return True
        self.is_marked = True
        if marker.kind == markers.START:
            self._read_start(incoming)
            return False
        if marker.kind == markers.ITEM:
            number = self._count if marker.number is None else marker.number
            if number == self._count:
                self._count += 1
                return True
            if number > self._count:
                self.finish(self._gap_before(number))
            return False  # of a smaller number: it was redelivered
        if marker.kind == markers.END:
            self.has_ended = True
            is_short = marker.number is not None and marker.number > self._count
            self.finish(self._gap_before(marker.number) if is_short else None)
        elif marker.kind == markers.FAULT:
            self.has_ended = True
            self.finish(marker.fault(incoming.payload))
        return False

    def _gap_before(self, number: int | None) -> ConnectionLostError:
        return ConnectionLostError(f"replies {self._count} to {(number or 0) - 1} were lost")

    def drain(self, incoming: Incoming) -> None:
        """Take what the marker of an unwanted message says: the channel of a cancellation, or the end."""
        marker = markers.read(incoming) if incoming.correlation_id == self.correlation_id else None
        if marker is not None and marker.kind == markers.START:
            self._read_start(incoming)
        elif marker is not None and marker.kind in (markers.END, markers.FAULT):
            self.has_ended = True
            self.control_known.resolve(None)

    def _read_start(self, start: Incoming) -> None:
        self.control = start.reply_to_channel
        taken = self.reply_extensions & start.extensions.keys()
        self.extensions = {key: start.extensions[key] for key in taken}
        self.control_known.resolve(None)

    def finish(self, error: MessagingError | None) -> None:
        """Take no more items."""
        self.is_final = True
        self.error = error


class ReplySubscription(Subscription):
    """The subscription to the replies of one request. See :class:`Subscription` for threads.

    Args:
        requests: the requests of the instance.
        services, spec, consumption: as for ``Subscription``.
        publisher: sends the request.
        publication: the request.
        patience: how long the next reply may take, seconds.
    """

    is_lasting = False

    def __init__(
        self,
        requests: OpenRequests,
        services: ServiceRegistry,
        publisher: MessagePublisher,
        spec: SubscriptionSpec,
        consumption: Consumption,
        publication: RequestPublication,
        patience: float,
    ) -> None:
        super().__init__(requests.connection, services, publisher.publish_internally, spec, consumption)
        self.hand_out.on_empty = self._on_empty
        self.settlement.on_flushed = self._settle_markers
        self.publication = publication
        publication.on_failed = self._unsent
        #: its outcome, for interceptors
        self.over: Promise[None] = Promise("the end of replies")
        self.over.was_retrieved = True
        self.patience = patience
        self.sequence = ReplySequence(publication.correlation_id or "", self.adapter.capabilities.reply_extensions)
        #: of its replies, in ``OpenRequests.awaited``
        self.key = spec.channel, self.sequence.correlation_id
        self._publisher = publisher
        self._requests = requests
        #: tokens of messages that arrived after the stream was closed, acknowledged while it waits for the channel of
        #: its cancellation
        self._unwanted: list[Any] = []
        #: whether these are acknowledged as they arrive
        self._is_draining = False
        #: tokens of markers that are not acknowledged yet
        self._marker_tokens: list[Any] = []
        #: when the last message arrived, or the consumer still had one; monotonic seconds
        self._heard_at = clock.monotonic()

    # --- the request

    def start(self) -> None:
        """Subscribe, then send the request."""
        self._requests.streams[self] = self.expire
        self._requests.deadlines.watch(self.patience)
        self.ready.listen(self.send)
        self.connection.subscriptions.start(self)

    def send(self) -> None:
        """Send the request: replies can be received now."""
        if not self.ended:
            self._heard_at = clock.monotonic()
            self._publisher.outbox.post(self.publication)

    def _unsent(self, error: MessagingError) -> None:
        """Fail: the message of the request failed."""
        if not self.ended:
            self.fail(error)

    # --- replies

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Buffer replies, without the markers that travel beside them."""
        self._heard_at = clock.monotonic()
        if self.leaving:
            if not self.ended:
                self._drain(batch)
            return
        items: list[Incoming] = []
        for incoming in batch:
            if self.sequence.is_item(incoming):
                items.append(incoming)
            elif incoming.token is not None:
                self._marker_tokens.append(incoming.token)
        if items:
            super().deliver(items)
        self._settle_markers()
        if self.sequence.is_final and not self.ended and not self.buffered:
            self._conclude()

    def _settle_markers(self) -> None:
        """Acknowledge markers, after the replies ahead of them: some brokers need the order."""
        if self._marker_tokens and not self.buffer.messages and self.credit.is_returned:
            marked, self._marker_tokens = self._marker_tokens, []
            self.adapter.acknowledge(marked)

    def _on_empty(self) -> None:
        """End after the last reply. By the consumer."""
        if self.sequence.is_final and not self.buffer.messages:
            self.connection.engine.call(self._conclude)

    def _conclude(self) -> None:
        if not self.ended and not self.buffered:
            self.end(self.sequence.error)

    def expire(self, now: float) -> float:
        """End the stream if its deadline has passed; return the seconds left, or ``inf`` if it needs no deadline."""
        if self.ended or self.sequence.is_final:
            return inf
        if self.paused or self.buffered or not self.credit.is_returned:
            self._heard_at = now  # a slow consumer holds replies back
        left = self._heard_at + self.patience - now
        if left > 0:
            return left
        channel = self.publication.plan.channel
        if self.counters.received and not self.sequence.is_marked:
            self.sequence.finish(None)  # a responder without markers: its last reply has arrived
            self._conclude()
        elif self.publication.may_have_arrived:
            why = f"no reply within {self.patience:g} s; it may have been handled, or will be"
            self.fail(OutcomeUnknownError(f"request to {channel!r}: {why}"))
        else:
            self.fail(DeadlineError(f"request to {channel!r}: not sent within {self.patience:g} s"))
        return inf

    # --- ends

    def on_connection_lost(self) -> None:
        """Fail a stream whose replies no session keeps."""
        if self.publication.may_have_arrived and not self.adapter.capabilities.keeps_session:
            self._fail_lost()
        else:
            super().on_connection_lost()

    def reconnected(self, resumed: bool) -> None:
        """Fail a stream if the session that kept its replies is gone."""
        if self.publication.may_have_arrived and not resumed:
            self._fail_lost()
        else:
            super().reconnected(resumed)

    def _fail_lost(self) -> None:
        channel = self.publication.plan.channel
        if not self.ended and not self.sequence.is_final:
            why = "the connection was lost before all replies had come"
            self.connection.engine.loop.call_soon(self._unsent, ConnectionLostError(f"request to {channel!r}: {why}"))

    def stop(self) -> Promise[None] | None:
        """See ``Subscribed.stop``; a stream that is closed early waits for the channel of its cancellation."""
        stopped = super().stop()
        known = self.sequence.control_known
        if self.sequence.is_final or self.ended or known.done() or not self.publication.may_have_arrived:
            return stopped
        if Features.EXTENSION_MANDATORY in self.adapter.capabilities.features:
            return stopped  # the responder finds out by itself: its replies are returned
        both: Promise[None] = Promise("the end of replies")

        def listen() -> None:
            clock.call_later(self.connection.engine.loop, _LINGER, known.resolve, None)
            known.listen(partial(when_stopped, partial(both.resolve, None)))
            when_stopped(self._start_draining)

        def when_stopped(call: Callable[[], object]) -> None:
            if stopped is not None:
                stopped.listen(call)
            else:
                call()

        self.connection.engine.call(listen)
        return both

    def _start_draining(self) -> None:
        """Acknowledge unwanted replies: the start marker may be behind more of them than the broker's window."""
        if self.ended or self.handle is None or self.sequence.control_known.done():
            return
        self._is_draining = True
        self.flush()
        # in the order of their arrival: some brokers need it
        self._unwanted[:0] = [*[incoming.token for incoming in self.buffer.clear()], *self._marker_tokens]
        self._marker_tokens.clear()
        self._acknowledge_unwanted()
        self.throttle.release()
        if self.paused:
            self.paused = False
            self.connection.reading.unpause(self.handle)

    def _drain(self, batch: Sequence[Incoming]) -> None:
        """Read the markers of unwanted messages."""
        for incoming in batch:
            self.sequence.drain(incoming)
        self._unwanted += [incoming.token for incoming in batch if incoming.token is not None]
        if self._is_draining:
            self._acknowledge_unwanted()

    def _acknowledge_unwanted(self) -> None:
        tokens, self._unwanted = self._unwanted, []
        self.adapter.acknowledge(tokens)

    def _end(self, error: MessagingError | None) -> None:
        first = not self.ended
        super()._end(error)
        if not first:
            return
        self._requests.release(self.key, self)
        self._requests.streams.pop(self, None)
        if error is None:
            self.over.resolve(None)
        else:
            self.over.reject(error)
        closed = error or StreamConsumedError("the stream of its replies was closed")
        self._publisher.outbox.fail(self.publication, closed)
        if not self.sequence.has_ended and self.sequence.control is not None:
            self._cancel(self.sequence.control)

    def _cancel(self, channel: str) -> None:
        """Tell the responder to stop, on the channel of its start marker: more replies would follow."""
        route = self.adapter.addressing.reply_routes(channel)[0]
        headers = markers.Marker(markers.CANCEL).headers()
        extensions = {**self.sequence.extensions, Features.EXTENSION_HEADERS: headers}
        context = MessageContext(route.channel, route.channel_extension, extensions=extensions)
        try:
            plan = self._publisher.compile(context)
            promise = self._publisher.publish_checked(b"", plan, self.sequence.correlation_id, on_loop=True)
        except MessagingError as error:
            logger.debug("the responder at %r cannot be told to stop: %s", channel, error)
        else:
            promise.was_retrieved = True
