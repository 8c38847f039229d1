"""MQTT 5 and 3.1.1, with the properties and reason codes of paho-mqtt.

==================  ==================================================================================
adapter             the contract
capabilities        features, extensions and checks
session             publishing, and what a lost connection leaves for the next one; in_flight: its window
inbound             received messages; answers: when each is acknowledged; leftovers: those without a stream
router, streams     the streams that a message goes to; copies: several copies of one message
subscriptions       streams at the broker; sharing: whether a 3.1.1 broker has shared subscriptions
mapping             contexts as properties (MQTT 5) or in an envelope (3.1.1)
connection          one connection: connecting, reading, control packets, keepalive
transport           its socket: gathered writes; websocket: its framing
packets             packets as bytes
settings            the options of a URL
handshake           CONNECT, CONNACK and DISCONNECT, and what a broker grants
==================  ==================================================================================

Data goes down: session, transport. Only outcomes come up, once: messages received and written, connections lost.

paho packs and unpacks the properties of CONNECT, CONNACK and the broker's DISCONNECT, and names the reason codes. All
packets are this package's own, read from and written to its own connection. That takes several times fewer steps per
message, and keeps the state of every handshake in one place: which packet ids are in use, which packets to send again
after reconnecting, and which acknowledgements are still owed.
"""

from messaging_adapters.mqtt.adapter import MqttAdapter
from messaging_adapters.mqtt.settings import MqttSettings

__all__ = ["MqttAdapter", "MqttSettings"]
