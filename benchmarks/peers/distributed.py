"""Events between two processes: the distributed event admin and the connected typed event bus, and iPOPO's MQTT bridge.

An event has the number of the message, or when it was due, and a text that fills it up. A consumer makes the payload
that the tally counts of both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import messaging
from benchmarks.peers import job
from benchmarks.peers.job import STAMP, Job, Tally

if TYPE_CHECKING:
    from messaging.distributedeventing import DistributedEventAdmin
    from messaging.typedevent import BusConnection, TypedEventBus

TOPIC: Final = "benchmark/messages"
#: bytes of an event that are neither the text nor the number: the keys
_OTHER: Final = 24
#: how long connecting and announcing may take, seconds
_SETUP: Final = 30.0
_STEP: Final = 0.02
#: events that may wait for the outbox: none is dropped
_LIMIT: Final = 1_000_000


def events(job: Job) -> Iterator[dict[str, Any]]:
    """The events to publish."""
    text = "x" * max(1, job.size - _OTHER)
    for payload in job.blocking_payloads():
        yield {"stamp": int.from_bytes(payload[:STAMP], "big"), "text": text}


def counted(job: Job, tally: Tally) -> Callable[[dict[str, Any]], None]:
    """Return what a consumer calls with each event."""
    received, filler, size = tally.received, b"x" * (job.size - STAMP), max(1, job.size - _OTHER)

    def count(event: dict[str, Any]) -> None:
        if len(event["text"]) != size:
            received(b"")  # damaged: it counts as such
        else:
            received(event["stamp"].to_bytes(STAMP, "big") + filler)

    return count


def _connect(job: Job) -> messaging.Messaging:
    if job.style.endswith("amqp"):
        return messaging.connect(f"amqp://{job.host}:{job.port}")
    return messaging.connect(f"mqtt://{job.host}:{job.port}?version={job.version}&max_inflight={job.window}")


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SETUP
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit("the other process was not found")
        time.sleep(_STEP)


def publish(job: Job) -> None:
    if job.style == "ipopo":
        _publish_ipopo(job)
        return
    with ExitStack() as stack:
        m = stack.enter_context(_connect(job))
        publish, is_known = _publisher(job, m, stack)
        _wait(is_known)
        job.ready()
        job.wait_for_go()
        start = time.monotonic()
        for event in events(job):
            publish(event)
        job.finish(start=start, end=time.monotonic())


def _publisher(
    job: Job, m: messaging.Messaging, stack: ExitStack
) -> tuple[Callable[[dict[str, Any]], object], Callable[[], bool]]:
    """Return what publishes an event, and what tells whether the subscriber is known."""
    if job.style.startswith("admin"):
        admin = stack.enter_context(_admin(m))
        return lambda event: admin.publish_event(TOPIC, event), lambda: _is_wanted(admin.get_dto().node)
    bus, connection = _bus(m, stack)
    return lambda event: bus.deliver_untyped(TOPIC, event), lambda: _is_wanted(connection.get_dto().node)


def _is_wanted(node: Any) -> bool:
    return node.is_settled and any(each.interests for each in node.members)


def _admin(m: messaging.Messaging, **options: Any) -> DistributedEventAdmin:
    from messaging.distributedeventing import DistributedEventAdmin

    return DistributedEventAdmin(instance=m, **options)


def _bus(m: messaging.Messaging, stack: ExitStack) -> tuple[TypedEventBus, BusConnection]:
    from messaging.typedevent import TypedEventBus

    bus = stack.enter_context(TypedEventBus())
    return bus, stack.enter_context(bus.connect(m, "benchmark/*", limit=_LIMIT))


def subscribe(job: Job) -> None:
    tally = Tally(job)
    count = counted(job, tally)
    if job.style == "ipopo":
        _subscribe_ipopo(job, tally, count)
        return
    with ExitStack() as stack:
        m = stack.enter_context(_connect(job))
        if job.style.startswith("admin"):
            admin = stack.enter_context(_admin(m, queue_limit=_LIMIT))
            admin.on(TOPIC, handler=lambda event: count(event.value))
            admin.announced(_SETUP).result()
        else:
            bus, connection = _bus(m, stack)
            bus.on(TOPIC, handler=lambda _, event: count(event))
            connection.announced(_SETUP).result()
        job.ready()
        tally.wait()
        tally.finish()


# --- iPOPO


def _ipopo(job: Job) -> tuple[Any, Any]:
    """Start a framework with the Event Admin and its MQTT bridge; return its context and the Event Admin."""
    from pelix.framework import create_framework
    from pelix.ipopo.constants import use_ipopo
    from pelix.services import FACTORY_EVENT_ADMIN, FACTORY_EVENT_ADMIN_MQTT, SERVICE_EVENT_ADMIN, SERVICE_EVENT_HANDLER

    logging.getLogger("pelix").setLevel(logging.ERROR)
    framework = create_framework(("pelix.ipopo.core", "pelix.services.eventadmin", "pelix.services.eventadmin_mqtt"))
    framework.start()
    context = framework.get_bundle_context()
    with use_ipopo(context) as ipopo:
        ipopo.instantiate(FACTORY_EVENT_ADMIN, "event-admin", {"pool.threads": 1})
        ipopo.instantiate(
            FACTORY_EVENT_ADMIN_MQTT, "bridge", {"event.topics": "*", "mqtt.host": job.host, "mqtt.port": job.port}
        )
    # the bridge is a handler once it is connected
    _wait(lambda: context.get_service_reference(SERVICE_EVENT_HANDLER) is not None)
    reference: Any = context.get_service_reference(SERVICE_EVENT_ADMIN)
    return context, context.get_service(reference)


def _publish_ipopo(job: Job) -> None:
    from pelix.framework import FrameworkFactory
    from pelix.services import EVENT_PROP_PROPAGATE

    _, admin = _ipopo(job)
    job.ready()
    job.wait_for_go()
    start = time.monotonic()
    for event in events(job):
        admin.send(TOPIC, {**event, EVENT_PROP_PROPAGATE: True})
    job.finish(start=start, end=time.monotonic())
    time.sleep(1.0)  # its client sends on a thread of its own, and disconnecting drops what waits
    FrameworkFactory.delete_framework()


def _subscribe_ipopo(job: Job, tally: Tally, count: Callable[[dict[str, Any]], None]) -> None:
    from pelix.framework import FrameworkFactory
    from pelix.services import PROP_EVENT_TOPICS, SERVICE_EVENT_HANDLER

    context, _ = _ipopo(job)

    class Receiver:
        def handle_event(self, _: str, properties: dict[str, Any]) -> None:
            count(properties)

    context.register_service(SERVICE_EVENT_HANDLER, Receiver(), {PROP_EVENT_TOPICS: [TOPIC]})
    time.sleep(0.5)  # its subscription is not confirmed to it
    job.ready()
    tally.wait()
    tally.finish()
    FrameworkFactory.delete_framework()


if __name__ == "__main__":
    job.run({"publish": publish, "subscribe": subscribe}, "rx-messaging")
