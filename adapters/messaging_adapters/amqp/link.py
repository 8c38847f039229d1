"""The connections, the publisher and the subscriptions of an instance, from ``open`` to the next loss.

Publishing and consuming have a connection each: a broker that is short of memory accepts no messages, but goes on
delivering them. The one for consuming is made with the first subscription. The end of either ends the link. A
:class:`Connector` makes the links of an instance, one after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

import aiormq

from messaging.adapter import Events, PlannedLossError
from messaging.errors import (
    AuthenticationError,
    BrokerError,
    ConnectFailedError,
    ConnectionLostError,
    CredentialsError,
    QueueRefusedError,
    SubscriptionRefusedError,
)
from messaging.execution import clock, on_worker
from messaging.model.credentials import Credentials
from messaging_adapters.amqp import topology
from messaging_adapters.amqp.connection import CLOSE_GRACE, UNCONFIRMED_GRACE, AmqpWire, connect, refusal
from messaging_adapters.amqp.consumer import QueueConsumer
from messaging_adapters.amqp.declarations import QueueSpec, RefusingQueues
from messaging_adapters.amqp.delays import Delays
from messaging_adapters.amqp.deliveries import QueueSubscription
from messaging_adapters.amqp.publisher import AmqpPublisher
from messaging_adapters.amqp.target import AmqpSettings, AmqpTarget, log_in

if TYPE_CHECKING:
    import ssl


logger = logging.getLogger(__name__)

T = TypeVar("T")

#: seconds that a planned reconnect is delayed by unconfirmed messages
_PLANNED_TIMEOUT: Final = 1.0
#: reply codes of a broker that does not know ``connection.update-secret``: it ends the connection
_UNKNOWN_METHOD: Final = frozenset({501, 502, 503, 505, 540})


class Connector:
    """Makes the links of an instance, and knows the credentials of now: they change while programs run.

    Args:
        target: where to connect the next link, without the credentials of a provider; may be replaced.
        settings: of the instance.

    Attributes:
        provider: returns the credentials of the next connection; see ``TakesCredentials``.
        used: the target with the credentials of the last connection.
        refusing: the queues that are known to refuse messages when they are full.
        link: the link of now; ``None`` before the first, and once closed.
    """

    def __init__(self, target: AmqpTarget, settings: AmqpSettings) -> None:
        self.target = self.used = target
        self.settings = settings
        self.provider: Callable[[], Awaitable[Credentials]] | None = None
        self.refusing = RefusingQueues()
        self.link: AmqpLink | None = None
        #: whether the broker is not known to lack ``connection.update-secret``
        self._updates_secret = True

    def linked(self) -> AmqpLink:
        """Return the link of now, which may be lost.

        Raises:
            ConnectionLostError: there is none.
        """
        if self.link is None:
            raise ConnectionLostError(f"there is no connection to {self.target}")
        return self.link

    async def open(self, events: Events) -> None:
        """Make a link. The link of a lost connection does not outlive it."""
        await self.close()
        target, context = await self.log_in(may_reuse=False)
        self.link = AmqpLink(self, await connect(target, "publishing", context), events)

    async def log_in(self, *, may_reuse: bool = True) -> tuple[AmqpTarget, ssl.SSLContext | None]:
        """Return credentials and certificates for the next connection.

        With ``may_reuse``, the credentials in use serve if the provider fails.
        """
        if self.provider is None:
            self.used = self.target
        else:
            now = clock.time_of(asyncio.get_running_loop())
            try:
                self.used = log_in(self.target, await self.provider(), now)
            except CredentialsError:
                if not may_reuse or now >= self.used.expires_at:
                    raise
        target = self.used
        if target.tls is None:
            return target, None
        return target, await on_worker(target.tls.context)

    async def renew(self, credentials: Credentials) -> None:
        """See ``TakesCredentials``: ``connection.update-secret``, or a planned reconnect."""
        link = self.link
        if link is None or not link.alive:
            return
        target = log_in(self.target, credentials, clock.time_of(asyncio.get_running_loop()))
        if not self._updates_secret or target.username != self.used.username:
            await link.end_as_planned("to log in with new credentials")
            return
        try:
            await link.update_secret(target)
        except ConnectionLostError as error:
            self._updates_secret = error.code not in _UNKNOWN_METHOD
            logger.info("%s: the new secret is not in use: %s", link.wires[0].label, error)
            raise
        self.used = target

    async def close(self) -> None:
        """End the link. Unsettled deliveries are requeued."""
        link, self.link = self.link, None
        if link is not None:
            await link.close()


class AmqpLink:
    """See the module.

    Args:
        connector: logs in for the connection to consume on.
        publishing: the connection to publish on.
        events: told if the link ends without ``close``, and when the broker stops accepting messages, and resumes.
    """

    def __init__(self, connector: Connector, publishing: AmqpWire, events: Events) -> None:
        settings = connector.settings
        self.alive = True
        self.publisher = AmqpPublisher(publishing, settings.exchange, settings.publish_window, connector.refusing)
        self._connector = connector
        self._target = connector.used
        self._settings = settings
        self.wires = [publishing]
        self._consuming: AmqpWire | None = None
        self._connecting = asyncio.Lock()
        #: the attempts to connect of now
        self._dialling: dict[asyncio.Timeout, None] = {}
        self._events = events
        self._blocked_timer: asyncio.TimerHandle | None = None
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._delays = Delays(publishing, self._target.username)
        publishing.lost = self._end
        publishing.blocked = self._block

    async def subscribe(self, subscription: QueueSubscription) -> QueueConsumer:
        """Subscribe; see ``Adapter.subscribe``."""
        source = subscription.source
        wire = await self._consuming_wire()
        self._count += 1
        consumer = QueueConsumer(
            wire,
            subscription,
            exchange=self._settings.exchange,
            tag=f"{self._target.name[:40]}-{self._count}",
            spawn=self._spawn,
            delays=self._delays if source.delay is not None else None,
        )
        await consumer.open()
        self._connector.refusing.declared(source)
        return consumer

    async def administer(
        self, what: str, request: Callable[[AmqpWire], Awaitable[T]], queue: QueueSpec | None = None
    ) -> T:
        """Make a request about a queue, on a connection of its own: the broker may close it over the request.

        Args:
            what: the subject of errors.
            request: see :mod:`.administration`.
            queue: its declaration, for the error about a queue that differs.

        Raises:
            QueueRefusedError: the broker refused the request.
            ConnectFailedError, ConnectionLostError: as they say.
        """
        self._check()
        try:
            wire = await self._dial("administration")
        except TimeoutError:
            self._check()
            raise ConnectFailedError(f"no connection to {self._target} within {self._target.timeout:g} s") from None
        try:
            return await request(wire)
        except aiormq.AMQPChannelError as error:
            raise refusal(QueueRefusedError, what, error, topology.way_out(queue, error) if queue else "") from error
        finally:
            self.wires.remove(wire)
            await wire.close()

    def read(self, wanted: bool) -> None:
        """Resume or pause reading deliveries."""
        if self._consuming is not None:
            self._consuming.read(wanted)

    async def close(self) -> None:
        """Disconnect, within about a second. Idempotent; does not raise.

        It takes up to ``UNCONFIRMED_GRACE`` if the broker has to read messages first that it does not confirm.
        """
        # acknowledgements are written at the end of the loop's turn
        await asyncio.sleep(0)
        self.alive = False
        for wire in self.wires:
            wire.lost = lambda _: None
        self._stop_dialling()
        self._watch_blocked(None)
        await self._close_wires()
        self.publisher.end(ConnectionLostError(f"connection to {self._target} was closed"))
        self._delays.end()
        if self._tasks:
            await clock.wait(self._tasks, timeout=1.0)

    async def update_secret(self, target: AmqpTarget) -> None:
        """Replace the secret of both connections by that of ``target``.

        Raises:
            ConnectionLostError: a connection was lost, and the link with it: planned, if the broker refused the secret.
        """
        # at the same time: a broker that is out of memory answers on one of them only
        updates = (self.wires[0].update_secret(target), self._update_consuming(target))
        for outcome in await asyncio.gather(*updates, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _update_consuming(self, target: AmqpTarget) -> None:
        async with self._connecting:
            if self._consuming is not None:
                await self._consuming.update_secret(target)

    async def end_as_planned(self, purpose: str) -> None:
        """Disconnect in good order and report the loss, so that the core makes another connection."""
        await self.publisher.finish(_PLANNED_TIMEOUT)
        # acknowledgements are written at the end of the loop's turn
        await asyncio.sleep(0)
        if not self.alive:
            return
        for wire in self.wires:
            wire.lost = lambda _: None
        try:
            await self._close_wires()
        finally:
            self._end(PlannedLossError(f"connection to {self._target} ended {purpose}"))

    async def _close_wires(self) -> None:
        grace = UNCONFIRMED_GRACE if self.publisher.wrote_unanswered() else CLOSE_GRACE
        await asyncio.gather(*[wire.close(grace) for wire in self.wires])

    async def _consuming_wire(self) -> AmqpWire:
        async with self._connecting:
            self._check()
            if self._consuming is None:
                self._consuming = await self._connect()
            return self._consuming

    async def _connect(self) -> AmqpWire:
        try:
            wire = await self._dial("consuming")
        except (ConnectFailedError, TimeoutError) as error:
            if isinstance(error, AuthenticationError) and self._connector.provider is None:
                what = f"no connection to consume on: {error}"
                raise SubscriptionRefusedError(what, code=error.code, detail=error.detail) from error
            self._check()  # the link ended, and the attempt with it
            # treated as a loss: the core opens again, with its delays
            reason = str(error) or f"none within {self._target.timeout:g} s"
            code, detail = (error.code, error.detail) if isinstance(error, BrokerError) else (None, None)
            what = f"no connection to {self._target} to consume on: {reason}"
            lost = ConnectionLostError(what, code=code, detail=detail)
            lost.__cause__ = error
            self._end(lost)
            raise lost from error
        wire.lost = self._end
        return wire

    async def _dial(self, purpose: str) -> AmqpWire:
        async with clock.timeout(self._target.timeout) as dialling:
            self._dialling[dialling] = None
            try:
                target, context = await self._connector.log_in()
                wire = await connect(target, purpose, context)
            finally:
                self._dialling.pop(dialling, None)  # its deadline cannot be changed after it has passed
        if not self.alive:  # it came too late
            await wire.close()
            self._check()
        self.wires.append(wire)
        return wire

    def _block(self, reason: str | None) -> None:
        self.publisher.block(reason)
        self._delays.block(reason)
        self._watch_blocked(reason)
        if reason is None:
            logger.info("%s: the broker accepts messages again", self.wires[0].label)
            self._events.impaired(None)
        else:
            logger.warning("%s: the broker accepts no messages: %s; publishing waits", self.wires[0].label, reason)
            self._events.impaired(BrokerError(f"{self._target} takes no messages for now: {reason}", detail=reason))

    def _watch_blocked(self, reason: str | None) -> None:
        """End the link if the broker accepts no messages for too long; with ``None`` it accepts them again."""
        timeout = self._settings.blocked_timeout
        if reason is not None and self._blocked_timer is None and timeout is not None:
            text = f"{self._target} took no messages for {timeout:g} s: {reason}"
            self._blocked_timer = clock.call_later(
                asyncio.get_running_loop(),
                timeout,
                lambda: self._end(ConnectionLostError(text, detail=reason)),
            )
        elif reason is None and self._blocked_timer is not None:
            self._blocked_timer.cancel()
            self._blocked_timer = None

    def _stop_dialling(self) -> None:
        for dialling in self._dialling:
            if not dialling.expired():
                dialling.reschedule(clock.time_of(asyncio.get_running_loop()))

    def _check(self) -> None:
        if not self.alive:
            raise ConnectionLostError(f"connection to {self._target} lost")

    def _end(self, cause: ConnectionLostError) -> None:
        if not self.alive:
            return
        self.alive = False
        for wire in self.wires:
            # tokens of either connection are stale from here on
            wire.alive = False
        self._stop_dialling()
        self._watch_blocked(None)
        self.publisher.channels.flush_replies()
        self._events.lost(cause)
        self.publisher.end(cause)
        self._delays.end()
        for wire in self.wires:
            self._spawn(wire.close())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
