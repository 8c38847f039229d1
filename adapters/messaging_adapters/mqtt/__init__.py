"""MQTT 5 and 3.1.1, over paho-mqtt.

==================  ==================================================================================
adapter             the contract: opening, losing and closing
capabilities        features, extensions and checks
subscriptions       streams at the broker; sharing: whether a 3.1.1 broker has shared subscriptions
last_will           the last will
login               credentials that change; reauthentication: AUTH
outbound            published messages: windows, packet ids, QoS 1 and 2, sending again
inbound             received messages; answers: when each is acknowledged; leftovers: those without a stream
router, streams     the streams that a message goes to
mapping             contexts as properties (MQTT 5) or in an envelope (3.1.1)
packets             PUBLISH and its acknowledgements as bytes
link                one connection, and the list of its parts
settings            the options of a URL
==================  ==================================================================================

paho makes CONNECT, SUBSCRIBE, UNSUBSCRIBE and DISCONNECT, and reads CONNACK and DISCONNECT. The connection is this
package's own: PUBLISH packets, all answers and pings are read from and written to its buffers and do not pass through
paho. That takes several times fewer steps per message, and keeps the state of every handshake in one place: which
packet ids are in use, which packets to send again after reconnecting, and which acknowledgements are still owed.
"""

from messaging_adapters.mqtt.adapter import MqttAdapter
from messaging_adapters.mqtt.settings import MqttSettings

__all__ = ["MqttAdapter", "MqttSettings"]
