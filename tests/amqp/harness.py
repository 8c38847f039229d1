"""Stands in for the core: drives one adapter directly, on a loop of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from adapters.amqp import AmqpAdapter
from messaging.errors import ConnectFailedError
from messaging.model import Incoming, MessageContext, SubscriptionSpec, parse_url
from messaging.model.extensions import publish_options, subscribe_options
from messaging.model.settings import load_settings
from tests.doubles.events import Recorded
from tests.doubles.plans import plan_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence

    from adapters.amqp.connection import Wire
    from adapters.amqp.consumer import QueueConsumer
    from adapters.amqp.link import Link
    from messaging.errors import MessagingError

T = TypeVar("T")

#: seconds any wait in a test may take
PATIENCE = 15.0
_numbers = itertools.count(1)


def run(main: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """Run a test's coroutine; fail if it leaves a task behind, or something went wrong behind its back."""
    mishaps: list[str] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: mishaps.append(str(context)))
        async with asyncio.timeout(60):
            result = await main
        # tasks that were told to end do so within a few turns of the loop; no other task may be left
        for _ in range(5):
            await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"left behind: {others}"
        return result

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        result = runner.run(watched())
    assert not mishaps, mishaps
    return result


async def until(condition: Callable[[], Any], what: str = "condition", patience: float = PATIENCE) -> None:
    """Wait until ``condition()`` is true."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain: {what}"
        await asyncio.sleep(0.005)


async def within(awaitable: Awaitable[T], patience: float = PATIENCE) -> T:
    """Await, but not for ever."""
    async with asyncio.timeout(patience):
        return await awaitable


def unique(name: str) -> str:
    """``name`` with a number that no other test has."""
    return f"{name}-{next(_numbers)}"


def make_adapter(url: str, name: str = "test", **settings: Any) -> AmqpAdapter:
    parsed = parse_url(url)
    return AmqpAdapter(parsed, load_settings(AmqpAdapter.settings_type, parsed, settings), name)


class Out:
    """An ``adapter.Outgoing``."""

    def __init__(self, adapter: AmqpAdapter, payload: bytes, context: MessageContext) -> None:
        self.payload = payload
        self.correlation_id = context.correlation_id
        self.plan = plan_of(context, publish_options(context.extensions, adapter.capabilities))
        adapter.check_publish(self.plan)
        self.settled = False
        self.was_sent = False
        #: how often it was settled: once, if all is well
        self.settlements = 0
        self.error: MessagingError | None = None
        self.message_id = self.plan.options.message_id or unique("id")
        self.outcome = asyncio.Event()

    def sent(self) -> None:
        self.was_sent = True

    def confirm(self) -> None:
        self._settle(None)

    def fail(self, error: MessagingError) -> None:
        self._settle(error)

    def _settle(self, error: MessagingError | None) -> None:
        self.settlements += 1
        if not self.settled:
            self.settled = True
            self.error = error
            self.outcome.set()

    async def result(self) -> None:
        """Wait for the outcome.

        Raises:
            MessagingError: what it failed with.
        """
        await within(self.outcome.wait())
        if self.error is not None:
            raise self.error


class Sink:
    """An ``adapter.Sink`` that keeps everything."""

    def __init__(self) -> None:
        self.arrived: list[Incoming] = []
        self.batches: list[int] = []
        self.error: MessagingError | None = None
        self.failures = 0
        self.changed = asyncio.Event()

    def deliver(self, batch: Sequence[Incoming]) -> None:
        self.arrived += batch
        self.batches.append(len(batch))
        self.changed.set()

    def fail(self, error: MessagingError) -> None:
        self.error = error
        self.failures += 1
        self.changed.set()

    @property
    def payloads(self) -> list[bytes]:
        return [incoming.payload for incoming in self.arrived]

    async def count(self, number: int) -> list[Incoming]:
        """Wait for ``number`` messages."""
        while len(self.arrived) < number:
            self.changed.clear()
            try:
                await within(self.changed.wait())
            except TimeoutError:
                raise AssertionError(f"{len(self.arrived)} of {number} messages arrived: {self.payloads}") from None
        return self.arrived

    async def next(self) -> Incoming:
        """Wait for a message and take it."""
        await self.count(1)
        return self.arrived.pop(0)


class Client:
    """An adapter with what a test needs around it."""

    def __init__(self, adapter: AmqpAdapter) -> None:
        self.adapter = adapter
        self.events = Recorded()
        self.losses = self.events.losses

    async def open(self) -> None:
        assert await self.adapter.open(self.events) is False

    @property
    def link(self) -> Link:
        assert self.adapter.link is not None
        return self.adapter.link

    @property
    def wires(self) -> list[Wire]:
        """The connections: for publishing, and for consuming if there is a subscription."""
        return self.link.wires

    async def lost(self, patience: float = PATIENCE) -> MessagingError:
        await until(lambda: self.losses, "the loss", patience)
        return self.losses[-1]

    def message(
        self, channel: str, payload: bytes = b"x", *, key: str | None = None,
        extensions: Mapping[str, Any] | None = None, **context: Any,
    ) -> Out:  # fmt: skip
        known = MappingProxyType(dict(extensions or {}))
        return Out(self.adapter, payload, MessageContext(channel, key, extensions=known, **context))

    async def publish(self, channel: str, *payloads: bytes, **more: Any) -> None:
        """Publish and wait for the confirms."""
        batch = [self.message(channel, payload, **more) for payload in payloads]
        await within(self.adapter.publish(batch))
        for message in batch:
            await message.result()

    async def subscribe(
        self, channel: str, *, key: str | None = None, sink: Sink | None = None, **extensions: Any
    ) -> tuple[Sink, QueueConsumer]:
        sink = sink or Sink()
        spec = SubscriptionSpec(
            channel, key, subscribe_options(extensions, self.adapter.capabilities, self.adapter.settings)
        )
        self.adapter.check_subscribe(spec)
        return sink, await within(self.adapter.subscribe(spec, sink))

    def acknowledge(self, *arrived: Incoming) -> None:
        self.adapter.acknowledge([incoming.token for incoming in arrived])

    def reject(self, *arrived: Incoming) -> None:
        self.adapter.reject([incoming.token for incoming in arrived])


@contextlib.asynccontextmanager
async def connected(url: str, **settings: Any) -> AsyncIterator[Client]:
    """A client that is connected, and closed afterwards."""
    client = Client(make_adapter(url, **settings))
    await within(client.open())
    try:
        yield client
    finally:
        await within(client.adapter.close())


async def open_fails(
    url: str, error: type[ConnectFailedError] = ConnectFailedError, **settings: Any
) -> ConnectFailedError:
    """Open, check that it fails in time and leaves nothing behind, and return the error."""
    client = Client(make_adapter(url, **settings))
    try:
        with pytest.raises(error) as caught:
            await within(client.open(), 5)
    finally:
        await client.adapter.close()
    assert client.losses == []
    return caught.value
