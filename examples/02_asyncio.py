"""The same objects in asyncio: ``async with``, ``await`` and ``async for``.

python examples/02_asyncio.py [URL]
"""

import asyncio
import sys

import messaging
from messaging import MessageStream, Messaging

STEPS = 5


async def count_down(m: Messaging) -> None:
    for number in range(STEPS, -1, -1):
        # Awaiting the promise waits until the broker has the message. An int is sent as JSON.
        await m.publish("examples/rocket/count", number, qos=1)
        await asyncio.sleep(0.05)


async def watch(stream: MessageStream) -> None:
    async for message in stream:
        number = message.value(int)
        print("lift-off" if number == 0 else number)
        if number == 0:
            break


async def main(url: str) -> None:
    # On a thread with a running event loop, connect() does not block. "async with" waits for the connection, and for
    # the subscription.
    async with (
        messaging.connect(url) as m,
        m.subscribe("examples/rocket/count", qos=1) as stream,
        asyncio.timeout(20),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(watch(stream))
        tasks.create_task(count_down(m))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples"))
