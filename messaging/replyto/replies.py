"""Where replies go, with which context, which come later, and which streams of them can be cancelled (RFC 5.7.3).

**Closing.** A deferred request is acknowledged, so no other responder gets it: an instance that closes answers it. It
waits for the reply for half of the time that is left for closing, and reports :class:`~messaging.errors.ClosedError`
then. If no time is left it reports that at once, and takes the time to send it.

**Threads.** Any thread adds deferred requests and sends replies. The lock guards the requests; no code of the
application runs under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from messaging.adapter import Adapter
from messaging.codecs.cache import BoundedCache
from messaging.connection import Connection
from messaging.errors import ArgumentError, InvalidChannelError
from messaging.errors.checks import check_procedure
from messaging.execution import Promise, clock, engine, workers
from messaging.model import NO_EXTENSIONS, Features, MessageContext, PublishPlan, ReplyRoute, SubscriptionSpec, channels
from messaging.publishing import MessagePublisher
from messaging.replyto.markers import Marker
from messaging.replyto.requests import OpenRequests

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


class DeferredRequests:
    """The requests of one instance whose replies come later. Thread safe.

    Each is known by the function that abandons it: reports that the reply was not ready when the instance closed. It is
    called on a thread, or on the loop if there is none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        #: the oldest first -> whether its reply is being put into the outbox
        self._waiting: dict[Callable[[], object], bool] = {}
        #: promise that no request is left; while the instance closes
        self._settled: Promise[None] | None = None
        #: the time to wait for replies is over
        self._is_over = False

    def add(self, abandon: Callable[[], object]) -> None:
        """Note a request whose reply comes later."""
        with self._lock:
            self._waiting[abandon] = False
            is_late = self._is_over
        if is_late:  # its handler returned while the instance closed
            engine().call(self._abandon)

    def take(self, abandon: Callable[[], object]) -> bool:
        """Return whether the reply of a request is to be sent now. Call :meth:`sent` after that."""
        with self._lock:
            if self._waiting.get(abandon, True):
                return False
            self._waiting[abandon] = True
            return True

    def sent(self, abandon: Callable[[], object]) -> None:
        """Note that a reply is in the outbox, or failed."""
        with self._lock:
            del self._waiting[abandon]
        self._note_settled()

    def _note_settled(self) -> None:
        settled = self._settled
        if settled is not None and not self._waiting:
            settled.resolve(None)

    def finish(self, left: float) -> Promise[None] | None:
        """Have all requests answered, because the instance closes.

        Args:
            left: seconds that are left for closing.

        Returns:
            The promise that the answers are in the outbox; ``None`` if there are none.
        """
        with self._lock:
            if not self._waiting:
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

    def _report(self, abandon: Callable[[], object]) -> None:
        try:
            abandon()
        finally:
            self.sent(abandon)


_HEADERS: Final = Features.EXTENSION_HEADERS


class Replies:
    """Addresses and publishes the replies of one instance. From any thread, unless a method says otherwise.

    Attributes:
        publisher: publishes the replies.
        requests: of the instance; its inbox also receives the cancellations of streams.
        streams: streams of replies that requesters may cancel, by correlation id: the functions that stop their
            handlers. Written by the threads of the handlers.
        deferred: requests whose replies come later.
        best_qos: the highest quality of service that replies can have.
    """

    def __init__(self, connection: Connection, publisher: MessagePublisher, requests: OpenRequests) -> None:
        self.connection = connection
        self.adapter: Adapter = connection.adapter
        self.requests = requests
        self.streams: dict[str, Callable[[str | None], object]] = {}
        requests.on_cancel = self._cancel
        self.deferred = DeferredRequests()
        connection.on_finishing = self.deferred.finish
        self.publisher = publisher
        self.best_qos: str
        patterns = connection.settings.reply_channels
        #: match the channels that replies may go to; ``None`` without the setting
        self._allowed = (
            None
            if patterns is None
            else [channels.matcher(channels.check_pattern(each.strip())) for each in patterns.split(",")]
        )
        #: subscriptions to requests: no reply goes to their channels
        self._served: tuple[SubscriptionSpec, ...] = ()
        self._routes: BoundedCache[str, tuple[ReplyRoute, ...]] = BoundedCache()
        self._plans: BoundedCache[tuple[Any, ...], PublishPlan] = BoundedCache()
        #: plans by all that matters but the channel
        self._alike: BoundedCache[tuple[Any, ...], PublishPlan] = BoundedCache()
        self.refresh()

    def refresh(self) -> None:
        """Forget the checked contexts: the features that the adapter announces have changed."""
        self.best_qos = self.adapter.capabilities.acknowledging_qos or self.adapter.capabilities.default_qos
        self._plans.clear()
        self._alike.clear()
        self._routes.clear()

    def _cancel(self, correlation_id: str) -> None:
        """Stop the handler of a stream: its requester wants no more. On the loop."""
        stop = self.streams.get(correlation_id)
        if stop is not None:
            stop(None)

    def is_allowed(self, channel: str) -> bool:
        """Return whether replies may go to a channel that a request names."""
        if channel in self._routes:
            return True
        if self._allowed is None:
            may_go = not channel.startswith("$")
        else:
            may_go = any(matches(channel) for matches in self._allowed)
        return may_go and not self._is_served(channel, None)

    # --- routes

    def serve(self, specs: Sequence[SubscriptionSpec]) -> None:
        """Set the subscriptions to requests: no reply goes to their channels from now on. On the loop."""
        self._served = tuple(specs)
        # not cleared: a thread that has looked at the earlier channels may enter its route only now
        self._routes = BoundedCache()

    def _is_served(self, channel: str, extension: str | None) -> bool:
        reaches = self.adapter.addressing.reaches
        return any(reaches(spec, channel, extension) for spec in self._served)

    def refuse_served(self, channel: str, extension: str | None) -> None:
        """Refuse a channel of a reply that handlers of this instance take requests from.

        Raises:
            InvalidChannelError: the reply would be their next request, and so on.
        """
        if self._is_served(channel, extension):
            shown = repr(channel) if extension is None else f"{channel!r} with the extension {extension!r}"
            raise InvalidChannelError(
                f"a reply to {shown} is not sent: request handlers of {self.adapter.name!r} take requests from there; "
                f"leave the channel as the response builder has it, or name one that no handler here serves"
            )

    def routes(self, channel: str) -> tuple[ReplyRoute, ...]:
        """Return the routes of replies to a channel, best first.

        Raises:
            InvalidChannelError: handlers of this instance take requests from there.
        """
        routes = self._routes
        found = routes.get(channel)
        if found is None:
            self.refuse_served(channel, None)
            first, *others = self.adapter.addressing.reply_routes(channel)
            found = first, *(each for each in others if not self._is_served(each.channel, each.channel_extension))
            routes[channel] = found
        return found

    def prefer(self, channel: str, route: ReplyRoute) -> None:
        """Try ``route`` first for the next replies to ``channel``: a reply has arrived that way."""
        routes = self._routes
        known = routes.get(channel)
        if known is not None:
            routes[channel] = (route, *(each for each in known if each != route))

    # --- publishing

    def plan(
        self,
        route: ReplyRoute,
        qos: str,
        content_type: str | None,
        content_encoding: str | None = None,
        extensions: Mapping[str, Any] = NO_EXTENSIONS,
        marker: Marker | None = None,
        control: str | None = None,
    ) -> PublishPlan:
        """Return the plan of a reply; raises as ``MessagePublisher.publish``.

        ``control`` is the reply channel of the reply itself.
        """
        if extensions and marker is None and self.publisher.chain is not None and _HEADERS in extensions:
            # interceptors add other values to each reply: only these are checked
            others = {key: value for key, value in extensions.items() if key != _HEADERS}
            plain = self.plan(route, qos, content_type, content_encoding, others, None, control)
            return self.publisher.extended(plain, extensions[_HEADERS])
        is_plain = not extensions and marker is None and control is None
        if is_plain:
            key = (route, qos, content_type, content_encoding)
            found = self._plans.get(key)
            if found is not None:
                return found
            # where each request has a reply channel of its own, only the name of the channel has to be checked
            alike = (route.channel_extension, route.mandatory, qos, content_type, content_encoding)
            other = self._alike.get(alike)
            if other is not None:
                found = self._plans[key] = self.publisher.readdress(other, route.channel)
                return found
        wanted: dict[str, Any] = {**extensions}
        wanted.setdefault(Features.EXTENSION_QOS, qos)
        tells = route.mandatory and Features.EXTENSION_MANDATORY in self.adapter.capabilities.features
        if tells and wanted[Features.EXTENSION_QOS] != "0":
            wanted.setdefault(Features.EXTENSION_MANDATORY, True)
        if marker is not None:
            wanted[Features.EXTENSION_HEADERS] = {**wanted.get(Features.EXTENSION_HEADERS, {}), **marker.headers()}
        context = MessageContext(
            route.channel,
            route.channel_extension,
            content_type,
            content_encoding,
            None,
            control,
            MappingProxyType(wanted),
        )
        plan = self.publisher.compile(context)
        if is_plain:
            self._plans[key] = self._alike[alike] = plan
        return plan
