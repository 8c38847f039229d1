"""Replay random programs of clients against a real Mosquitto and the simulated broker, and compare the answers.

::

    python -m tests.simulation.brokers.mqtt.compare --programs 200 --seed 1

Each step is done on both sides. A PINGREQ on every connection, or the end of a connection, tells when the answers of
Mosquitto are complete. Then the packets of each client are compared, decoded. What may differ, and does not count:
packet identifiers that a broker chose, assigned client ids, and the order of messages of different topics.

Programs cover both protocol versions, all QoS, windows, queues and their limit, sessions, take-over, wills, retained
messages, shared and overlapping subscriptions, properties, protocol errors, and restarts in good order. What depends on
time is not compared. The model is Mosquitto 2.0.11, where the simulated broker differs on purpose:

=============================================  =====================================================================
Mosquitto 2.0.11                               the simulated broker
=============================================  =====================================================================
sends retained messages to shared              follows MQTT 5; ``retained_to_shared`` imitates it
subscriptions
ends connections without DISCONNECT at a       sends 0x8E and 0x8B; ``says_goodbye`` imitates it
take-over and when it stops
forgets shared subscriptions in a restart      keeps them; ``saves_shared`` imitates it
exceeds the window when an older message is    keeps the window; the programs acknowledge the newest message while
acknowledged while others are queued           others are queued
ignores a smaller Receive Maximum of a         keeps it; the programs do not change it
session that goes on
narrows the window for good after a message    does not; the programs do neither
that is too large and a negative PUBREC,
widens it for an unknown PUBACK
answers 0x97 to messages beyond its Receive    MQTT 5: DISCONNECT 0x93, so that a client's fault is seen; 3.1.1: accepts
Maximum; MQTT 3.1.1: acknowledges and drops    them; the programs keep to the limit
tells the reason of some errors, often an      always tells the reason of the specification; these DISCONNECTs do not
unspecific one                                 count
ends a session for a second CONNECT            ends the connection; the programs do not send one
ends the connection at the second repetition   answers PUBREC; the programs repeat once
of a QoS 2 message
accepts No Local on shared subscriptions,      refuses them as MQTT 5 says; the programs send none; tested on their own
``$share/g``, ``$share/+/a``, subscription
identifiers and wildcard response topics in
PUBLISH, flags of 2
keeps No Local and Retain As Published of an   replaces them [MQTT-3.8.4-3]; the programs do not change them
earlier SUBSCRIBE
answers 0 to UNSUBSCRIBE of ``$own/a`` if      answers 0x11; the programs do not unsubscribe from such filters
no client has a filter below ``$own``
drops the will for DISCONNECT with reasons     drops it for 0 only [MQTT-3.14.4-3]; the programs send 0 and 4
other than 4
refuses control characters in topics           accepts them, but for NUL; the programs use none
saves sessions that began without Clean        saves sessions with an expiry interval; in programs with restarts both
Start, whatever their expiry interval          are the same ones
delivers retained messages in another order    keeps their order; no retained message of QoS 1 or 2 in such programs
after a restart
ends the connection for an empty message to    answers 0x87; the programs send messages that are not empty
``$SYS/a``
speaks MQTT 3.1, publishes ``$SYS``            neither
=============================================  =====================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from messaging.testing.brokers import Mosquitto
from tests.simulation.brokers.fake_host import FakeHost, FakePeer
from tests.simulation.brokers.mqtt.broker import MqttBroker
from tests.simulation.brokers.mqtt.connection import MqttConnection
from tests.simulation.brokers.mqtt.packets import (
    PINGREQ_BYTES,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    V311,
    Ack,
    Connack,
    Connect,
    Disconnect,
    Framer,
    Packet,
    Ping,
    Publish,
    decode,
    encode,
)
from tests.simulation.brokers.mqtt.programs import TOPICS, Client, Delivery, Program, Step, brief
from tests.simulation.brokers.mqtt.properties import Properties, Property, ProtocolError
from tests.simulation.brokers.mqtt.settings import MqttSettings

SIMULATED: Final = "simulated"
REAL: Final = "mosquitto"
MAX_INFLIGHT: Final = 5
MAX_QUEUED: Final = 7
#: of the real broker
CONFIG: Final = (
    f"max_inflight_messages {MAX_INFLIGHT}",
    f"max_queued_messages {MAX_QUEUED}",
    "sys_interval 0",
    "set_tcp_nodelay true",
)
SETTINGS: Final = MqttSettings(
    max_inflight=MAX_INFLIGHT,
    max_queued=MAX_QUEUED,
    retained_to_shared=True,
    says_goodbye=False,
    saves_shared=False,
)
#: Whether some programs stop and start the broker.
RESTARTS: Final = True
#: Reasons for a DISCONNECT which Mosquitto tells sometimes, and the simulated broker always: unspecified, malformed
#: packet, protocol error, not authorized, invalid topic filter, invalid topic name, invalid topic alias.
ERRORS: Final = (0x80, 0x81, 0x82, 0x87, 0x8F, 0x90, 0x94)
#: for an answer of the real broker, seconds
TIMEOUT: Final = 5.0


class Different(Exception):  # noqa: N818  # a finding, not an error
    """The two brokers did not do the same."""


class RealLink:
    """A connection to the real broker."""

    def __init__(self, port: int, version: int) -> None:
        self.version = version
        self.is_open = True
        self._framer = Framer()
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """Send ``data``. A connection that the broker has reset is noticed when it is read."""
        with contextlib.suppress(OSError):
            self._socket.sendall(data)

    def drop(self) -> None:
        """End the connection without DISCONNECT; the broker ends it, too, when it has noticed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def collect(self, is_ending: bool) -> list[Packet]:
        """Return the packets up to the next PINGRESP, or up to the end of the connection if ``is_ending``.

        Raises:
            Different: neither comes in time.
        """
        if not is_ending:
            self.send(PINGREQ_BYTES)
        packets: list[Packet] = []
        while True:
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                wanted = "the end of the connection" if is_ending else "PINGRESP"
                raise Different(f"mosquitto: no {wanted}; so far {packets}") from None
            except ConnectionError:
                data = b""
            if not data:
                self.close()
                return packets
            for first, body in self._framer.feed(data):
                try:
                    packet = decode(first, body, self.version)
                except ProtocolError as error:
                    raise Different(f"mosquitto: {error}: {first:#x} {body.hex()}") from None
                if not is_ending and packet == Ping(PINGRESP):
                    return packets
                packets.append(packet)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self.is_open = False
        self._socket.close()


class SimulatedLink:
    """A connection to the simulated broker."""

    def __init__(self, broker: MqttBroker, version: int) -> None:
        self.version = version
        self._peer = FakePeer()
        self._framer = Framer()
        self._connection: MqttConnection = broker.accept(self._peer)
        self._is_dropped = False

    @property
    def is_open(self) -> bool:
        """Return whether neither side has ended the connection."""
        return not (self._peer.ended or self._is_dropped)

    @property
    def has_queue(self) -> bool:
        """Return whether messages wait until the client acknowledges others."""
        session = self._connection.session
        return session is not None and bool(session.queued)

    def send(self, data: bytes) -> None:
        """Send ``data``."""
        self._connection.received(data)

    def drop(self) -> None:
        """End the connection without DISCONNECT."""
        self._is_dropped = True
        self._connection.lost()

    def collect(self) -> list[Packet]:
        """Return the packets that have arrived."""
        return [decode(first, body, self.version) for first, body in self._framer.feed(self._peer.take())]


@dataclass
class Comparison:
    """The run of one program.

    Args:
        seed, number: name the program.
        server: the real broker, which has no session and no retained message.
        length: steps.
        tail: how many of the last steps to show in a difference; 0 shows all.
    """

    seed: int
    number: int
    server: Mosquitto
    length: int = 60
    tail: int = 0

    def run(self) -> int:
        """Do the steps on both sides; return their number.

        Raises:
            Different: with the program so far.
        """
        program = Program(random.Random(f"{self.seed}/{self.number}"), (SIMULATED, REAL), RESTARTS)
        broker = MqttBroker(FakeHost(self.number), SETTINGS)
        self._prime(broker)
        real: dict[int, RealLink] = {}
        simulated: dict[int, SimulatedLink] = {}
        done: list[str] = []
        try:
            for _ in range(self.length):
                step = program.next_step()
                done.append(step.text)
                self._do(program, broker, step, real, simulated)
            for client in program.clients:
                if client.is_connected:
                    self._do(program, broker, program.last_step(client), real, simulated)
        except Different as difference:
            steps = "\n  ".join(done[-self.tail :] if self.tail else done)
            raise Different(f"program {self.number} of seed {self.seed}\n  {steps}\n{difference}") from None
        finally:
            for link in real.values():
                link.close()
        self._clean(broker)
        if "restart" in done:
            self.server.restart()  # so that the retained messages of the next program have the order of _prime
        return len(done)

    def _do(
        self,
        program: Program,
        broker: MqttBroker,
        step: Step,
        real: dict[int, RealLink],
        simulated: dict[int, SimulatedLink],
    ) -> None:
        if step.restarts:
            broker.stop()
            self.server.stop()
            self._check(program, real, simulated, sorted(real))
            broker.start()
            self.server.start()
            return
        slot = step.slot
        if step.opens:
            version = program.clients[slot].version
            real[slot], simulated[slot] = RealLink(self.server.port, version), SimulatedLink(broker, version)
        if step.drops:
            simulated[slot].drop()
            real[slot].drop()
        else:
            simulated[slot].send(step.bytes_for(SIMULATED))
            real[slot].send(step.bytes_for(REAL))
        self._check(program, real, simulated, [slot, *(each for each in sorted(real) if each != slot)])

    def _check(
        self, program: Program, real: dict[int, RealLink], simulated: dict[int, SimulatedLink], slots: list[int]
    ) -> None:
        """Compare what the clients in ``slots`` were sent; the first one has done something."""
        for each in slots:
            client = program.clients[each]
            if not client.is_connected:
                continue
            expected = simulated[each].collect()
            found = real[each].collect(is_ending=not simulated[each].is_open)
            expected_events = describe(client, SIMULATED, expected)
            found_events = describe(client, REAL, found)
            client.is_connected = simulated[each].is_open
            client.has_queue = simulated[each].has_queue
            if real[each].is_open != simulated[each].is_open:
                found_events.append("the connection is open" if real[each].is_open else "the connection is closed")
            if expected_events != found_events:
                raise Different(
                    f"client {each}\n  simulated: {_lines(expected_events)}\n  mosquitto: {_lines(found_events)}"
                )

    def _prime(self, broker: MqttBroker) -> None:
        """Retain a message of each topic, and delete it: both brokers deliver retained messages in this order then."""
        for link in (RealLink(self.server.port, V311), SimulatedLink(broker, V311)):
            link.send(encode(Connect("primer", V311), V311))
            for topic in TOPICS:
                link.send(encode(Publish(topic, b"x", 0, True), V311) + encode(Publish(topic, b"", 0, True), V311))
            link.send(encode(Disconnect(), V311))
            if isinstance(link, RealLink):
                link.collect(is_ending=True)

    def _clean(self, broker: MqttBroker) -> None:
        """Take sessions and retained messages of the program from the real broker."""
        for client_id in list(broker.sessions):
            link = RealLink(self.server.port, V311)
            link.send(encode(Connect(client_id, V311), V311) + encode(Disconnect(), V311))
            link.collect(is_ending=True)
        link = RealLink(self.server.port, V311)
        link.send(encode(Connect("cleaner", V311), V311))
        for message in broker.retained:
            link.send(encode(Publish(message.topic, b"", 0, True), V311))
        link.collect(is_ending=False)
        link.close()


def describe(client: Client, side: str, packets: Iterable[Packet]) -> list[str]:
    """Return packets as lines that are the same on both sides; remember what the client has to acknowledge.

    Messages come last, by topic.
    """
    deliveries = client.deliveries[side]
    lines: list[str] = []
    messages: list[tuple[str, str]] = []
    for packet in packets:
        if isinstance(packet, Publish):
            properties = _normal(packet.properties)
            label = f"{packet.topic!r} {packet.payload[:8]!r} {packet.properties.get(0x0B, '')}"
            known = next((each for each in deliveries if packet.qos and each.packet_id == packet.packet_id), None)
            if known is None and packet.qos:
                stage = PUBACK if packet.qos == 1 else PUBREC
                deliveries.append(Delivery(label, packet.packet_id, packet.qos, stage))
            elif known is not None:
                messages.append((packet.topic, f"packet identifier in use: {known}"))
            flags = f"QoS {packet.qos} retain {packet.retain:d} dup {packet.duplicate:d}"
            size = f" of {len(packet.payload)} bytes" if len(packet.payload) > 20 else ""
            line = f"PUBLISH {packet.topic!r} {packet.payload[:20]!r}{size} {flags} {properties}"
            messages.append((packet.topic, line))
        elif isinstance(packet, Ack) and packet.kind == PUBREL:
            waiting = next((each for each in deliveries if each.packet_id == packet.packet_id), None)
            if waiting is None and packet.packet_id != 60_000:  # of an earlier connection
                waiting = Delivery("?", packet.packet_id, 2, 0)
                deliveries.append(waiting)
            if waiting is not None:
                waiting.stage = PUBCOMP
            lines.append(f"PUBREL {'unknown' if waiting is None else waiting.label} {packet.reason:#x}")
        elif isinstance(packet, Connack):
            lines.append(f"CONNACK {packet.session_present} {packet.reason:#x} {_normal(packet.properties)}")
        elif isinstance(packet, Disconnect) and packet.reason in ERRORS:
            continue  # Mosquitto sends it after some errors only
        else:
            lines.append(brief(packet))
    return lines + [line for _, line in sorted(messages, key=lambda each: each[0])]


def _normal(properties: Properties) -> dict[str, Any]:
    """Return properties in the order of their identifiers, without what may differ."""
    found = {Property(number).name: properties[number] for number in sorted(properties)}
    if "ASSIGNED_CLIENT_ID" in found:
        found["ASSIGNED_CLIENT_ID"] = "…"
    if "MESSAGE_EXPIRY" in found:  # it counts down
        found["MESSAGE_EXPIRY"] = -(-found["MESSAGE_EXPIRY"] // 1000) * 1000
    return found


def _lines(events: list[str]) -> str:
    return "\n             ".join(events or ["nothing"])


def compare(
    programs: Iterable[int], seed: int, length: int = 60, limit: int = 1, tail: int = 0
) -> tuple[int, list[str]]:
    """Compare programs on a Mosquitto of their own.

    Args:
        programs: their numbers.
        seed: of all of them.
        length: steps of each.
        limit: differences after which to stop.
        tail: how many of the last steps to show in a difference; 0 shows all.

    Returns:
        The number of compared steps, and the differences.
    """
    differences: list[str] = []
    steps = 0
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Mosquitto(CONFIG, persistence=True))
        for number in programs:
            try:
                steps += Comparison(seed, number, broker, length, tail).run()
            except Different as difference:
                differences.append(str(difference))
                if len(differences) >= limit:
                    break
                stack.close()
                broker = stack.enter_context(Mosquitto(CONFIG, persistence=True))
    return steps, differences


def main(arguments: list[str] | None = None) -> int:
    """Compare as the command line says; return 1 if there was a difference."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=200, help="how many programs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--length", type=int, default=60, help="steps of a program (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=1, help="differences after which to stop (default: %(default)s)")
    parser.add_argument("--tail", type=int, default=0, help="how many of the last steps to show (default: all)")
    options = parser.parse_args(arguments)
    numbers = range(options.first, options.first + options.programs)
    steps, differences = compare(numbers, options.seed, options.length, options.limit, options.tail)
    for difference in differences:
        sys.stdout.write(f"{difference}\n\n")
    sys.stdout.write(f"{options.programs} programs, {steps} steps, {len(differences)} differences\n")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
