"""The state of edge nodes: births, aliases, sequence numbers and deaths (Sparkplug 3.0, 5).

A birth defines the metrics of an edge node or of a device: names, aliases and types. Data after it may leave out names
and types. When data cannot be read, or a message was lost, the decoder asks the edge node for a rebirth.

**Bounds.** A decoder knows ``max_nodes`` edge nodes and ``max_metrics`` metrics; the edge node that was silent for
longest is forgotten first, and is asked for a rebirth when it is heard again.

**Threads.** A decoder may be used by any thread. ``request_rebirth`` is called on that thread, without a lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from messaging.errors import ArgumentError, DecodeError, UnknownMetricError
from messaging.errors.checks import plain_function
from messaging.errors.text import SafeLog
from messaging.execution import clock, seconds
from messaging.sparkplug.datatypes import DataType
from messaging.sparkplug.model import Definitions, Metric, Payload, Template
from messaging.sparkplug.payloads import decode, encode
from messaging.sparkplug.readings import STALE, Reading, quality_of
from messaging.sparkplug.topics import MessageType, Topic

logger = SafeLog(__name__)

#: metric of commands that ask for a rebirth
REBIRTH: Final = "Node Control/Rebirth"
#: metric that tells which NBIRTH an NDEATH belongs to
BDSEQ: Final = "bdSeq"
_SEQUENCE: Final = 256
_IGNORED: Final = frozenset({MessageType.STATE, MessageType.NCMD, MessageType.DCMD})


class _Node:
    """What is known of an edge node that has sent a birth, or of which a device has."""

    __slots__ = ("bdseq", "births", "has_gap", "seq")

    def __init__(self) -> None:
        #: definitions by device; ``None`` stands for the edge node itself
        self.births: dict[str | None, Definitions] = {}
        self.bdseq: int | None = None
        #: of the last message
        self.seq: int | None = None
        #: whether a message was lost since the last NBIRTH, or that birth
        self.has_gap = False

    def follow(self, seq: int | None) -> str | None:
        """Note the sequence number of a message; return which ones are missing if a message before it was lost."""
        before = self.seq
        if seq is None:
            return None
        self.seq = seq
        # the same number again is a message that the broker has delivered twice
        if before is None or seq in ((before + 1) % _SEQUENCE, before):
            return None
        return f"a message was lost: sequence number {seq} came after {before}"

    @property
    def size(self) -> int:
        return sum(1 + each.count for each in self.births.values())


class _Read(NamedTuple):
    """What a message comes to: readings, and why a rebirth is needed or the message cannot be read."""

    readings: list[Reading]
    reason: str | None = None
    error: UnknownMetricError | None = None


class SparkplugDecoder:
    """Turns Sparkplug B messages into readings, with the state of their edge nodes.

    Args:
        request_rebirth: is called with the channel and the payload of a command to publish, at QoS 0 and not
            retained; ``None``: nothing is asked for.
        max_nodes: edge nodes that are known.
        max_metrics: metrics that are known, of all edge nodes together.
        rebirth_interval: seconds between two requests to one edge node, at least.

    Raises:
        ArgumentError: a bound is not at least 1, the interval is negative, or ``request_rebirth`` is not callable.
    """

    def __init__(
        self,
        request_rebirth: Callable[[str, bytes], object] | None = None,
        *,
        max_nodes: int = 1000,
        max_metrics: int = 200_000,
        rebirth_interval: float = 30.0,
    ) -> None:
        if request_rebirth is not None:
            request_rebirth = plain_function(request_rebirth, "request_rebirth")
        for name, bound in (("max_nodes", max_nodes), ("max_metrics", max_metrics)):
            if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
                raise ArgumentError(f"{name} must be an int of at least 1")
        self._request_rebirth = request_rebirth
        self._max_nodes = max_nodes
        self._max_metrics = max_metrics
        self._interval = seconds(rebirth_interval, "rebirth_interval")
        if self._interval < 0:
            raise ArgumentError(f"rebirth_interval must be 0 or more seconds, not {self._interval:g}")
        self._lock = threading.Lock()  # guards what follows
        #: by group and edge node, the one that was heard last at the end
        self._nodes: OrderedDict[tuple[str, str], _Node] = OrderedDict()
        self._metrics = 0
        #: monotonic time of the last request, by group and edge node
        self._asked: OrderedDict[tuple[str, str], float] = OrderedDict()

    # --- messages

    def read(self, channel: str, payload: bytes) -> list[Reading]:
        """Return the readings of a message, and keep what it tells about its edge node.

        A birth and data have one for each metric. A death has one for each metric of its birth: null, with the
        quality 500, stale. Commands, and the state of host applications, have none.

        Raises:
            InvalidChannelError: the channel is no topic of Sparkplug B.
            DecodeError: the payload is no Sparkplug B payload, or a birth does not define its metrics.
            UnknownMetricError: a metric has no name or type, and no birth tells them; a rebirth is requested.
        """
        return self._read(channel, payload, is_new=True)

    def reread(self, channel: str, payload: bytes) -> list[Reading]:
        """Return the readings of a message of the past, by the births that are known now. The state stays as it is.

        Raises: as :meth:`read`. No rebirth is requested.
        """
        return self._read(channel, payload, is_new=False)

    @property
    def known_nodes(self) -> int:
        """Return the number of edge nodes whose births are known."""
        return len(self._nodes)

    @property
    def known_metrics(self) -> int:
        """Return the number of metrics, members of templates, devices and edge nodes that are known."""
        return self._metrics

    def _read(self, channel: str, payload: bytes, *, is_new: bool) -> list[Reading]:
        topic = Topic.parse(channel)
        if topic.type in _IGNORED:
            return []
        key = (topic.group, topic.edge_node)
        with self._lock:
            node = self._nodes.get(key)
            if node is not None:
                self._nodes.move_to_end(key)
            match topic.type:
                case MessageType.NBIRTH | MessageType.DBIRTH:
                    found = self._birth(topic, decode(payload), node, is_new=is_new)
                case MessageType.NDEATH | MessageType.DDEATH:
                    found = self._death(topic, decode(payload), node, is_new=is_new)
                case _:
                    found = self._data(topic, payload, node, is_new=is_new)
            is_due = is_new and found.reason is not None and self._is_due(key)
        if is_due and self._request_rebirth is not None:
            logger.info("sparkplug: edge node '%s/%s': %s; asking it for a rebirth", *key, found.reason)
            self._request_rebirth(str(Topic(MessageType.NCMD, *key)), rebirth_request())
        if found.error is not None:
            raise found.error
        return found.readings

    # --- births

    def _birth(self, topic: Topic, payload: Payload, node: _Node | None, *, is_new: bool) -> _Read:
        definitions = Definitions(payload.metrics)
        if definitions.count >= self._max_metrics:
            raise DecodeError(f"a birth of {definitions.count} metrics; at most {self._max_metrics - 1} are kept")
        readings = _readings(topic, payload, is_uncertain=False)
        if not is_new:
            return _Read(readings)
        if topic.device is None:
            return _Read([*self._node_birth(topic, payload, node, definitions), *readings])
        if node is None:
            node = self._add(topic)
        reason = node.follow(payload.seq)
        if None not in node.births:
            reason = "a device was born, and no birth of the edge node was received"
        elif reason is not None:
            node.has_gap = True
        self._define(topic, node, definitions)
        return _Read(readings, reason)

    def _node_birth(
        self, topic: Topic, payload: Payload, node: _Node | None, definitions: Definitions
    ) -> list[Reading]:
        bdseq = _bdseq(payload)
        stale: list[Reading] = []
        if node is None:
            node = self._add(topic)
        elif None in node.births and (bdseq is None or bdseq != node.bdseq):
            # a new session: its devices are born anew, and no death told that the old ones are gone
            for device in [each for each in node.births if each is not None]:
                stale += _stale(topic, device, node.births[device], _now())
                self._metrics -= 1 + node.births.pop(device).count
        node.bdseq, node.has_gap = bdseq, False
        node.seq = payload.seq
        self._define(topic, node, definitions)
        return stale

    def _add(self, topic: Topic) -> _Node:
        node = self._nodes[topic.group, topic.edge_node] = _Node()
        return node

    def _define(self, topic: Topic, node: _Node, definitions: Definitions) -> None:
        before = node.births.get(topic.device)
        if before is not None:
            self._metrics -= 1 + before.count
        node.births[topic.device] = definitions
        self._metrics += 1 + definitions.count
        while len(self._nodes) > self._max_nodes or (self._metrics > self._max_metrics and len(self._nodes) > 1):
            self._forget(next(iter(self._nodes)))
        if self._metrics > self._max_metrics:  # all of them are of this edge node: its other devices are forgotten
            for device in [each for each in node.births if each != topic.device]:
                self._metrics -= 1 + node.births.pop(device).count

    def _forget(self, key: tuple[str, str]) -> None:
        self._metrics -= self._nodes.pop(key).size
        logger.warning(
            "sparkplug: forgot the edge node '%s/%s', which was silent for longest: at most %d edge nodes and %d "
            "metrics are known", *key, self._max_nodes, self._max_metrics,
        )  # fmt: skip

    # --- deaths

    def _death(self, topic: Topic, payload: Payload, node: _Node | None, *, is_new: bool) -> _Read:
        if node is None:
            return _Read([])
        if topic.device is not None:
            timestamp = payload.timestamp if payload.timestamp is not None else _now()
            definitions = node.births.get(topic.device)
            readings = [] if definitions is None else _stale(topic, topic.device, definitions, timestamp)
            reason = None
            if is_new:
                reason = node.follow(payload.seq)
                node.has_gap |= reason is not None
                if definitions is not None:
                    self._metrics -= 1 + node.births.pop(topic.device).count
            return _Read(readings, reason)
        bdseq = _bdseq(payload)
        if bdseq is not None and node.bdseq is not None and bdseq != node.bdseq:
            logger.info(
                "sparkplug: ignored a death of the edge node '%s/%s': it is of another session, bdSeq %d and not %d",
                topic.group, topic.edge_node, bdseq, node.bdseq,
            )  # fmt: skip
            return _Read([])
        now = _now()
        readings = [each for device, known in node.births.items() for each in _stale(topic, device, known, now)]
        if is_new:
            self._metrics -= self._nodes.pop((topic.group, topic.edge_node)).size
        return _Read(readings)

    # --- data

    def _data(self, topic: Topic, payload: bytes, node: _Node | None, *, is_new: bool) -> _Read:
        definitions = None if node is None else node.births.get(topic.device)
        found = decode(payload, definitions)
        reason: str | None = None
        if definitions is None:
            reason = "there is data, and no birth was received"
        elif any(definitions.find(each.name or None, each.alias) is None for each in found.metrics):
            reason = "there is data of a metric that its birth does not define"
        if node is not None and is_new:
            lost = node.follow(found.seq)
            node.has_gap |= lost is not None
            reason = reason or lost
        is_uncertain = node is None or definitions is None or node.has_gap
        try:
            _check_known(topic, found.metrics, definitions)
        except UnknownMetricError as error:
            return _Read([], reason or str(error), error)
        return _Read(_readings(topic, found, is_uncertain=is_uncertain), reason)

    # --- rebirths

    def _is_due(self, key: tuple[str, str]) -> bool:
        """Return whether an edge node may be asked now, and note that it is."""
        if self._request_rebirth is None:
            return False
        now = clock.monotonic()
        asked = self._asked.get(key)
        if asked is not None and now - asked < self._interval:
            return False
        self._asked[key] = now
        self._asked.move_to_end(key)
        if len(self._asked) > self._max_nodes:
            self._asked.popitem(last=False)
        return True


def rebirth_request() -> bytes:
    """Return the payload of a command that asks an edge node for its births (Sparkplug 3.0, 5.15)."""
    now = _now()
    return encode(Payload(now, (Metric(REBIRTH, True, DataType.Boolean, now),)))


def _now() -> int:
    return int(clock.wall() * 1000)


def _bdseq(payload: Payload) -> int | None:
    for each in payload.metrics:
        if each.name == BDSEQ and isinstance(each.value, int):
            return each.value
    return None


def _readings(topic: Topic, payload: Payload, *, is_uncertain: bool) -> list[Reading]:
    return [
        Reading(
            topic.group, topic.edge_node, topic.device, each.name or "", each.type, each.value,
            payload.timestamp if each.timestamp is None else each.timestamp, each.alias, quality_of(each),
            each.is_historical, each.is_transient, is_uncertain, each.properties, each.metadata,
        )
        for each in payload.metrics
    ]  # fmt: skip


def _stale(topic: Topic, device: str | None, definitions: Definitions, timestamp: int) -> list[Reading]:
    return [
        Reading(topic.group, topic.edge_node, device, each.name, each.type, None, timestamp, quality=STALE)
        for each in definitions.metrics
    ]


def _check_known(topic: Topic, metrics: Iterable[Metric], definitions: Definitions | None) -> None:
    for each in metrics:
        if each.name and (each.type is not None or each.value is None):
            if isinstance(each.value, Template):
                _check_members_known(topic, each, each.value)
            continue
        label = f"metric {each.name!a:.90}" if each.name else f"alias {each.alias}"
        why = "no birth was received" if definitions is None else "its birth does not define it"
        raise UnknownMetricError(f"{label} of {_place(topic)} is not known: {why}")


def _check_members_known(topic: Topic, metric: Metric, template: Template) -> None:
    for each in template.metrics:
        if each.type is None and each.value is not None:
            raise UnknownMetricError(
                f"member {each.name!a:.90} of metric {metric.name!a:.90} of {_place(topic)} is not known: it has no "
                "type, and no birth tells it"
            )
        if isinstance(each.value, Template):
            _check_members_known(topic, metric, each.value)


def _place(topic: Topic) -> str:
    if topic.device is None:
        return f"edge node '{topic.group}/{topic.edge_node}'"
    return f"device '{topic.group}/{topic.edge_node}/{topic.device}'"
