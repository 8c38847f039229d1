"""Acknowledge messages by a filter or by hand, and receive rejected messages from a dead-letter channel.

python examples/04_acknowledgement.py [URL]
"""

import sys

import messaging
from messaging import Features, Message, Messaging

ORDERS = [{"id": 1, "total": 20}, {"id": 2, "total": -5}, {"id": 3, "total": 7}]
TIMEOUT = 10


def is_plausible(message: Message) -> bool:
    return bool(message.value(dict)["total"] > 0)


def by_filter(m: Messaging) -> None:
    # Direct acknowledgement: the filter decides before a message enters the stream. A refused message is rejected. With
    # a dead-letter channel it goes there at once, instead of being redelivered.
    context = (
        m.acknowledge_context_builder()
        .filter_acknowledge(is_plausible)
        .message_context_builder()
        .channel("examples/orders")
        .extension_entry(Features.EXTENSION_QOS, "1")
        .extension_entry(Features.EXTENSION_DEAD_LETTER_CHANNEL, "examples/refused")
        .build_context()
    )
    with m.subscribe("examples/refused", qos=1) as refused, m.subscription.subscribe(context) as orders:
        for order in ORDERS:
            m.publish("examples/orders", order, qos=1)
        print("accepted:", [orders.receive(TIMEOUT).value(dict)["id"] for _ in range(2)])
        print("refused:", refused.receive(TIMEOUT).value(dict)["id"])


def by_hand(m: Messaging) -> None:
    # The consumer acknowledges or rejects, at any time. After three rejected deliveries a message is dead-lettered.
    with (
        m.subscribe("examples/returned", qos=1) as returned,
        m.subscribe(
            "examples/parcels",
            acknowledge="manual",
            max_deliveries=3,
            dead_letter_channel="examples/returned",
            qos=1,
        ) as parcels,
    ):
        m.publish("examples/parcels", "an unwanted parcel", qos=1)
        for attempt in (1, 2, 3):
            parcel = parcels.receive(TIMEOUT)
            print(f"attempt {attempt}: rejected: {parcel.reject()}")
        letter = returned.receive(TIMEOUT)
        # On protocols with headers, a header has the reason.
        reason = letter.context.extensions.get("headers", {}).get("x-dead-letter-reason", "unknown")
        print(f"returned: {letter.value(str)} ({reason})")


if __name__ == "__main__":
    with messaging.connect(sys.argv[1] if len(sys.argv) > 1 else "memory://examples") as m:
        by_filter(m)
        by_hand(m)
