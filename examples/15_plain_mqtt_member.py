"""A plain MQTT program in an event network: it announces itself, receives an event and sends one.

    python examples/15_plain_mqtt_member.py [URL [URL]]

The class Lamp needs paho-mqtt and no part of this toolkit: JSON on MQTT channels is all there is to it. The second URL,
which is the first one by default, is that of the program on the other side, such as amqp://localhost for a RabbitMQ
with its MQTT plugin.
"""

import json
import queue
import sys
import threading
import time
import uuid
from urllib.parse import unquote, urlsplit

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion

TIMEOUT = 20
#: the first levels of all channels, the same for all programs of the network
PREFIX = "examples/home"


# --- the plain program


class Lamp:
    """Takes the events of ``light/switch``, and publishes to ``light/state``."""

    def __init__(self, url: str) -> None:
        broker = urlsplit(url)
        self.member = str(uuid.uuid4())  # new for each run
        self._subscribed = threading.Event()
        self._client = Client(CallbackAPIVersion.VERSION2)
        if broker.username is not None:
            self._client.username_pw_set(unquote(broker.username), unquote(broker.password or ""))
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.on_message = self._received
        self._client.connect(broker.hostname or "localhost", broker.port or 1883)
        self._client.subscribe([(f"{PREFIX}/light/switch", 1), (f"{PREFIX}-members/all", 1)])
        self._client.loop_start()
        self._subscribed.wait(TIMEOUT)
        self._announce("update")

    def _announce(self, kind: str) -> None:
        """Tell the other members what this one wants and publishes."""
        announcement = {
            "announcement": 1,
            "kind": kind,
            "member": self.member,
            "name": "lamp",
            # It counts as lost after twice this time without an announcement: repeat the update before, in a long run.
            "heartbeat": 60,
            "interests": [{"topics": "light/switch"}],
            "offers": ["light/state"],
        }
        self._client.publish(f"{PREFIX}-members/all", json.dumps(announcement), qos=1)

    def _received(self, client: Client, _: object, message: MQTTMessage) -> None:
        content = json.loads(message.payload)
        if message.topic.endswith("-members/all"):
            if content["kind"] == "query" and content["member"] != self.member:
                self._announce("update")  # a member that has just joined asks for the others
            return
        print(f"lamp: {message.topic.removeprefix(PREFIX + '/')} {content['data']}")
        event = {"event": 1, "data": {"is_on": content["data"]["on"], "watts": 7}}
        client.publish(f"{PREFIX}/light/state", json.dumps(event), qos=1)

    def close(self) -> None:
        self._announce("leave")
        self._client.disconnect()  # after the messages before it
        self._client.loop_stop()


# --- the program on the other side, with this toolkit

import messaging  # noqa: E402  # not at the top: the plain program above needs none of it
from messaging.distributedeventing import DistributedEventAdmin, EventNetwork, MemberDTO  # noqa: E402
from messaging.services import ServiceRegistry  # noqa: E402


def found(admin: DistributedEventAdmin) -> MemberDTO:
    """Wait for the announcement of the lamp."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        for each in admin.members():
            if each.name == "lamp" and each.interests:
                return each
        time.sleep(0.01)
    raise TimeoutError("the lamp has not announced itself")


def main(lamp_url: str, url: str) -> None:
    states: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
    network = EventNetwork(prefix=PREFIX)
    with (
        messaging.connect(url) as m,
        DistributedEventAdmin(ServiceRegistry(), m, network=network) as admin,
        admin.create_subscription("light/state") as light,
    ):
        light.subscribe(states.put)
        light.ready.result(TIMEOUT)
        admin.ready.result(TIMEOUT)
        lamp = Lamp(lamp_url)
        try:
            member = found(admin)
            print(f"joined: {member.name} wants {', '.join(member.interests)}")
            admin.publish_event("light/switch", {"on": True})
            print("home:", states.get(timeout=TIMEOUT))
        finally:
            lamp.close()


if __name__ == "__main__":
    given = sys.argv[1:] or ["mqtt://localhost"]
    main(given[0], given[-1])
