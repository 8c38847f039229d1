"""The bus as a service (157.5, 157.7), from its opening to its closing: nothing published is lost, nothing is left."""

from __future__ import annotations

import asyncio
import textwrap
from typing import Any

import pytest

from messaging.errors import ClosedError
from messaging.services import ServiceEvent, ServiceEventKind, ServiceRegistry, default_registry
from messaging.testing.waiting import PATIENCE, eventually
from messaging.typedevent import TypedEventBus, TypedEventMonitor, UntypedEventHandler
from tests.scripts import run_script
from tests.typedevent.conftest import Bus, Gate, Order, Recorder, logged, named

# --- as a service


def test_a_bus_and_its_monitor_are_services_until_it_is_closed(services: ServiceRegistry) -> None:
    """157.5, 157.6, 157.7.1, 157.7.2."""
    with Bus(services, name="mine") as bus:
        assert services.service(TypedEventBus) is bus
        assert services.service(TypedEventMonitor) is bus.monitor
        for interface in (TypedEventBus, TypedEventMonitor):
            reference = services.find_one(
                interface,
                "(&(osgi.implementation=osgi.typedevent)(version>=1.1.0)(!(version>=2.0.0))(event.bus.name=mine))",
            )
            assert reference is not None
    assert services.find() == []


def test_a_bus_may_be_used_as_soon_as_it_is_found(services: ServiceRegistry) -> None:
    received: list[Any] = []

    def found(event: ServiceEvent) -> None:
        if event.kind is ServiceEventKind.REGISTERED:
            found_bus: TypedEventBus = services.get(event.reference)
            found_bus.on(handler=lambda order: received.append(order), type=Order)
            found_bus.deliver(Order(1))

    services.add_listener(found, TypedEventBus)
    with Bus(services) as bus:
        bus.drain()
        assert received == [Order(1)]


def test_handlers_may_be_there_before_the_bus(services: ServiceRegistry) -> None:
    """157.4: the whiteboard pattern, in either order."""
    untyped = Recorder().untyped(services, "a")
    typed = Recorder().typed(services, type=Order)
    left = Recorder().unhandled(services)
    with Bus(services) as bus:
        bus.deliver_untyped("a", {})
        bus.deliver(Order(1))
        bus.send("b", {})
    assert untyped.topics == ["a"]
    assert typed.data == [Order(1)]
    assert left.topics == ["b"]


def test_handlers_are_for_all_buses_of_their_registry_unless_they_say_for_which(
    services: ServiceRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    with Bus(services, name="first") as first, Bus(services, name="second") as second:
        every = Recorder().untyped(services, "a")
        one = Recorder().untyped(services, "a", target="(event.bus.name=second)")
        none = Recorder().untyped(services, "a", target="(event.bus.name=third)")
        bad = Recorder().untyped(services, "a", target="nonsense")
        wrong = bad.registration
        for number, bus in enumerate((first, second)):
            bus.send("a", {"n": number})
        one.registration.update(named("a", target="(event.bus.name=f*)"))
        for number, bus in enumerate((first, second), 2):
            bus.send("a", {"n": number})
        assert every.of("n") == [0, 1, 2, 3]
        assert one.of("n") == [1, 2]
        assert none.events == bad.events == []
        assert first.handler_of(wrong) is second.handler_of(wrong) is None
        assert len(logged(caplog, repr(wrong.reference), "is ignored")) == 2  # by each of them


def test_handlers_of_other_registries_are_not_called(bus: Bus) -> None:
    elsewhere = Recorder().untyped(ServiceRegistry(), "*")
    bus.send("a", {})
    assert elsewhere.events == []


def test_without_a_registry_it_is_that_of_the_process() -> None:
    with Bus() as bus:
        assert bus.services is default_registry()
        received = Recorder()
        with default_registry().register(UntypedEventHandler, received, {"event.topics": "test/lifecycle"}):
            bus.send("test/lifecycle", {})
        assert received.topics == ["test/lifecycle"]
    assert default_registry().find(TypedEventBus) == []


def test_buses_have_names(services: ServiceRegistry) -> None:
    with (
        Bus(services) as first,
        Bus(services) as second,
        Bus(services, name="x") as third,
    ):
        assert first.name != second.name
        assert (third.name, third.get_dto().name) == ("x", "x")
        assert repr(third) == "<Bus 'x'>"
    assert repr(third) == "<Bus 'x', closed>"


def test_the_dto_shows_handlers_threads_and_monitors(bus: Bus) -> None:
    gate = Gate().typed(bus, ["a", "b/*"], type=Order, filter="(id>=0)", principal="me")
    for number in range(4):
        bus.deliver(Order(number), "a")
    gate.wait()
    dto = bus.get_dto()
    (handler,) = dto.handlers
    assert (dto.name, dto.threads, dto.monitors) == (bus.name, 1, 0)
    assert handler.service_id == gate.registration.reference.id
    assert handler.kind == "TypedEventHandler"
    assert (handler.topics, handler.filter, handler.principal) == (("a", "b/*"), "(id>=0)", "me")
    assert (handler.waiting, handler.failures, handler.dropped, handler.blocked) == (3, 0, 0, None)
    gate.opened.set()
    bus.drain()
    eventually(lambda: bus.get_dto().threads == 0, "the thread has left")
    assert bus.get_dto().handlers[0].waiting == 0


# --- closing


def test_a_closed_bus_takes_nothing(bus: Bus) -> None:
    bus.close()
    for call in (
        lambda: bus.deliver(Order(1)),
        lambda: bus.deliver_untyped("a", {}),
        lambda: bus.create_publisher("a"),
        lambda: bus.on("a", handler=lambda event: None),
        lambda: bus.on("a")(lambda event: None),
        lambda: bus.on_unhandled(handler=lambda event: None),
        lambda: bus.__enter__(),
        lambda: asyncio.run(bus.__aenter__()),
    ):
        with pytest.raises(ClosedError, match=f"{bus.name}' is closed"):
            call()
    assert bus.services.find() == []


# --- the end of the program


def run(program: str) -> str:
    """Return what a program of its own has printed at its end."""
    done = run_script(textwrap.dedent(program), seconds=6 * PATIENCE)
    assert done.stderr == ""
    return done.stdout


def test_published_events_are_delivered_even_if_the_program_ends_right_after_that() -> None:
    """157.3: typed, untyped, on threads and in coroutines; the bus was not closed."""
    out = run("""
        import asyncio, dataclasses, sys, time
        from messaging.typedevent import TypedEventBus

        @dataclasses.dataclass
        class Order:
            id: int

        bus = TypedEventBus()
        counts = {"typed": 0, "untyped": 0, "coroutine": 0}

        def count(name):
            counts[name] += 1
            if sum(counts.values()) == 3_000:
                print(counts, flush=True)

        @bus.on
        def typed(order: Order):
            if order.id == 0:
                time.sleep(0.2)  # sleeps: what follows waits for it when the program ends
            count("typed")

        @bus.on("*")
        def untyped(event):
            count("untyped")

        @bus.on(Order)
        async def coroutine(event):
            await asyncio.sleep(0)
            count("coroutine")

        for number in range(1_000):
            bus.deliver(Order(number))
    """)
    assert out == "{'typed': 1000, 'untyped': 1000, 'coroutine': 1000}\n"


def test_a_handler_that_hangs_does_not_keep_the_program_from_ending() -> None:
    out = run("""
        import logging, threading
        from messaging.dispatch import EventService
        from messaging.typedevent import TypedEventBus

        logging.disable()
        EventService.close.__defaults__ = (0.5,)  # seconds that the end of the program waits, five by default
        bus = TypedEventBus()
        entered = threading.Event()

        @bus.on("a")
        def hang(event):
            entered.set()
            threading.Event().wait()

        bus.deliver_untyped("a", {})
        entered.wait()
        print("end")
    """)
    assert out == "end\n"  # it is waited for, but not for ever


def test_a_forked_child_has_the_bus_but_none_of_the_events_of_its_parent() -> None:
    """What the parent published, it delivers; the child goes on with what it publishes itself, and may close it."""
    out = run("""
        import os, sys, threading
        from messaging.typedevent import TypedEventBus

        bus = TypedEventBus()
        received = []
        entered, opened = threading.Event(), threading.Event()

        @bus.on("a")
        def handle(event):
            received.append(event["n"])
            entered.set()
            opened.wait()

        other = []
        bus.on("*", handler=lambda event: other.append(event["n"]))
        for number in range(3):
            bus.deliver_untyped("a", {"n": number})
        entered.wait()
        bus.flush()
        child = os.fork()
        if child == 0:
            opened.set()
            received.clear(), other.clear()
            for number in range(10, 13):
                bus.deliver_untyped("a", {"n": number})
            bus.flush().result(10)
            print("child", received, other, flush=True)
            bus.close()
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
        opened.set()
        bus.close()
        print("parent", received, other)
    """)
    assert out == "child [10, 11, 12] [10, 11, 12]\n0\nparent [0, 1, 2] [0, 1, 2]\n"


def test_a_signal_may_close_the_bus_while_its_thread_publishes() -> None:
    out = run("""
        import signal
        from messaging.errors import ClosedError
        from messaging.typedevent import TypedEventBus

        bus = TypedEventBus()
        received = []
        bus.on("a", handler=lambda event: received.append(event["n"]))
        signal.signal(signal.SIGALRM, lambda *_: bus.close())
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        number = 0
        try:
            while True:
                bus.deliver_untyped("a", {"n": number})
                number += 1
        except ClosedError:
            pass
        print(received[:number] == [*range(number)], len(received) - number in (0, 1))
    """)
    assert out == "True True\n"


def test_ignored_handlers_are_looked_at_again_by_another_bus(bus: Bus) -> None:
    ignored = repr(Recorder().untyped(bus, "a*").registration.reference)
    assert bus.logged(ignored, "is ignored", bus.name)
    with Bus(bus.services, name="second"):
        assert bus.logged(ignored, "is ignored", "second")
