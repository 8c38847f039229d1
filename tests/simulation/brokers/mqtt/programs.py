"""Random programs of clients for the comparison with a real broker: a grammar of packets, and what clients remember.

A program is written while it runs, since what a client can acknowledge depends on what it was sent. All decisions come
from one seeded generator and from what the simulated broker sent, so that a seed and a number name a program.
"""

from __future__ import annotations

import random
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final

from tests.simulation.brokers.mqtt.packets import (
    AUTH,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    V5,
    V311,
    Ack,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Publish,
    Request,
    Subscribe,
    Unsubscribe,
    Will,
    encode,
    frame,
)
from tests.simulation.brokers.mqtt.properties import Properties, Property, encode_properties, encode_text
from tests.simulation.brokers.mqtt.session import NEVER

TOPICS: Final = ("a", "a/b", "a/b/c", "b", "a/", "/a", "$own/a", "b/ü")
FILTERS: Final = (
    "a", "a/b", "a/b/c", "b", "a/", "/a", "$own/a", "b/ü",
    "#", "+", "a/#", "a/+", "+/b", "+/+", "a/+/c", "/#", "$own/#", "+/a", "+/b/#",
    "$share/g/a", "$share/g/a/#", "$share/h/a/b", "$share/h/+", "$share/g/#",
)  # fmt: skip
BAD_FILTERS: Final = (
    "a#",
    "a/#/b",
    "a+",
    "+a/b",
    "",
)
#: The largest packet that some clients accept, and a payload that is too large for it.
SMALL_PACKET: Final = 200
LARGE_PAYLOAD: Final = 220
#: Own QoS 2 messages of a client that are not completed: fewer than the broker's Receive Maximum.
MAX_OPEN: Final = 4
#: Expiry intervals that do not pass while a program runs, in seconds.
LONG: Final = 5000


@dataclass
class Delivery:
    """A QoS 1 or 2 message that a client was sent and has not completed.

    Attributes:
        label: what tells it from others, whatever packet identifier the broker chose.
        stage: the acknowledgement that is due: PUBACK, PUBREC or PUBCOMP; 0 while PUBREL is awaited.
    """

    label: str
    packet_id: int
    qos: int
    stage: int


@dataclass
class Client:
    """A place for connections of one client after the other.

    Attributes:
        has_queue: whether messages for it wait at the broker until it acknowledges others.
        filters: that it has subscribed to; an earlier connection may have had others.
        deliveries: uncompleted messages on either side, by the name of the side.
    """

    slot: int
    version: int = V5
    client_id: str = ""
    is_connected: bool = False
    had_expiry: bool = False
    has_queue: bool = False
    filters: list[str] = field(default_factory=list)
    aliases: dict[int, str] = field(default_factory=dict)
    deliveries: dict[str, list[Delivery]] = field(default_factory=dict)

    @property
    def session(self) -> str:
        """Return a name of the session: the client id, or one of the place where the broker assigns it."""
        return self.client_id or f"assigned to {self.slot}"


@dataclass
class Step:
    """What one client does.

    Attributes:
        slot: of the client.
        text: for people.
        packets: to send, as bytes, or a function of the side where packet identifiers of the broker are needed.
        opens: it opens a connection first.
        drops: it ends the connection without DISCONNECT.
        restarts: the broker is stopped and started; the slot does not matter.
    """

    slot: int
    text: str
    packets: dict[str, bytes] | bytes = b""
    opens: bool = False
    drops: bool = False
    restarts: bool = False

    def bytes_for(self, side: str) -> bytes:
        """Return what to send on one side."""
        return self.packets if isinstance(self.packets, bytes) else self.packets[side]


class Program:
    """Writes the steps of one program.

    Args:
        rng: of this program.
        sides: names of the compared sides; the first one decides.
        restarts: whether the broker may be restarted, in some programs.
    """

    def __init__(self, rng: random.Random, sides: tuple[str, str], restarts: bool = False) -> None:
        self.rng = rng
        self.sides = sides
        self.clients = [Client(slot) for slot in range(rng.choice((1, 2, 2, 3)))]
        self.version = rng.choice((V311, V5, 0))  # 0: each connection its own
        #: Some clients accept small packets only. Mosquitto never takes a QoS 1 or 2 message that is too large out of
        #: the client's window again, so that large ones are of QoS 0 then.
        self.has_small = rng.random() < 0.2
        self._count = 0
        self._last_id = 0
        self._restarts = restarts and rng.random() < 0.1
        self._restarts_left = 2  # each takes a fifth of a second
        #: Receive Maximum of each client: Mosquitto does not keep to a smaller one when a session goes on.
        self._windows = {f"c{each}": rng.choice((0, 0, 1, 2, 3, 8)) if self.version else 0 for each in range(3)}
        #: No Local and Retain As Published of each filter. Mosquitto does not change them with a second SUBSCRIBE.
        self._options = {
            each: (rng.random() < 0.2 and not each.startswith("$share"), rng.random() < 0.3)
            if self.version
            else (False, False)
            for each in FILTERS
        }
        #: QoS 2 messages of sessions that are not completed: by session, then the PUBLISH by packet identifier
        self._open: dict[str, dict[int, Publish]] = {}

    def next_step(self) -> Step:
        """Return what happens next."""
        rng = self.rng
        client = rng.choice(self.clients)
        if self._restarts and self._restarts_left and rng.random() < 0.05:
            self._restarts_left -= 1
            return Step(client.slot, "restart", restarts=True)
        if not client.is_connected:
            return self._connect(client)
        kinds = [
            (self._publish, 30), (self._subscribe, 14), (self._acknowledge, 26), (self._burst, 8), (self._release, 8),
            (self._unsubscribe, 4), (self._disconnect, 4), (self._drop, 5), (self._break, 2), (self._oddity, 3),
        ]  # fmt: skip
        kind = rng.choices([each for each, _ in kinds], [weight for _, weight in kinds])[0]
        return kind(client) or self._publish(client)

    def last_step(self, client: Client) -> Step:
        """Return the step that ends a connection in good order."""
        return self._step(client, Disconnect())

    # What clients do.

    def _connect(self, client: Client) -> Step:
        rng = self.rng
        client.version = self.version or rng.choice((V311, V5))
        client.client_id = rng.choices(
            (f"c{client.slot}", f"c{rng.randrange(3)}", ""), (85, 10, 0 if self._restarts else 5)
        )[0]
        is_clean = rng.random() < 0.35 or (client.version == V311 and not client.client_id)
        # Mosquitto 2.0.11 saves the sessions that began without Clean Start, whatever their expiry interval
        expiries: tuple[int | None, ...] = (None, 0, LONG, LONG, NEVER)
        if self._restarts and client.version == V5:
            is_clean, expiries = False, (LONG, NEVER)
        properties: dict[int, Any] = {}
        if client.version == V5:
            for number, values in (
                (Property.SESSION_EXPIRY, expiries),
                (Property.RECEIVE_MAXIMUM, (self._windows.get(client.client_id) or None,)),
                (Property.MAXIMUM_PACKET_SIZE, (SMALL_PACKET if self.has_small else None, None)),
            ):
                value = rng.choice(values)
                if number == Property.SESSION_EXPIRY and not client.client_id:
                    continue  # nothing could clean up the session
                if value is not None:
                    properties[number] = value
        client.had_expiry = bool(properties.get(Property.SESSION_EXPIRY)) or (client.version == V311 and not is_clean)
        will = None
        if rng.random() < 0.3:
            will_properties = self._message_properties(client)
            if will_properties and rng.random() < 0.3:
                will_properties = {**will_properties, Property.WILL_DELAY: 0}
            topic, payload = rng.choice(TOPICS), f"will {self._number()}".encode()
            will = Will(topic, payload, rng.randrange(3), rng.random() < 0.3, will_properties)
            if will.retain and self._restarts:
                will.qos = 0  # see _message
        packet = Connect(
            client.client_id, client.version, is_clean, rng.choice((600, 600, 0)), None, None, will, properties
        )
        client.aliases, client.filters = {}, []
        client.deliveries = {side: [] for side in self.sides}
        client.is_connected = True
        if is_clean or not client.client_id:
            self._open[client.session] = {}
        return self._step(client, packet, opens=True)

    def _publish(self, client: Client) -> Step:
        return self._step(client, self._message(client, self.rng.randrange(3), self.rng.choice(TOPICS)))

    def _burst(self, client: Client) -> Step:
        topic, qos = self.rng.choice(TOPICS), self.rng.randrange(2)
        packets = [self._message(client, qos, topic) for _ in range(self.rng.randrange(2, 9))]
        data = b"".join(encode(packet, client.version) for packet in packets)
        return Step(client.slot, f"{client.slot}: burst {' '.join(map(brief, packets))}", data)

    def _message(self, client: Client, qos: int, topic: str) -> Publish:
        rng = self.rng
        open_ids = self._open.setdefault(client.session, {})
        if len(open_ids) >= MAX_OPEN:
            qos = 0
        payload = f"{self._number()}:".encode()
        if rng.random() < 0.2 and not (qos and self.has_small):
            payload += b"x" * LARGE_PAYLOAD
        retain = rng.random() < 0.15
        if retain and rng.random() < 0.3:
            payload = b""
        if retain and self._restarts:
            qos = 0  # the order of retained messages after a restart differs, and would decide which ones wait
        packet = Publish(topic, payload, qos, retain, properties=dict(self._message_properties(client)))
        if qos:
            packet.packet_id = self._next_id()
            if qos == 2:
                open_ids[packet.packet_id] = packet
        if client.version == V5 and rng.random() < 0.15:
            alias = rng.randrange(1, 11)
            packet.properties = {**packet.properties, Property.TOPIC_ALIAS: alias}
            if client.aliases.get(alias) == topic and qos < 2:
                packet.topic = ""
            else:
                client.aliases[alias] = topic
        return packet

    def _message_properties(self, client: Client) -> Properties:
        rng = self.rng
        if client.version != V5 or rng.random() < 0.5:
            return {}
        every: dict[int, Any] = {
            Property.PAYLOAD_FORMAT: 1,
            Property.MESSAGE_EXPIRY: LONG,
            Property.CONTENT_TYPE: "text/plain",
            Property.RESPONSE_TOPIC: "b",
            Property.CORRELATION_DATA: b"\0\xff",
            Property.USER_PROPERTY: [("k", "1"), ("k", "2"), ("j", "")],
        }
        return {number: value for number, value in every.items() if rng.random() < 0.4}

    def _subscribe(self, client: Client) -> Step:
        rng = self.rng
        is_5 = client.version == V5
        requests = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            request = Request(rng.choice(FILTERS), rng.randrange(3))
            if is_5:
                request.no_local, request.retain_as_published = self._options[request.filter]
                request.retain_handling = rng.choice((0, 0, 1, 2))
            requests.append(request)
            client.filters.append(request.filter)
        properties: dict[int, Any] = {}
        if is_5 and rng.random() < 0.4:
            properties[Property.SUBSCRIPTION_IDENTIFIER] = rng.randrange(1, 300)
        return self._step(client, Subscribe(self._next_id(), requests, properties))

    def _unsubscribe(self, client: Client) -> Step:
        # Mosquitto answers 0 instead of 0x11 for "$own/a" if no client subscribed to a filter below "$own"
        known = [each for each in FILTERS if not each.startswith("$own")]
        rng = self.rng
        filters = [rng.choice(known) for _ in range(rng.choice((1, 1, 2)))]
        if client.filters and rng.random() < 0.6:
            filters[0] = rng.choice(client.filters)
        return self._step(client, Unsubscribe(self._next_id(), filters))

    def _acknowledge(self, client: Client) -> Step | None:
        """Acknowledge the oldest message, another one, or all that are due.

        While messages are queued, the newest one only. For each older one Mosquitto 2.0.11 sends more than the window
        allows: as many as there would be room for if the newer messages in flight were not there.
        """
        rng = self.rng
        first, second = self.sides
        every = client.deliveries[first]
        due = [each for each in (every[-1:] if client.has_queue else every) if each.stage]
        if not due:
            return None
        chosen = rng.choices(([due[0]], [rng.choice(due)], due), (6, 2, 2))[0]
        sent: dict[str, bytes] = {first: b"", second: b""}
        texts = []
        for mine in list(chosen):
            kind = mine.stage
            texts.append(f"{kind}({mine.label})")
            alike = [
                [e for e in client.deliveries[side] if (e.label, e.stage) == (mine.label, kind)] for side in self.sides
            ]
            position = next(index for index, each in enumerate(alike[0]) if each is mine)
            theirs = alike[1][position] if position < len(alike[1]) else None
            for side, each in ((first, mine), (second, theirs)):
                if each is None:
                    continue
                sent[side] += encode(Ack(kind, each.packet_id), client.version)
                if kind == PUBREC:
                    each.stage = 0
                else:
                    client.deliveries[side].remove(each)
        return Step(client.slot, f"{client.slot}: acknowledge {', '.join(texts)}", sent)

    def _release(self, client: Client) -> Step | None:
        """Go on with one's own QoS 2 messages: PUBREL, or PUBLISH with DUP."""
        open_ids = self._open.setdefault(client.session, {})
        if not open_ids:
            return None
        packet_id = self.rng.choice(list(open_ids))
        packet = open_ids[packet_id]
        if self.rng.random() < 0.2 and packet.topic and not packet.duplicate:
            packet.duplicate = True  # Mosquitto ends the connection when it gets the message a third time
            again = Publish(packet.topic, packet.payload, 2, packet.retain, True, packet_id)
            return self._step(client, again)
        del open_ids[packet_id]
        return self._step(client, Ack(PUBREL, packet_id))

    def _disconnect(self, client: Client) -> Step:
        packet = Disconnect()
        if client.version == V5:
            packet.reason = self.rng.choice((0, 0, 4))
            if client.had_expiry and self.rng.random() < 0.3:
                packet.properties = {Property.SESSION_EXPIRY: self.rng.choice((0, LONG))}
        return self._step(client, packet)

    def _drop(self, client: Client) -> Step:
        return Step(client.slot, f"{client.slot}: drop the connection", drops=True)

    def _oddity(self, client: Client) -> Step:
        """Send something unusual that is no error: unknown packet identifiers, topics of the broker itself."""
        rng = self.rng
        is_idle = not client.deliveries[self.sides[0]]  # otherwise Mosquitto takes room in the window for it
        kind = rng.choice((PUBREL, PUBREC, PUBACK, PUBCOMP) if is_idle else (PUBREL, PUBREC))
        reserved = Publish(rng.choice(("$SYS/a", "$share/g/a")), b"x", rng.randrange(3), rng.random() < 0.5)
        reserved.packet_id = self._next_id() if reserved.qos else 0
        return self._step(client, rng.choice((Ack(kind, 60_000), reserved)))

    def _break(self, client: Client) -> Step:
        """Break the protocol."""
        is_5 = client.version == V5
        number = self._next_id()
        every: list[Packet | bytes] = [
            Subscribe(number, [Request(self.rng.choice(BAD_FILTERS))]),
            Unsubscribe(number, [self.rng.choice(BAD_FILTERS)]),
            Publish("a/+", b"wild", 1, packet_id=number),
            Publish("a/#", b"wild"),
            Publish("", b"no topic", 1, packet_id=number),
            Publish("a", b"no identifier", 1, packet_id=0),
            Publish("a\0", b"NUL"),
            Connack(False, 0),
            frame(0x36, encode_text("a") + b"\0\1\0"),  # QoS 3
            frame(0x82, b"\0\5" + (b"\0" if is_5 else b"")),  # no filter
            frame(0x82, b"\0\5" + (b"\0" if is_5 else b"") + encode_text("a") + b"\x03"),  # QoS 3
            frame(0x80, b"\0\5" + (b"\0" if is_5 else b"") + encode_text("a") + b"\0"),  # flags
            frame(0x30, b"\0\x09a"),  # too short
            b"\x30\xff\xff\xff\xff\x01",  # length of five bytes
            frame(0x00, b""),
        ]
        if is_5:
            every += [
                Publish("a", b"alias 0", properties={Property.TOPIC_ALIAS: 0}),
                Publish("a", b"alias 11", properties={Property.TOPIC_ALIAS: 11}),
                Subscribe(number, [Request("a")], {Property.SUBSCRIPTION_IDENTIFIER: 0}),
                Disconnect(kind=AUTH),
                frame(0x30, encode_text("a") + encode_properties({Property.WILL_DELAY: 5})),
                frame(0x30, encode_text("a") + b"\x02\x7f\x00"),  # unknown property
                frame(0x30, encode_text("a") + b"\x04\x01\x00\x01\x00"),  # the payload format twice
            ]
            if 1 not in client.aliases:
                every.append(Publish("", b"unknown alias", properties={Property.TOPIC_ALIAS: 1}))
            if not client.had_expiry:
                every.append(Disconnect(0, {Property.SESSION_EXPIRY: LONG}))
        packet = self.rng.choice(every)
        if isinstance(packet, bytes):
            return Step(client.slot, f"{client.slot}: broken {packet.hex()}", packet)
        return self._step(client, packet)

    def _step(self, client: Client, packet: Packet, opens: bool = False) -> Step:
        return Step(client.slot, f"{client.slot}: {brief(packet)}", encode(packet, client.version), opens)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _number(self) -> int:
        self._count += 1
        return self._count


def brief(packet: Any) -> str:
    """Return a packet, or a part of it, as text without fields that have their default."""
    parts = []
    for each in fields(packet):
        value = getattr(packet, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if value == default:
            continue
        if each.name == "properties":
            value = {Property(number).name.lower(): value[number] for number in value}
        elif isinstance(value, bytes) and len(value) > 20:
            value = value[:8] + b"..."
        elif isinstance(value, Will):
            value = brief(value)
        elif isinstance(value, list) and value and isinstance(value[0], Request):
            value = [brief(request) for request in value]
        parts.append(f"{value!r}" if default is MISSING else f"{each.name}={value!r}")
    return f"{type(packet).__name__}({', '.join(parts)})"
