"""Publish and subscribe with plain, blocking calls.

    python examples/01_publish_subscribe_sync.py [URL]

URL is a broker, such as mqtt://localhost or amqp://user:password@host/vhost. Without one, it is in this process.
"""

import sys

import messaging

WEATHER = {"oslo": "snow", "rome": "sunny", "cork": "rain"}


def main(url: str) -> None:
    # Inside this block the broker has confirmed the subscription; leaving it sends what still waits, and disconnects.
    # "+" stands for any one level of a channel. qos=1 asks for acknowledged delivery: on MQTT that has to be said.
    with messaging.connect(url) as m, m.subscribe("examples/weather/+", qos=1) as stream:
        # publish() does not wait: it returns a promise, so that many can be on their way at once ...
        promises = [m.publish(f"examples/weather/{city}", text, qos=1) for city, text in WEATHER.items()]
        for promise in promises:
            # ... and now the broker has taken responsibility for the message, or this raises.
            promise.result(timeout=10)

        for number, message in enumerate(stream, start=1):
            # The context says where a message came from. value() decodes the payload by its content type; value(str)
            # asks for text, whatever the sender said about it, or could not say.
            print(f"{message.context.channel}: {message.value(str)}")
            # Asking for the next message acknowledges this one, and so does closing the stream.
            if number == len(WEATHER):
                break


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples")
