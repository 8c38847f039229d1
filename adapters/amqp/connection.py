"""One connection to the broker: aiormq's, with a lane beside it for what passes once per message.

aiormq does the handshake, channels, declarations, heartbeats and closing. Deliveries and publisher confirms never
get that far: the protocol under its stream reader hands the frames of chosen channels to their :class:`Lane` and
passes on the rest. Publishes and acknowledgements are written to the transport directly; as both sides write whole
frames, they may take turns. Only public hooks are used: a transport factory that returns a stream reader and writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import aiormq
from aiormq import spec
from yarl import URL

from adapters.amqp import frames
from messaging.errors import AuthenticationError, ConnectFailedError, ConnectionLostError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from pydantic import SecretStr

logger = logging.getLogger(__name__)

T = TypeVar("T")

PRODUCT: Final = "rx-messaging"
#: how long closing in good order may take before the transport is cut, seconds
CLOSE_GRACE: Final = 0.8
#: how often the lane tells aiormq that the peer is alive, seconds
_ALIVE_INTERVAL: Final = 0.5
#: aiormq leaves out the code where it has a class for it
_CODES: Final[dict[type[BaseException], int]] = {
    aiormq.ChannelAccessRefused: 403,
    aiormq.ChannelNotFoundEntity: 404,
    aiormq.ChannelLockedResource: 405,
    aiormq.ChannelPreconditionFailed: 406,
}
_KINDS: Final = (frames.METHOD, frames.HEADER, frames.BODY, frames.HEARTBEAT)
#: largest frame of a handshake, bytes; after it, what was agreed counts
_HANDSHAKE_FRAME_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to connect. Shows no password."""

    host: str
    port: int
    username: str
    password: SecretStr
    vhost: str
    #: seconds between heartbeats; 0 turns them off
    heartbeat: int
    #: what the broker calls the connections
    name: str
    #: deadline of the second connection, and of any single request to the broker, seconds
    timeout: float
    #: ``None`` without TLS
    tls: Tls | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """What TLS needs to know: paths of PEM files, and whether the broker's certificate is left unverified."""

    cafile: Path | None
    certfile: Path | None
    keyfile: Path | None
    insecure: bool

    def context(self) -> ssl.SSLContext:
        """Make the context; reads files.

        Raises:
            ConnectFailedError: one of the files cannot be used.
        """
        try:
            context = ssl.create_default_context(cafile=self.cafile)
            if self.certfile is not None:
                # without a password callback OpenSSL would ask at the terminal
                context.load_cert_chain(self.certfile, self.keyfile, password="")
        except (OSError, ssl.SSLError) as error:
            shown = ", ".join(str(path) for path in (self.cafile, self.certfile, self.keyfile) if path is not None)
            raise ConnectFailedError(f"cannot use the TLS files {shown}: {error}") from error
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class Lane(Protocol):
    """What takes the frames of a channel before aiormq sees them. Must not raise."""

    def take(self, kind: int, data: bytes, at: int, end: int, /) -> bool:
        """Take the frame with the payload ``data[at:end]``; ``False`` leaves it to aiormq."""
        ...

    def closed(self, reason: str) -> None:
        """The broker closed the channel. From here on nothing may be written on it: that would end the connection."""


class _FrameProtocol(asyncio.StreamReaderProtocol):
    """Splits what arrives into frames and decides who gets each."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self.lanes: dict[int, Lane] = {}
        self.frame_max = _HANDSHAKE_FRAME_MAX
        #: why the broker closed the connection: code and text
        self.close_reason: tuple[int, str] | None = None
        self.blocked: Callable[[bool], None] = lambda _: None
        self._time = loop.time
        self._rest = b""
        self.speaks_amqp = True
        self._alive_at = 0.0

    def data_received(self, data: bytes) -> None:
        if not self.speaks_amqp:
            super().data_received(data)
            return
        data = self._rest + data if self._rest else data
        lanes, size, at, unpack, prefix = self.lanes, len(data), 0, frames.PREFIX.unpack_from, frames.PREFIX.size
        passed: list[bytes] = []
        taken = False
        while size - at >= prefix:
            kind, channel, length = unpack(data, at)
            end = at + frames.OVERHEAD + length
            if kind not in _KINDS or length > self.frame_max or (end <= size and data[end - 1] != frames.END):
                # aiormq knows best what to say about it, and ends the connection
                self.speaks_amqp = False
                passed.append(data[at:])
                at = size
                break
            if end > size:
                break
            lane = lanes.get(channel)
            if lane is not None and lane.take(kind, data, at + prefix, end - 1):
                taken = True
            else:
                if kind == frames.METHOD:
                    self._look(channel, data, at + prefix, end - 1)
                passed.append(data[at:end])
            at = end
        self._rest = data[at:]
        if taken and not passed and (now := self._time()) - self._alive_at > _ALIVE_INTERVAL:
            # the broker sends no heartbeat while it sends messages, but aiormq does not see those
            self._alive_at = now
            passed.append(frames.HEARTBEAT_FRAME)
        if passed:
            super().data_received(b"".join(passed))

    def _look(self, channel: int, data: bytes, at: int, end: int) -> None:
        """Notice what aiormq is told, but passes on late or not at all."""
        method = data[at : at + 4]
        if method == frames.CHANNEL_CLOSE:
            lane = self.lanes.pop(channel, None)
            if lane is not None:
                lane.closed("{} {}".format(*frames.read_close(data, at, end)))
        elif method == frames.CHANNEL_CLOSE_OK:
            self.lanes.pop(channel, None)
        elif method == frames.CONNECTION_CLOSE:
            self.close_reason = frames.read_close(data, at, end)
        elif method == frames.CONNECTION_BLOCKED:
            self.blocked(True)
        elif method == frames.CONNECTION_UNBLOCKED:
            self.blocked(False)


class _Transport(aiormq.TransportFactory):
    """Gives aiormq a connection that is made already: it would log the failure to make one as an error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._streams = reader, writer

    async def create(self, url: URL, **_: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        del url  # it was used already
        return self._streams


class _Connection(aiormq.Connection):
    #: as the specification has it (4.2.7): a peer that was silent for two intervals is gone
    HEARTBEAT_GRACE_MULTIPLIER = 2


class _ConnectionWithoutHeartbeat(aiormq.Connection):
    #: silence means nothing: otherwise aiormq takes the peer for dead after it, and does not say good-bye
    HEARTBEAT_GRACE_MULTIPLIER = 2**31


def _named(kind: type[T]) -> type[T]:
    """A method without pamqp's check of names, which allows fewer than brokers do."""
    return type(kind.__name__, (kind,), {"validate": lambda _: None})


ExchangeDeclare = _named(spec.Exchange.Declare)
QueueDeclare = _named(spec.Queue.Declare)
QueueBind = _named(spec.Queue.Bind)
QueueDelete = _named(spec.Queue.Delete)
BasicConsume = _named(spec.Basic.Consume)


class Wire:
    """An open connection. On one loop only; made by :func:`connect`.

    Attributes:
        alive: until the connection is lost or closed; what was received before is void afterwards.
        frame_max: the largest frame the broker takes, bytes.
    """

    def __init__(
        self, target: Target, connection: aiormq.Connection, protocol: _FrameProtocol, writer: asyncio.StreamWriter
    ) -> None:
        self.alive = True
        self.lost: Callable[[ConnectionLostError], None] = lambda _: None
        tune = connection.connection_tune
        self.frame_max = tune.frame_max or frames.DEFAULT_FRAME_MAX
        protocol.frame_max = tune.frame_max or frames.NO_LIMIT
        self._channel_max = tune.channel_max or 65_535
        self._target = target
        self._connection = connection
        self._protocol = protocol
        self._writer = writer
        connection.closing.add_done_callback(self._closed)

    @property
    def lanes(self) -> dict[int, Lane]:
        """Channel number -> who takes its frames."""
        return self._protocol.lanes

    def on_blocked(self, callback: Callable[[bool], None]) -> None:
        """Have ``callback`` told when the broker stops, and when it resumes, taking messages for lack of resources."""
        self._protocol.blocked = callback

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
            self._end(_os_error(error), error)
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

    async def ask(self, request: Awaitable[T]) -> T:
        """Await an answer of the broker.

        Raises:
            ConnectionLostError: the connection went away or, as no answer came in time, was given up.
            aiormq.AMQPChannelError: the broker refused and closed the channel.
        """
        try:
            async with asyncio.timeout(self._target.timeout):
                return await request
        except TimeoutError:
            self.abort(f"no answer within {self._target.timeout:g} s")
            raise ConnectionLostError(f"{self._target} did not answer within {self._target.timeout:g} s") from None
        except aiormq.AMQPChannelError:
            raise
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            # this is how aiormq ends what waits for a connection that breaks
            self.abort("a request was given up")
            raise ConnectionLostError(f"connection to {self._target} lost") from error
        except (aiormq.AMQPError, RuntimeError, OSError) as error:
            # RuntimeError is what aiormq raises for requests on what is closed
            self._check(error)
            raise aiormq.ChannelClosed(504, "the channel is closed") from error

    def _is_gone(self) -> bool:
        # aiormq notices later that its transport is closed, and to write to one is an error in uvloop
        if self.alive and self._writer.is_closing():
            self._end("the transport is closed", None)
        return not self.alive

    def _check(self, cause: BaseException | None = None) -> None:
        if self._is_gone() or not self._connection.is_opened:
            raise ConnectionLostError(f"connection to {self._target} lost") from cause

    def abort(self, reason: str) -> None:
        """Give the connection up: ``lost`` is called, and the transport is cut."""
        self._end(reason, None)
        self._writer.transport.abort()

    async def close(self) -> None:
        """Disconnect in good order, or after ``CLOSE_GRACE`` seconds without. Idempotent; does not raise."""
        self.alive = False
        connection, transport = self._connection, self._writer.transport
        # an error of our own: aiormq's default would reach whoever still waits as a cancellation
        closing = asyncio.ensure_future(connection.close(aiormq.ConnectionClosed(200, "closed")))
        await asyncio.wait([closing], timeout=CLOSE_GRACE)
        transport.abort()
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
            if self._protocol.close_reason is not None:  # the broker knows better
                reason = "{} {}".format(*self._protocol.close_reason)
            lost = ConnectionLostError(f"connection to {self._target} lost: {reason}")
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
    reader = asyncio.StreamReader(loop=loop)
    protocol = _FrameProtocol(reader, loop)
    try:
        transport, _ = await loop.create_connection(lambda: protocol, target.host, target.port, ssl=context)
    except (OSError, ssl.SSLError, UnicodeError) as error:
        raise ConnectFailedError(f"cannot connect to {target}: {_os_error(error)}") from error
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    url = URL.build(
        scheme="amqp",
        host=target.host,
        port=target.port,
        user=target.username,
        password=target.password.get_secret_value(),
        path="/",
        query={"heartbeat": target.heartbeat, "name": f"{target.name} ({purpose})"},
    )
    kind = _Connection if target.heartbeat else _ConnectionWithoutHeartbeat
    connection = kind(url, transport_factory=_Transport(reader, writer))
    # not by the URL: aiormq reads some percent signs in it twice
    connection.vhost = target.vhost
    try:
        await connection.connect({"product": PRODUCT})
    except (Exception, asyncio.CancelledError) as error:
        transport.abort()
        # it may have been cancelled in the moment it was through
        await connection.close(aiormq.ConnectionClosed(200, "closed"))
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        raise _connect_error(target, protocol, error) from error
    finally:
        # needed for the log-in only
        connection.url = connection.url.with_password(None)
    return Wire(target, connection, protocol, writer)


def _is_cancelled() -> bool:
    """Whether it is the current task that was cancelled, rather than something of aiormq's that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _connect_error(target: Target, protocol: _FrameProtocol, error: BaseException) -> ConnectFailedError:
    if protocol.close_reason is not None:
        code, text = protocol.close_reason
        if code == 403:
            return AuthenticationError(f"{target} refused the credentials of {target.username!r}: {code} {text}")
        return ConnectFailedError(f"{target} refused the connection: {code} {text}")
    if isinstance(error, aiormq.AuthenticationError):
        return AuthenticationError(f"{target} takes no user name and password (SASL PLAIN)")
    if not protocol.speaks_amqp or isinstance(error, (aiormq.ProtocolSyntaxError, aiormq.IncompatibleProtocolError)):
        return ConnectFailedError(f"{target} does not speak AMQP 0-9-1")
    return ConnectFailedError(f"cannot connect to {target}: {describe(error)}")


def _os_error(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else None
    if number is not None and number > 0:  # those of the resolver are below
        return os.strerror(number)  # asyncio puts a sentence of its own into the error
    return describe(error)


def describe(error: BaseException) -> str:
    """What the broker or the library said, with the reply code where there is one."""
    code = _CODES.get(type(error))
    if code is not None:
        return f"{code} {error}"
    if isinstance(error, (aiormq.ChannelClosed, aiormq.ConnectionClosed)) and len(error.args) == 2:
        return f"{error.args[0]} {error.args[1]}"
    if isinstance(error.__cause__, asyncio.IncompleteReadError):
        return "the peer closed it"
    return str(error) or type(error).__name__
