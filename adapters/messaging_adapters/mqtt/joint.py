"""Several channels with one order of arrival: streams that share one outlet.

Each channel has a subscription at the broker, which sends one packet for overlapping ones, or one for each (MQTT 5
with subscription identifiers, mosquitto). So of the streams that match a channel one takes its messages: the one whose
SUBSCRIBE the broker granted first. That changes only with the broker's answer to UNSUBSCRIBE, in the order of the
packets: packets before it are for the streams of before. Packets for a channel that is not subscribed to any more may
come later, from the broker's queue: another stream of the joint subscription takes them. Thus no message is lost by a
change; one of which the broker sends several packets may be taken twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from messaging.bounded import BoundedCache
from messaging_adapters.mqtt.streams import Outlet

if TYPE_CHECKING:
    from collections.abc import Callable

    from messaging.adapter import Sink
    from messaging_adapters.mqtt.streams import Stream

#: channels of messages whose stream is cached
_CACHED: Final = 4096


class Joint(Outlet):
    """The streams of a joint subscription; its handle.

    Attributes:
        is_abandoned: returns whether it takes the messages of a channel that no stream matches.
        streams: by pattern; the granted ones come first, in the order of the broker's answers.
        parted: streams whose channel was parted, with messages that are not settled.
    """

    __slots__ = ("_granted", "_takers", "is_abandoned", "parted", "streams")

    is_joint = True

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.is_abandoned: Callable[[str], bool] = _no_channel
        self.streams: dict[str, Stream] = {}
        self.parted: list[Stream] = []
        self._granted: dict[Stream, None] = {}
        #: channel of a message -> the stream that takes it
        self._takers: BoundedCache[str, Stream | None] = BoundedCache(_CACHED)

    def entered(self, stream: Stream) -> None:
        """Add a stream, whose SUBSCRIBE the broker has not granted."""
        self.streams[stream.route.pattern] = stream
        self._takers.clear()

    def grant(self, stream: Stream) -> None:
        """Note that the broker has granted the SUBSCRIBE of a stream."""
        if self.streams.get(stream.route.pattern) is stream:
            self._granted.setdefault(stream)
            self._takers.clear()

    def left(self, stream: Stream) -> None:
        """Remove a stream, which has ended or was parted."""
        if self.streams.get(stream.route.pattern) is stream:
            del self.streams[stream.route.pattern]
        self._granted.pop(stream, None)
        self._takers.clear()

    def keep(self, stream: Stream) -> None:
        """Keep the unsettled messages of a parted stream settleable."""
        self.parted = [each for each in (*self.parted, stream) if each.unsettled]

    def takes(self, stream: Stream, topic: str) -> bool:
        """Return whether ``stream``, which matches ``topic``, takes its messages."""
        if topic not in self._takers:
            candidates = (*self._granted, *self.streams.values())
            self._takers[topic] = next((each for each in candidates if each.route.matches(topic)), None)
        return self._takers[topic] is stream

    @property
    def settling(self) -> Stream | None:
        """A stream that settles its messages, if there is one: it takes those of abandoned channels."""
        return next((each for each in self.streams.values() if each.settles), None)

    def heir(self, topic: str) -> Stream | None:
        """Return the stream that takes a message on ``topic``, which none matches; ``None`` unless it is abandoned."""
        return self.settling if self.is_abandoned(topic) else None


def _no_channel(_: str) -> bool:
    """Return ``False``: no channel is abandoned."""
    return False
