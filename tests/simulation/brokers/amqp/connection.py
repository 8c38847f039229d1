"""One connection: its handshake, frames, channels, heartbeats and end.

The client's bytes come in any fragmentation. The frames of a publish, and acknowledgements, are decoded by hand, all
other methods by :mod:`.methods`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from pamqp import commands

from tests.simulation.brokers.amqp import frames, methods
from tests.simulation.brokers.amqp.channel import Channel
from tests.simulation.brokers.amqp.errors import NAMES, AmqpError
from tests.simulation.brokers.amqp.handshake import CHANNEL_MAX, FRAME_MAX, HEADER, START, Handshake

if TYPE_CHECKING:
    from pamqp.base import Frame

    from tests.simulation.brokers.amqp.broker import AmqpBroker
    from tests.simulation.brokers.amqp.queues import Queue
    from tests.simulation.brokers.amqp.virtual_host import VirtualHost
    from tests.simulation.brokers.host import Peer, Timer

#: how long the broker waits for the answer to its connection.close, seconds
_CLOSING_TIMEOUT: Final = 30.0
#: how long a client has for the handshake, seconds
_HANDSHAKE_TIMEOUT: Final = 10.0

#: bytes that the client has not taken, beyond which it gets no deliveries
_CONGESTED: Final = 1 << 20
#: how soon, and at most how late, the broker looks whether the client has read, seconds
_FIRST_LOOK: Final = 0.01
_LAST_LOOK: Final = 0.64

_CLOSE: Final = commands.Connection.Close.index
_CLOSE_OK: Final = commands.Connection.CloseOk.index
_CHANNEL_OPEN: Final = commands.Channel.Open.index
_CHANNEL_CLOSE: Final = commands.Channel.Close.index
_CHANNEL_CLOSE_OK: Final = commands.Channel.CloseOk.index

_U32: Final = struct.Struct(">I")
_SETTLEMENT: Final = struct.Struct(">IQB")
_BODY_SIZE: Final = struct.Struct(">HHQ")
_MULTIPLE: Final = 1


class _Content:
    """A publish whose content is arriving on a channel."""

    __slots__ = ("body", "missing", "raw", "target")

    def __init__(self, target: tuple[str, str, bytes, bool]) -> None:
        self.target = target
        #: properties; ``None`` before the header
        self.raw: bytes | None = None
        self.missing = 0
        self.body: list[bytes] = []


class AmqpConnection:
    """See the module; ``host.Connection``.

    Attributes:
        state: "header", "start", "tune", "open", "running", "closing" or "ended".
        exclusive_queues: deleted with it.
        capabilities: that the client has announced.
        secret: the password or token that the client has authenticated with last.
    """

    def __init__(self, broker: AmqpBroker, peer: Peer) -> None:
        self.broker = broker
        self.peer = peer
        self.state = "header"
        self.frame_max = FRAME_MAX
        self.channel_max = CHANNEL_MAX
        self.user = ""
        self.user_bytes = b""
        self.secret = ""
        self.vhost: VirtualHost | None = None
        self.channels: dict[int, Channel] = {}
        self.exclusive_queues: dict[str, Queue] = {}
        self.capabilities: dict[str, bool] = {}
        self._handshake = Handshake(self)
        self._contents: dict[int, _Content] = {}
        #: the beginning of a frame, and the number of bytes it takes to go on
        self._rest: bytes | bytearray = b""
        self._wanted = 0
        #: why the broker takes no messages on this connection
        self._alarm: str | None = None
        self._has_published = False
        self._is_blocked = False
        self._is_dropping = False
        self._heartbeat = 0
        self._was_heard = self._has_sent = False
        self._silent = 0
        self._timers: dict[str, Timer] = {}
        self._arm("handshake", _HANDSHAKE_TIMEOUT, self._on_handshake_timeout)

    @property
    def is_ended(self) -> bool:
        """Return whether nothing is sent any more."""
        return self.state == "ended"

    @property
    def open_vhost(self) -> VirtualHost:
        """Return the virtual host of a connection that is open."""
        assert self.vhost is not None
        return self.vhost

    @property
    def is_congested(self) -> bool:
        """Return whether the client reads so slowly that its consumers get nothing for now."""
        if self.peer.unsent <= _CONGESTED:
            return False
        if "drain" not in self._timers and self.state == "running":
            self._arm("drain", _FIRST_LOOK, lambda: self._look_again(_FIRST_LOOK * 2))
        return True

    def _look_again(self, delay: float) -> None:
        """Deliver again once the client has read enough; until then look at longer and longer intervals."""
        if self.peer.unsent > _CONGESTED:
            self._arm("drain", delay, lambda: self._look_again(min(delay * 2, _LAST_LOOK)))
            return
        self._disarm("drain")
        for channel in [*self.channels.values()]:
            channel.resume()

    def can(self, capability: str) -> bool:
        """Return whether the client has announced a capability."""
        return self.capabilities.get(capability, False)

    def write(self, data: bytes) -> None:
        """Send bytes, unless the connection has ended."""
        if self.state != "ended" and not self._is_dropping:
            self._has_sent = True
            self.peer.send(data)

    def send(self, kind: type[Frame], **values: Any) -> None:
        """Send a method on channel 0."""
        self.write(methods.encode(kind, 0, **values))

    # --- receiving

    def received(self, data: bytes) -> None:
        """See ``host.Connection``."""
        if self.state == "ended":
            return
        self._was_heard = True
        rest = self._rest
        if rest:
            if len(rest) + len(data) < self._wanted or self._is_blocked:
                # in place: a frame may arrive byte by byte
                self._rest = rest = bytearray(rest) if isinstance(rest, bytes) else rest
                rest += data
                return
            data = bytes(rest) + data
        if self._is_blocked:
            self._rest = data
            return
        self._process(data)

    def _process(self, data: bytes) -> None:
        at = 0
        if self.state == "header":
            if len(data) < len(HEADER):
                self._rest, self._wanted = data, len(HEADER)
                return
            if data[: len(HEADER)] != HEADER:
                self.write(HEADER)
                self.finish()
                return
            at = len(HEADER)
            self.state = "start"
            self.write(START)
        size, unpack, published = len(data), frames.PREFIX.unpack_from, {}
        self._wanted = 7
        while size - at >= 7 and self.state != "ended" and not self._is_blocked:
            kind, number, length = unpack(data, at)
            end = at + frames.OVERHEAD + length
            if length > self.frame_max - frames.OVERHEAD or (end <= size and data[end - 1] != frames.END_MARK):
                self._bad_frame(kind, data[at:end], length)
                at = size
                break
            if end > size:
                self._wanted = end - at
                break
            start, at = at + 7, end
            index = 0
            try:
                if kind == frames.METHOD:
                    (index,) = _U32.unpack_from(data, start)
                    self._method(index, number, data, start, end - 1)
                elif kind == frames.HEARTBEAT:
                    continue
                else:
                    index = frames.PUBLISH
                    channel = self._take_content(kind, number, data, start, end - 1)
                    if channel is not None:
                        published[channel] = True
            except AmqpError as error:
                self._refuse(error, number, index)
            except (ValueError, IndexError, struct.error):
                self._refuse(AmqpError(501, f"malformed frame of type {kind}"), 0, index)
        self._rest = data[at:] if self.state != "ended" else b""
        for channel in published:
            channel.confirms.flush()

    def _bad_frame(self, kind: int, frame: bytes, length: int) -> None:
        if self.state == "closing":
            return
        largest = self.frame_max - frames.OVERHEAD
        what = (
            f"{{frame_too_large,{length},{largest}}}"
            if length > largest
            else f"{{invalid_frame_end_marker,{frame[-1] if frame else 0}}}"
        )
        if self.state != "running":
            self.finish()
        else:
            self._refuse(AmqpError(501, f"type {kind}, all octets = <<>>: {what}"), 0, 0)

    # --- methods

    def _method(self, index: int, number: int, data: bytes, at: int, end: int) -> None:
        if self.state == "closing":
            self._on_closing(index)
            return
        if self.state != "running":
            self._handshake.take(index, data, at + 4)
            return
        channel = self.channels.get(number)
        if channel is None or channel.is_closing:
            self._on_unusable_channel(channel, index, number, data, at)
            return
        if number in self._contents:
            del self._contents[number]
            raise AmqpError(505, "expected content header for class 60, got non content header frame instead")
        broker = self.broker
        if index == frames.PUBLISH:
            self._contents[number] = _Content(channel.target(data[at + 6 : end]))
            self._note_publish()
            return
        if broker.is_faulty:
            broker.injector.before_method(self, number)
            if self.state == "ended":
                return
        if index == frames.ACK:
            _, tag, flags = _SETTLEMENT.unpack_from(data, at)
            channel.ack(tag, bool(flags & _MULTIPLE))
        elif index == frames.NACK:
            _, tag, flags = _SETTLEMENT.unpack_from(data, at)
            channel.nack(tag, multiple=bool(flags & _MULTIPLE), requeue=bool(flags & 2))
        elif index == frames.REJECT:
            _, tag, flags = _SETTLEMENT.unpack_from(data, at)
            channel.nack(tag, multiple=False, requeue=bool(flags & 1))
        elif index == _CHANNEL_CLOSE:
            self._drop_channel(channel)
            self.write(methods.encode(commands.Channel.CloseOk, number))
        elif index == _CHANNEL_OPEN:
            raise AmqpError(504, "second 'channel.open' seen")
        elif index == _CHANNEL_CLOSE_OK:
            pass
        else:
            given = methods.decode(index, data, at + 4) if index in methods.NAMES else None
            channel.handle(index, given)
        if broker.is_faulty:
            broker.injector.after_method(self, number)

    def _on_unusable_channel(self, channel: Channel | None, index: int, number: int, data: bytes, at: int) -> None:
        """Handle a method on channel 0, on one that is not open, or on one that the broker has closed."""
        if not number:
            self._on_channel_zero(index, data, at)
        elif channel is not None:
            if index == _CHANNEL_CLOSE_OK:
                del self.channels[number]
            elif index == _CHANNEL_CLOSE:
                self.write(methods.encode(commands.Channel.CloseOk, number))
        elif index != _CHANNEL_OPEN:
            raise AmqpError(504, "expected 'channel.open'")
        elif number > self.channel_max or len(self.channels) >= self.channel_max:
            raise AmqpError(
                530,
                f"number of channels opened ({len(self.channels)}) has reached the negotiated channel_max "
                f"({self.channel_max})",
            )
        else:
            self.channels[number] = Channel(self, number)
            self.write(methods.encode(commands.Channel.OpenOk, number))

    def _on_channel_zero(self, index: int, data: bytes, at: int) -> None:
        if index == _CLOSE:
            self._drop_all()
            self.send(commands.Connection.CloseOk)
            self.finish()
        elif index == commands.Connection.UpdateSecret.index:
            given = methods.decode(index, data, at + 4)
            secret = given.new_secret.decode("utf-8", "replace")
            if self.broker.login(self.user, secret):
                self.secret = secret
                self.send(commands.Connection.UpdateSecretOk)
            else:
                raise AmqpError(530, "New secret was refused by one of the backends")
        else:
            name = methods.NAMES.get(index, "unknown")
            raise AmqpError(503, f"unexpected method in connection state running: {name}")

    # --- content

    def _take_content(self, kind: int, number: int, data: bytes, at: int, end: int) -> Channel | None:
        """Take a header or body frame; return the channel if its message is complete."""
        channel = self.channels.get(number)
        if self.state != "running" or (channel is not None and channel.is_closing):
            return None
        if channel is None:
            raise AmqpError(504, "expected 'channel.open'")
        content = self._contents.get(number)
        if content is None:
            raise AmqpError(505, "expected method frame, got non method frame instead")
        if kind == frames.HEADER:
            if content.raw is not None:
                raise AmqpError(505, "expected content body, got non content body frame instead")
            class_id, _, content.missing = _BODY_SIZE.unpack_from(data, at)
            if class_id != 60:
                raise AmqpError(505, f"expected content header for class 60, got one for class {class_id} instead")
            content.raw = data[at + 12 : end]
        elif content.raw is None:
            raise AmqpError(505, "expected content header for class 60, got non content header frame instead")
        else:
            content.body.append(data[at:end])
            content.missing -= end - at
        if content.missing > 0:
            return None
        del self._contents[number]
        broker = self.broker
        if broker.is_faulty:
            broker.injector.before_method(self, number)
            if self.state == "ended":  # pyright: ignore[reportUnnecessaryComparison]
                return None
        body = content.body[0] if len(content.body) == 1 else b"".join(content.body)
        channel.publish(content.target, content.raw, body)
        if broker.is_faulty:
            broker.injector.blocks(self)
            broker.injector.after_method(self, number)
        return channel

    def _note_publish(self) -> None:
        if not self._has_published:
            self._has_published = True
            self._block()

    def opened(self, vhost: VirtualHost) -> None:
        """End the handshake."""
        self.vhost = vhost
        self.state = "running"
        self._disarm("handshake")
        self._alarm = self.broker.alarm

    def _on_closing(self, index: int) -> None:
        """Handle a method after the broker has closed the connection."""
        if index == _CLOSE_OK:
            self.finish()
        elif index == _CLOSE:
            self.send(commands.Connection.CloseOk)

    # --- refusals

    def _refuse(self, error: AmqpError, number: int, index: int) -> None:
        """Close a channel, or the connection, over an error."""
        if self.state in ("closing", "ended"):
            return
        channel = self.channels.get(number)
        self.broker.host.note(f"amqp: {self.peer.name}: {error.code} {NAMES[error.code]} {error.text}")
        self._contents.pop(number, None)
        values = {
            "reply_code": error.code,
            "reply_text": error.reply_text(),
            "class_id": index >> 16,
            "method_id": index & 0xFFFF,
        }
        if error.is_soft and channel is not None:
            self.broker.counters.channel_errors += 1
            channel.is_closing = True
            channel.end()
            self.write(methods.encode(commands.Channel.Close, number, **values))
        else:
            self.close_by_error(values)

    def close_by_error(self, values: dict[str, Any]) -> None:
        """Close the connection with ``connection.close``, whose arguments are ``values``."""
        if self.state in ("closing", "ended", "header"):
            return
        self.broker.counters.connection_errors += 1
        if self.broker.on_closing is not None:
            self.broker.on_closing(self)
        self._drop_all()
        self.state = "closing"
        self._is_blocked = False
        self.send(commands.Connection.Close, **values)
        self._arm("closing", _CLOSING_TIMEOUT, self.finish)

    # --- messages that the broker does not take

    def set_alarm(self, reason: str | None) -> None:
        """Stop taking messages for a reason, or take them again with ``None``."""
        if self.state == "ended" or self._alarm == reason:
            return
        self._alarm = reason
        if reason is not None:
            if self._has_published:
                self._block()
        elif self._is_blocked:
            self._is_blocked = False
            if self.can("connection.blocked"):
                self.send(commands.Connection.Unblocked)
            self._arm_watch()
            rest, self._rest = bytes(self._rest), b""
            self._process(rest)

    def _block(self) -> None:
        """Read nothing more from a connection that publishes, while the broker takes no messages."""
        if self._alarm is None or self._is_blocked or self.state != "running":
            return
        self._is_blocked = True
        self._disarm("watch")
        if self.can("connection.blocked"):
            self.send(commands.Connection.Blocked, reason=self._alarm)

    # --- heartbeats

    def _arm(self, name: str, delay: float, function: Any) -> None:
        self._disarm(name)
        self._timers[name] = self.broker.host.call_later(delay, function)

    def _disarm(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def begin_heartbeats(self, interval: int) -> None:
        """Send heartbeats, and expect those of the client, in seconds; 0 for none."""
        self._heartbeat = interval
        if interval:
            self._arm("send", interval / 2, self._send_heartbeat)
            self._arm("watch", interval, self._watch)

    def _send_heartbeat(self) -> None:
        if not self._has_sent:
            self.write(frames.HEARTBEAT_FRAME)
        self._has_sent = False
        self._arm("send", self._heartbeat / 2, self._send_heartbeat)

    def _arm_watch(self) -> None:
        if self._heartbeat:
            self._silent = 0
            self._was_heard = True
            self._arm("watch", self._heartbeat, self._watch)

    def _watch(self) -> None:
        """Count intervals without bytes from the client: the second one ends the connection."""
        self._silent = 0 if self._was_heard else self._silent + 1
        self._was_heard = False
        if self._silent > 1:
            self.broker.host.note(f"amqp: {self.peer.name} missed heartbeats")
            self._drop_all()
            self.finish()
        else:
            self._arm("watch", self._heartbeat, self._watch)

    def _on_handshake_timeout(self) -> None:
        self.broker.host.note(f"amqp: {self.peer.name}: handshake timeout")
        self.finish()

    # --- the end

    def _drop_channel(self, channel: Channel) -> None:
        self.channels.pop(channel.number, None)
        self._contents.pop(channel.number, None)
        channel.is_closing = True
        channel.end()

    def _drop_all(self) -> None:
        """End all channels, and delete the exclusive queues."""
        # Channels end at the same time. What one gives back, another one may be given, and lose if it has a consumer
        # without acknowledgement; the client sees nothing of it.
        self._is_dropping = True
        if len(self.channels) > 1 and self.broker.host.random.random() < 0.5:
            for channel in self.channels.values():
                channel.pause()
        for channel in [*self.channels.values()]:
            self._drop_channel(channel)
        for queue in [*self.exclusive_queues.values()]:
            queue.vhost.delete_queue(queue)
        self._is_dropping = False

    def finish(self) -> None:
        """End, and close the socket in good order."""
        self._end()
        self.peer.close()

    def cut(self) -> None:
        """Reset the connection."""
        if self.state != "ended":
            self.peer.abort()
            self.lost()

    def lost(self) -> None:
        """See ``host.Connection``."""
        if self.state == "ended":
            return
        self._end()
        self._drop_all()

    def _end(self) -> None:
        self.state = "ended"
        self._rest = b""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.broker.forget(self)

    def vanish(self) -> None:
        """End with the broker, which restores its queues by itself."""
        self._end()
