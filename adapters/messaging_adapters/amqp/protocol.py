"""The stream below aiormq: it splits the received bytes into frames and hands each frame to its reader.

The frames of chosen channels go to their :class:`FrameLane`. Frames that end the connection, or that tell whether the
broker accepts messages, are handled here. aiormq receives the replies to its own requests, and heartbeats, after they
were checked. The stream reader that aiormq reads from is the only hook: a transport factory returns it.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, cast

import pamqp.frame
from aiormq import spec

from messaging.execution import clock
from messaging_adapters.amqp import frames, internals

if TYPE_CHECKING:
    from pydantic import SecretStr

_KINDS: Final = (frames.METHOD, frames.HEADER, frames.BODY, frames.HEARTBEAT)
#: largest frame during the handshake, bytes; the agreed size applies after it
_HANDSHAKE_FRAME_MAX: Final = 1 << 20
#: reply code of a channel that the broker closes over a missing permission
_ACCESS_REFUSED: Final = 403
#: bytes of the text of a close
_MAX_TEXT: Final = 255
#: how much earlier than here credentials may have expired by the clock of the broker, seconds
_SKEW: Final = 2.0
#: the replies that aiormq awaits after the handshake
_REPLIES: Final = frozenset(
    reply.index.to_bytes(4, "big")
    for reply in (
        spec.Channel.OpenOk,
        spec.Channel.Close,
        spec.Channel.CloseOk,
        spec.Exchange.DeclareOk,
        spec.Queue.DeclareOk,
        spec.Queue.BindOk,
        spec.Queue.UnbindOk,
        spec.Queue.PurgeOk,
        spec.Queue.DeleteOk,
        spec.Basic.QosOk,
        spec.Basic.ConsumeOk,
        spec.Confirm.SelectOk,
        spec.Connection.CloseOk,
    )
)


class FrameLane(Protocol):
    """The reader of the frames of one channel, which come to it before aiormq sees them."""

    def take(self, kind: int, data: bytes, at: int, end: int, /) -> bool:
        """Take the frame with the payload ``data[at:end]``, or return ``False`` to leave it to aiormq.

        Raises:
            IndexError, struct.error, ValueError: the frame is malformed. The connection is then closed.
        """
        ...

    def closed(self, code: int, text: str, /) -> None:
        """Handle the close of the channel by the broker, with its reply code and text.

        Nothing may be written on the channel from here on: a frame would end the connection.
        """


class FrameProtocol(asyncio.StreamReaderProtocol):
    """See the module. Until ``end_handshake`` is called all frames go to aiormq, for the handshake."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reader = internals.StreamEnd(loop=loop) if internals.ENABLED else asyncio.StreamReader(loop=loop)
        super().__init__(self.reader, loop=loop)
        self.lanes: dict[int, FrameLane] = {}
        #: when bytes were received last, in the loop's time
        self.heard_at = clock.time_of(loop)
        #: why the broker closed the connection: reply code and text
        self.close_reason: tuple[int, str] | None = None
        #: the method that the broker closed the connection over, as ``Frame.index`` of pamqp; 0 for none
        self.culprit = 0
        self.speaks_amqp = True
        #: the first bytes of a peer that does not speak AMQP
        self.greeting = b""
        #: called when the broker has accepted a new secret
        self.secret_updated: Callable[[], object] = _nothing
        #: passwords that no text of the broker shows
        self.secrets: deque[SecretStr] = deque(maxlen=2)
        #: when the credentials of the connection expire, in the loop's time
        self.expires_at = math.inf
        self._blocked: Callable[[str | None], object] = _nothing
        self._ended: Callable[[str, BaseException | None], object] = _nothing
        self._frame_max = _HANDSHAKE_FRAME_MAX
        #: the handshake has ended; deaf once the end was reported; at its end once the stream is closed
        self._is_open = self._is_deaf = self._is_at_end = False
        self._time = clock.clock_of(loop)
        #: the beginning of a frame, and the number of bytes it takes to go on with it
        self._rest: bytes | bytearray = b""
        self._wanted = 0
        self._own_transport: asyncio.Transport | None = None

    def end_handshake(
        self,
        frame_max: int,
        blocked: Callable[[str | None], object],
        ended: Callable[[str, BaseException | None], object],
    ) -> None:
        """End the handshake: from here on aiormq sees only replies and heartbeats.

        Args:
            frame_max: the largest payload of a frame that the broker may send, bytes.
            blocked: called with the reason when the broker stops accepting messages, and with ``None`` when it resumes.
            ended: called once, with reason and cause, when the connection has ended.
        """
        self._frame_max, self._blocked, self._ended = frame_max, blocked, ended
        self._is_open = True
        self.end_quietly()

    def end_quietly(self) -> None:
        """Let aiormq read the end of the connection as one in good order: it logs no warning then."""
        if isinstance(self.reader, internals.StreamEnd):
            self.reader.ends_quietly = True

    def feed_heartbeat(self) -> None:
        """Let aiormq read a heartbeat: it does not see the messages that show that the broker is alive."""
        if self._is_open and not self._is_deaf and not self._is_at_end:
            self.reader.feed_data(frames.HEARTBEAT_FRAME)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport for replies to frames that aiormq does not see."""
        self._own_transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        super().connection_made(transport)

    def eof_received(self) -> bool | None:
        """Report the end of the connection."""
        self._end("the peer closed it", None)
        self._is_at_end = True
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection."""
        self._end(str(exc) or type(exc).__name__ if exc is not None else "the peer closed it", exc)
        self._is_at_end = True
        super().connection_lost(exc)

    def _end(self, reason: str, cause: BaseException | None) -> None:
        if self._is_open and not self._is_deaf:
            self._is_deaf = True
            self._ended(reason, cause)

    def _break(self, reason: str, cause: BaseException | None = None) -> None:
        """Close the connection to a peer that violates the protocol."""
        self._end(f"the broker does not keep to AMQP 0-9-1: {reason}", cause)
        if self._own_transport is not None:
            cut(self._own_transport)

    def data_received(self, data: bytes) -> None:
        """Split received bytes into frames and hand them out."""
        self.heard_at = self._time()
        if self._is_deaf:
            return
        if not self.speaks_amqp:
            super().data_received(data)
            return
        rest = self._rest
        if rest:
            if len(rest) + len(data) < self._wanted:
                # in place: a frame may arrive byte by byte
                self._rest = rest = bytearray(rest) if isinstance(rest, bytes) else rest
                rest += data
                return
            data = b"".join((rest, data))
        lanes, size, at, unpack, prefix = self.lanes, len(data), 0, frames.PREFIX.unpack_from, frames.PREFIX.size
        passed: list[bytes] = []
        self._wanted = prefix
        try:
            while size - at >= prefix:
                kind, channel, length = unpack(data, at)
                end = at + frames.OVERHEAD + length
                if kind not in _KINDS or length > self._frame_max or (end <= size and data[end - 1] != frames.END):
                    at = self._not_a_frame(data, at, length, passed)
                    break
                if end > size:
                    self._wanted = end - at
                    break
                lane = lanes.get(channel)
                if lane is None or not lane.take(kind, data, at + prefix, end - 1):
                    frame = self._for_aiormq(kind, channel, data[at:end])
                    if frame is not None:
                        passed.append(frame)
                    elif self._has_ended():
                        break
                at = end
        except (IndexError, ValueError, struct.error) as error:
            self._break(f"a malformed frame on channel {channel}", error)
        self._rest = data[at:]
        if passed:
            super().data_received(b"".join(passed))
        if self._has_ended():
            self.reader.feed_eof()

    def _has_ended(self) -> bool:
        return self._is_deaf

    def _not_a_frame(self, data: bytes, at: int, length: int, passed: list[bytes]) -> int:
        """Handle bytes that are not a frame, and return the position at which to go on."""
        if self._is_open:
            what = f"a frame of {length} bytes" if data[at] in _KINDS and length > self._frame_max else "no frame"
            self._break(f"{what}; at most {self._frame_max} bytes were agreed")
        else:
            # aiormq raises the error that fits
            self.speaks_amqp = False
            self.greeting = data[at:]
            passed.append(data[at:])
        return len(data)

    def _for_aiormq(self, kind: int, channel: int, frame: bytes) -> bytes | None:
        """Return a frame as aiormq reads it, or ``None`` if it concerns the whole connection and is handled here."""
        start, stop = frames.PREFIX.size, len(frame) - 1
        method = frame[start : start + 4] if kind == frames.METHOD else b""
        if method == frames.CONNECTION_CLOSE:
            self.close_reason = code, text = self._read_close(frame, start, stop)
            self.culprit = int.from_bytes(frame[stop - 4 : stop], "big")
            if self._is_open:
                if self._own_transport is not None and not self._own_transport.is_closing():
                    self._own_transport.write(frames.CLOSE_OK)
                self._end(f"{code} {text}", None)
                return None
            return pamqp.frame.marshal(spec.Connection.Close(code, text, *struct.unpack(">HH", frame[-5:-1])), channel)
        if not self._is_open:
            return frames.limited(frame) if method == frames.CONNECTION_TUNE else frame
        if kind == frames.HEARTBEAT:
            return frame
        if method in (frames.CONNECTION_BLOCKED, frames.CONNECTION_UNBLOCKED):
            self._blocked(frames.read_blocked(frame, start, stop) if method == frames.CONNECTION_BLOCKED else None)
            return None
        if method == frames.CONNECTION_UPDATE_SECRET_OK:
            self.secret_updated()
            return None
        if method not in _REPLIES:
            what = f"method {'.'.join(map(str, struct.unpack('>HH', method)))}" if method else "content"
            self._break(f"unexpected {what} on channel {channel}")
            return None
        lane = self.lanes.pop(channel, None) if method in (frames.CHANNEL_CLOSE, frames.CHANNEL_CLOSE_OK) else None
        if method == frames.CHANNEL_CLOSE:
            code, text = self._read_close(frame, start, stop)
            if code == _ACCESS_REFUSED and self._time() >= self.expires_at - _SKEW:
                # not a fault of the message or subscription: the next connection has other credentials
                self._end(f"the credentials have expired: {code} {text}", None)
                if self._own_transport is not None:
                    cut(self._own_transport)
                return None
            if lane is not None:
                lane.closed(code, text)
            # pamqp decodes no text that RabbitMQ cut off within a character
            return pamqp.frame.marshal(spec.Channel.Close(code, text, *struct.unpack(">HH", frame[-5:-1])), channel)
        try:
            pamqp.frame.unmarshal(frame)
        except Exception as error:  # noqa: BLE001  # any exception of the decoder would end aiormq's reader
            self._break(f"a malformed frame on channel {channel}", error)
            return None
        return frame

    def _read_close(self, frame: bytes, start: int, stop: int) -> tuple[int, str]:
        """Return reply code and text of a close; the broker may repeat a password, which its text then omits."""
        code, text = frames.read_close(frame, start, stop)
        for secret in self.secrets:
            text = text.replace(secret.get_secret_value(), "***")
        return code, text.encode()[:_MAX_TEXT].decode("utf-8", "ignore")


def _nothing(*_: object) -> None:
    """Ignore an event before the handshake has ended."""


def cut(transport: asyncio.WriteTransport) -> None:
    """Close ``transport`` and discard its write buffer. Does nothing if its connection has ended."""
    try:
        transport.abort()
    except AttributeError:
        # asyncio's TLS transport releases its connection when it is closed after a loss. In Python 3.11.2, the
        # interpreter of Debian 12, its abort() then raises: "'NoneType' object has no attribute '_abort'".
        if not transport.is_closing():
            raise
