"""Event buses within a process: from publishing to the return of all handlers, and how long a single event takes.

Besides the topic of the events there may be others, each with a handler that gets nothing. Handlers count. The event
is the same object every time where the library takes it; it has six fields.
"""

from __future__ import annotations

import abc
import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.peers import job
from benchmarks.peers.job import Job, percentiles

TOPIC: Final = "benchmark/orders/placed"
#: how long events may be on their way, seconds
_PATIENCE: Final = 60.0
_LIBRARIES: Final = {
    "blinker": ("blinker",),
    "pypubsub": ("PyPubSub",),
    "pyee": ("pyee",),
    "bubus": ("bubus",),
    "ipopo-post": ("iPOPO",),
    "ipopo-send": ("iPOPO",),
    "subject": ("reactivex",),
}

Handler = Callable[[Any], None]


@dataclass
class Order:
    """A typed event."""

    id: int = 7
    customer: str = "c-1"
    total: float = 99.5
    currency: str = "EUR"
    paid: bool = False
    note: str | None = None


class Bus(abc.ABC):
    """How a library is used."""

    def __init__(self, job: Job) -> None:
        self.event: Any = Order() if job.kind == "typed" else asdict(Order())

    @abc.abstractmethod
    def subscribe(self, topic: str, handler: Handler) -> None:
        """Have a handler called with the events of a topic."""

    @abc.abstractmethod
    def publisher(self) -> Callable[[], object]:
        """What publishes one event to ``TOPIC``."""

    def close(self) -> None:  # noqa: B027  # most have nothing to end
        """The end."""


class Ours(Bus):
    """The typed event bus: asynchronous."""

    def __init__(self, job: Job) -> None:
        from messaging.services import ServiceRegistry
        from messaging.typedevent import TypedEventBus

        super().__init__(job)
        self._bus = TypedEventBus(ServiceRegistry())

    def subscribe(self, topic: str, handler: Handler) -> None:
        def typed(event: Order) -> None:
            handler(event)

        def untyped(event: dict[str, Any]) -> None:
            handler(event)

        self._bus.on(topic, handler=typed if isinstance(self.event, Order) else untyped)

    def publisher(self) -> Callable[[], object]:
        bus, event = self._bus, self.event
        if isinstance(event, Order):
            return lambda: bus.deliver(event, TOPIC)
        return lambda: bus.deliver_untyped(TOPIC, event)

    def close(self) -> None:
        self._bus.close()


class EventAdmin(Bus):
    """Event Admin: the event is a property, or is the properties."""

    def __init__(self, job: Job) -> None:
        from messaging import eventadmin
        from messaging.services import ServiceRegistry

        super().__init__(job)
        self._module = eventadmin
        self._services = ServiceRegistry()
        self._admin = eventadmin.EventAdmin(self._services)
        self._is_sync = job.style == "send"

    def subscribe(self, topic: str, handler: Handler) -> None:
        properties = {self._module.EventConstants.EVENT_TOPIC: topic}
        self._services.register(self._module.EventHandler, lambda event: handler(event), properties)

    def publisher(self) -> Callable[[], object]:
        make, properties = self._module.Event, {"event": self.event} if isinstance(self.event, Order) else self.event
        publish = self._admin.send_event if self._is_sync else self._admin.post_event
        return lambda: publish(make(TOPIC, properties))

    def close(self) -> None:
        self._admin.close()


class Blinker(Bus):
    """One signal for each topic; synchronous."""

    def __init__(self, job: Job) -> None:
        import blinker

        super().__init__(job)
        self._signal = blinker.signal

    def subscribe(self, topic: str, handler: Handler) -> None:
        self._signal(topic).connect(lambda _, event: handler(event), weak=False)

    def publisher(self) -> Callable[[], object]:
        send, event = self._signal(TOPIC).send, self.event
        return lambda: send(self, event=event)


class PyPubSub(Bus):
    """Topics with a schema of one argument; synchronous."""

    def __init__(self, job: Job) -> None:
        from pubsub import pub

        super().__init__(job)
        self._pub = pub
        self._listeners: list[Any] = []  # it holds them weakly

    def subscribe(self, topic: str, handler: Handler) -> None:
        def listener(event: Any) -> None:
            handler(event)

        self._listeners.append(listener)
        self._pub.subscribe(listener, topic.replace("/", "."))

    def publisher(self) -> Callable[[], object]:
        send, topic, event = self._pub.sendMessage, TOPIC.replace("/", "."), self.event
        return lambda: send(topic, event=event)


class Pyee(Bus):
    """An emitter; synchronous."""

    def __init__(self, job: Job) -> None:
        from pyee.base import EventEmitter

        super().__init__(job)
        self._emitter = EventEmitter()

    def subscribe(self, topic: str, handler: Handler) -> None:
        self._emitter.on(topic, lambda event: handler(event))

    def publisher(self) -> Callable[[], object]:
        emit, event = self._emitter.emit, self.event
        return lambda: emit(TOPIC, event)


class Subject(Bus):
    """A bare ``reactivex.Subject`` for each topic; synchronous."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._subjects: dict[str, Any] = {}

    def subscribe(self, topic: str, handler: Handler) -> None:
        import reactivex

        subject = self._subjects.setdefault(topic, reactivex.Subject())
        subject.subscribe(lambda event: handler(event))

    def publisher(self) -> Callable[[], object]:
        subjects, event = self._subjects, self.event
        return lambda: subjects[TOPIC].on_next(event)


class Ipopo(Bus):
    """iPOPO's Event Admin: handlers are services; ``post`` is asynchronous, with its default of one thread."""

    def __init__(self, job: Job) -> None:
        import logging

        from pelix.framework import create_framework
        from pelix.ipopo.constants import use_ipopo
        from pelix.services import FACTORY_EVENT_ADMIN, SERVICE_EVENT_ADMIN

        logging.getLogger("pelix").setLevel(logging.ERROR)
        super().__init__(job)
        self._framework = create_framework(("pelix.ipopo.core", "pelix.services.eventadmin"))
        self._framework.start()
        self._context = self._framework.get_bundle_context()
        with use_ipopo(self._context) as ipopo:
            ipopo.instantiate(FACTORY_EVENT_ADMIN, "event-admin", {"pool.threads": 1})
        reference: Any = self._context.get_service_reference(SERVICE_EVENT_ADMIN)
        self._admin = self._context.get_service(reference)
        self._is_sync = job.style == "ipopo-send"

    def subscribe(self, topic: str, handler: Handler) -> None:
        from pelix.services import PROP_EVENT_TOPICS, SERVICE_EVENT_HANDLER

        class Receiver:
            def handle_event(self, _: str, properties: dict[str, Any]) -> None:
                handler(properties)

        self._context.register_service(SERVICE_EVENT_HANDLER, Receiver(), {PROP_EVENT_TOPICS: [topic]})

    def publisher(self) -> Callable[[], object]:
        properties = {"event": self.event} if isinstance(self.event, Order) else self.event
        publish = self._admin.send if self._is_sync else self._admin.post
        return lambda: publish(TOPIC, properties)

    def close(self) -> None:
        from pelix.framework import FrameworkFactory

        FrameworkFactory.delete_framework()


_BUSES: Final[dict[str, type[Bus]]] = {
    "typed": Ours,
    "post": EventAdmin,
    "send": EventAdmin,
    "blinker": Blinker,
    "pypubsub": PyPubSub,
    "pyee": Pyee,
    "subject": Subject,
    "ipopo-post": Ipopo,
    "ipopo-send": Ipopo,
}


def _subscribe_all(job: Job, subscribe: Callable[[str, Handler], None]) -> list[list[int]]:
    """Subscribe to all topics; returns what each handler of ``TOPIC`` counts."""

    def ignore(_: Any) -> None:
        raise AssertionError("an event on a topic that has none")

    def counter() -> tuple[list[int], Handler]:
        count = [0]

        def count_it(_: Any) -> None:
            count[0] += 1

        return count, count_it

    for number in range(job.topics - 1):
        subscribe(f"benchmark/others{number % 100}/topic{number}", ignore)
    counts = []
    for _ in range(job.handlers):
        count, handler = counter()
        subscribe(TOPIC, handler)
        counts.append(count)
    return counts


def _finish(job: Job, start: float, counts: list[list[int]]) -> None:
    """Wait until all has been handled, and tell."""
    deadline = time.monotonic() + _PATIENCE
    while any(count[0] < job.count for count in counts) and time.monotonic() < deadline:
        time.sleep(0.0005)
    end = time.monotonic()
    lost = sum(job.count - count[0] for count in counts)
    job.finish(start=start, end=end, received=job.count, lost=lost, libraries=_versions(job))


def _versions(job: Job) -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in _LIBRARIES.get(job.style, ())}


def dispatch(job: Job) -> None:
    """As fast as possible."""
    if job.style == "bubus":
        _Bubus(job).dispatch()
        return
    bus = _BUSES[job.style](job)
    counts = _subscribe_all(job, bus.subscribe)
    publish = bus.publisher()
    job.ready()
    job.wait_for_go()
    start = time.monotonic()
    for _ in range(job.count):
        publish()
    _finish(job, start, counts)
    bus.close()


def latency(job: Job) -> None:
    """One event at a time: from publishing to the beginning of the handler."""
    if job.style == "bubus":
        _Bubus(job).latency()
        return
    bus = _BUSES[job.style](job)
    arrived = threading.Event()
    at = 0

    def handler(_: Any) -> None:
        nonlocal at
        at = time.perf_counter_ns()
        arrived.set()

    bus.subscribe(TOPIC, handler)
    publish = bus.publisher()
    latencies = []
    job.ready()
    job.wait_for_go()
    start = time.monotonic()
    for _ in range(job.count):
        arrived.clear()
        published = time.perf_counter_ns()
        publish()
        if not arrived.wait(_PATIENCE):
            break
        latencies.append(at - published)
    job.finish(
        start=start,
        end=time.monotonic(),
        received=len(latencies),
        lost=job.count - len(latencies),
        libraries=_versions(job),
        **percentiles(latencies),
    )
    bus.close()


class _Bubus:
    """Event classes rather than topics; an event is dispatched once, and awaited, since no more than 100 may wait."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def _make(self) -> tuple[Any, type[Any]]:
        import logging

        from bubus import BaseEvent, EventBus

        logging.getLogger("bubus").setLevel(logging.ERROR)

        class Placed(BaseEvent):  # type: ignore[misc]
            id: int = 7
            customer: str = "c-1"
            total: float = 99.5
            currency: str = "EUR"
            paid: bool = False
            note: str | None = None

        return EventBus(name="benchmark"), Placed

    def dispatch(self) -> None:
        job = self._job

        async def main() -> None:
            bus, placed = self._make()
            handlers = iter(range(job.handlers + job.topics))

            def subscribe(topic: str, handler: Handler) -> None:
                def named(event: Any) -> None:
                    handler(event)

                named.__name__ = f"handler{next(handlers)}"  # it complains of handlers that have the same name
                bus.on(placed if topic == TOPIC else topic.replace("/", ""), named)

            counts = _subscribe_all(job, subscribe)
            job.ready()
            job.wait_for_go()
            start = time.monotonic()
            for _ in range(job.count):
                await bus.dispatch(placed())
            _finish(job, start, counts)
            await bus.stop()

        asyncio.run(main())

    def latency(self) -> None:
        job = self._job
        latencies: list[int] = []

        async def main() -> None:
            bus, placed = self._make()
            at = 0

            def handler(_: Any) -> None:
                nonlocal at
                at = time.perf_counter_ns()

            bus.on(placed, handler)
            job.ready()
            job.wait_for_go()
            start = time.monotonic()
            for _ in range(job.count):
                event = placed()
                published = time.perf_counter_ns()
                await bus.dispatch(event)
                latencies.append(at - published)
            end, count = time.monotonic(), len(latencies)
            job.finish(start=start, end=end, received=count, lost=0, libraries=_versions(job), **percentiles(latencies))
            await bus.stop()

        asyncio.run(main())


if __name__ == "__main__":
    job.run({"dispatch": dispatch, "latency": latency})
