"""Answer one request with many replies, until the requester cancels it (RFC 5.7.5).

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
    """A ReplyToManySubscriptionHandler: any number of replies to a request."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def handle_responses(self, request: Message, builder: MessageContextBuilder) -> reactivex.Observable[Message]:
        symbol = request.value(str)
        cents = itertools.cycle(CENTS)

        def quote(_: int) -> Message:
            # The builder has the reply channel and the correlation id.
            return builder.content(Quote(symbol=symbol, cents=next(cents))).build_message()

        # The observable is endless. It is disposed of when the requester cancels the request. A sync or async generator
        # works too; it is closed then.
        return reactivex.interval(0.02).pipe(ops.map(quote), ops.finally_action(self.stopped.set))


def serve(m: Messaging, quotes: Quotes) -> ServiceRegistration:
    # Any object can be a handler. Its properties name the channel and the whiteboard, which finds it in the registry.
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
        # The request is sent at once. The replies are a stream with a bounded buffer, like any other stream: an
        # observable, an iterator and an async iterator. Disposing it tells the handler to stop; take() does that here.
        m.reply_to_many.publish_with_reply_many(request, model=Quote).pipe(
            ops.map(quote_of), ops.take(WANTED)
        ).subscribe(
            on_next=lambda quote: print(f"{quote.symbol}: {quote.cents / 100:.2f}"),
            on_error=lambda error: print(f"failed: {error}"),
            on_completed=done.set,
        )
        print("all received:", done.wait(timeout=20))
        print("handler stopped:", quotes.stopped.wait(timeout=20))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples")
