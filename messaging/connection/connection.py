"""Keeps one adapter connected: opens it, reconnects it, and gives it subscriptions, publications and verdicts.

Everything here runs on the engine's loop unless a docstring says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.adapter import PlannedLossError
from messaging.connection.state import ConnectionStates, StateName
from messaging.errors import (
    AuthenticationError,
    BrokerError,
    ClosedError,
    ConnectFailedError,
    ConnectionLostError,
    MessagingError,
    SubscriptionRefusedError,
    TakenOverError,
)
from messaging.execution import Promise, of_library
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.connection.subscribed import Source, Subscribed
    from messaging.execution import Engine
    from messaging.model import Outgoing

logger = SafeLog(__name__)

#: subscriptions opened at the same time after a reconnect
_RESUBSCRIBE_AT_ONCE: Final = 32
#: a connection that lasted this long does not count as another failed attempt, seconds
_STABLE_SECONDS: Final = 5.0
#: how long closing waits for the listeners of the registry, and for the adapter, seconds
_TELL_SECONDS: Final = 5.0
_ADAPTER_CLOSE_SECONDS: Final = 5.0
#: sources whose delivery counts wait for the next subscription; the ones left first are forgotten first
_LEFT_COUNTS: Final = 256


class PublishQueue(Protocol):
    """The messages that wait to be published on a connection. Called on the engine loop, but for :meth:`put`."""

    def put(self, entry: Any, *, queue: bool = True) -> None:
        """Accept a message; without ``queue`` it is not sent, but counted as pending. From any thread."""

    def adopt(self, entry: Any) -> None:
        """Fail a message at its deadline."""

    def withdraw(self, entry: Any) -> None:
        """Fail a message whose publisher was interrupted."""

    def start(self) -> None:
        """Start sending, as soon as there is a connection."""

    def connected(self) -> None:
        """Send on the new connection."""

    def disconnected(self) -> None:
        """Send nothing until :meth:`connected`."""

    def refuse(self) -> None:
        """Accept no more messages."""

    async def drain(self, deadline: float) -> None:
        """Return when every accepted message is settled, or at ``deadline`` (loop time)."""

    def close(self) -> None:
        """Fail the messages that are left."""

    def forsake(self) -> None:
        """Fail every message in a forked child."""


class Connection:
    """The link between one messaging instance and its adapter.

    Attributes:
        states: what the connection is like, readable from any thread, and those who want to know.
        cause: the last trouble, also after it is over.
        ready: resolves with the first connection, fails if there is to be none.
    """

    def __init__(self, engine: Engine, adapter: Adapter, outbox: PublishQueue) -> None:
        settings = adapter.settings
        self.engine = engine
        self.adapter = adapter
        self.settings = settings
        self.states = ConnectionStates(engine)
        self.cause: MessagingError | None = None
        #: no new subscriptions are taken
        self.closing = False
        #: the process was forked, and this is the child's copy of what the parent goes on with
        self.is_forsaken = False
        self._ended = asyncio.Event()
        self.ready: Promise[None] = Promise(f"connecting {adapter.name!r} to {adapter.url}")
        self.outbox = outbox
        self.subscriptions: set[Subscribed] = set()
        #: called on the loop after each connection, and once when there will be none any more
        self.on_connected: Callable[[], object] = _nothing
        self.on_closed: Callable[[], Promise[None] | None] = _nothing
        self._opening: dict[Subscribed, asyncio.Task[Any] | None] = {}
        #: subscriptions on their way out: none of ``subscriptions`` any more, but not yet gone at the broker
        self._departures: dict[Subscribed, asyncio.Task[Any]] = {}
        self._warned_of_end = False
        #: delivery counts of messages that ended subscriptions have rejected, by source
        self._left_counts: dict[Source, dict[object, int]] = {}
        #: counts connections
        self._generation = 0
        #: loop time of the last one
        self._connected_at = 0.0
        self._retries = self._delays()
        self._will: Outgoing | None = None
        self._lost = asyncio.Event()
        self._loss_is_planned = False
        #: what keeps an existing connection from being as it should be: the broker, and subscriptions under way
        self._impairment: MessagingError | None = None
        self._unrestored: set[asyncio.Task[Any]] = set()
        adapter.impaired = self._impaired
        self._task: asyncio.Task[Any] | None = None
        #: subscriptions that have enough to do for the moment
        self._crowded: set[Subscribed] = set()
        #: subscriptions with verdicts on their way to the loop
        self._to_flush: deque[Subscribed] = deque()
        self._signalled = False

    # --- any thread

    @property
    def state(self) -> StateName:
        """The name of the state now."""
        return self.states.value.name

    @property
    def label(self) -> str:
        """The connection as log lines name it: see ``BrokerUrl.label``."""
        return self.adapter.url.label(self.adapter.name)

    def request_flush(self, subscription: Subscribed) -> None:
        """Have ``subscription.flush`` called on the loop soon: one wake-up serves all that ask. From any thread."""
        self._to_flush.append(subscription)
        if not self._signalled:
            try:
                self._signalled = True
                self.engine.call(self.flush_verdicts)
            except BaseException:  # an interrupt: the next request signals again
                self._signalled = False
                raise

    def set_will(self, will: Outgoing) -> None:
        """Have the adapter register ``will``, now or once connected. From any thread."""
        self.outbox.put(will, queue=False)
        try:
            self.engine.call(self._register_will, will)
        except BaseException:  # an interrupt: nobody has its promise
            self.engine.call(self.outbox.withdraw, will)
            raise

    # --- life cycle

    def start(self) -> None:
        """Start connecting."""
        self.outbox.start()
        self._task = self.engine.spawn(self._run())

    async def _run(self) -> None:
        try:
            resumed = await self._connect_first()
        except MessagingError as error:
            self.cause = error
            self.states.change("closed", error)
            self.outbox.close()
            for subscription in [*self.subscriptions]:
                subscription.fail(error)
            await self._close_adapter()
            await self._tell_closed()
            self.ready.reject(error)
            return
        logger.info("%s: connected", self.label)
        while True:
            try:
                await self._connected(resumed)
            except Exception:  # a defect here must not be the end of all reconnecting
                logger.exception("%s is not fully set up after connecting", self.adapter.name)
                self.outbox.connected()
                self.ready.resolve(None)
            await self._lost.wait()
            self.outbox.disconnected()
            self._trouble("reconnecting", None if self._loss_is_planned else self.cause)
            resumed = await self._reconnect()

    async def _connect_first(self) -> bool:
        for delay in self._delays():
            try:
                return await self._open()
            except MessagingError as error:
                if not self.settings.retry_connect:
                    raise
                self._trouble("connecting", error)
                pause = self._pause(delay)
                logger.warning("%s: cannot connect: %s; trying again in %.1f s", self.label, error, pause)
            await asyncio.sleep(pause)
        raise AssertionError("the delays never end")

    async def _reconnect(self) -> bool:
        lost_at = self.engine.loop.time()
        if lost_at - self._connected_at > _STABLE_SECONDS:
            # a connection that ends as soon as it is made is no reason to hurry
            self._retries = self._delays()
        pause = self._pause(next(self._retries))
        if self._loss_is_planned:
            logger.info("%s: connecting anew, as planned", self.label)
        else:
            logger.warning("%s: connection lost: %s; reconnecting in %.1f s", self.label, self.cause, pause)
        while True:
            await asyncio.sleep(pause)
            was_refused = self.state == "refused"
            try:
                resumed = await self._open()
            except MessagingError as error:
                self._trouble("reconnecting", error)
                pause = self._pause(next(self._retries))
                # a refusal needs a change at the broker, so an operator has to read of it, once
                level = logging.WARNING if self.state == "refused" and not was_refused else logging.INFO
                logger.log(level, "%s: cannot reconnect: %s; trying again in %.1f s", self.label, error, pause)
            else:
                seconds = self.engine.loop.time() - lost_at
                logger.info("%s: connected again after %.1f s", self.label, seconds)
                return resumed

    def _trouble(self, name: StateName, cause: MessagingError | None) -> None:
        """There is no connection: because nobody is there, or because the broker does not want one."""
        if cause is not None:
            self.cause = cause
        refused = isinstance(cause, BrokerError) and (
            isinstance(cause, (AuthenticationError, TakenOverError))
            or (isinstance(cause, ConnectFailedError) and cause.code is not None)
        )
        self.states.change("refused" if refused else name, cause)

    def _pause(self, delay: float) -> float:
        """Return the seconds until the next attempt: many, if only a change at the broker can make it a success."""
        if isinstance(self.states.value.cause, (AuthenticationError, TakenOverError)):
            longest = self.settings.reconnect_max
            return max(delay, random.uniform(longest / 2, longest))  # noqa: S311
        return delay

    def _delays(self) -> Iterator[float]:
        """Decorrelated jitter: clients that lost the same broker do not come back in step."""
        low, high = self.settings.reconnect_min, max(self.settings.reconnect_min, self.settings.reconnect_max)
        delay = low
        yield random.uniform(0, low)  # noqa: S311  # spreads load, guards nothing
        while True:
            delay = min(high, random.uniform(low, delay * 3))  # noqa: S311
            yield delay

    async def _open(self) -> bool:
        self._lost.clear()
        timeout = self.settings.connect_timeout
        try:
            async with asyncio.timeout(timeout):
                return await of_library(self.adapter.open(self._on_lost))
        except TimeoutError:
            raise ConnectFailedError(f"no connection to {self.adapter.url} within {timeout:g} s") from None
        except ConnectionLostError as error:
            raise ConnectFailedError(f"cannot connect to {self.adapter.url}: {error}") from error
        except MessagingError:
            raise
        except Exception as error:
            logger.exception("the adapter of %s failed to open", self.adapter.name)
            raise ConnectFailedError(f"cannot connect to {self.adapter.url}: {type(error).__name__}") from error

    async def _connected(self, resumed: bool) -> None:
        self._generation += 1
        self._connected_at = self.engine.loop.time()
        self._up()
        self.on_connected()
        for subscription in self.subscriptions:
            subscription.reconnected(resumed)
            if not resumed:
                subscription.handle = None
        gate = asyncio.Semaphore(_RESUBSCRIBE_AT_ONCE)

        async def open_one(subscription: Subscribed) -> None:
            async with gate:
                await self._subscribe(subscription)

        # subscriptions first, so that nobody misses the answer to what waits in the outbox; but not for ever
        opening = [self.engine.spawn(open_one(each)) for each in self.subscriptions if each.handle is None]
        if opening:
            _, self._unrestored = await asyncio.wait(opening, timeout=self.settings.connect_timeout)
            for task in self._unrestored:
                task.add_done_callback(self._restored)
            self._up()
        if self._will is not None:
            await self._hand_over_will()
        if not self._lost.is_set():
            self.outbox.connected()
            self.ready.resolve(None)

    def _up(self) -> None:
        """There is a connection: say how well it is."""
        cause = self._impairment
        if cause is None and self._unrestored:
            cause = ConnectFailedError(f"{len(self._unrestored)} subscriptions are not restored yet")
        if not self._lost.is_set():
            self.states.change("connected" if cause is None else "degraded", cause)

    def _impaired(self, cause: MessagingError | None) -> None:
        """See ``Adapter.impaired``."""
        self._impairment = cause
        if self.states.value.is_up:
            self._up()

    def _restored(self, task: asyncio.Task[Any]) -> None:
        self._unrestored.discard(task)
        if self.states.value.is_up:
            self._up()

    def _on_lost(self, cause: MessagingError) -> None:
        if self.state != "closed" and not self._lost.is_set():
            self._loss_is_planned = isinstance(cause, PlannedLossError)
            if not self._loss_is_planned:
                self.cause = cause
            self._impairment = None
            self._unrestored = set()
            self.outbox.disconnected()
            for subscription in self.subscriptions:
                subscription.lost()
            self._lost.set()

    async def close(self, timeout: float) -> None:
        """End in good order, for at most ``timeout`` seconds, then settle everything.

        First the streams: observers finish the message in progress, and may still publish. Then the outbox.
        """
        if self.closing:
            await self._ended.wait()
            return
        if self.state == "closed":
            return
        self.closing = True
        try:
            await self._close_in_order(self.engine.loop.time() + timeout)
        finally:
            self._ended.set()

    async def _close_in_order(self, deadline: float) -> None:
        ending = [self.engine.spawn(self.remove(each)) for each in self.subscriptions | self._departures.keys()]
        if ending:
            await asyncio.wait(ending, timeout=max(0.0, deadline - self.engine.loop.time()))
        self.outbox.refuse()
        await self.outbox.drain(deadline)
        self.flush_verdicts()
        self.states.change("closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=1.0)
        for subscription in [*self.subscriptions]:
            subscription.complete()
        self.subscriptions.clear()
        for task in self._opening.values():
            if task is not None:
                task.cancel()
        self.outbox.close()
        await self._close_adapter()
        await self._tell_closed()
        self.ready.reject(ClosedError(f"{self.adapter.name!r} was closed before it was connected"))
        self.ready.exception()  # whoever closed it knows

    async def _tell_closed(self) -> None:
        told = self.on_closed()
        if told is not None:
            with contextlib.suppress(TimeoutError):  # a listener of the registry that hangs must not hold up the rest
                await asyncio.wait_for(told, _TELL_SECONDS)

    def forsake(self, error: MessagingError) -> None:
        """In a forked child, where no engine runs this: end everything, touch nothing of the parent's."""
        self.states.forsake()
        self.is_forsaken = True
        self.ready.forsake(error)
        for subscription in self.subscriptions:
            subscription.ended = True
            subscription.ready.forsake(error)
        self.subscriptions.clear()
        self.outbox.forsake()

    async def _close_adapter(self) -> None:
        self.adapter.impaired = _nothing  # whoever keeps the adapter is not to keep all this
        try:
            await asyncio.wait_for(of_library(self.adapter.close()), _ADAPTER_CLOSE_SECONDS)
        except Exception:
            logger.exception("the adapter of %s failed to close", self.adapter.name)

    # --- subscriptions

    def start_subscription(self, subscription: Subscribed) -> None:
        """Subscribe in a task of its own."""
        self.engine.spawn(self.add(subscription))

    async def add(self, subscription: Subscribed) -> None:
        """Subscribe now or, while there is no connection, after the next one."""
        if self.state == "closed" or self.closing:
            subscription.fail((None if self.closing else self.cause) or ClosedError(f"{self.adapter.name!r} is closed"))
            return
        self.subscriptions.add(subscription)
        subscription.take_over(self._left_counts.pop(subscription.source, {}))
        if self.states.value.is_up and not self._lost.is_set():
            await self._subscribe(subscription)

    async def _subscribe(self, subscription: Subscribed) -> None:
        if subscription in self._opening or subscription not in self.subscriptions:
            return
        self._opening[subscription] = asyncio.current_task()
        try:
            await self._subscribe_once_or_again(subscription)
        except MessagingError as error:
            self.subscriptions.discard(subscription)
            subscription.fail(error)
        except Exception as error:
            logger.exception("the adapter of %s failed to subscribe", self.adapter.name)
            self.subscriptions.discard(subscription)
            failure = SubscriptionRefusedError(f"subscribing to {subscription.spec.channel!r} failed")
            failure.__cause__ = error
            subscription.fail(failure)
        finally:
            del self._opening[subscription]

    async def _subscribe_once_or_again(self, subscription: Subscribed) -> None:
        """Subscribe; again, if there was another connection before the adapter had an answer from the last one."""
        while subscription in self.subscriptions:
            generation = self._generation
            try:
                handle = await of_library(self.adapter.subscribe(subscription.spec, subscription))
            except ConnectionLostError:
                if generation == self._generation:
                    return  # the next connection subscribes
                continue
            if subscription in self.subscriptions and generation == self._generation:
                subscription.handle = handle
                if subscription.paused:
                    self.adapter.pause(handle)
                subscription.ready.resolve(None)
                return
            await self.unsubscribe(handle)

    def end_subscription(self, subscription: Subscribed) -> None:
        """:meth:`remove` in a task of its own."""
        self.engine.spawn(self.remove(subscription))

    async def remove(self, subscription: Subscribed) -> None:
        """Let the consumer finish the message in progress, unsubscribe, and complete.

        Whoever asks meanwhile waits for the same end. When the instance closes, a broker that keeps its session keeps
        its subscriptions.
        """
        self.subscriptions.discard(subscription)
        subscription.leaving = True
        if subscription.ended:  # it failed, and takes leave without its consumer
            await self._silence(subscription)
        await asyncio.shield(self.depart(subscription))

    def depart(self, subscription: Subscribed) -> asyncio.Task[Any]:
        """End it at the broker, unless that is under way. :meth:`remove` and :meth:`close` wait for it."""
        departure = self._departures.get(subscription)
        if departure is None:
            departure = self._departures[subscription] = self.engine.spawn(self._take_leave(subscription))
            departure.add_done_callback(lambda _: self._departures.pop(subscription, None))
        return departure

    async def _take_leave(self, subscription: Subscribed) -> None:
        failed = subscription.ended
        if not failed:
            await self._silence(subscription)
        if self.state != "closed":  # else the adapter is closed too
            await self._heir_is_ready(subscription)
            subscription.flush()
            await subscription.release(self.settings.close_timeout)
        handle, subscription.handle = subscription.handle, None
        kept = self.adapter.keeps_session and subscription.is_lasting
        if handle is None:
            pass
        elif kept and subscription.is_kept and not self.closing:
            self.adapter.detach(handle)
        elif failed or not (kept and self.closing):
            self._warn_of_end(subscription, kept=kept)
            heir = subscription.heir
            if heir is not None and heir.handle is not None and not self.adapter.can_reject:
                self.adapter.bequeath(handle, heir.handle)
            await self.unsubscribe(handle)
        subscription.complete()
        subscription.heir = None  # which may have one as well, and so on

    def _warn_of_end(self, subscription: Subscribed, *, kept: bool) -> None:
        """Say once that a session from which the last stream is unsubscribed keeps nothing."""
        if not kept or self._warned_of_end or not subscription.is_stream or subscription.heir is not None:
            return
        if any(each.is_stream for each in self.subscriptions):
            return
        self._warned_of_end = True
        logger.warning(
            "%s: the subscription to %r has ended with its stream, so the broker keeps no messages for this session; "
            "subscribe with keep_subscription=True to leave it there, or close the instance rather than the stream",
            self.adapter.name, subscription.spec.channel,
        )  # fmt: skip

    async def _heir_is_ready(self, subscription: Subscribed) -> None:
        """Wait for the subscription that was made in place of this one, before its messages are released."""
        heir = subscription.heir
        if heir is None or subscription.handle is None or not self.states.value.is_up:
            return
        with contextlib.suppress(TimeoutError, MessagingError):
            async with asyncio.timeout(self.settings.close_timeout):
                await heir.ready

    def hand_on(self, subscription: Subscribed, counts: Mapping[object, int]) -> None:
        """Have the other subscriptions to the same source, or the next one, go on with these delivery counts."""
        source = subscription.source
        heirs = [each for each in self.subscriptions if each is not subscription and each.source == source]
        for heir in heirs:
            heir.take_over(counts)
        if not heirs and counts:
            self._left_counts.setdefault(source, {}).update(counts)
            if len(self._left_counts) > _LEFT_COUNTS:
                self._left_counts.pop(next(iter(self._left_counts)))

    def crowded(self, subscription: Subscribed) -> None:
        """Let its consumer catch up before anything more is read."""
        if not self._crowded:
            self.adapter.suspend_reading()
        self._crowded.add(subscription)

    def relieved(self, subscription: Subscribed) -> None:
        """It did, or is not waited for any longer. Idempotent."""
        if subscription in self._crowded:
            self._crowded.remove(subscription)
            if not self._crowded:
                self.adapter.resume_reading()

    async def _silence(self, subscription: Subscribed) -> None:
        """Let the consumer finish the message in progress; one that hangs must not keep the broker waiting."""
        stopped = subscription.stop()
        if stopped is not None and not stopped.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped, self.settings.close_timeout)

    async def unsubscribe(self, handle: Any) -> None:
        """Have the adapter unsubscribe; whatever goes wrong is logged."""
        try:
            async with asyncio.timeout(self.settings.close_timeout):
                await of_library(self.adapter.unsubscribe(handle))
        except (ConnectionLostError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            logger.info("%s could not tell the broker of an unsubscription: %s", self.adapter.name, reason)
        except Exception:
            logger.exception("the adapter of %s failed to unsubscribe", self.adapter.name)

    def flush_verdicts(self) -> None:
        """Hand the verdicts gathered so far to the adapter."""
        # cleared before the queue is read: whoever appends after this line signals again
        self._signalled = False
        to_flush = self._to_flush
        if self.state == "closed":
            to_flush.clear()  # the adapter is closed too
        for _ in range(len(to_flush)):
            try:
                to_flush.popleft().flush()
            except Exception:  # the others are not to suffer from it
                logger.exception("%s failed to settle messages", self.adapter.name)

    # --- last will

    def _register_will(self, will: Outgoing) -> None:
        self.outbox.adopt(will)
        self._will = will
        if self.states.value.is_up and not self._lost.is_set():
            self.engine.spawn(self._hand_over_will())

    async def _hand_over_will(self) -> None:
        will, self._will = self._will, None
        if will is None or will.settled:
            return
        generation = self._generation
        try:
            async with asyncio.timeout(self.settings.connect_timeout):
                await of_library(self.adapter.set_will(will))
        except (ConnectionLostError, TimeoutError):
            self._will = will  # handed over with the next connection, until its deadline
            if generation != self._generation and self.states.value.is_up and not self._lost.is_set():
                self.engine.spawn(self._hand_over_will())  # which is there already
        except MessagingError as error:
            will.fail(error)
        except Exception as error:
            logger.exception("the adapter of %s failed to set a last will", self.adapter.name)
            will.fail(MessagingError(f"the adapter failed to set the last will: {type(error).__name__}"))


def _nothing(*_: object) -> None:
    """Nobody wants to know."""
