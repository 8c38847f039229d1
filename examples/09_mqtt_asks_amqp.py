"""Send requests from a blocking MQTT client to an asyncio AMQP service, over one RabbitMQ with its MQTT plugin.

    python examples/09_mqtt_asks_amqp.py [URL [URL]]

The first URL is for the client, the second one for the service, such as

    'mqtt://guest:guest@localhost?version=3.1.1&envelope=true' amqp://guest:guest@localhost

The plugin speaks MQTT 3.1.1, which cannot carry correlation ids, reply channels and content types. envelope=true puts
them in front of the payload. The AMQP service reads such envelopes, and answers a request in one with another one.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

from pydantic import BaseModel

import messaging

TIMETABLE = {"oslo": [("Bergen", 403), ("Narvik", 1120)], "cork": [("Dublin", 155), ("Cobh", 24)]}
TIMEOUT = 10


class Train(BaseModel):
    to: str
    minutes: int


async def trains(station: str) -> AsyncIterator[Train]:
    for to, minutes in TIMETABLE[station]:
        await asyncio.sleep(0.01)  # a slow lookup
        yield Train(to=to, minutes=minutes)


async def fastest(station: str) -> Train:
    return min([train async for train in trains(station)], key=lambda train: train.minutes)


def ask(url: str) -> None:
    with messaging.connect(url) as m:
        train: Train = m.request("examples/trains/fastest", "cork", Train, qos=1, timeout=TIMEOUT).result()
        print(f"fastest from Cork: {train.to}, {train.minutes} minutes")

        # Many replies to one request: an iterator that ends when the generator of the service ends.
        with m.request_many("examples/trains/all", "oslo", Train, qos=1, timeout=TIMEOUT) as replies:
            for reply in replies:
                train = reply.value()
                print(f"from Oslo: {train.to}, {train.minutes} minutes")


async def main(client_url: str, service_url: str) -> None:
    async with messaging.connect(service_url) as service:
        # Coroutines and async generators run on the event loop that registers them, this one.
        service.reply("examples/trains/fastest", fastest)
        service.reply("examples/trains/all", trains)
        async with asyncio.timeout(TIMEOUT):
            await service.whiteboard.ready()
        # The client could be another program. It needs to know the channels only.
        await asyncio.to_thread(ask, client_url)


if __name__ == "__main__":
    urls = sys.argv[1:] or ["memory://examples"]
    asyncio.run(main(urls[0], urls[-1]))
