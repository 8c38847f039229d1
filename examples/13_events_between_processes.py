"""Three processes and one broker: a shop publishes typed events, a kitchen and a ledger receive them.

    python examples/13_events_between_processes.py [URL]

The processes know neither each other nor the place of each other: each connects its typed event bus to the broker.
"""

import contextlib
import subprocess
import sys
import threading
from dataclasses import dataclass

import messaging
from messaging import Messaging
from messaging.distributedeventing import EventNetwork
from messaging.services import ServiceRegistry
from messaging.typedevent import RangePolicy, TypedEventBus

TIMEOUT = 20
#: the processes of one network have the same prefix
NETWORK = EventNetwork(prefix="examples/shop")


@dataclass(frozen=True)
class Order:
    id: int
    dish: str


@dataclass(frozen=True)
class Closed:
    orders: int


def shop(m: Messaging) -> None:
    with (
        TypedEventBus(ServiceRegistry(), name="shop") as bus,
        bus.connect(m, "orders/*", network=NETWORK) as connection,
    ):
        connection.ready.result(TIMEOUT)
        # deliver() does not wait for the network. An event is sent only if another process wants it.
        for number, dish in enumerate(("soup", "fish", "cake"), 1):
            bus.deliver(Order(number, dish), "orders/placed")
        bus.deliver(Closed(3), "orders/closed")
    # Leaving the with block sends the events that wait.
    print("the shop has closed")


def kitchen(m: Messaging) -> None:
    closed = threading.Event()
    with TypedEventBus(ServiceRegistry(), name="kitchen") as bus:
        bus.on("orders/placed", handler=lambda order: print(f"the kitchen cooks {order.dish}"), type=Order)
        bus.on("orders/closed", handler=lambda _: closed.set(), type=Closed)
        with bus.connect(m, "orders/*", network=NETWORK) as connection:
            # Now every other process knows what this one wants: it misses no event from here on.
            connection.announced().result(TIMEOUT)
            print("ready", flush=True)
            closed.wait(TIMEOUT)


def ledger(m: Messaging) -> None:
    # The history makes the bus want the events, whether it has a handler or not. It is in memory here.
    history = {"orders/placed": RangePolicy.at_most(100)}
    closed, booked = threading.Event(), threading.Event()
    with TypedEventBus(ServiceRegistry(), name="ledger", history=history) as bus:
        bus.on("orders/closed", handler=lambda _: closed.set(), type=Closed)
        with bus.connect(m, "orders/*", network=NETWORK) as connection:
            connection.announced().result(TIMEOUT)
            print("ready", flush=True)
            closed.wait(TIMEOUT)

            # A late joiner: all orders were placed before it registers, and the history has the last two.
            def book(order: Order) -> None:
                print(f"the ledger books order {order.id} late")
                if order.id == 3:
                    booked.set()

            bus.on("orders/placed", handler=book, type=Order, history=2)
            booked.wait(TIMEOUT)


ROLES = {"shop": shop, "kitchen": kitchen, "ledger": ledger}


def start(role: str, url: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, url, role], stdout=subprocess.PIPE, encoding="utf-8")


def main(url: str) -> None:
    with contextlib.ExitStack() as stack:
        consumers = []
        for role in ("kitchen", "ledger"):
            process = stack.enter_context(start(role, url))
            stack.callback(process.kill)  # if this process fails; killing a process that has ended does nothing
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the {role} has failed")
            consumers.append(process)
        # The output of each process is shown at its end, so that the lines do not mix.
        for each in [stack.enter_context(start("shop", url)), *consumers]:
            print(each.communicate(timeout=TIMEOUT)[0], end="", flush=True)


if __name__ == "__main__":
    broker = sys.argv[1] if len(sys.argv) > 1 else "mqtt://localhost"
    if len(sys.argv) > 2:
        with messaging.connect(broker) as instance:
            ROLES[sys.argv[2]](instance)
    else:
        main(broker)
