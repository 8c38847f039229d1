"""Run a gateway in a program: select and convert readings, pass on requests, and look at its counters.

    python examples/18_gateway.py [URL]

The plant and the cloud are channels of one broker here. Each instance could be another broker with another protocol.
`messaging gateway run FILE` runs the same settings from a file: see examples/gateway.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Callable

import messaging
from messaging import Message, Messaging, MessagingError
from messaging.gateway import Gateway, GatewaySettings

TIMEOUT = 10


def settings(url: str, folder: str) -> GatewaySettings:
    # The keys of a configuration file. What does not fit is an error that names the key.
    return GatewaySettings.model_validate(
        {
            "name": "plant-7",
            "data": folder,  # accepted messages are here until the cloud has confirmed them
            "instances": {"plant": {"url": url}, "cloud": {"url": url}},
            "routes": {
                "telemetry": {
                    "from": {"instance": "plant", "channel": "plant/{site}/{device}/telemetry"},
                    "to": {"instance": "cloud", "channel": "cloud/{site}/{device}"},
                    "where": "(quality=good)",
                    "transform": [
                        {"rename": {"t": "celsius"}},
                        {"unit": {"field": "celsius", "from": "degF", "to": "degC"}},
                        {"select": ["celsius"]},
                    ],
                    "deadband": {"field": "celsius", "absolute": 0.5},
                    "buffer": {"full": "block"},
                }
            },
            "requests": {
                "ask": {
                    "from": {"instance": "cloud", "channel": "ask/{device}"},
                    "to": {"instance": "plant", "channel": "plant/{device}/ask"},
                }
            },
        }
    )


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the gateway does not respond")
        time.sleep(0.02)


def send_readings(m: Messaging, gateway: Gateway) -> None:
    route = gateway.route("telemetry")

    def is_subscribed() -> bool:
        # The gateway connects and subscribes in the background: brokers may be away when it starts.
        m.publish("plant/probe/probe/telemetry", {"quality": "none"}).result(TIMEOUT)
        return route.report().received > 0

    wait(is_subscribed)
    # The second is within the deadband of the first, the third has the wrong quality.
    for t, quality in [(71.6, "good"), (71.8, "good"), (500, "bad"), (80.6, "good")]:
        m.publish("plant/bonn/d1/telemetry", {"t": t, "quality": quality}).result(TIMEOUT)
    wait(lambda: route.report().published == 2)


def ask_device(m: Messaging) -> str:
    # A program in the cloud asks a device of the plant, whose broker it cannot reach.
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            return str(m.request("ask/d1", "how are you?", timeout=1).result().value())
        except MessagingError:
            if time.monotonic() > deadline:
                raise


def main(url: str) -> None:
    arrived: list[str] = []

    def note(message: Message) -> None:
        arrived.append(f"{message.context.channel}: {message.value()['celsius']:.1f} °C")

    with (
        tempfile.TemporaryDirectory() as folder,
        messaging.connect(url) as cloud,
        messaging.connect(url) as device,
        Gateway(settings(url, folder)) as gateway,
    ):
        cloud.on("cloud/bonn/+", note)
        device.reply("plant/d1/ask", lambda question: f"{question} Fine!")
        send_readings(device, gateway)
        wait(lambda: len(arrived) == 2)
        for line in arrived:
            print(line)
        print(ask_device(cloud))
        report = gateway.report().routes[0]
        print(f"{report.published} published, {report.buffer.depth} stored, {report.buffer.dead_letters} dead letters")


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://18")
