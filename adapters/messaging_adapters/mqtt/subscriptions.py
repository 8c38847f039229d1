"""Subscribes and unsubscribes the streams of an instance at the broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from messaging.adapter import Adapter, Sink
from messaging.environment.signals import on_failure
from messaging.errors import ConnectionLostError, SubscriptionRefusedError
from messaging.execution import clock
from messaging.model import Features, SubscriptionSpec
from messaging_adapters.mqtt import handshake, packets
from messaging_adapters.mqtt.capabilities import RETAIN_HANDLING
from messaging_adapters.mqtt.connection import NetworkConnection
from messaging_adapters.mqtt.handshake import Connack, ConnectTarget, Grants
from messaging_adapters.mqtt.in_flight import Answer, InFlightWindow
from messaging_adapters.mqtt.settings import MqttSettings
from messaging_adapters.mqtt.sharing import Sharing
from messaging_adapters.mqtt.streams import FilterRoute, JointOutlet, Stream, filter_of, shown

if TYPE_CHECKING:
    from messaging_adapters.mqtt.inbound import Inbound
    from messaging_adapters.mqtt.router import Router

logger = logging.getLogger(__name__)

#: seconds of a new connection after which subscriptions end that no stream has taken over
ORPHAN_TIMEOUT: Final = 30.0


class BrokerSubscriptions:
    """The subscriptions of one instance. On the loop.

    Args:
        adapter: has the features; features that the broker lacks are removed.
        window: knows when a packet id is free.
    """

    def __init__(
        self,
        adapter: Adapter,
        settings: MqttSettings,
        grants: Grants,
        router: Router,
        inbound: Inbound,
        window: InFlightWindow,
    ) -> None:
        self._adapter = adapter
        self._settings = settings
        self._grants = grants
        self._router = router
        self._inbound = inbound
        self._window = window
        self._persistent = settings.persistent
        self._sharing = Sharing()
        self._connection: NetworkConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: filters of an earlier process, whose subscriptions are to end on the next connection
        self._abandoned: dict[str, None] = {}
        self._connack: Connack | None = None

    def connected(self, connection: NetworkConnection, connack: Connack) -> None:
        """Use a new connection; end the subscriptions that the broker did not confirm to end on an earlier one.

        That waits for the streams that subscribe again: between an UNSUBSCRIBE and the next SUBSCRIBE, a session would
        miss messages.
        """
        self._connection = connection
        self._connack = connack
        if not connack.session_present:
            self._abandoned.clear()
        if self._router.orphans or self._abandoned:
            self._timer = clock.call_later(asyncio.get_running_loop(), ORPHAN_TIMEOUT, self.end_orphans)

    def disconnected(self) -> None:
        """Note that the connection is lost."""
        self._connection = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end_orphans(self) -> None:
        """End the subscriptions that were to end on an earlier connection, and that no stream has taken over."""
        if self._connection is not None:
            orphans, self._router.orphans = self._router.orphans, {}  # a connection that is closing puts them back
            for stream in orphans.values():
                self._connection.requests.unsubscribe_soon(stream.route.filter, *self._ends(stream))
                self._inbound.leftovers.drop(stream)
            abandoned, self._abandoned = self._abandoned, {}
            for topic_filter in abandoned:
                if not self._router.has(topic_filter):
                    self._leave_abandoned(topic_filter)

    def _ends(self, stream: Stream, last: Stream | None = None) -> tuple[Callable[[Answer], None], Callable[[], None]]:
        """Return what to call with the answer to the UNSUBSCRIBE of a removed stream, and without one."""
        departing = self._inbound.leftovers.departing

        def read(answer: Answer) -> None:
            departing.pop(stream, None)
            if answer.code < packets.FAILURE:
                self._router.unsubscribed(stream.route.filter, last)

        def lost() -> None:  # a session that outlives the connection may keep the subscription
            departing.pop(stream, None)
            self._router.orphan(stream)

        return read, lost

    async def subscribe(
        self, target: ConnectTarget, spec: SubscriptionSpec, sink: Sink, joint: JointOutlet | None = None
    ) -> Stream:
        """See ``Adapter.subscribe``. There is no time limit here.

        Args:
            target: where the instance connects to.
            spec: what to subscribe to.
            sink: takes the messages.
            joint: the joint subscription that it becomes part of.
        """
        connection, connack = self._connection, self._connack
        if connection is None or connack is None:
            raise ConnectionLostError(f"no connection to {target}")
        # messages on their way to an earlier stream of the filter are not for this one
        await connection.requests.unsubscribed(filter_of(spec.options.queue, spec.channel))
        stream = self._router.add(spec, sink, joint)
        route, asked = stream.route, int(spec.options.qos)
        self._inbound.claim(stream)
        # a further SUBSCRIBE makes the broker send retained messages again, which shared subscriptions do not get
        if route.is_shared and route.confirmed and not route.differs:
            if joint is not None:
                joint.grant(stream)
            return stream

        def read(answer: Answer) -> None:
            if joint is not None:
                (joint.left if _is_refused(answer, asked) else joint.grant)(stream)

        # a session may have the subscription from an earlier attempt or process: it keeps it for the next one
        with on_failure(partial(self._withdraw, stream, is_at_broker=not self._persistent)):
            await self._window.free_id()
            qos = route.qos
            identifier = self._router.identify(stream) if connack.identifiers else None
            if not (self._settings.v5 and connack.identifiers):
                self._warn_of_overlap(route)
            wanted = packets.subscribe_options(
                qos,
                no_local=route.no_local,
                as_published=route.as_published,
                # a queue gets none (MQTT 5, 4.8.2); mosquitto sends it some unless told not to
                retain_handling=2 if route.is_shared else spec.options.custom.get(RETAIN_HANDLING, 0),
            )
            if route.differs:
                self._end_differing(connection, route)
            route.held.add(route.options)
            answer = await connection.requests.subscribe(route.filter, wanted, identifier, read)
        if _is_refused(answer, asked):
            self._withdraw(stream, is_at_broker=True)
            reason = f"it grants QoS 0, without acknowledgement; QoS {asked} was asked for"
            if answer.code >= packets.FAILURE:
                reason = handshake.reason_name(answer.code, answer.detail)
            raise SubscriptionRefusedError(
                f"{target} refused {shown(spec)}: {reason}", code=answer.code, detail=answer.detail
            )
        self._grants.subscribed(target, route.filter, asked, answer.code)
        route.confirmed = route.confirmed or qos == route.qos
        return stream

    def _end_differing(self, connection: NetworkConnection, route: FilterRoute) -> None:
        """End the subscription that the broker has to a filter, or may have, for the sake of other options.

        By MQTT 5, 3.8.4, SUBSCRIBE alone replaces it, and loses no message. But mosquitto up to 2.0 keeps the options
        of the first SUBSCRIBE. UNSUBSCRIBE and the SUBSCRIBE that follows at once are one write.
        """
        logger.warning(
            "mqtt '%s': the subscription to %r gets other values of noLocal or retainAsPublished: it is ended and made "
            "again; a message that the broker receives in the moment between is lost",
            self._adapter.name, route.filter,
        )  # fmt: skip
        ended = route.held - {route.options}

        def read(answer: Answer) -> None:
            if answer.code < packets.FAILURE:
                route.held.difference_update(ended)
                return
            logger.warning(
                "mqtt '%s': the broker refused to end the subscription to %r: %s; it may keep its values of noLocal "
                "and retainAsPublished; use another instance, or end the session",
                self._adapter.name, route.filter, handshake.reason_name(answer.code, answer.detail),
            )  # fmt: skip

        connection.requests.unsubscribe_soon(route.filter, read)

    async def check_sharing(self, target: ConnectTarget, spec: SubscriptionSpec) -> None:
        """Refuse a queue if the broker has no shared subscriptions; see :mod:`.sharing`."""
        if spec.options.queue is None or self._settings.v5:
            return
        try:
            await self._sharing.require(target)
        except SubscriptionRefusedError:
            features = self._adapter.capabilities.features - {Features.POINT_TO_POINT, Features.EXTENSION_QUEUE}
            self._adapter.capabilities = replace(self._adapter.capabilities, features=features)
            raise

    def _warn_of_overlap(self, route: FilterRoute) -> None:
        """Warn that the broker sends one packet for overlapping filters, with the QoS of any one of them."""
        for other in self._router.contradicting(route):
            logger.warning(
                "mqtt '%s': subscriptions to %r (QoS %d) and %r (QoS %d) overlap: without MQTT 5 a message for both "
                "may come with QoS 0, and without acknowledgement; give both the same qos",
                self._adapter.name, route.filter, route.qos, other.filter, other.qos,
            )  # fmt: skip

    def _withdraw(self, stream: Stream, *, is_at_broker: bool) -> None:
        """Undo a subscription that was not confirmed. The session's next stream gets the messages it has claimed.

        Args:
            stream: of the subscription.
            is_at_broker: whether to undo it there, too.
        """
        if stream.ended:
            return
        self._end(stream)
        if stream.route.is_kept and stream.route.streams == [stream] and not is_at_broker:
            self._router.detach(stream)  # as it was before
        elif self._router.remove(stream):
            if not is_at_broker:
                self._router.withdrawn[stream.route.filter] = stream
            elif self._connection is not None:
                self._connection.requests.unsubscribe_soon(stream.route.filter, *self._ends(stream))
            else:
                self._router.orphan(stream)

    async def part(self, joint: JointOutlet, pattern: str) -> None:
        """See ``Adapter.part``. The stream takes messages until the broker has answered."""
        stream = joint.streams.get(pattern)
        if stream is None:
            if joint.heir(pattern) is not None:
                self._leave_abandoned(pattern)
            return

        def part() -> None:
            if joint.streams.get(pattern) is stream:
                joint.left(stream)
                joint.keep(stream)
                self._router.unroute(stream)

        def read(answer: Answer) -> None:
            part()
            self._ends(stream, stream)[0](answer)

        if len(stream.route.streams) > 1:
            part()
        elif self._connection is None:
            raise ConnectionLostError(f"no connection to end the subscription to {pattern!r}")
        else:
            await self._connection.requests.unsubscribe(stream.route.filter, read)

    def _leave_abandoned(self, topic_filter: str) -> None:
        """Unsubscribe a filter of an earlier process, on the next connection if this one ends unanswered."""
        if self._connection is None:
            self._abandoned[topic_filter] = None
        else:
            lost = partial(self._abandoned.setdefault, topic_filter, None)
            self._connection.requests.unsubscribe_soon(topic_filter, lost=lost)

    async def unsubscribe_joint(self, joint: JointOutlet) -> None:
        """End a joint subscription; see ``Adapter.unsubscribe``."""
        joint.ended = True
        for stream in joint.parted:
            self._end(stream)
            stream.end()
        joint.parted.clear()
        await asyncio.gather(*map(self.unsubscribe, [*joint.streams.values()]))

    async def unsubscribe(self, stream: Stream) -> None:
        """See ``Adapter.unsubscribe``."""
        if stream.ended:
            return
        route = stream.route
        others = [each for each in route.streams if each is not stream and each.settles]
        if route.is_shared and others:
            self._inbound.bequeath(stream, others[0])
        else:
            self._end(stream)
        if not self._router.remove(stream):
            return
        if self._connection is None:
            self._router.orphan(stream)
            return
        if self._persistent:
            self._inbound.leftovers.departing[stream] = None
        await self._connection.requests.unsubscribe(route.filter, *self._ends(stream, stream))

    def _end(self, stream: Stream) -> None:
        """Leave the unsettled messages of a stream to the session's next one; without a session, settle them."""
        if self._persistent:
            self._inbound.leave(stream)
        else:
            self._inbound.release(stream)

    def requeues(self, stream: Stream) -> bool:
        """See ``Adapter.redelivers``."""
        route = stream.route
        return self._persistent or (route.is_shared and any(each is not stream for each in route.streams))


def _is_refused(answer: Answer, asked: int) -> bool:
    """Return whether the broker refused, or granted no acknowledgement, and messages would be lost on the way."""
    return answer.code >= packets.FAILURE or (asked > 0 and answer.code == 0)
