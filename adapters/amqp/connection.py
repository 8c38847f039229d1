"""One connection to the broker: aiormq's, with a lane beside it for what passes once per message.

aiormq does the handshake, channels, declarations, heartbeats and closing. Deliveries and publisher confirms never
get that far: the protocol under its stream reader (:mod:`.protocol`) hands the frames of chosen channels to their
``Lane`` and passes on the rest. Publishes and acknowledgements are written to the transport directly; as both sides
write whole frames, they may take turns. Only public hooks are used: a transport factory that returns a stream reader
and writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import aiormq
from aiormq import spec
from yarl import URL

from adapters.amqp import frames, tables
from adapters.amqp.protocol import FrameProtocol
from adapters.amqp.target import failure
from adapters.amqp.transport import cut
from messaging.connection import tls
from messaging.errors import AuthenticationError, BrokerError, ConnectFailedError, ConnectionLostError
from messaging.text import without_frames

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pamqp.base import Frame

    from adapters.amqp.protocol import Lane
    from adapters.amqp.target import Target

logger = logging.getLogger(__name__)

T = TypeVar("T")
B = TypeVar("B", bound=BrokerError)

PRODUCT: Final = "rx-messaging"
#: how long closing in good order may take before the transport is cut, seconds
CLOSE_GRACE: Final = 0.8
#: the same for a broker that may have much to read before it comes to that: what nobody confirms
UNCONFIRMED_GRACE: Final = 4.0
#: as the specification has it (4.2.7): a peer that was silent for two intervals is gone
SILENT_HEARTBEATS: Final = 2
#: aiormq leaves out the code where it has a class for it
_CODES: Final[dict[type[BaseException], int]] = {
    aiormq.ChannelAccessRefused: 403,
    aiormq.ChannelNotFoundEntity: 404,
    aiormq.ChannelLockedResource: 405,
    aiormq.ChannelPreconditionFailed: 406,
}


class _Transport(aiormq.TransportFactory):
    """Gives aiormq a connection that is made already: it would log the failure to make one as an error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._streams = reader, writer

    async def create(self, url: URL, **_: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        del url  # it was used already
        return self._streams


class _Connection(aiormq.Connection):
    #: silence is ours to notice: aiormq does not see messages, and does not say good-bye to whom it takes for dead
    HEARTBEAT_GRACE_MULTIPLIER = 2**31


def _named(kind: type[T]) -> type[T]:
    """A method without pamqp's check of names, which allows fewer than brokers do."""
    return type(kind.__name__, (kind,), {"validate": lambda _: None})


ExchangeDeclare = _named(spec.Exchange.Declare)
QueueDeclare = _named(spec.Queue.Declare)
QueueDelete = _named(spec.Queue.Delete)
BasicQos = spec.Basic.Qos
BasicConsume = _named(spec.Basic.Consume)


class QueueBind(_named(spec.Queue.Bind)):  # type: ignore[misc]  # a class that is made by a function
    """``queue.bind`` whose arguments are written as headers are: pamqp cuts floats to 32 bits, and none would match."""

    def marshal(self) -> bytes:
        """Return the arguments of the method as bytes."""
        names = b"".join(map(frames.short_string, (self.queue, self.exchange, self.routing_key)))
        return b"\x00\x00" + names + b"\x00" + tables.write_table(self.arguments or {})


class Wire:
    """An open connection. On one loop only; made by :func:`connect`.

    Attributes:
        alive: until the connection is lost or closed; what was received before is void afterwards.
        lost: told of a loss, once.
        blocked: told why the broker takes no messages for now, and ``None`` when it does again.
        frame_max: the largest frame either side sends, bytes, as agreed in the handshake.
    """

    def __init__(
        self, target: Target, connection: aiormq.Connection, protocol: FrameProtocol, writer: asyncio.StreamWriter
    ) -> None:
        self.alive = True
        self.lost: Callable[[ConnectionLostError], object] = lambda _: None
        self.blocked: Callable[[str | None], object] = lambda _: None
        tune = connection.connection_tune
        self.frame_max = tune.frame_max
        self._channel_max = tune.channel_max or 65_535
        self._target = target
        self._connection = connection
        self._protocol = protocol
        self._writer = writer
        self._watch: asyncio.TimerHandle | None = None
        self._is_blocked = False
        protocol.settle(tune.frame_max - frames.OVERHEAD, self._block, self._end)
        connection.closing.add_done_callback(self._closed)
        if target.heartbeat:
            self._look_for_silence()

    @property
    def lanes(self) -> dict[int, Lane]:
        """Channel number -> who takes its frames."""
        return self._protocol.lanes

    def _block(self, reason: str | None) -> None:
        self._is_blocked = reason is not None
        self.blocked(reason)

    def _look_for_silence(self) -> None:
        if not self.alive:
            return
        loop, patience = asyncio.get_running_loop(), self._target.heartbeat * SILENT_HEARTBEATS
        left = self._protocol.heard_at + patience - loop.time()
        if left <= 0:
            self.abort(f"it was silent for {patience} s")
        else:
            self._watch = loop.call_later(left, self._look_for_silence)

    def write(self, data: bytes) -> bool:
        """Write whole frames.

        Returns:
            Whether they are on their way. If not, the connection is gone, and ``lost`` was called unless it was closed.
        """
        if self._is_gone():
            return False
        self._writer.write(data)
        return True

    async def drain(self) -> None:
        """Wait while the transport's buffer is too full.

        Raises:
            ConnectionLostError: the connection went away.
        """
        try:
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            self._end(describe(error), error)
            self._check(error)
        self._check()

    async def channel(self, *, confirms: bool = False) -> aiormq.Channel:
        """Open a channel.

        Raises:
            ConnectionLostError: the connection went away.
            aiormq.AMQPChannelError: as many are open as the broker allows.
        """
        if len(self._connection.channels) >= self._channel_max:
            # opening one more would cost the connection
            raise aiormq.ChannelClosed(506, f"the broker allows {self._channel_max} channels on a connection")
        channel = await self.ask(self._connection.channel(publisher_confirms=confirms))
        assert isinstance(channel, aiormq.Channel)  # noqa: S101  # declared as its abstract base
        return channel

    async def close_channel(self, channel: aiormq.Channel) -> None:
        """Close a channel; nothing happens if it is closed already.

        Raises:
            ConnectionLostError: the connection went away.
        """
        if not channel.is_closed:
            with contextlib.suppress(aiormq.AMQPChannelError):
                await self.ask(channel.close(aiormq.ChannelClosed(200, "closed")))

    async def command(self, channel: aiormq.Channel, method: Frame) -> Any:
        """Send a method on a channel and await the answer.

        Raises:
            ConnectionLostError: the connection went away or, as no answer came in time, was given up.
            aiormq.AMQPChannelError: the broker refused, and closed the channel, or even the connection over it. The
                latter is a refusal, too: the same on another connection would only cost that one as well.
        """
        try:
            return await self.ask(channel.rpc(method))
        except ConnectionLostError as error:
            if self._protocol.close_reason is None or self._protocol.culprit != method.index:
                raise
            raise aiormq.ChannelClosed(*self._protocol.close_reason) from error

    async def ask(self, request: Awaitable[T]) -> T:
        """Await an answer of the broker. Raises as :meth:`command`."""
        asking = asyncio.ensure_future(request)
        asking.add_done_callback(_look_at)
        try:
            while not (await asyncio.wait([asking], timeout=self._target.timeout))[0]:
                if self._is_blocked:
                    continue  # it takes no requests, either
                # not cancelled, which aiormq would log, and take for a reason to ask for more: it ends with the rest
                why = f"no answer within {self._target.timeout:g} s"
                self.abort(why)
                raise ConnectionLostError(f"connection to {self._target} lost: {why}")
        except asyncio.CancelledError:
            asking.cancel()
            raise
        try:
            return asking.result()
        except aiormq.AMQPChannelError:
            raise
        except asyncio.CancelledError as error:
            # this is how aiormq ends what waits for a connection that breaks
            self.abort("a request was given up")
            raise ConnectionLostError(f"connection to {self._target} lost") from error
        except Exception as error:
            if type(error) is not Exception and not isinstance(error, (aiormq.AMQPError, RuntimeError, OSError)):
                raise
            # what aiormq raises for requests on what is closed: RuntimeError, or Exception itself
            self._check(error)
            raise aiormq.ChannelClosed(504, "the channel is closed") from error

    def _is_gone(self) -> bool:
        # aiormq notices later that its transport is closed, and to write to one is an error in uvloop
        if self.alive and self._writer.is_closing():
            self._end("the transport is closed", None)
        return not self.alive

    def _check(self, cause: BaseException | None = None) -> None:
        if self._is_gone() or not self._connection.is_opened:
            code, text = self._protocol.close_reason or (None, None)
            why = f": {code} {text}" if code is not None else ""
            lost = ConnectionLostError(f"connection to {self._target} lost{why}", code=code, detail=text)
            raise lost from cause

    def abort(self, reason: str) -> None:
        """Give the connection up: ``lost`` is called, and the transport is cut."""
        self._end(reason, None)
        cut(self._writer.transport)

    def read(self, wanted: bool) -> None:
        """Read from the socket, or do not for now."""
        transport = cast("asyncio.Transport", self._writer.transport)  # it is both ways
        if not transport.is_closing():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                (transport.resume_reading if wanted else transport.pause_reading)()

    async def close(self, grace: float = CLOSE_GRACE) -> None:
        """Disconnect in good order, or after ``grace`` seconds without. Idempotent; does not raise."""
        self.alive = False
        if self._watch is not None:
            self._watch.cancel()
        connection, transport = self._connection, self._writer.transport
        # an error of our own: aiormq's default would reach whoever still waits as a cancellation
        self.read(True)
        closing = asyncio.ensure_future(connection.close(aiormq.ConnectionClosed(200, "closed")))
        await asyncio.wait([closing], timeout=grace)
        cut(transport)
        # with its transport gone, nothing in aiormq waits for the peer any more
        if not (await asyncio.wait([closing], timeout=CLOSE_GRACE))[0]:
            logger.warning("the connection to %s did not end", self._target)
            closing.cancel()

    def _closed(self, closing: asyncio.Future[Any]) -> None:
        error = None if closing.cancelled() else closing.exception()
        self._end(describe(error) if error is not None else "the broker ended it", error)

    def _end(self, reason: str, cause: BaseException | None) -> None:
        if self.alive:
            self.alive = False
            if self._watch is not None:
                self._watch.cancel()
            code, text = self._protocol.close_reason or (None, None)
            if code is not None:  # the broker knows better
                reason = f"{code} {text}"
            lost = ConnectionLostError(f"connection to {self._target} lost: {reason}", code=code, detail=text)
            lost.__cause__ = cause
            self.lost(lost)


async def connect(target: Target, purpose: str, context: ssl.SSLContext | None) -> Wire:
    """Connect and log in. Leaves nothing behind when it fails or is cancelled.

    Args:
        target: where to.
        purpose: tells connections of one instance apart at the broker.
        context: for TLS, or ``None`` for none.

    Raises:
        AuthenticationError: the broker refused the credentials.
        ConnectFailedError: anything else.
    """
    loop = asyncio.get_running_loop()
    protocol = FrameProtocol(loop)
    try:
        transport, _ = await loop.create_connection(lambda: protocol, target.host, target.port, ssl=context)
    except (OSError, UnicodeError) as error:
        reason = tls.explain(error, "amqps", "amqp") if context is not None and isinstance(error, OSError) else None
        raise ConnectFailedError(f"cannot connect to {target}: {reason or describe(error)}") from error
    writer = asyncio.StreamWriter(transport, protocol, protocol.reader, loop)
    # the URL holds the password: it is never in a variable of a frame that a report of an error may show
    connection = _Connection(_url(target, purpose), transport_factory=_Transport(protocol.reader, writer))
    # not by the URL: aiormq reads some percent signs in it twice
    connection.vhost = target.vhost
    try:
        await connection.connect({"product": PRODUCT})
    except (Exception, asyncio.CancelledError) as error:
        cut(transport)
        # it may have been cancelled in the moment it was through
        await connection.close(aiormq.ConnectionClosed(200, "closed"))
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        raise _connect_error(target, protocol, error) from without_frames(error)
    finally:
        # needed for the log-in only
        connection.url = connection.url.with_password(None)
    if connection.connection_tune.frame_max < frames.FRAME_MIN_SIZE:
        cut(transport)
        await connection.close(aiormq.ConnectionClosed(200, "closed"))
        limit = connection.connection_tune.frame_max
        raise ConnectFailedError(
            f"cannot connect to {target}: it takes frames of {limit} bytes; AMQP 0-9-1 asks for {frames.FRAME_MIN_SIZE}"
        )
    return Wire(target, connection, protocol, writer)


def _url(target: Target, purpose: str) -> URL:
    return URL.build(
        scheme="amqp",
        host=target.host,
        port=target.port,
        user=target.username,
        password=None if target.password is None else target.password.get_secret_value(),
        path="/",
        query={
            "heartbeat": target.heartbeat,
            "name": f"{target.name} ({purpose})",
            "auth": "external" if target.username is None else "plain",
        },
    )


def _is_cancelled() -> bool:
    """Whether it is the current task that was cancelled, rather than something of aiormq's that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _connect_error(target: Target, protocol: FrameProtocol, error: BaseException) -> ConnectFailedError:
    if protocol.close_reason is not None:
        code, text = protocol.close_reason
        if code == 403:
            return AuthenticationError(f"{target} refused {target.who}: {code} {text}", code=code, detail=text)
        return ConnectFailedError(f"{target} refused the connection: {code} {text}", code=code, detail=text)
    if isinstance(error, aiormq.AuthenticationError):
        how = "client certificate (SASL EXTERNAL)" if target.username is None else "user name and password (SASL PLAIN)"
        return AuthenticationError(f"{target} takes no {how}")
    hint = tls.wants_tls(protocol.greeting, "amqps", "amqp")
    if hint is not None:
        return ConnectFailedError(f"cannot connect to {target}: {hint}")
    if not protocol.speaks_amqp or isinstance(error, (aiormq.ProtocolSyntaxError, aiormq.IncompatibleProtocolError)):
        return ConnectFailedError(f"{target} does not speak AMQP 0-9-1")
    return ConnectFailedError(f"cannot connect to {target}: {describe(error)}")


def _look_at(asked: asyncio.Future[Any]) -> None:
    if not asked.cancelled():
        asked.exception()


def reply(error: BaseException) -> tuple[int | None, str | None]:
    """Reply code and text of the broker, if that is what the library's ``error`` is about."""
    code = _CODES.get(type(error))
    if code is not None:
        return code, str(error)
    if isinstance(error, (aiormq.ChannelClosed, aiormq.ConnectionClosed)) and len(error.args) == 2:
        return error.args[0], error.args[1]
    return None, None


def refusal(kind: type[B], what: str, error: aiormq.AMQPChannelError, way_out: str = "") -> B:
    """An error of ours for what the broker refused; ``way_out`` is appended to its text."""
    code, text = reply(error)
    refused = kind("; ".join(filter(None, (f"{what}: {describe(error)}", way_out))), code=code, detail=text)
    refused.__cause__ = error
    return refused


def describe(error: BaseException) -> str:
    """What the broker or the library said, with the reply code where there is one."""
    code, text = reply(error)
    if code is not None:
        return f"{code} {text}"
    if isinstance(error.__cause__, asyncio.IncompleteReadError):
        return "the peer closed it"
    if isinstance(error, asyncio.CancelledError):  # this is how aiormq ends what waits for a connection that breaks
        return "the connection broke"
    words = failure(error.__cause__) if error.__cause__ is not None else None
    return words or failure(error) or str(error) or type(error).__name__
