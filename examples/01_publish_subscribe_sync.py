"""Publish and subscribe with plain, blocking calls.

    python examples/01_publish_subscribe_sync.py [URL]

URL names a broker, such as mqtt://localhost or amqp://user:password@host/vhost. The default is a broker inside this
process.
"""

import sys

import messaging

WEATHER = {"oslo": "snow", "rome": "sunny", "cork": "rain"}


def main(url: str) -> None:
    # Entering the block waits until the broker has confirmed the subscription. Leaving it sends the pending messages
    # and disconnects. "+" stands for any one level of a channel. qos=1 asks for acknowledged delivery, which MQTT does
    # not do by default.
    with messaging.connect(url) as m, m.subscribe("examples/weather/+", qos=1) as stream:
        # publish() does not wait. It returns a promise, so that many messages can be in flight at once.
        promises = [m.publish(f"examples/weather/{city}", text, qos=1) for city, text in WEATHER.items()]
        for promise in promises:
            # Returns when the broker has taken responsibility for the message, otherwise raises.
            promise.result(timeout=10)

        for number, message in enumerate(stream, start=1):
            # The context has the channel of a message. value() decodes the payload by its content type; value(str)
            # decodes it as text, with or without a content type.
            print(f"{message.context.channel}: {message.value(str)}")
            # Requesting the next message acknowledges this one. So does closing the stream.
            if number == len(WEATHER):
                break


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples")
