"""MQTT 5 and 3.1.1, over paho-mqtt.

==========  ============================================================================
adapter     the contract: features, opening, losing and closing, subscriptions
outbound    what is published: windows, packet ids, QoS 1 and 2, sending again
inbound     what arrives: acknowledgement, credit, redelivery
router      which streams a message is for
mapping     contexts as properties (MQTT 5) or in an envelope (3.1.1)
envelope    the envelope
packets     PUBLISH and its acknowledgements as bytes
link        paho on the engine's loop
handshake   CONNECT and CONNACK
wire        the socket that paho is given
settings    the options of a URL
==========  ============================================================================

paho makes the connection: TCP and TLS, CONNECT, SUBSCRIBE, UNSUBSCRIBE, pings, DISCONNECT, and all that is in their
answers. The socket it reads from and writes to is ours, so PUBLISH packets and their acknowledgements need not pass
through it: they are read from and written to the same buffers beside it. That takes public API only, several times
fewer steps per message, and leaves the state of every exchange in one place: which packet ids are in use, what to send
again after reconnecting, and which acknowledgement is still owed.
"""

from adapters.mqtt.adapter import MqttAdapter
from adapters.mqtt.settings import MqttSettings

__all__ = ["MqttAdapter", "MqttSettings"]
