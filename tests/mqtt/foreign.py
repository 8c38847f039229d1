"""Clients that are not ours: plain paho-mqtt, on a thread of its own, and on a socket in memory."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any, Self

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from messaging.testing.brokers import Mosquitto
from messaging.testing.waiting import PATIENCE, Recorder


class Foreign:
    """An MQTT 5 client.

    Args:
        broker: where to connect to.
        clean_start: whether a session of ``client_id`` is forgotten.
        **properties: of CONNECT.
    """

    def __init__(self, broker: Mosquitto, client_id: str = "", *, clean_start: bool = True, **properties: Any) -> None:
        self._broker = broker
        self._clean_start = clean_start
        self._properties = properties
        self._messages: queue.Queue[mqtt.MQTTMessage] = queue.Queue()
        self._answers: Recorder[str] = Recorder()
        client = self._client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id, protocol=mqtt.MQTTv5)
        client.on_connect = lambda *_: self._answers.append("CONNACK")
        client.on_subscribe = lambda *_: self._answers.append("SUBACK")
        client.on_message = lambda _client, _data, message: self._messages.put(message)

    def __enter__(self) -> Self:
        self._client.connect(
            self._broker.host,
            self._broker.port,
            clean_start=self._clean_start,
            properties=_made(PacketTypes.CONNECT, self._properties),
        )
        self._client.loop_start()
        self._answers.wait_for(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def subscribe(self, topic: str, qos: int = 0) -> None:
        """Subscribe, and wait for the answer."""
        count = len(self._answers)
        self._client.subscribe(topic, qos)
        self._answers.wait_for(count + 1)

    def publish(self, topic: str, payload: bytes, qos: int = 0, *, retain: bool = False, **properties: Any) -> None:
        """Publish, and wait until that is done. A list is a property given several times."""
        info = self._client.publish(topic, payload, qos, retain, _made(PacketTypes.PUBLISH, properties))
        info.wait_for_publish(PATIENCE)

    def receive(self) -> mqtt.MQTTMessage:
        """The next message."""
        return self._messages.get(timeout=PATIENCE)


def _made(kind: int, values: dict[str, Any]) -> Properties:
    properties = Properties(kind)  # type: ignore[no-untyped-call]
    for name, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            setattr(properties, name, each)
    return properties


class MemorySocket:
    """A socket of paho with both ends in memory: what paho writes can be compared with packets of this project.

    Attributes:
        client: of paho.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.client: mqtt.Client = _MemoryClient(self, *arguments, **keywords)
        self._from_paho = bytearray()

    def connect(self, connect: Callable[[str, int], object]) -> None:
        """Have ``connect(host, port)`` call ``client.connect`` for this socket."""
        connect("memory", 1)  # neither is used

    def take(self) -> bytes:
        """Return the packets that paho has written since the last call."""
        data = bytes(self._from_paho)
        self._from_paho.clear()
        return data

    # --- the methods that paho calls

    def recv(self, size: int) -> bytes:
        """Return nothing: the broker is silent."""
        raise BlockingIOError

    def send(self, data: bytes | bytearray) -> int:
        """Keep ``data`` for :meth:`take`."""
        self._from_paho += data
        return len(data)

    def setblocking(self, flag: bool) -> None:
        """Do nothing: it never blocks."""

    def fileno(self) -> int:
        """Return -1: there is no descriptor."""
        return -1

    def close(self) -> None:
        """Do nothing: packets that were written can still be taken."""


class _MemoryClient(mqtt.Client):
    """A client that uses a :class:`MemorySocket`."""

    def __init__(self, memory: MemorySocket, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._memory = memory

    def _create_socket(self) -> MemorySocket:
        return self._memory
