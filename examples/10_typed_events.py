"""Deliver typed events within a process, with filters, history and a monitor (OSGi Typed Event 1.1).

python examples/10_typed_events.py
"""

import asyncio
import threading
from dataclasses import dataclass

from pydantic import BaseModel

from messaging.services import ServiceRegistry
from messaging.typedevent import (
    MonitorEvent,
    RangePolicy,
    TypedEventBus,
    TypedEventConstants,
    TypedEventHandler,
)


@dataclass(frozen=True)
class Item:
    name: str
    cents: int


@dataclass(frozen=True)
class Order:
    id: int
    total: int
    items: tuple[Item, ...] = ()


class Receipt(BaseModel):
    """Another view of an Order: it has some of its fields, converted."""

    id: str
    total: float
    currency: str = "EUR"


class Audit(TypedEventHandler[Order]):
    """A handler as a service, which the bus finds in the registry."""

    def notify(self, topic: str, event: Order) -> None:
        print(f"audit: {topic} {event.id}")


def watch(bus: TypedEventBus) -> None:
    @bus.on("orders/*", filter="(total>=1000)")
    def large(event: Order) -> None:
        print(f"large: {event.id} with {len(event.items)} items")

    @bus.on("orders/placed", type=Receipt)
    def receipt(topic: str, event: Receipt) -> None:
        print(f"receipt for {topic}: {event!r}")

    @bus.on_unhandled
    def unhandled(topic: str, event: dict[str, object]) -> None:
        print(f"unhandled {topic}: {event}")


async def late(bus: TypedEventBus) -> None:
    """Register a handler after the events; it receives the last two of them."""
    seen: list[int] = []
    enough = asyncio.Event()

    @bus.on("orders/+", history=2)
    async def remember(event: Order) -> None:  # runs on this event loop
        seen.append(event.id)
        if len(seen) == 3:
            enough.set()

    bus.deliver(Order(5, 50), "orders/stored")
    async with asyncio.timeout(20):
        await enough.wait()
    print("late:", seen)


def main() -> None:
    services = ServiceRegistry()
    # The history keeps two orders of each topic.
    with TypedEventBus(services, history={"orders/*": RangePolicy.at_most(2)}) as bus:
        watch(bus)
        audit = services.register(
            TypedEventHandler, Audit(), {TypedEventConstants.TYPED_EVENT_TOPICS: "orders/cancelled"}
        )

        def publish(event: Order, topic: str) -> None:
            bus.deliver(event, topic)
            # Delivery is asynchronous. flush() waits until all earlier events are handled.
            bus.flush().result(timeout=20)

        publish(Order(1, 250), "orders/placed")
        publish(Order(2, 4200, (Item("lamp", 4000), Item("bulb", 200))), "orders/changed")
        bus.deliver_untyped("weather/report", {"celsius": 21.5, "wind": {"from": "NW"}})
        publish(Order(3, 999), "orders/cancelled")

        # Handlers are services: changed properties select other events.
        audit.update({TypedEventConstants.TYPED_EVENT_TOPICS: "orders/returned"})
        publish(Order(4, 10), "orders/returned")

        asyncio.run(late(bus))

        done = threading.Event()
        events: list[MonitorEvent] = []
        bus.monitor.monitor_events(10, True).subscribe(events.append, on_completed=done.set)
        print("kept:", done.wait(timeout=20) and [event.event_data["id"] for event in events])


if __name__ == "__main__":
    main()
