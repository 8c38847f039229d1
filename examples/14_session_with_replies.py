"""Events with replies and with an end (RFC 214): a session, private topics and correlation ids.

python examples/14_session_with_replies.py [URL]
"""

import queue
import sys
from dataclasses import dataclass

import messaging
from messaging.distributedeventing import (
    DistributableEvent,
    DistributableEventConsumer,
    DistributedEventAdmin,
    EventNetwork,
    PushEvent,
)
from messaging.services import ServiceRegistry

TIMEOUT = 20
#: the processes of one network have the same prefix
NETWORK = EventNetwork(prefix="examples/auction")


@dataclass(frozen=True)
class Lot:
    name: str
    price: int


@dataclass(frozen=True)
class Bid:
    bidder: str
    price: int


class Bids(DistributableEventConsumer[Bid]):
    """Receives the replies, as whole events: the correlation id tells which lot a bid is for."""

    def __init__(self) -> None:
        self.received: queue.SimpleQueue[tuple[str | None, Bid]] = queue.SimpleQueue()

    def accept(self, event: PushEvent[DistributableEvent[Bid]]) -> None:
        self.received.put((event.value.correlation_id, event.value.data))


def bid(admin: DistributedEventAdmin, name: str, budget: int) -> None:
    """Answer each lot that the bidder can pay with an event on its private topic."""

    @admin.on("lots/*", type=Lot, is_whole=True)
    def consider(event: PushEvent[DistributableEvent[Lot]]) -> None:
        lot = event.value
        if lot.data.price < budget and lot.reply_to is not None:
            offer = Bid(name, lot.data.price + 10)
            admin.publish_event(lot.reply_to, offer, correlation_id=lot.correlation_id)


def watch(admin: DistributedEventAdmin) -> queue.SimpleQueue[str]:
    """Follow sessions to their end. A consumer without is_session_aware receives the data only."""
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()

    @admin.on("lots/*", type=Lot, is_session_aware=True)
    def follow(event: PushEvent[Lot]) -> None:
        seen.put(f"on offer: {event.value.name}" if event.kind == "data" else f"the session ended: {event.kind}")

    return seen


def auction(admin: DistributedEventAdmin) -> None:
    bids = Bids()
    # All events of the session have its private topic in reply_to. It is served until the session ends.
    with admin.create_session("lots/today", Lot, bids, Bid) as session:
        # Replies may come at once: wait until the broker has the subscription to the private topic.
        admin.announced(TIMEOUT).result()
        session.publish_event(Lot("lamp", 40), "lot-1")
        session.publish_event(Lot("clock", 90), "lot-2")
        received = [bids.received.get(timeout=TIMEOUT) for _ in range(3)]
        for correlation_id, offer in sorted(received, key=lambda each: (str(each[0]), each[1].bidder)):
            print(f"{correlation_id}: {offer.bidder} bids {offer.price}")
        # The promise resolves when every consumer, in this process and in others, has taken the event.
        session.publish_event_with_notification(Lot("vase", 500), "lot-3", timeout=TIMEOUT).result()
        print("everyone has seen the vase")
    # Leaving the with block closes the session; an exception would end it with an error event.


def main(url: str) -> None:
    # Each side has its own connection and its own services. They could be programs on two machines.
    with (
        messaging.connect(url) as here,
        messaging.connect(url) as there,
        DistributedEventAdmin(ServiceRegistry(), here, name="auctioneer", network=NETWORK) as auctioneer,
        DistributedEventAdmin(ServiceRegistry(), there, name="hall", network=NETWORK) as hall,
    ):
        bid(hall, "Ada", 60)
        bid(hall, "Grace", 100)
        seen = watch(hall)
        auctioneer.ready.result(TIMEOUT)
        hall.announced(TIMEOUT).result()  # the auctioneer knows the consumers in the hall
        auction(auctioneer)
        for _ in range(4):
            print(seen.get(timeout=TIMEOUT))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples")
