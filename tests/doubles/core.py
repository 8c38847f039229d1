"""The core's side of the adapter contract: what a test needs to drive one adapter directly, on a loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Self, TypeVar

import pytest
import uvloop

from messaging.adapter import Adapter
from messaging.errors import MessagingError, OutcomeUnknownError
from messaging.model import Incoming, MessageContext, publish_options
from messaging.testing.waiting import PATIENCE, eventually_async, within
from tests.doubles.plans import plan_of

T = TypeVar("T")

#: begins the names of this process: workers share brokers
_RUN = secrets.token_hex(2)
_numbers = itertools.count(1)


def run(main: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """Run a test's coroutine; fail if it leaves a task behind, or something went wrong behind its back."""
    mishaps: list[str] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: mishaps.append(str(context)))
        async with asyncio.timeout(10 * PATIENCE):
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


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests on a loop of their own, made by the fixture ``loop_factory`` if a test has it.

    Arguments that are asynchronous context managers are entered.
    """
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            arguments = {}
            for name in inspect.signature(test).parameters:
                value = pyfuncitem.funcargs[name]
                is_entered = isinstance(value, AbstractAsyncContextManager)
                arguments[name] = await stack.enter_async_context(value) if is_entered else value
            await test(**arguments)

    run(main(), pyfuncitem.funcargs.get("loop_factory"))
    return True


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> Any:
    """Has a test run on both kinds of event loop."""
    return request.param


def unique(name: str) -> str:
    """``name`` with a number that no other test has."""
    return f"{name}-{_RUN}-{next(_numbers)}"


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """A port that refuses connections, and that no other program can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


class Out:
    """An ``adapter.Outgoing``."""

    def __init__(self, adapter: Adapter, payload: bytes, context: MessageContext) -> None:
        self.payload = payload
        self.correlation_id = context.correlation_id
        self.plan = plan_of(context, publish_options(context.extensions, adapter.capabilities))
        adapter.check_publish(self.plan)
        self.settled = False
        self.was_sent = False
        #: whether its time to live is over
        self.is_over = False
        #: how often it was settled: once, if all is well
        self.settlements = 0
        self.error: MessagingError | None = None
        self.message_id = self.plan.options.message_id or unique("id")
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def prepare(self) -> bool:
        if self.is_over:
            self.fail(OutcomeUnknownError("its time to live is over"))
        return not self.is_over

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
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
                self.done.exception()  # a test need not look at each

    async def result(self) -> None:
        """Wait for the outcome.

        Raises:
            MessagingError: what it failed with.
        """
        await within(self.done)


class Sink:
    """An ``adapter.Sink`` that keeps everything."""

    def __init__(self) -> None:
        self.arrived: list[Incoming] = []
        self.batches: list[int] = []
        self.error: MessagingError | None = None
        self.failures = 0

    def deliver(self, batch: Sequence[Incoming]) -> None:
        assert batch
        self.arrived += batch
        self.batches.append(len(batch))

    def fail(self, error: MessagingError) -> None:
        self.error = error
        self.failures += 1

    @property
    def payloads(self) -> list[bytes]:
        return [incoming.payload for incoming in self.arrived]

    async def count(self, number: int) -> list[Incoming]:
        """Wait for ``number`` messages."""
        await eventually_async(lambda: len(self.arrived) >= number, lambda: f"{number} messages: {self.payloads}")
        return self.arrived

    async def next(self) -> Incoming:
        """Wait for a message and take it."""
        await self.count(1)
        return self.arrived.pop(0)


async def settled(*awaitables: Awaitable[Any]) -> None:
    """Wait for all outcomes, whatever they are."""
    await within(asyncio.gather(*awaitables, return_exceptions=True))


# --- a broker that is played by the test


class BrokerEnd:
    """The broker's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def write(self, data: bytes) -> None:
        """Send what need not be a whole packet or frame."""
        self._writer.write(data)

    async def is_silent(self) -> bool:
        """Return whether the client sends nothing more: neither now nor once the loop has done what is due."""
        for _ in range(20):
            await asyncio.sleep(0)
        return not self._reader._buffer  # type: ignore[attr-defined]  # its only way to tell without waiting

    async def end(self) -> bytes:
        """Wait until the client has closed; returns what it still said."""
        rest = b""
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                while data := await self._reader.read(65_536):
                    rest += data
        return rest

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


C = TypeVar("C", bound=BrokerEnd)


class Listener(Generic[C]):
    """Listens on the loopback interface.

    Args:
        scheme: of its URL.
        kind: makes the connections.
    """

    def __init__(self, scheme: str, kind: Callable[[asyncio.StreamReader, asyncio.StreamWriter], C]) -> None:
        self._scheme = scheme
        self._kind = kind
        self._accepted: asyncio.Queue[C] = asyncio.Queue()
        self.connections: list[C] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for _ in range(3):  # a connection may be about to be accepted
            for connection in self.connections:
                connection.abort()
            await asyncio.sleep(0)
        await self._server.wait_closed()
        await asyncio.sleep(0)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(self._kind(reader, writer))
        self._accepted.put_nowait(self.connections[-1])

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    async def session(self) -> C:
        """The next connection."""
        return await within(self._accepted.get())
