"""Subscriptions at sources: made again when the broker refuses or ends them."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

from messaging import MessageStream, Messaging, Promise
from messaging.errors import ArgumentError, ClosedError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Backoff, clock, engine, workers
from messaging.gateway.extensions import exclude_each_other, is_unacknowledged, of_route, with_prefetch
from messaging.gateway.patterns import ChannelPattern
from messaging.gateway.settings import RouteSettings
from messaging.model import MessageContext

logger = SafeLog(__name__)

#: bounds of the pause before a subscription that failed is made again, seconds
_SHORTEST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 60.0
#: subscription option, and extension of received messages, of MQTT: what recognises a message without an id
PACKET_ID: Final = "packetId"


class Subscribing:
    """Subscribes on worker threads; again, after growing pauses, when the broker refuses or ends the subscription.

    Thread safe.

    Args:
        what: the part of the gateway, for the log: "route 'plant'".
        subscribe: makes the subscription, and calls :meth:`note_success` when it is there.

    Attributes:
        problem: why the source sends nothing; ``None``: it does, or is not connected.
        is_stopped: whether no subscription is made any more.
    """

    def __init__(self, what: str, subscribe: Callable[[], object]) -> None:
        self._what = what
        self._subscribe = subscribe
        self._delays = Backoff(_SHORTEST_PAUSE, _LONGEST_PAUSE)
        self.problem: str | None = None
        self.is_stopped = False

    def start(self) -> None:
        """Subscribe, on a worker thread: it waits for the broker."""
        if not self.is_stopped:
            workers().submit(self._attempt)

    def _attempt(self) -> None:
        try:
            self._subscribe()
        except MessagingError as error:
            self.note_failure(error)

    def note_success(self) -> None:
        """Note that the subscription is there."""
        self.problem = None
        self._delays.reset()

    def note_failure(self, error: Exception) -> None:
        """Subscribe again later, unless the instance was closed."""
        if not self.is_stopped and not isinstance(error, ClosedError):
            self.problem, pause = str(error), next(self._delays)
            logger.error("%s: not subscribed: %s; subscribing again in %.3g s", self._what, error, pause)
            running = engine()
            running.call(clock.call_later, running.loop, pause, self.start)


class SourceSubscription:
    """Subscribes to the source of one route. Thread safe.

    Args:
        route: its name, for the log.
        settings: of the route.
        source: the instance that the messages come from.
        take: gets each message, on a worker thread, one at a time.

    Attributes:
        subscribing: makes the subscription.
        is_confirmed: whether the broker has confirmed the subscription.
    """

    def __init__(self, route: str, settings: RouteSettings, source: Messaging, take: Callable[[Any], object]) -> None:
        self._route = route
        self._settings = settings
        self._source = source
        self._take = take
        self._pattern = ChannelPattern(settings.source.channel).pattern
        self.subscribing = Subscribing(f"route '{route}'", self._subscribe)
        self.is_confirmed = False
        self._stream: MessageStream[Any] | None = None

    def _subscribe(self) -> None:
        self._stream = stream = self._open()
        stream.ready.add_done_callback(self._note_ready)
        stream.subscribe(self._take, self._ended, None)
        if self.subscribing.is_stopped:
            stream.close()

    def _extensions(self) -> dict[str, Any]:
        """Return the subscription options, by the present features of the source: the next broker may have others."""
        settings, features = self._settings, self._source.features
        extensions = with_prefetch(of_route(settings, features), settings.source.prefetch)
        if PACKET_ID in features:
            extensions.setdefault(PACKET_ID, True)
        return extensions

    def _open(self) -> MessageStream[Any]:
        extensions = self._extensions()
        context = MessageContext(self._pattern, extensions=MappingProxyType(extensions))
        subscribe = self._source.subscription.subscribe
        if is_unacknowledged(extensions):
            return subscribe(context)
        try:
            return subscribe(context, keep_subscription=True, acknowledge="manual")
        except ArgumentError:
            logger.warning(
                "route '%s': the broker of '%s' keeps no messages of %r while the gateway is away; set a queue, or a "
                "client_id and a session", self._route, self._source.name, self._settings.source.channel,
            )  # fmt: skip
            return subscribe(context, acknowledge="manual")

    def _note_ready(self, ready: Promise[None]) -> None:
        if ready.exception(0) is None:
            self.is_confirmed = True
            self.subscribing.note_success()

    def _ended(self, error: Exception) -> None:
        self.is_confirmed = False
        self.subscribing.note_failure(error)

    def excludes(self, other: SourceSubscription) -> bool:
        """Return whether the source refuses a subscription while it has ``other``."""
        return (
            self._source is other._source
            and self._pattern == other._pattern
            and exclude_each_other(self._extensions(), other._extensions(), self._source.features)
        )

    def end(self) -> Promise[None] | None:
        """End the subscription at the broker, and subscribe no more. Return the end of the stream if there is one."""
        self.subscribing.is_stopped = True
        return None if self._stream is None else self._stream.close()
