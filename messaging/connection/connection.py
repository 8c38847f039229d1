"""The connection of one instance: opens and reconnects its adapter, and restores its subscriptions.

Everything runs on the engine's loop unless a docstring states otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

from messaging.adapter import Adapter, PlannedLossError
from messaging.connection.opening import Opener
from messaging.connection.presence import PendingWill, Presence
from messaging.connection.renewal import CredentialRenewal
from messaging.connection.state import ConnectionStates, Epoch, StateName
from messaging.connection.subscribed import PublishQueue, ReadControl, Verdicts
from messaging.connection.subscriptions import ConnectionSubscriptions
from messaging.errors import (
    AuthenticationError,
    BrokerError,
    ClosedError,
    ConnectFailedError,
    MessagingError,
    TakenOverError,
)
from messaging.errors.text import SafeLog
from messaging.execution import Engine, Promise, clock, of_library

logger = SafeLog(__name__)

#: longest wait of closing for the listeners of the registry, and for the adapter, seconds
_TELL_SECONDS: Final = 5.0
_ADAPTER_CLOSE_SECONDS: Final = 5.0
#: what closing takes at least to answer requests whose replies come later, seconds
_ANSWER_SECONDS: Final = 0.2


class Connection:
    """The link between one messaging instance and its adapter.

    Attributes:
        states: the current state, readable from any thread, and its observers.
        cause: the last problem, kept after it is over.
        epoch: the number of connections that were made, and whether the last one is up. Written on the engine loop.
        ready: resolves with the first connection; fails if the instance is closed without one.
    """

    def __init__(self, engine: Engine, adapter: Adapter, outbox: PublishQueue) -> None:
        settings = adapter.settings
        self.engine = engine
        self.adapter = adapter
        self.settings = settings
        self.states = ConnectionStates(engine)
        self.cause: MessagingError | None = None
        #: whether this is the copy of the parent's connection in a forked child
        self.is_abandoned = False
        self._ended = asyncio.Event()
        self.ready: Promise[None] = Promise(f"connecting {adapter.name!r} to {adapter.url}")
        self.outbox = outbox
        self.epoch = Epoch()
        self.reading = ReadControl(adapter)
        self.subscriptions = ConnectionSubscriptions(
            engine, adapter, self.epoch, self.states, self.reading, lambda: self.cause
        )
        self.endings = self.subscriptions.endings
        self.verdicts = Verdicts(engine, adapter, self.states)
        self.last_will = PendingWill(engine, adapter, outbox, self.epoch)
        self.presence = Presence(adapter)
        self._renewal = CredentialRenewal(engine, adapter, lambda: self.label)
        #: called on the loop after each connect, and once when the connection is closed
        self.on_connected: Callable[[], object] = _nothing
        self.on_closed: Callable[[], Promise[None] | None] = _nothing
        #: called with the seconds left for closing before the outbox refuses messages; what it promises is waited for,
        #: and sent, even if none are left
        self.on_finishing: Callable[[float], Promise[None] | None] = _nothing
        #: connections that were lost, without those that were ended to connect anew
        self.losses = 0
        #: loop time of the last connect
        self._connected_at = 0.0
        self._opener = Opener(engine, adapter, self._renewal)
        self._loss = asyncio.Event()
        self._loss_cause: MessagingError | None = None
        #: reasons for the state ``degraded``: of the broker, and subscriptions that are not restored yet
        self._impairment: MessagingError | None = None
        self._unrestored: set[asyncio.Task[Any]] = set()
        self._task: asyncio.Task[Any] | None = None

    # --- any thread

    @property
    def state(self) -> StateName:
        """The name of the state now."""
        return self.states.value.name

    @property
    def is_closing(self) -> bool:
        """Whether the instance is being closed, or is closed."""
        return self.endings.is_closing or self.states.is_closed

    def refuse_closed(self) -> None:
        """Raise ``ClosedError`` if the instance is being closed, or is closed. From any thread."""
        if self.is_closing:
            raise ClosedError(f"the instance {self.adapter.name!r} is closed")

    @property
    def label(self) -> str:
        """The connection as log lines name it, with its host: see ``BrokerUrl.label``."""
        return self.adapter.url.label(self.adapter.name, self._opener.hosts.current)

    # --- life cycle

    def start(self) -> None:
        """Start connecting."""
        self.outbox.start()
        self._task = self.engine.spawn(self._run())

    async def _run(self) -> None:
        try:
            resumed = await self._connect_first()
        except MessagingError as error:
            await self._fail(error)
            return
        logger.info("%s: connected", self.label)
        while True:
            try:
                await self._connected(resumed)
            except Exception:  # a defect must not end the reconnecting
                logger.exception("%s: not fully set up after connecting; continuing", self.label)
                self.outbox.connected()
                self.ready.resolve(None)
            await self._loss.wait()
            self.outbox.disconnected()
            resumed = await self._reconnect()

    async def _fail(self, error: MessagingError) -> None:
        """Close after the first attempt to connect failed."""
        self.cause = error
        self.states.change("closed", error, self._opener.where)
        try:
            self.outbox.close()
            await self.outbox.finish()
            self.subscriptions.fail_all(error)
            await self._close_adapter()
            await self._tell_closed()
            self.ready.reject(error)
        finally:
            self._ended.set()

    async def _connect_first(self) -> bool:
        self._loss.clear()
        await self.presence.connecting()
        if not (self.settings.retry_connect or self.settings.start_offline):
            return await self._opener.once(self)
        endpoint = await self._opener.ready()
        while True:
            try:
                return await self._opener.attempt(endpoint, self)
            except MessagingError as error:
                self._trouble("connecting", error)
                logger.warning("%s: cannot connect: %s; %s", self.label, error, self._next("trying again"))
            endpoint = await self._opener.ready()

    async def _reconnect(self) -> bool:
        lost_at = clock.time_of(self.engine.loop)
        cause = self._loss_cause
        if cause is None or isinstance(cause, PlannedLossError):
            self._opener.hosts.again()
            self._trouble("reconnecting", None)
            logger.info("%s: connecting anew, as planned", self.label)
        else:
            self._trouble("reconnecting", self._opener.lost(cause, lost_at - self._connected_at))
            logger.warning("%s: connection lost: %s; %s", self.label, self.cause, self._next("reconnecting"))
        while True:
            endpoint = await self._opener.ready()
            was_refused = self.state == "refused"
            try:
                self._loss.clear()
                resumed = await self._opener.attempt(endpoint, self)
            except MessagingError as error:
                self._trouble("reconnecting", error)
                # a refusal needs a change at the broker: it is a warning for the operator, once
                level = logging.WARNING if self.state == "refused" and not was_refused else logging.INFO
                logger.log(level, "%s: cannot reconnect: %s; %s", self.label, error, self._next("trying again"))
            else:
                seconds = clock.time_of(self.engine.loop) - lost_at
                logger.info("%s: connected again after %.1f s", self.label, seconds)
                return resumed

    def _next(self, doing: str) -> str:
        """Return what happens next, for the log: ``doing`` with the same endpoint, or a connection to another one."""
        hosts = self._opener.hosts
        endpoint, wait = hosts.next()
        return f"{doing if endpoint == hosts.current else f'connecting to {endpoint}'} in {wait:.1f} s"

    def _trouble(self, name: StateName, cause: MessagingError | None) -> None:
        """Enter the state ``name``, or ``refused`` if the broker answered and refused the connection."""
        if cause is not None:
            self.cause = cause
        refused = isinstance(cause, BrokerError) and (
            isinstance(cause, (AuthenticationError, TakenOverError))
            or (isinstance(cause, ConnectFailedError) and cause.code is not None)
        )
        self.states.change("refused" if refused else name, cause, self._opener.where)

    async def _connected(self, resumed: bool) -> None:
        self.epoch.number += 1
        self._connected_at = clock.time_of(self.engine.loop)
        if not self._loss.is_set():
            self._renewal.connected()
        self.subscriptions.reconnected(resumed)
        self._up()
        self.on_connected()
        # subscriptions first, for a bounded time, so that no reply to a message of the outbox is missed
        self._unrestored = await self.subscriptions.restore()
        if self._unrestored:
            for task in self._unrestored:
                task.add_done_callback(self._restored)
            self._up()
        await self.last_will.hand_over()
        if not self._loss.is_set():
            await self.presence.connected()
        if not self._loss.is_set():
            self.outbox.connected()
            self.ready.resolve(None)

    def _up(self) -> None:
        """Enter the state ``connected`` or ``degraded``."""
        cause = self._impairment
        if cause is None and self._unrestored:
            cause = ConnectFailedError(f"{len(self._unrestored)} subscriptions are not restored yet")
        if not self._loss.is_set():
            self.epoch.is_usable = True
            self.states.change("connected" if cause is None else "degraded", cause, self._opener.where)

    def impaired(self, cause: MessagingError | None) -> None:
        """Note that the broker is degraded, or with ``None`` that it is not any more; see ``adapter.Events``."""
        self._impairment = cause
        if self.states.value.is_up:
            self._up()

    def _restored(self, task: asyncio.Task[Any]) -> None:
        self._unrestored.discard(task)
        if self.states.value.is_up:
            self._up()

    def lost(self, cause: MessagingError) -> None:
        """Note the end of the connection; see ``adapter.Events``."""
        if self.state != "closed" and not self._loss.is_set():
            self._loss_cause = cause
            if not isinstance(cause, PlannedLossError):
                self.cause = cause
                self.losses += 1
            self._impairment = None
            self._unrestored = set()
            self.epoch.is_usable = False
            self._renewal.stop()
            self.outbox.disconnected()
            self.subscriptions.connection_lost()
            self._loss.set()

    async def close(self, timeout: float) -> None:
        """Close in order, for at most ``timeout`` seconds, then fail the rest.

        Streams close first: observers finish the message in progress and may still publish. The outbox follows.
        """
        if self.endings.is_closing or self.state == "closed":
            await self._ended.wait()
            return
        self.endings.is_closing = True
        try:
            await self._close_in_order(clock.time_of(self.engine.loop) + timeout)
        finally:
            self._ended.set()

    async def _close_in_order(self, deadline: float) -> None:
        await self.subscriptions.end_all(deadline - clock.time_of(self.engine.loop))
        now = clock.time_of(self.engine.loop)
        finishing = self.on_finishing(max(0.0, deadline - now))
        if finishing is not None:
            deadline = max(deadline, now + _ANSWER_SECONDS)
            with contextlib.suppress(TimeoutError):
                await clock.wait_for(finishing, deadline - now)
        self.outbox.refuse()
        await self.outbox.drain(deadline)
        self.verdicts.flush()
        self.epoch.is_usable = False
        self.states.change("closed", None, self.states.value.host)
        self._renewal.stop()
        if self._task is not None:
            self._task.cancel()
            await clock.wait([self._task], timeout=1.0)
        self.subscriptions.complete_all()
        self.outbox.close()
        await self._close_adapter()
        await self.outbox.finish()
        await self._tell_closed()
        self.ready.reject(ClosedError(f"{self.adapter.name!r} was closed before it was connected"))
        self.ready.exception()  # marks it as retrieved: the application closed the connection itself

    async def _tell_closed(self) -> None:
        told = self.on_closed()
        if told is not None:
            with contextlib.suppress(TimeoutError):  # a listener of the registry that hangs must not delay closing
                await clock.wait_for(told, _TELL_SECONDS)

    def abandon(self) -> None:
        """End everything in a forked child, which has no engine, without touching the parent's connection."""
        self.is_abandoned = True
        self.states.abandon()
        self.subscriptions.abandon()
        self.outbox.abandon()

    async def _close_adapter(self) -> None:
        try:
            await clock.wait_for(of_library(self.adapter.close()), _ADAPTER_CLOSE_SECONDS)
        except Exception:
            logger.exception("%s: the adapter failed to close", self.label)


def _nothing(*_: object) -> None:
    """Do nothing: the default of a callback."""
