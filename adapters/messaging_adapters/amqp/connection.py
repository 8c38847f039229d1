"""One connection to the broker: aio-pika's, with a fast lane for the frames that pass once per message.

aio-pika and aiormq do the handshake, channels, declarations, heartbeats and closing. Deliveries and publisher confirms
bypass them: the protocol under aiormq's stream reader (:mod:`.protocol`) hands the frames of chosen channels to their
``FrameLane`` and passes on the others. Publishes and acknowledgements are written to the transport directly. Both
sides write whole frames, so they may take turns. The hook is aiormq's transport factory, which returns the streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import aio_pika
import aiormq
from aio_pika.abc import AbstractChannel, UnderlayConnection
from aio_pika.connection import make_url
from aio_pika.tools import OneShotCallback

from messaging.adapter import PlannedLossError
from messaging.connection import tls
from messaging.connection.names import reach
from messaging.connection.proxies import open_through
from messaging.errors import AuthenticationError, BrokerError, ConnectFailedError, ConnectionLostError
from messaging.errors.text import without_frames
from messaging.execution import clock
from messaging_adapters.amqp import frames, internals
from messaging_adapters.amqp.protocol import FrameLane, FrameProtocol, cut
from messaging_adapters.amqp.target import AmqpTarget

if TYPE_CHECKING:
    from pamqp.base import Frame
    from yarl import URL


logger = logging.getLogger(__name__)

T = TypeVar("T")
B = TypeVar("B", bound=BrokerError)

PRODUCT: Final = "rx-messaging"
#: longest close handshake before the transport is cut, seconds
CLOSE_GRACE: Final = 0.8
#: the same for a broker that may have unconfirmed messages to read before the close, seconds
UNCONFIRMED_GRACE: Final = 4.0
#: intervals of silence after which a peer is lost (4.2.7)
SILENT_HEARTBEATS: Final = 2
#: reply code of a connection that an operator, or a broker that stops, closes
_FORCED: Final = 320
#: reply codes that aiormq leaves out of errors which it has a class for
_CODES: Final[dict[type[BaseException], int]] = {
    aiormq.ChannelAccessRefused: 403,
    aiormq.ChannelNotFoundEntity: 404,
    aiormq.ChannelLockedResource: 405,
    aiormq.ChannelPreconditionFailed: 406,
}


class _OpenStreams(aiormq.TransportFactory):
    """Streams that are open already: aiormq logs a failure to open them as an error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._streams = reader, writer

    async def create(self, url: URL, **_: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        del url  # the streams are connected to it
        return self._streams


class LaneConnection(aio_pika.Connection):
    """aio-pika's connection over open streams.

    The virtual host is not in the path of the URL, where aiormq would decode ``%2F`` twice.
    """

    def __init__(self, url: URL, vhost: str, streams: aiormq.TransportFactory) -> None:
        super().__init__(url)
        if internals.ENABLED:
            self.CHANNEL_CLASS = internals.LenientChannel
        kind = internals.ObservedConnection if internals.ENABLED else aiormq.Connection
        #: the connection that aio-pika stands on
        self.amqp: aiormq.Connection = kind(url, transport_factory=streams)
        self.amqp.vhost = vhost

    async def connect(self, timeout: float | None = None) -> None:
        """Log in, and forget the password. The caller keeps the deadline: ``timeout`` has no effect."""
        del timeout
        try:
            await self.amqp.connect({"product": PRODUCT})
        finally:
            self.url = self.amqp.url = self.amqp.url.with_password(None)

        async def closed(_: object) -> None:
            self.connected.clear()

        on_close = OneShotCallback(closed)
        self.amqp.closing.add_done_callback(on_close)
        self.transport = UnderlayConnection(self.amqp, on_close)
        self.connected.set()

    async def close(self, exc: Any = None) -> None:
        """Disconnect. Requests that wait for a reply raise an exception: aiormq's default would cancel them."""
        del exc
        closed = aiormq.ConnectionClosed(200, "closed")
        # also where the handshake failed, and aio-pika knows no connection
        await self.amqp.close(closed)
        await super().close(closed)


class AmqpWire:
    """An open connection. For one event loop only; made by :func:`connect`.

    Attributes:
        alive: false once the connection is lost or closed. Deliveries that came before cannot be settled then.
        lost: called once when the connection is lost.
        blocked: called with the reason when the broker stops accepting messages, and with ``None`` when it resumes.
        frame_max: the largest frame that either side sends, bytes, as agreed in the handshake.
        label: names the instance and its host in log lines.
        lanes: by channel number.
    """

    def __init__(
        self, target: AmqpTarget, connection: LaneConnection, protocol: FrameProtocol, writer: asyncio.StreamWriter
    ) -> None:
        self.alive = True
        self.lost: Callable[[ConnectionLostError], object] = lambda _: None
        self.blocked: Callable[[str | None], object] = lambda _: None
        tune = connection.amqp.connection_tune
        self.frame_max = tune.frame_max
        self._channel_max = tune.channel_max or 65_535
        self.label = f"amqp '{target.name}' ({target})"
        self.lanes: dict[int, FrameLane] = protocol.lanes
        self._target = target
        self._connection = connection
        self._protocol = protocol
        self.writer = writer
        self._watch: asyncio.TimerHandle | None = None
        self._is_blocked = False
        #: waits for the broker to accept a new secret
        self._updating: asyncio.Event | None = None
        protocol.expires_at = target.expires_at
        protocol.end_handshake(tune.frame_max - frames.OVERHEAD, self._block, self._end)
        connection.amqp.closing.add_done_callback(self._closed)
        if target.heartbeat:
            self._check_silence()

    def _block(self, reason: str | None) -> None:
        self._is_blocked = reason is not None
        self.blocked(reason)

    def _check_silence(self) -> None:
        """Close the connection if the broker is silent for too long. Otherwise aiormq is told that it is alive."""
        if not self.alive:
            return
        loop, interval = asyncio.get_running_loop(), self._target.heartbeat
        limit = interval * SILENT_HEARTBEATS
        silence = clock.time_of(loop) - self._protocol.heard_at
        if silence >= limit:
            self.abort(f"it was silent for {limit} s")
            return
        if silence < interval:
            self._protocol.feed_heartbeat()
        # aiormq takes three silent intervals for a loss, and must not be first
        self._watch = clock.call_later(loop, min(limit - silence, interval / 2), self._check_silence)

    async def update_secret(self, target: AmqpTarget) -> None:
        """Replace the secret of the connection by that of ``target`` (``connection.update-secret``).

        A broker that is out of memory answers once it has recovered: this returns without the answer after the
        timeout. A broker that refuses, or does not know the method, ends the connection, which is then reported as
        planned.

        Raises:
            ConnectionLostError: the connection was lost.
        """
        if target.password is None:
            return
        self._protocol.secrets.extend(target.secrets)
        answered = self._updating = asyncio.Event()
        self._protocol.secret_updated = answered.set
        try:
            # no variable refers to the frame, see :func:`connect`
            self.write(frames.update_secret(target.password.get_secret_value(), "credentials renewed"))
            self._check()
            with contextlib.suppress(TimeoutError):
                await clock.wait_for(answered.wait(), self._target.timeout)
            self._check()
            if not answered.is_set() and not self._is_blocked:
                why = f"no answer to update-secret within {self._target.timeout:g} s"
                self.abort(why)
                raise self._loss(why)
            self._protocol.expires_at = target.expires_at
        finally:
            self._updating = None

    def write(self, data: bytes) -> bool:
        """Write whole frames.

        Returns:
            Whether they were written. If not, the connection has ended, and ``lost`` was called unless it was closed.
        """
        if self._is_gone():
            return False
        self.writer.write(data)
        return True

    async def drain(self) -> None:
        """Wait while the transport's buffer is too full.

        Raises:
            ConnectionLostError: the connection was lost.
        """
        try:
            await self.writer.drain()
        except (OSError, RuntimeError) as error:
            self._end(describe(error), error)
            self._check(error)
        self._check()

    async def channel(self, *, confirms: bool = False) -> AbstractChannel:
        """Open a channel.

        Raises:
            ConnectionLostError: the connection was lost.
            aiormq.AMQPChannelError: the broker allows no further channels.
        """
        if len(self._connection.amqp.channels) >= self._channel_max:
            # opening one more would cost the connection
            raise aiormq.ChannelClosed(506, f"the broker allows {self._channel_max} channels on a connection")
        return await self._ask(self._open_channel(confirms))

    async def _open_channel(self, confirms: bool) -> AbstractChannel:
        return await self._connection.channel(publisher_confirms=confirms)

    async def close_channel(self, channel: AbstractChannel | None) -> None:
        """Close a channel. Does nothing if there is none, or it is closed already.

        Raises:
            ConnectionLostError: the connection was lost.
        """
        if channel is not None and not channel.is_closed:
            with contextlib.suppress(aiormq.AMQPChannelError):
                await self._ask(channel.close())

    async def command(self, request: Awaitable[T], method: type[Frame]) -> T:
        """Await the reply to a request on a channel, which sends ``method``.

        Raises:
            ConnectionLostError: the connection was lost, or was closed because no reply came in time.
            aiormq.AMQPChannelError: the broker refused the request and closed the channel, or even the connection over
                it. The latter counts as a refusal, too: the same request would cost the next connection as well.
        """
        try:
            return await self._ask(request)
        except ConnectionLostError as error:
            if self._protocol.close_reason is None or self._protocol.culprit != method.index:
                raise
            raise aiormq.ChannelClosed(*self._protocol.close_reason) from error
        except ValueError as error:
            raise aiormq.ChannelClosed(502, f"the AMQP library does not send it: {error}") from error

    async def _ask(self, request: Awaitable[T]) -> T:
        """Await a reply of the broker. Raises as :meth:`command`."""
        asking = asyncio.ensure_future(request)
        asking.add_done_callback(_retrieve)
        try:
            while not (await clock.wait([asking], timeout=self._target.timeout))[0]:
                if self._is_blocked:
                    continue  # a blocked broker answers no requests, either
                # The request is not cancelled: aiormq would log that, and send another one. It ends with the rest.
                why = f"no answer within {self._target.timeout:g} s"
                self.abort(why)
                raise self._loss(why)
        except asyncio.CancelledError:
            asking.cancel()
            raise
        try:
            return asking.result()
        except aiormq.AMQPChannelError:
            raise
        except asyncio.CancelledError as error:
            # aiormq cancels the requests on a connection that breaks
            self.abort("a request was given up")
            raise self._loss("a request was given up", error) from error
        except Exception as error:
            if type(error) is not Exception and not isinstance(error, (aiormq.AMQPError, RuntimeError, OSError)):
                raise
            # aiormq raises RuntimeError, or Exception itself, for requests on closed channels and connections
            self._check(error)
            raise aiormq.ChannelClosed(504, "the channel is closed") from error

    def _is_gone(self) -> bool:
        # aiormq notices a closed transport later, and in uvloop it is an error to write to it
        if self.alive and self.writer.is_closing():
            self._end("the transport is closed", None)
        return not self.alive

    def _check(self, cause: BaseException | None = None) -> None:
        if self._is_gone() or not self._connection.amqp.is_opened:
            raise self._loss("", cause)

    def _loss(self, reason: str, cause: BaseException | None = None) -> ConnectionLostError:
        """Return the error for a lost connection; a reason that the broker gave is the better one."""
        code, text = self._protocol.close_reason or (None, None)
        what = f"connection to {self._target} lost", reason if code is None else f"{code} {text}"
        is_refusal = self._updating is not None and code not in (None, _FORCED)
        kind = PlannedLossError if is_refusal else ConnectionLostError
        lost = kind(": ".join(filter(None, what)), code=code, detail=text)
        lost.__cause__ = cause
        return lost

    def abort(self, reason: str) -> None:
        """Report the loss of the connection, and cut the transport."""
        self._end(reason, None)
        cut(self.writer.transport)

    def read(self, wanted: bool) -> None:
        """Resume or pause reading from the socket."""
        transport = cast("asyncio.Transport", self.writer.transport)  # it is both ways
        if not transport.is_closing():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                (transport.resume_reading if wanted else transport.pause_reading)()

    async def close(self, grace: float = CLOSE_GRACE) -> None:
        """Disconnect with the close handshake, or without it after ``grace`` seconds. Idempotent; does not raise."""
        self.alive = False
        if self._watch is not None:
            self._watch.cancel()
        self.read(True)
        # aiormq sends no good-bye to a peer that it believes to be silent
        self._protocol.feed_heartbeat()
        closing = asyncio.ensure_future(self._connection.close())
        await clock.wait([closing], timeout=grace)
        cut(self.writer.transport)
        # with its transport closed, nothing in aiormq waits for the peer any more
        if not (await clock.wait([closing], timeout=CLOSE_GRACE))[0]:
            logger.warning("%s: the connection did not close in time", self.label)
            closing.cancel()

    def _closed(self, closing: asyncio.Future[Any]) -> None:
        error = None if closing.cancelled() else closing.exception()
        self._end(describe(error) if error is not None else "the broker ended it", error)

    def _end(self, reason: str, cause: BaseException | None) -> None:
        if self.alive:
            self.alive = False
            if self._watch is not None:
                self._watch.cancel()
            self.lost(self._loss(reason, cause))
            if self._updating is not None:
                self._updating.set()  # :meth:`update_secret` then finds the connection lost


async def connect(target: AmqpTarget, purpose: str, context: ssl.SSLContext | None) -> AmqpWire:
    """Connect and log in. Nothing is left behind on failure or cancellation.

    ``purpose`` distinguishes the connections of one instance at the broker.

    Raises:
        AuthenticationError: the broker refused the credentials.
        ConnectFailedError: any other failure.
    """
    loop = asyncio.get_running_loop()
    protocol = FrameProtocol(loop)
    protocol.secrets.extend(target.secrets)
    try:
        name = None if context is None or target.tls is None else target.tls.name_of(target.host)
        sock = await (
            reach(target.address or target.host, target.port)
            if target.proxy is None
            else open_through(target.proxy, target.host, target.port)
        )
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock, ssl=context, server_hostname=name)
    except (OSError, UnicodeError) as error:
        reason = tls.explain(error, "amqps", "amqp") if context is not None and isinstance(error, OSError) else None
        raise ConnectFailedError(f"cannot connect to {target}: {reason or describe(error)}") from error
    except ConnectFailedError as error:  # of the proxy
        raise ConnectFailedError(f"cannot connect to {target}: {error}") from error.__cause__
    if context is not None and target.tls is not None:
        target.tls.made(transport.get_extra_info("ssl_object"))
    writer = asyncio.StreamWriter(transport, protocol, protocol.reader, loop)
    # The URL holds the password. No variable of a frame refers to it, so that no report of an error shows it.
    connection = LaneConnection(_url(target, purpose), target.vhost, _OpenStreams(protocol.reader, writer))
    try:
        await connection.connect()
    except (Exception, asyncio.CancelledError) as error:
        cut(transport)
        # the log-in may have succeeded in the moment of the cancellation
        await connection.close()
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        raise _connect_error(target, protocol, error) from without_frames(error)
    limit = connection.amqp.connection_tune.frame_max
    if limit < frames.FRAME_MIN_SIZE:
        await _leave(connection, protocol, transport)
        raise ConnectFailedError(
            f"cannot connect to {target}: it takes frames of {limit} bytes; AMQP 0-9-1 asks for {frames.FRAME_MIN_SIZE}"
        )
    if not connection.amqp.publisher_confirms:
        await _leave(connection, protocol, transport)
        raise ConnectFailedError(
            f"cannot connect to {target}: it has no publisher confirms, without which no message is known to have "
            "arrived; a broker with the AMQP extensions of RabbitMQ has them"
        )
    return AmqpWire(target, connection, protocol, writer)


async def _leave(connection: LaneConnection, protocol: FrameProtocol, transport: asyncio.WriteTransport) -> None:
    """End a connection whose handshake granted too little."""
    protocol.end_quietly()
    cut(transport)
    await connection.close()


def _url(target: AmqpTarget, purpose: str) -> URL:
    return make_url(
        host=target.host,
        port=target.port,
        login=target.username or "",
        password="" if target.password is None else target.password.get_secret_value(),
        heartbeat=target.heartbeat,
        name=f"{target.name} ({purpose})",
        auth="external" if target.username is None else "plain",
    )


def _is_cancelled() -> bool:
    """Return whether the current task was cancelled, rather than a future of aiormq that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _connect_error(target: AmqpTarget, protocol: FrameProtocol, error: BaseException) -> ConnectFailedError:
    if protocol.close_reason is not None:
        code, text = protocol.close_reason
        if code == 403:
            return AuthenticationError(f"{target} refused {target.identity}: {code} {text}", code=code, detail=text)
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


def _retrieve(asked: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a request that its caller no longer awaits."""
    if not asked.cancelled():
        asked.exception()


def reply(error: BaseException) -> tuple[int | None, str | None]:
    """Return reply code and text of the broker, or ``None`` twice for an error of other origin."""
    code = _CODES.get(type(error))
    if code is not None:
        return code, str(error)
    if isinstance(error, (aiormq.ChannelClosed, aiormq.ConnectionClosed)) and len(error.args) == 2:
        return error.args[0], error.args[1]
    return None, None


def refusal(kind: type[B], what: str, error: aiormq.AMQPChannelError, way_out: str = "") -> B:
    """Return the error for a refusal of the broker. ``way_out`` is appended to its text."""
    code, text = reply(error)
    refused = kind("; ".join(filter(None, (f"{what}: {describe(error)}", way_out))), code=code, detail=text)
    refused.__cause__ = error
    return refused


def describe(error: BaseException) -> str:
    """Return the words of the broker or the library, with the reply code if there is one."""
    code, text = reply(error)
    if code is not None:
        return f"{code} {text}"
    if isinstance(error.__cause__, asyncio.IncompleteReadError):
        return "the peer closed it"
    if isinstance(error, asyncio.CancelledError):  # aiormq cancels the requests on a connection that breaks
        return "the connection broke"
    for each in (error.__cause__, error):
        words: str | None = None
        if isinstance(each, ssl.SSLError):
            words = tls.explain(each, "amqps", "amqp")
        elif isinstance(each, OSError):
            # the numbers of the resolver are negative; asyncio puts a sentence of its own into the others
            words = os.strerror(each.errno) if each.errno is not None and each.errno > 0 else str(each)
        if words:
            return words
    return str(error) or type(error).__name__
