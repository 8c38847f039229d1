"""The stream under aiormq: it splits what arrives into frames and decides who gets each.

The frames of chosen channels go to their :class:`Lane`. What says that the connection ends, or that the broker takes
no messages for now, is dealt with here; aiormq gets the answers to its own requests and heartbeats, after they were
found to be in order. For whatever else ends its stream it logs a traceback: so it is told of every end as if it had
said good-bye and heard it back. Only public hooks are used: the stream reader that a transport factory returns.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Final, Protocol, cast

import pamqp.frame
from aiormq import spec

from adapters.amqp import frames
from adapters.amqp.transport import cut

_KINDS: Final = (frames.METHOD, frames.HEADER, frames.BODY, frames.HEARTBEAT)
#: largest frame of a handshake, bytes; after it, what was agreed counts
_HANDSHAKE_FRAME_MAX: Final = 1 << 20
#: what aiormq waits for once the handshake is over
_ANSWERS: Final = frozenset(
    answer.index.to_bytes(4, "big")
    for answer in (
        spec.Channel.OpenOk,
        spec.Channel.Close,
        spec.Channel.CloseOk,
        spec.Exchange.DeclareOk,
        spec.Queue.DeclareOk,
        spec.Queue.BindOk,
        spec.Queue.DeleteOk,
        spec.Basic.QosOk,
        spec.Basic.ConsumeOk,
        spec.Confirm.SelectOk,
        spec.Connection.CloseOk,
    )
)
_CLOSE_OK: Final = pamqp.frame.marshal(spec.Connection.CloseOk(), 0)


class Lane(Protocol):
    """What takes the frames of a channel before aiormq sees them."""

    def take(self, kind: int, data: bytes, at: int, end: int, /) -> bool:
        """Take the frame with the payload ``data[at:end]``; ``False`` leaves it to aiormq.

        Raises:
            IndexError, struct.error, ValueError: it is malformed. The connection is given up then.
        """
        ...

    def closed(self, code: int, text: str, /) -> None:
        """The broker closed the channel, with this reply code and text.

        From here on nothing may be written on it: that would end the connection.
        """


class _Reader(asyncio.StreamReader):
    """What aiormq reads from. Once ``settled``, its end is a good-bye."""

    settled = False

    def feed_eof(self) -> None:
        if self.settled and not self.at_eof():
            self.settled = False
            self.feed_data(_CLOSE_OK)
        super().feed_eof()

    def set_exception(self, exc: Exception) -> None:
        if self.settled:
            self.feed_eof()
        else:
            super().set_exception(exc)


class FrameProtocol(asyncio.StreamReaderProtocol):
    """See the module. Until ``settle`` everything goes to aiormq, which does the handshake."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reader = _Reader(loop=loop)
        super().__init__(self.reader, loop=loop)
        self.lanes: dict[int, Lane] = {}
        #: when anything was heard last, in the loop's time
        self.heard_at = loop.time()
        #: why the broker closed the connection: reply code and text
        self.close_reason: tuple[int, str] | None = None
        #: the method it closed the connection over, as ``Frame.index`` of pamqp; 0 for none
        self.culprit = 0
        self.speaks_amqp = True
        #: how it began, if it does not
        self.greeting = b""
        self._blocked: Callable[[str | None], object] = _nothing
        self._ended: Callable[[str, BaseException | None], object] = _nothing
        self._frame_max = _HANDSHAKE_FRAME_MAX
        self._is_settled = self._is_deaf = False
        self._time = loop.time
        #: the beginning of a frame, and how many bytes it takes to go on with it
        self._rest: bytes | bytearray = b""
        self._wanted = 0
        self._own_transport: asyncio.Transport | None = None

    def settle(
        self,
        frame_max: int,
        blocked: Callable[[str | None], object],
        ended: Callable[[str, BaseException | None], object],
    ) -> None:
        """The handshake is over.

        Args:
            frame_max: what a frame the broker sends may hold, bytes.
            blocked: told why the broker takes no messages, and ``None`` when it does again.
            ended: told once why and by what the connection has ended.
        """
        self._frame_max, self._blocked, self._ended = frame_max, blocked, ended
        self._is_settled = self.reader.settled = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, to answer on it what aiormq is not to see."""
        self._own_transport = cast("asyncio.Transport", transport)  # uvloop's is none by birth
        super().connection_made(transport)

    def eof_received(self) -> bool | None:
        """The peer sends nothing more: that is the end."""
        self._end("the peer closed it", None)
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is gone."""
        self._end(str(exc) or type(exc).__name__ if exc is not None else "the peer closed it", exc)
        super().connection_lost(exc)

    def _end(self, reason: str, cause: BaseException | None) -> None:
        if self._is_settled and not self._is_deaf:
            self._is_deaf = True
            self._ended(reason, cause)

    def _break(self, reason: str, cause: BaseException | None = None) -> None:
        """Give up a peer that does not keep to the protocol."""
        self._end(f"the broker does not keep to AMQP 0-9-1: {reason}", cause)
        if self._own_transport is not None:
            cut(self._own_transport)

    def data_received(self, data: bytes) -> None:
        """Split, and hand out; called by the transport."""
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
                    if self._is_for_aiormq(kind, channel, data, at, end):
                        passed.append(data[at:end] if self._is_settled else _agreeable(data[at:end]))
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
        """Deal with what is no frame, and return where to go on."""
        if self._is_settled:
            what = f"a frame of {length} bytes" if data[at] in _KINDS and length > self._frame_max else "no frame"
            self._break(f"{what}; at most {self._frame_max} bytes were agreed")
        else:
            # aiormq knows best what to say about it
            self.speaks_amqp = False
            self.greeting = data[at:]
            passed.append(data[at:])
        return len(data)

    def _is_for_aiormq(self, kind: int, channel: int, data: bytes, at: int, end: int) -> bool:
        """Whether aiormq is to get a frame. What concerns the whole connection is dealt with here."""
        start, stop = at + frames.PREFIX.size, end - 1
        if kind == frames.HEARTBEAT:
            return True
        method = data[start : start + 4] if kind == frames.METHOD else b""
        if method == frames.CONNECTION_CLOSE:
            self.close_reason = frames.read_close(data, start, stop)
            self.culprit = int.from_bytes(data[stop - 4 : stop], "big")
            if not self._is_settled:
                return True
            if self._own_transport is not None and not self._own_transport.is_closing():
                self._own_transport.write(_CLOSE_OK)
            self._end("{} {}".format(*self.close_reason), None)
            return False
        if not self._is_settled:
            return True
        if method == frames.CONNECTION_BLOCKED:
            self._blocked(frames.read_blocked(data, start, stop))
            return False
        if method == frames.CONNECTION_UNBLOCKED:
            self._blocked(None)
            return False
        if method not in _ANSWERS:
            what = f"method {'.'.join(map(str, struct.unpack('>HH', method)))}" if method else "content"
            self._break(f"unexpected {what} on channel {channel}")
            return False
        try:
            pamqp.frame.unmarshal(data[at:end])
        except Exception as error:  # noqa: BLE001  # whatever the decoder raises: aiormq would end with it
            self._break(f"a malformed frame on channel {channel}", error)
            return False
        if method == frames.CHANNEL_CLOSE:
            lane = self.lanes.pop(channel, None)
            if lane is not None:
                lane.closed(*frames.read_close(data, start, stop))
        elif method == frames.CHANNEL_CLOSE_OK:
            self.lanes.pop(channel, None)
        return True


def _agreeable(frame: bytes) -> bytes:
    """A frame of the handshake, with the limits that are agreed to here."""
    start = frames.PREFIX.size
    is_tune = frame[0] == frames.METHOD and frame[start : start + 4] == frames.CONNECTION_TUNE
    return frames.limited(frame) if is_tune else frame


def _nothing(*_: object) -> None:
    """Nobody is to be told."""
