"""Many replies to one request: a handler service streams quotes until the requester has seen enough (RFC 5.7.5).

python examples/08_stock_quotes.py [URL]
"""

import itertools
import sys
import threading

import reactivex
from pydantic import BaseModel
from reactivex import operators as ops

import messaging
from messaging import Message, MessageContextBuilder, Messaging
from messaging.replyto import CHANNEL, TARGET, ReplyToManySubscriptionHandler
from messaging.services import ServiceRegistration

CENTS = [101_20, 101_35, 100_90, 101_05]
WANTED = 3


class Quote(BaseModel):
    symbol: str
    cents: int


class Quotes:
    """A ReplyToManySubscriptionHandler: one request, any number of replies."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def handle_responses(self, request: Message, builder: MessageContextBuilder) -> reactivex.Observable[Message]:
        symbol = request.value(str)
        cents = itertools.cycle(CENTS)

        def quote(_: int) -> Message:
            # Where to, and in answer to what, the builder knows.
            return builder.content(Quote(symbol=symbol, cents=next(cents))).build_message()

        # It would never end by itself. Once the requester wants no more, it is disposed of. A generator, sync or async,
        # does as well; it is closed then.
        return reactivex.interval(0.02).pipe(ops.map(quote), ops.finally_action(self.stopped.set))


def serve(m: Messaging, quotes: Quotes) -> ServiceRegistration:
    # Any object can be a handler: its properties say of what, and the whiteboards they mean find it in the registry.
    properties = {TARGET: f"(osgi.messaging.name={m.name})", CHANNEL: "examples/quotes"}
    registration = m.services.register(ReplyToManySubscriptionHandler, quotes, properties)
    m.whiteboard.ready().result(timeout=20)
    return registration


def quote_of(reply: Message) -> Quote:
    quote: Quote = reply.value()
    return quote


def main(url: str) -> None:
    quotes = Quotes()
    with messaging.connect(url, name="exchange") as exchange, messaging.connect(url) as m, serve(exchange, quotes):
        request = m.context_builder().channel("examples/quotes").content("ACME").build_message()
        done = threading.Event()
        # The request is sent at once. The replies are a stream like any other: an observable, an iterator, and so on,
        # with a bounded buffer. Disposing it, here as take() completes, tells the handler to stop.
        m.reply_to_many.publish_with_reply_many(request, model=Quote).pipe(
            ops.map(quote_of), ops.take(WANTED)
        ).subscribe(
            on_next=lambda quote: print(f"{quote.symbol}: {quote.cents / 100:.2f}"),
            on_error=lambda error: print(f"failed: {error}"),
            on_completed=done.set,
        )
        print("seen enough:", done.wait(timeout=20))
        print("the handler was told to stop:", quotes.stopped.wait(timeout=20))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples")
