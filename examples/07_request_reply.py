"""Requests and replies with pydantic models: a handler, a sync and an asyncio requester, and what may go wrong.

python examples/07_request_reply.py [URL]
"""

import asyncio
import logging
import sys

from pydantic import BaseModel, Field

import messaging
from messaging import DeadlineError, Messaging, OutcomeUnknownError, ReplyError, UnroutableError

PRICES = {"apple": 0.25, "bread": 3.5}
TIMEOUT = 10


class Order(BaseModel):
    item: str
    count: int = Field(gt=0)


class Price(BaseModel):
    total: float


def serve(m: Messaging) -> None:
    # The requests are validated against the annotation; what the function returns travels as JSON. With queue="..."
    # several programs share the requests between them. reply() returns once the broker has confirmed the subscription.
    @m.reply("examples/price")
    def price(order: Order) -> Price:
        if order.item not in PRICES:
            raise LookupError(f"no {order.item} today")
        return Price(total=PRICES[order.item] * order.count)


def ask(m: Messaging) -> None:
    # request() does not wait: it returns the promise of the reply. With a model that is the promise of such an object.
    promise = m.request("examples/price", Order(item="apple", count=4), Price, timeout=TIMEOUT)
    found: Price = promise.result()
    print(f"four apples: {found.total:.2f}")


async def ask_async(url: str) -> None:
    async with messaging.connect(url) as m:
        # Many requests may be under way at once; each gets its own reply. Cancelling who awaits one cancels it.
        orders = [Order(item=item, count=2) for item in PRICES]
        prices = await asyncio.gather(*[m.request("examples/price", order, Price, timeout=TIMEOUT) for order in orders])
        for order, price in zip(orders, prices, strict=True):
            print(f"two of {order.item}: {price.total:.2f}")


def go_wrong(m: Messaging) -> None:
    # What a handler raises, and what does not fit its model, its requester is told: the kind and the text, no more.
    try:
        m.request("examples/price", Order(item="cake", count=1), Price, timeout=TIMEOUT).result()
    except ReplyError as error:
        print(f"refused: {error.kind}: {error.reason}")
    try:
        m.request("examples/price", {"item": "apple", "count": -1}, Price, timeout=TIMEOUT).result()
    except ReplyError as error:
        print(f"does not fit: {error.kind}")

    # A request with qos 1 that nobody takes fails at once, where the protocol tells. MQTT 3.1.1 does not ...
    try:
        m.request("examples/nobody", "hello?", qos=1, timeout=TIMEOUT).result()
    except (UnroutableError, DeadlineError) as error:
        print(f"nobody is there: {type(error).__name__}")
    # ... nor does anybody tell of one without confirmation. Then there is just no reply, as from a handler that hangs.
    try:
        m.request("examples/nobody", "hello?", qos=0, timeout=0.3).result()
    except OutcomeUnknownError as error:
        print(f"no reply: {type(error).__name__}")


def main(url: str) -> None:
    # The responder has a connection of its own: it may as well be another program on another machine.
    with messaging.connect(url) as responder, messaging.connect(url) as m:
        serve(responder)
        ask(m)
        asyncio.run(ask_async(url))
        go_wrong(m)


if __name__ == "__main__":
    # The responder logs what its handlers raise, with a traceback. Here that is meant to happen, and not to be shown.
    logging.basicConfig(level=logging.CRITICAL)
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples")
