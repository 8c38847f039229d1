"""Send requests and answer them with pydantic models, in sync and asyncio code, and handle the errors.

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
    # Requests are validated against the annotation. The return value is sent as JSON. With queue="..." several
    # programs share the requests. reply() returns when the broker has confirmed the subscription.
    @m.reply("examples/price")
    def price(order: Order) -> Price:
        if order.item not in PRICES:
            raise LookupError(f"no {order.item} today")
        return Price(total=PRICES[order.item] * order.count)


def ask(m: Messaging) -> None:
    # request() does not wait. It returns a promise of the reply, or of an object if it has a model.
    promise = m.request("examples/price", Order(item="apple", count=4), Price, timeout=TIMEOUT)
    found: Price = promise.result()
    print(f"four apples: {found.total:.2f}")


async def ask_async(url: str) -> None:
    async with messaging.connect(url) as m:
        # Many requests may be pending at once; each gets its own reply. Cancelling the awaiting task cancels a request.
        orders = [Order(item=item, count=2) for item in PRICES]
        prices = await asyncio.gather(*[m.request("examples/price", order, Price, timeout=TIMEOUT) for order in orders])
        for order, price in zip(orders, prices, strict=True):
            print(f"two of {order.item}: {price.total:.2f}")


def fail(m: Messaging) -> None:
    # If the handler raises, or the request does not fit its model, the requester gets the kind and text of the error.
    try:
        m.request("examples/price", Order(item="cake", count=1), Price, timeout=TIMEOUT).result()
    except ReplyError as error:
        print(f"refused: {error.kind}: {error.reason}")
    try:
        m.request("examples/price", {"item": "apple", "count": -1}, Price, timeout=TIMEOUT).result()
    except ReplyError as error:
        print(f"does not fit: {error.kind}")

    # A request with qos=1 and without a responder fails at once where the protocol reports that. MQTT 3.1.1 does not.
    try:
        m.request("examples/unserved", "hello?", qos=1, timeout=TIMEOUT).result()
    except (UnroutableError, DeadlineError) as error:
        print(f"no responder: {type(error).__name__}")
    # Without confirmation, no protocol reports it. The request times out, as with a handler that hangs.
    try:
        m.request("examples/unserved", "hello?", qos=0, timeout=0.3).result()
    except OutcomeUnknownError as error:
        print(f"no reply: {type(error).__name__}")


def main(url: str) -> None:
    # The responder has its own connection. It could be another program on another machine.
    with messaging.connect(url) as responder, messaging.connect(url) as m:
        serve(responder)
        ask(m)
        asyncio.run(ask_async(url))
        fail(m)


if __name__ == "__main__":
    # The responder logs the exceptions of its handlers with a traceback. This example provokes them and hides the log.
    logging.basicConfig(level=logging.CRITICAL)
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples")
