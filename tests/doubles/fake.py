"""A broker that does what a test tells it to, and its adapter: written from ``messaging/adapter.py`` alone.

``fake://`` announces everything, ``bare://`` next to nothing: no credit, no reject, no properties. ``login://`` is
``fake://`` with credentials that may change. They are installed by entry points of a distribution that ``conftest.py``
writes. What a test sets on the :class:`FakeBroker` before connecting is in force from the first ``open`` on.

The adapter runs on the engine's loop. Methods of the broker may be called on any other thread; they return when the
loop has done it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeVar

from pydantic import Field

from messaging import Messaging
from messaging.adapter import Adapter, Events, PlannedLossError, Sink
from messaging.errors import ConnectionLostError, MessagingError
from messaging.execution import engine
from messaging.model import NO_EXTENSIONS, Capabilities, Endpoint, Features, Incoming, Outgoing, SubscriptionSpec
from messaging.model.credentials import Credentials
from messaging.model.settings import Settings, TlsSettings
from messaging.testing.waiting import PATIENCE, Recorder, eventually

T = TypeVar("T")

EVERYTHING: Final = frozenset(
    value for name, value in vars(Features).items() if name.isupper() and isinstance(value, str)
) | {"fakeColour"}
NEXT_TO_NOTHING: Final = frozenset(
    {
        Features.ACKNOWLEDGE,
        Features.PUBLISH_SUBSCRIBE,
        Features.EXTENSION_QOS,
        Features.EXTENSION_TIMEOUT,
        Features.EXTENSION_AUTO_ACKNOWLEDGE,
        Features.EXTENSION_GUARANTEED_ORDERING,
        Features.EXTENSION_DEAD_LETTER_CHANNEL,
        Features.EXTENSION_MAX_DELIVERIES,
        Features.EXTENSION_PREFETCH,
        Features.EXTENSION_BUFFER_SIZE,
        Features.EXTENSION_OVERFLOW,
        Features.EXTENSION_QUEUE,
    }
)

_numbers = itertools.count(1)


def on_loop(function: Callable[..., T], *args: Any) -> T:
    """Call ``function`` on the engine's loop and return what it returns."""

    async def call() -> T:
        return function(*args)

    return asyncio.run_coroutine_threadsafe(call(), engine().loop).result(PATIENCE)


def settle_loop(turns: int = 3) -> None:
    """Return once the loop has done everything that was due, and what that made due."""
    for _ in range(turns):
        on_loop(lambda: None)


class Gate:
    """Lets coroutines on the loop pass, or makes them wait."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        #: coroutines that wait now
        self.waiting = 0

    async def passed(self) -> None:
        self.waiting += 1
        try:
            await self._open.wait()
        finally:
            self.waiting -= 1

    def close(self) -> None:
        on_loop(self._open.clear)

    def open(self) -> None:
        on_loop(self._open.set)


@dataclass(frozen=True, slots=True)
class Token:
    epoch: int
    number: int


class Handle:
    """A subscription at the broker."""

    def __init__(self, spec: SubscriptionSpec, sink: Sink, epoch: int) -> None:
        self.spec = spec
        self.sink = sink
        self.epoch = epoch
        self.paused = False
        self.closed = False


class JointHandle:
    """A joint subscription at the broker: a subscription for each channel, all with one sink."""

    def __init__(self) -> None:
        self.members: dict[str, Handle] = {}


@dataclass(frozen=True, slots=True)
class Sent:
    """A message as it went over the wire."""

    message_id: str
    channel: str
    payload: bytes
    epoch: int


class FakeBroker:
    """Does as a test says; remembers the calls of its adapter."""

    def __init__(self, scheme: str = "fake") -> None:
        self.name = f"b{next(_numbers)}"
        self.scheme = scheme
        brokers[self.name] = self
        self.adapter: FakeAdapter
        self.features = NEXT_TO_NOTHING if scheme == "bare" else EVERYTHING
        #: what ``open`` answers
        self.resumes = False
        #: keep unconfirmed messages over a loss, rather than fail them
        self.keeps = False
        #: whether tokens survive the connection they came from
        self.tokens_survive = False
        #: ``login://``: whether it takes new credentials on the same connection
        self.renews_in_place = True
        #: whether queues outlive their consumers
        self.requeues = True
        #: hold confirms back until :meth:`confirm`
        self.hold = False
        self.window = 1024
        self.limit: int | None = None
        self.gates = {
            name: Gate() for name in ("open", "publish", "subscribe", "unsubscribe", "set_will", "renew", "close")
        }
        #: errors that the next calls raise, by name of the call
        self.errors: dict[str, deque[BaseException]] = {name: deque() for name in self.gates}
        # --- what happened
        self.epoch = 0
        self.connected = False
        self.opened = self.closed = 0
        self.sent: Recorder[Sent] = Recorder()
        self.batches: list[int] = []
        self.held: Recorder[Outgoing] = Recorder()
        self.wills: list[Outgoing] = []
        #: ``login://``: the credentials of each connection, and those that it was given while connected
        self.logins: list[Credentials] = []
        self.renewals: list[Credentials] = []
        self.handles: list[Handle] = []
        self.unsubscribed: Recorder[Handle] = Recorder()
        self.acknowledged: Recorder[Token] = Recorder()
        self.rejected: Recorder[Token] = Recorder()
        self.calls: list[str] = []
        self.endpoints: list[Endpoint] = []
        #: whether nothing is to be read for now, and how often that was asked for
        self.suspended = False
        self.suspensions = 0
        self.events: Any = None
        self._lost: Callable[[MessagingError], None] | None = None
        self._tokens = itertools.count(1)

    def for_row(self, fixtures: Mapping[str, Any]) -> FakeBroker:
        """Return a broker for one row of a table: this one if an instance of the test is connected to it already."""
        return self if any(isinstance(each, Messaging) for each in fixtures.values()) else FakeBroker(self.scheme)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    @property
    def payloads(self) -> list[bytes]:
        return [each.payload for each in self.sent]

    @property
    def live(self) -> list[Handle]:
        return [handle for handle in self.handles if not handle.closed]

    # --- orders

    def deliver(
        self,
        *payloads: bytes,
        channel: str = "a",
        handle: int | Handle = -1,
        qos0: bool = False,
        extensions: Mapping[str, Any] = NO_EXTENSIONS,
        delivery_count: int | None = None,
        **context: Any,
    ) -> list[Token]:
        """Deliver messages to a subscription, in one batch."""
        tokens = [Token(self.epoch, next(self._tokens)) for _ in payloads]
        batch = [
            Incoming(
                payload,
                channel,
                extensions=MappingProxyType(dict(extensions)),
                token=None if qos0 else token,
                delivery_count=delivery_count,
                **context,
            )
            for payload, token in zip(payloads, tokens, strict=True)
        ]

        def deliver() -> None:
            to = self.live[handle] if isinstance(handle, int) else handle
            to.sink.deliver(batch)

        on_loop(deliver)
        return tokens

    def confirm(self, count: int | None = None) -> None:
        """Confirm the oldest ``count`` held messages, or all."""

        def confirm() -> None:
            taken, self.held[:] = self.held[:count], self.held[len(self.held[:count]) :]
            for outgoing in taken:
                outgoing.confirm()

        on_loop(confirm)

    def fail(self, error: MessagingError, index: int = 0) -> None:
        """Refuse one of the held messages."""
        on_loop(lambda: self.held.pop(index).fail(error))

    def lose(
        self,
        cause: str | ConnectionLostError = "the cable was cut",
        *,
        first: Callable[[], object] | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """End the connection. ``first`` and ``then`` are called on the loop right before and after."""

        def lose() -> None:
            if first is not None:
                first()
            assert self._lost is not None
            self.connected = False
            error = ConnectionLostError(cause) if isinstance(cause, str) else cause
            if not self.keeps:
                held, self.held[:] = self.held[:], []
                for outgoing in held:
                    outgoing.fail(error)
            for handle in self.handles:
                handle.closed = handle.closed or not self.resumes
            lost, self._lost = self._lost, None
            lost(error)
            if then is not None:
                then()

        on_loop(lose)

    def lose_and_reconnect(self, subscriptions: int = 0) -> None:
        """End the connection; return when there is another one, with so many subscriptions."""
        opened = self.opened
        self.lose()
        self.wait_open(opened + 1)
        self.wait_subscribed(subscriptions)

    def go_down(self) -> None:
        """End the connection; the next one is not made before the gate ``open`` is opened."""
        self.gates["open"].close()
        self.lose()

    def end_subscription(self, error: MessagingError, handle: int = -1) -> None:
        """Cancel a subscription from the broker's side."""

        def end() -> None:
            ended = self.live[handle]
            ended.closed = True
            ended.sink.fail(error)

        on_loop(end)

    def end_joint(self, error: MessagingError) -> None:
        """Cancel the only joint subscription, all channels of it, from the broker's side."""

        def end() -> None:
            sink = self.live[0].sink
            for handle in self.live:
                handle.closed = True
            sink.fail(error)

        on_loop(end)

    # --- waits

    def wait_open(self, count: int = 1) -> None:
        eventually(lambda: self.opened >= count and self.connected, lambda: f"{count} connections, not {self.opened}")

    def wait_sent(self, count: int) -> None:
        self.sent.wait_for(count)

    def wait_acknowledged(self, count: int) -> None:
        self.acknowledged.wait_for(count)

    def wait_subscribed(self, count: int = 1) -> None:
        eventually(lambda: len(self.live) >= count, lambda: f"{count} subscriptions, not {len(self.live)}")


brokers: dict[str, FakeBroker] = {}


def _colour(value: Any) -> Any:
    if value not in ("red", "green"):
        raise ValueError("must be 'red' or 'green'")
    return value


class FakeSettings(TlsSettings):
    colour: str = Field("red", description="of the bikeshed")
    labels: dict[str, str] = Field(default_factory=dict, description="something complex")


class FakeAdapter(Adapter):
    provider: ClassVar[str] = "tests.fake"
    settings_type: ClassVar[type[Settings]] = FakeSettings
    can_reject: ClassVar[bool] = True
    publish_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({"fakeColour": _colour})
    subscribe_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = publish_extensions

    def __init__(self, url: Any, settings: Settings, name: str) -> None:
        super().__init__(url, settings, name)
        self.broker = brokers[url.host]
        self.broker.adapter = self
        self.closing = False

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # tests change the broker's
        return Capabilities(
            name=self.name,
            protocols=("fake",),
            features=self.broker.features,
            qos_levels=("0", "1"),
            default_qos="1",
            max_message_size=self.broker.limit,
            publish_window=self.broker.window,
            can_reject=self.can_reject,
            publish_extensions=self.publish_extensions,
            subscribe_extensions=self.subscribe_extensions,
        )

    def redelivers(self, spec: SubscriptionSpec, handle: Any = None) -> bool:
        return super().redelivers(spec) if handle is None else self.can_reject and self.broker.requeues

    async def _enter(self, call: str) -> None:
        broker = self.broker
        assert threading.current_thread().name == "messaging-engine", f"{call} was called off the loop"
        broker.calls.append(call)
        await broker.gates[call].passed()
        if broker.errors[call]:
            raise broker.errors[call].popleft()

    async def open(self, events: Events) -> bool:
        broker = self.broker
        assert not broker.connected, "open was called while connected"
        await self._enter("open")
        broker.epoch += 1
        broker.events = events
        broker._lost = events.lost
        broker.connected = True
        broker.opened += 1
        return broker.resumes and broker.opened > 1

    async def close(self) -> None:
        await self._enter("close")
        broker = self.broker
        broker.connected = False
        broker.closed += 1
        broker._lost = None
        broker.held.clear()
        for handle in broker.handles:
            handle.closed = True

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        broker = self.broker
        broker.batches.append(len(batch))
        for outgoing in batch:
            await self._enter("publish")
            if outgoing.settled:
                continue
            if not broker.connected:
                raise ConnectionLostError("not connected")
            broker.sent.append(Sent(outgoing.message_id, outgoing.plan.channel, outgoing.payload, broker.epoch))
            if outgoing.plan.options.qos == "0":
                outgoing.confirm()
                continue
            outgoing.sent()
            if broker.hold:
                broker.held.append(outgoing)
            else:
                outgoing.confirm()

    async def set_will(self, will: Outgoing) -> None:
        await self._enter("set_will")
        self.broker.wills.append(will)
        will.confirm()

    async def subscribe(self, spec: SubscriptionSpec, sink: Sink) -> Handle:
        epoch = self.broker.epoch
        await self._enter("subscribe")
        if not self.broker.connected or epoch != self.broker.epoch:
            raise ConnectionLostError("the connection went away while subscribing")
        handle = Handle(spec, sink, epoch)
        self.broker.handles.append(handle)
        return handle

    async def join(self, spec: SubscriptionSpec, sink: Sink, handle: JointHandle | None) -> JointHandle:
        joint = JointHandle() if handle is None else handle
        joint.members[spec.channel] = await self.subscribe(spec, sink)
        return joint

    async def part(self, handle: JointHandle, channel: str) -> None:
        if channel in handle.members:
            await self.unsubscribe(handle.members[channel])
            handle.members.pop(channel, None)

    async def unsubscribe(self, handle: Handle | JointHandle) -> None:
        await self._enter("unsubscribe")
        for each in _handles(handle):
            each.closed = True
            self.broker.unsubscribed.append(each)

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        self.broker.acknowledged.extend(token for token in tokens if not self.is_stale(token))

    def reject(self, tokens: Sequence[Any]) -> None:
        self.broker.rejected.extend(token for token in tokens if not self.is_stale(token))

    def is_stale(self, token: Any) -> bool:
        broker = self.broker
        return not broker.tokens_survive and (token.epoch != broker.epoch or not broker.connected)

    def pause(self, handle: Any | None) -> None:
        if handle is not None:
            for each in _handles(handle):
                each.paused = True
            return
        assert not self.broker.suspended
        self.broker.suspended = True
        self.broker.suspensions += 1

    def resume(self, handle: Any | None) -> None:
        if handle is not None:
            for each in _handles(handle):
                each.paused = False
            return
        assert self.broker.suspended
        self.broker.suspended = False


def _handles(handle: Handle | JointHandle) -> list[Handle]:
    return [*handle.members.values()] if isinstance(handle, JointHandle) else [handle]


class BareAdapter(FakeAdapter):
    can_reject: ClassVar[bool] = False
    publish_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({})
    subscribe_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({})

    def reject(self, tokens: Sequence[Any]) -> None:
        raise AssertionError("rejected on the wire although it cannot")


class LoginAdapter(FakeAdapter):
    credentials: Callable[[], Awaitable[Credentials]] | None = None

    async def open(self, events: Events) -> bool:
        if self.credentials is not None:
            self.broker.logins.append(await self.credentials())
        return await super().open(events)

    async def renew(self, credentials: Credentials) -> None:
        assert threading.current_thread().name == "messaging-engine"
        broker = self.broker
        broker.renewals.append(credentials)
        await self._enter("renew")
        if not broker.renews_in_place:
            broker.connected = False
            assert broker._lost is not None
            lost, broker._lost = broker._lost, None
            lost(PlannedLossError("ended to log in anew"))


class PoolAdapter(LoginAdapter):
    """The adapter of ``pool://b1,b2``: each host is a broker, and credentials may change."""

    def set_endpoint(self, endpoint: Endpoint) -> None:
        assert not self.broker.connected, "another host was named while connected"
        self.broker = brokers[endpoint.host.name]
        self.broker.adapter = self
        self.broker.endpoints.append(endpoint)


ENTRY_POINTS: Final = f"""\
[messaging.adapters]
fake = {__name__}:FakeAdapter
login = {__name__}:LoginAdapter
pool = {__name__}:PoolAdapter
bare = {__name__}:BareAdapter
notanadapter = {__name__}:FakeBroker
closedmodule = {__name__}.nowhere:Nothing
noattribute = {__name__}:Nothing
"""
