"""Subscriptions at the broker, the streams behind them, and the messages of QoS 1 and 2 that await an answer.

The broker holds one subscription for each distinct filter (:class:`FilterRoute`). Any number of subscriptions of the
core (:class:`Stream`) share it. A message of QoS 1 or 2 has one :class:`Receipt`, and a :class:`CopyToken` for each
stream that has to settle its copy. Several subscriptions of the core may share one order of arrival
(:class:`JointOutlet`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar, Final

from messaging.adapter import Sink
from messaging.codecs.cache import BoundedCache
from messaging.model import Incoming, SubscriptionSpec, channels
from messaging_adapters.mqtt.packets import Publish

#: channels of messages whose stream is cached
_CACHED: Final = 4096


class Receipt:
    """A message of QoS 1 or 2 that the broker has no answer to, or (``recorded``) only the first of two."""

    __slots__ = ("copies", "id", "number", "publish", "qos", "recorded", "session")

    def __init__(self, publish: Publish, session: int, number: int) -> None:
        self.id = publish.id
        self.qos = publish.qos
        self.publish = publish
        self.session = session
        #: copies that are not settled yet
        self.copies = 1
        #: QoS 2: PUBREC was sent and PUBREL is awaited; reset when the broker sends the message again
        self.recorded = False
        #: position among the messages of all connections, new or sent again
        self.number = number

    @property
    def is_due(self) -> bool:
        """Whether it is settled and its answer has not been sent."""
        return not (self.copies or self.recorded)


class CopyToken:
    """One stream's copy of a message."""

    __slots__ = ("receipt", "stream")

    def __init__(self, receipt: Receipt, stream: Stream) -> None:
        self.receipt = receipt
        self.stream = stream


class StreamOutlet:
    """Hands over the messages of one stream, or of several in one order of arrival (:class:`JointOutlet`).

    Attributes:
        sink: takes the messages.
        batch: messages that arrived since the sink was last called.
        ended: whether the sink takes no more.
    """

    __slots__ = ("batch", "ended", "sink")

    #: whether there may be several streams, of which one takes each message
    is_joint: ClassVar[bool] = False

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.batch: list[Incoming] = []
        self.ended = False

    def entered(self, stream: Stream) -> None:
        """Add a stream."""

    def left(self, stream: Stream) -> None:
        """Remove a stream, which has ended."""
        del stream
        self.ended = True

    def takes(self, stream: Stream, topic: str) -> bool:
        """Return whether ``stream``, which matches ``topic``, takes its messages."""
        del stream, topic
        return True


class Stream:
    """A subscription of the core: the handle that ``Adapter.subscribe`` returns."""

    __slots__ = ("ended", "number", "outlet", "replayed", "route", "settles", "since", "tells_id", "unsettled")

    def __init__(self, route: FilterRoute, outlet: StreamOutlet, number: int, settles: bool, tells_id: bool) -> None:
        self.route = route
        #: whether its messages carry their packet identifiers
        self.tells_id = tells_id
        #: whether its messages have to be acknowledged: it asked for more than QoS 0
        self.settles = settles
        self.outlet = outlet
        #: position among the streams of the instance
        self.number = number
        #: number of the first message that can arrive for it: those before arrived earlier
        self.since = 0
        #: in arrival order
        self.unsettled: dict[CopyToken, None] = {}
        #: without subscription identifiers: channels whose retained message it has received
        self.replayed: set[str] = set()
        self.ended = False
        outlet.entered(self)

    def end(self) -> None:
        """Take no more messages, nor verdicts."""
        self.ended = True
        self.outlet.left(self)


class FilterRoute:
    """A subscription at the broker and the streams behind it."""

    def __init__(
        self,
        queue: str | None,
        pattern: str,
        no_local: bool,
        as_published: bool,
        held: set[tuple[bool, bool]],
    ) -> None:
        self.filter = filter_of(queue, pattern)
        self.pattern = pattern
        #: subscription options (MQTT 5, 3.8.3.1): No Local, Retain As Published
        self.no_local = no_local
        self.as_published = as_published
        #: the options, No Local and Retain As Published, of the subscriptions of which the broker may have one
        self.held = held
        #: whether the retained flag of a message may be its publisher's: it does not tell an old message then
        self.passes_flags = as_published or any(published for _, published in self.held)
        #: streams compete for messages (``queue``, a shared subscription); otherwise each gets a copy
        self.is_shared = queue is not None
        self.matches = channels.matcher(pattern)
        #: the highest QoS that one of its streams asked for
        self.qos = 0
        #: whether the broker has confirmed it, with that QoS
        self.confirmed = False
        self.streams: list[Stream] = []
        #: the last stream was detached: the subscription stays at the broker
        self.is_kept = False
        #: the last stream, while none is open, if the messages that arrive are kept for the next one
        self.detached: Stream | None = None
        self.identifiers: deque[int] = deque()
        self._turn = 0

    @property
    def options(self) -> tuple[bool, bool]:
        """No Local and Retain As Published."""
        return self.no_local, self.as_published

    @property
    def differs(self) -> bool:
        """Whether the broker may have a subscription with other options."""
        return bool(self.held - {self.options})

    def change(self, no_local: bool, as_published: bool) -> None:
        """Have other options; the broker may have a subscription with the present ones."""
        self.no_local = no_local
        self.as_published = as_published
        self.passes_flags = self.passes_flags or as_published

    def receivers(self) -> list[Stream]:
        """Return the streams that the next message goes to."""
        if not self.is_shared or len(self.streams) < 2:
            return self.streams
        self._turn = (self._turn + 1) % len(self.streams)
        return self.streams[self._turn : self._turn + 1]


class JointOutlet(StreamOutlet):
    """Several channels with one order of arrival: the streams of a joint subscription; its handle.

    Each channel has a subscription at the broker, which sends one packet for overlapping ones, or one for each (MQTT 5
    with subscription identifiers, mosquitto). So of the streams that match a channel one takes its messages: the one
    whose SUBSCRIBE the broker granted first. That changes only with the broker's answer to UNSUBSCRIBE, in the order of
    the packets: packets before it are for the streams of before. Packets for a channel that is not subscribed to any
    more may come later, from the broker's queue: another stream of the joint subscription takes them. Thus no message
    is lost by a change; one of which the broker sends several packets may be taken twice.

    Attributes:
        is_abandoned: returns whether it takes the messages of a channel that no stream matches.
        streams: by pattern; the granted ones come first, in the order of the broker's answers.
        parted: streams whose channel was parted, with messages that are not settled.
    """

    __slots__ = ("_granted", "_takers", "is_abandoned", "parted", "streams")

    is_joint = True

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.is_abandoned: Callable[[str], bool] = lambda _: False
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


def filter_of(queue: str | None, pattern: str) -> str:
    """Return the topic filter to subscribe to at the broker."""
    return pattern if queue is None else f"$share/{queue}/{pattern}"


def shown(spec: SubscriptionSpec) -> str:
    """Return the text that names a subscription in errors."""
    queue = f" (queue {spec.options.queue!r})" if spec.options.queue is not None else ""
    return f"the subscription to {spec.channel!r}{queue}"
