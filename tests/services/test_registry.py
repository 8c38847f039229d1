"""The service registry: offering and finding services, and their events (OSGi core 5)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from messaging.errors import ArgumentError, ClosedError, InvalidFilterError
from messaging.services import (
    ServiceEvent,
    ServiceEventKind,
    ServiceProperties,
    ServiceReference,
    ServiceRegistration,
    ServiceRegistry,
    default_registry,
    interface_name,
)
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.threads import in_threads

REGISTERED = ServiceEventKind.REGISTERED
MODIFIED = ServiceEventKind.MODIFIED
UNREGISTERING = ServiceEventKind.UNREGISTERING


class Printer:
    class Tray:
        pass


class Events:
    """A listener that records its events."""

    def __init__(self) -> None:
        self.events: list[ServiceEvent] = []

    def __call__(self, event: ServiceEvent) -> None:
        self.events.append(event)

    @property
    def kinds(self) -> list[ServiceEventKind]:
        return [event.kind for event in self.events]


@pytest.fixture
def registry() -> ServiceRegistry:
    return ServiceRegistry()


# --- registering and finding -------------------------------------------------------------------------------


def test_interface_names_are_module_and_qualified_name() -> None:
    assert interface_name(Printer.Tray) == f"{__name__}.Printer.Tray"
    assert interface_name("anything") == "anything"


@table("interface", ["", 5, None, [], [Printer, 5], [""], Printer()])
def test_objects_that_are_no_interfaces_are_refused(registry: ServiceRegistry, interface: Any) -> None:
    with pytest.raises(ArgumentError, match="interface"):
        registry.register(interface, object())
    assert registry.find() == []


def test_standard_properties_are_the_registry_s(registry: ServiceRegistry) -> None:
    given = {"ServIce.Id": 99, "objectclass": "mine", "SERVICE.SCOPE": "bundle", "x": 1}
    first = registry.register("a", 1, given).reference
    second = registry.register("a", 2, {"Service.Ranking": 7}, scope="singleton").reference
    third = registry.register("a", object, scope="prototype").reference

    assert dict(first.properties) == {
        "objectClass": ("a",),
        "service.id": first.id,
        "service.scope": "singleton",
        "service.ranking": 0,
        "x": 1,
    }
    assert first.id < second.id < third.id
    assert (first.ranking, second.ranking) == (0, 7)
    assert "Service.Ranking" in list(second.properties)
    assert third.properties["service.scope"] == "prototype"


def test_properties_are_copied_read_only_and_keep_the_case_of_their_keys(registry: ServiceRegistry) -> None:
    given = {"Colour": "red"}
    properties = registry.register("a", 1, given).reference.properties
    given["Colour"] = "blue"

    assert isinstance(properties, Mapping)
    assert properties["colour"] == properties["COLOUR"] == properties.get("cOLOUR") == "red"
    assert "COLOUR" in properties
    assert 5 not in properties  # type: ignore[comparison-overlap]
    assert "Colour" in list(properties)
    assert properties.get("none") is None
    assert properties.get("none", 1) == 1
    with pytest.raises(KeyError):
        properties["none"]
    with pytest.raises(TypeError):
        properties["colour"] = "green"  # type: ignore[index]


def test_representations_show_no_property_values(registry: ServiceRegistry) -> None:
    registration = registry.register("a", "the service", {"token": "hush"})

    for shown in (registration, registration.reference, registration.reference.properties):
        assert "hush" not in repr(shown)
        assert "the service" not in repr(shown)


def test_properties_compare_as_mappings() -> None:
    assert ServiceProperties({"a": 1}) == {"a": 1}
    assert len(ServiceProperties({"a": 1, "B": 2})) == 2


@table(
    "properties, says",
    [
        ({"a": 1, "A": 2}, "given twice"),
        ({"": 1}, "non-empty str"),
        ({5: 1}, "non-empty str"),
        ({"service.ranking": "high"}, "must be an int, not str"),
        ({"service.ranking": True}, "must be an int, not bool"),
        ({"service.ranking": None}, "must be an int, not NoneType"),
    ],
)
def test_bad_properties_are_refused_and_change_nothing(properties: dict[Any, Any], says: str) -> None:
    registry = ServiceRegistry()
    registration = registry.register("a", 1, {"x": 1})
    events = Events()
    registry.add_listener(events)

    with pytest.raises(ArgumentError, match=says):
        registry.register("b", 1, properties)
    with pytest.raises(ArgumentError, match=says):
        registration.update(properties)
    assert registry.find() == [registration.reference]
    assert registration.reference.properties["x"] == 1
    assert events.kinds == []


def test_bad_services_and_scopes_are_refused(registry: ServiceRegistry) -> None:
    with pytest.raises(ArgumentError, match="must not be None"):
        registry.register("a", None)
    with pytest.raises(ArgumentError, match="'singleton' or 'prototype', not 'bundle'"):
        registry.register("a", 1, scope="bundle")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="must be callable, not int"):
        registry.register("a", 1, scope="prototype")
    with pytest.raises(ArgumentError, match="must be callable, not int"):
        registry.add_listener(5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="interface"):
        registry.find(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidFilterError):
        registry.find("a", "")
    with pytest.raises(InvalidFilterError):
        registry.add_listener(Events(), filter="nonsense")
    with pytest.raises(InvalidFilterError, match="not int"):
        registry.find("a", 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidFilterError, match="not int"):
        registry.add_listener(Events(), filter=5)  # type: ignore[arg-type]


def test_an_exception_of_a_factory_reaches_the_caller(registry: ServiceRegistry) -> None:
    def broken() -> Any:
        raise LookupError("no paper")

    reference = registry.register("a", broken, scope="prototype").reference

    with pytest.raises(LookupError, match="no paper"):
        registry.get(reference)


def test_a_factory_may_use_the_registry(registry: ServiceRegistry) -> None:
    registry.register("inner", "ink")
    registry.register("outer", lambda: [registry.service("inner")], scope="prototype")

    assert registry.service("outer") == ["ink"]


def test_looking_up_costs_the_same_however_many_others_there_are(registry: ServiceRegistry) -> None:
    """By the interface; what a filter is asked about are the services that have it."""
    few, wanted = ServiceRegistry(), "(colour=red)"
    for number in range(3_000):
        registry.register(f"other{number % 7}", number, {"colour": "red"})
    for each in (few, registry):
        each.register("a", "printer", {"colour": "red"})

    def best(lookup: Callable[[], object]) -> float:
        times = []
        for _ in range(15):
            start = time.perf_counter()
            for _ in range(200):
                lookup()
            times.append(time.perf_counter() - start)
        return min(times)

    for one, many in (
        (lambda: few.service("a"), lambda: registry.service("a")),
        (lambda: few.find("a", wanted), lambda: registry.find("a", wanted)),
        (lambda: few.find_one(), lambda: registry.find_one()),
        (lambda: few.find_one(None, wanted), lambda: registry.find_one(None, wanted)),
    ):
        assert best(many) < best(one) * 10


# --- changing and going ------------------------------------------------------------------------------------


def test_a_registration_is_a_context_manager(registry: ServiceRegistry) -> None:
    with registry.register("a", 1) as registration:
        assert registry.find("a") == [registration.reference]
        registration.unregister()
    assert registry.find("a") == []


def test_references_of_another_registry_mean_nothing(registry: ServiceRegistry) -> None:
    reference = registry.register("a", 1).reference

    assert ServiceRegistry().get(reference) is None


def test_service_skips_services_that_are_unregistered_during_the_search(registry: ServiceRegistry) -> None:
    first = registry.register("a", "first", {"service.ranking": 1})
    registry.register("a", "second")

    class Going(str):
        """A value that takes its service away while a filter looks at it."""

        def __eq__(self, other: object) -> bool:
            first.unregister()
            return True

        __hash__ = str.__hash__

    first.update({"service.ranking": 1, "x": Going("1")})

    assert registry.service("a", "(|(x=1)(service.ranking=0))") == "second"


def test_there_is_one_default_registry() -> None:
    assert default_registry() is default_registry()
    assert isinstance(default_registry(), ServiceRegistry)


# --- listeners ---------------------------------------------------------------------------------------------


def test_a_service_is_there_when_it_is_registered_and_gone_when_it_is_unregistering(registry: ServiceRegistry) -> None:
    seen: list[tuple[ServiceEventKind, Any, int]] = []
    registry.add_listener(lambda event: seen.append((event.kind, registry.get(event.reference), len(registry.find()))))
    registry.register("a", 5).unregister()

    assert seen == [(REGISTERED, 5, 1), (UNREGISTERING, None, 0)]


def test_a_removed_listener_hears_nothing_more(registry: ServiceRegistry) -> None:
    events = Events()
    handle = registry.add_listener(events)
    handle.remove()
    handle.remove()
    registry.register("a", 1)
    with registry.add_listener(events):
        registry.register("a", 2)
    registry.register("a", 3)

    assert events.kinds == [REGISTERED]


def test_a_listener_removed_by_another_during_an_event_is_not_called_any_more(registry: ServiceRegistry) -> None:
    events = Events()
    registry.add_listener(lambda _: handle.remove())
    handle = registry.add_listener(events)
    registry.register("a", 1)

    assert events.kinds == []


def test_a_listener_that_raises_is_logged_and_affects_no_other(
    registry: ServiceRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: ServiceEvent) -> None:
        raise LookupError("no paper")

    events = Events()
    registry.add_listener(broken)
    registry.add_listener(events)
    with caplog.at_level(logging.ERROR, "messaging.services"):
        registry.register("a", 1, {"token": "hush"})

    assert events.kinds == [REGISTERED]
    assert "no paper" in caplog.text
    assert "REGISTERED" in caplog.text
    assert "hush" not in caplog.text


def test_an_interrupt_in_a_listener_gets_through_and_other_listeners_miss_nothing(registry: ServiceRegistry) -> None:
    def interrupted(event: ServiceEvent) -> None:
        if event.kind is MODIFIED:
            raise KeyboardInterrupt

    events = Events()
    registry.add_listener(interrupted)
    registry.add_listener(events)
    registration = registry.register("a", 1)
    with pytest.raises(KeyboardInterrupt):
        registration.update({})
    registration.unregister()

    assert events.kinds == [REGISTERED, MODIFIED, UNREGISTERING]


def test_all_listeners_see_the_changes_of_a_service_in_the_same_order_even_if_one_makes_them(
    registry: ServiceRegistry,
) -> None:
    before, after = Events(), Events()
    registrations: dict[ServiceReference, ServiceRegistration] = {}

    def meddle(event: ServiceEvent) -> None:
        # "b" is registered within the event of "a", and unregistered within its own modification
        if event.kind is REGISTERED and "a" in event.reference.interfaces:
            inner = registry.register("b", 2)
            registrations[inner.reference] = inner
            inner.update({"x": 1})
        elif event.kind is MODIFIED:
            registrations[event.reference].unregister()

    registry.add_listener(before)
    registry.add_listener(meddle)
    registry.add_listener(after)
    outer = registry.register("a", 1)

    for events in (before, after):
        own = [event.kind for event in events.events if event.reference is not outer.reference]
        assert own == [REGISTERED, MODIFIED, UNREGISTERING]
    assert sum(event.reference is outer.reference for event in after.events) == 1


def test_listeners_run_outside_of_the_lock(registry: ServiceRegistry) -> None:
    done: list[bool] = []

    def use_from_another_thread(event: ServiceEvent) -> None:
        if "a" in event.reference.interfaces:
            thread = threading.Thread(target=lambda: registry.register("b", 2).unregister(), daemon=True)
            thread.start()
            thread.join(PATIENCE)
            done.append(not thread.is_alive())

    registry.add_listener(use_from_another_thread)
    registration = registry.register("a", 1)
    registration.update({})
    registration.unregister()

    assert done == [True, True, True]


def test_a_change_during_an_event_does_not_wait_and_is_delivered_by_the_delivering_thread(
    registry: ServiceRegistry,
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    seen: list[tuple[ServiceEventKind, str]] = []

    def slow(event: ServiceEvent) -> None:
        seen.append((event.kind, threading.current_thread().name))
        if event.kind is MODIFIED:
            inside.set()
            assert go_on.wait(PATIENCE)

    registry.add_listener(slow)
    registration = registry.register("a", 1)
    updater = threading.Thread(target=registration.update, name="updater", daemon=True)
    updater.start()
    assert inside.wait(PATIENCE)
    assert registration.unregister()  # would deadlock or overtake if it delivered by itself
    assert registry.find() == []
    assert len(seen) == 2
    go_on.set()
    updater.join(PATIENCE)

    assert seen[1:] == [(MODIFIED, "updater"), (UNREGISTERING, "updater")]


# --- threads -----------------------------------------------------------------------------------------------


def test_threads_that_register_find_and_unregister_do_not_disturb_each_other(registry: ServiceRegistry) -> None:
    def work(index: int) -> None:
        for turn in range(50):
            mine = {"owner": index, "service.ranking": (index * turn) % 5}
            with registry.register(["shared", f"own{index}"], (index, turn), mine) as registration:
                assert registry.service(f"own{index}") == (index, turn)
                found = registry.find("shared")
                assert registration.reference in found
                assert registry.find("shared", f"(owner={index})") == [registration.reference]
                registration.update({**mine, "service.ranking": turn % 3})
                assert registration.reference in registry.find("shared", f"(service.ranking={turn % 3})")
            assert registry.get(registration.reference) is None

    in_threads(6, work)

    assert registry.find() == []
    assert registry.find("shared") == []


def test_ids_are_unique_across_threads(registry: ServiceRegistry) -> None:
    in_threads(6, lambda _: [registry.register("a", 1) for _ in range(50)])

    found = registry.find("a")
    assert len(found) == 300
    assert [reference.id for reference in found] == sorted({reference.id for reference in found})


def test_threads_that_change_one_service_never_have_its_events_overlap_or_get_lost(registry: ServiceRegistry) -> None:
    busy = threading.Lock()
    overlaps: list[ServiceEvent] = []
    events = Events()

    def exclusive(event: ServiceEvent) -> None:
        if not busy.acquire(blocking=False):
            overlaps.append(event)
            return
        events(event)
        registry.find("a")  # lets others in between
        busy.release()

    registry.add_listener(exclusive)
    registration = registry.register("a", 1)
    updates: list[int] = []

    def work(index: int) -> None:
        for turn in range(50):
            if index == 0 and turn == 40:
                assert registration.unregister()
            try:
                registration.update({"x": turn})
            except ClosedError:
                return
            updates.append(turn)

    in_threads(5, work)

    assert overlaps == []
    assert events.kinds == [REGISTERED] + [MODIFIED] * len(updates) + [UNREGISTERING]


def test_a_service_unregistered_by_many_is_unregistered_once(registry: ServiceRegistry) -> None:
    events = Events()
    registry.add_listener(events)
    registration = registry.register("a", 1)
    wins: list[bool] = []
    in_threads(8, lambda _: wins.append(registration.unregister()))

    assert sorted(wins) == [False] * 7 + [True]
    assert events.kinds == [REGISTERED, UNREGISTERING]


def test_no_service_is_missed_by_listening_first_and_looking_second(registry: ServiceRegistry) -> None:
    ready = threading.Barrier(2)

    def register() -> None:
        ready.wait(PATIENCE)
        for number in range(200):
            registry.register("a", number)

    thread = threading.Thread(target=register, daemon=True)
    thread.start()
    ready.wait(PATIENCE)
    events = Events()
    registry.add_listener(events, "a")
    known = set(registry.find("a"))
    thread.join(PATIENCE)

    assert known | {event.reference for event in events.events} == set(registry.find("a"))
    assert len(registry.find("a")) == 200
