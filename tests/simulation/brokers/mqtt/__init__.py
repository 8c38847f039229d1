"""A broker for MQTT 3.1.1 and 5 at the level of bytes, driven by the simulated world.

Mosquitto 2.0 is the model; :mod:`tests.simulation.brokers.mqtt.compare` replays random programs against both.
"""

from tests.simulation.brokers.mqtt.broker import MqttBroker
from tests.simulation.brokers.mqtt.settings import MqttCounters, MqttFaults, MqttSettings

__all__ = ["MqttBroker", "MqttCounters", "MqttFaults", "MqttSettings"]
