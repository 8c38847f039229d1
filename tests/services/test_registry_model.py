"""The service registry against a simple model: a list, gone through from end to end and sorted each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from messaging.errors import ArgumentError, ClosedError
from messaging.services import (
    SERVICE_RANKING,
    LdapFilter,
    ListenerRegistration,
    ServiceEvent,
    ServiceEventKind,
    ServiceReference,
    ServiceRegistration,
    ServiceRegistry,
    interface_name,
)

Properties = dict[str, Any]


class Printer:
    pass


INTERFACES: list[type[Any] | str] = [Printer, "copier", "fax", "scanner"]

#: filters, and their meaning for interfaces and properties
FILTERS: dict[str | None, Callable[[list[str], Properties], bool]] = {
    None: lambda names, properties: True,
    "(x=1)": lambda names, properties: properties.get("x") == 1,
    "(X=*)": lambda names, properties: "x" in properties,
    "(!(x=1))": lambda names, properties: properties.get("x") != 1,
    "(x>=1)": lambda names, properties: properties.get("x", -1) >= 1,
    "(|(x=0)(colour=RED))": lambda names, properties: properties.get("x") == 0 or properties.get("colour") == "RED",
    "(&(colour=*E*)(x<=1))": lambda names, properties: (
        "E" in properties.get("colour", "") and properties.get("x", 9) <= 1
    ),
    "(objectClass=fax)": lambda names, properties: "fax" in names,
    "(service.ranking>=1)": lambda names, properties: properties.get(SERVICE_RANKING, 0) >= 1,
    f"(objectclass={interface_name(Printer)})": lambda names, properties: interface_name(Printer) in names,
}

# many of the same ranking, and some far apart
rankings = st.sampled_from([-(2**40), -1, 0, 0, 0, 1, 1, 5, 2**40])
properties_given = st.fixed_dictionaries(
    {}, optional={"x": st.integers(0, 2), "colour": st.sampled_from(["RED", "BLUE", "GREY"]), SERVICE_RANKING: rankings}
)
interfaces = st.sampled_from(INTERFACES)
filters = st.sampled_from([*FILTERS])


@dataclass
class Known:
    """A service as the model knows it."""

    registration: ServiceRegistration
    names: list[str]
    service: Any
    properties: Properties
    is_prototype: bool

    @property
    def reference(self) -> ServiceReference:
        return self.registration.reference

    @property
    def order(self) -> tuple[int, int]:
        return -self.properties.get(SERVICE_RANKING, 0), self.reference.id


@dataclass
class Listening:
    """A listener: the events it received, and the events expected."""

    interface: type[Any] | str | None
    filter: str | None
    handle: ListenerRegistration | None = None
    told: list[tuple[ServiceEventKind, int]] = field(default_factory=list)
    expected: list[tuple[ServiceEventKind, int]] = field(default_factory=list)

    def __call__(self, event: ServiceEvent) -> None:
        self.told.append((event.kind, event.reference.id))

    def expect(self, kind: ServiceEventKind, known: Known, before: Properties | None = None) -> None:
        if self.interface is not None and interface_name(self.interface) not in known.names:
            return
        fits = FILTERS[self.filter]
        if not fits(known.names, known.properties):
            if before is None or not fits(known.names, before):
                return
            kind = ServiceEventKind.MODIFIED_ENDMATCH
        self.expected.append((kind, known.reference.id))


class RegistryMachine(RuleBasedStateMachine):
    """Services come, change, overtake each other and go; each is found where it should be, and nowhere else."""

    services: Bundle[Known] = Bundle("services")
    listeners: Bundle[Listening] = Bundle("listeners")

    def __init__(self) -> None:
        super().__init__()
        self.registry = ServiceRegistry()
        self.there: list[Known] = []
        self.listening: list[Listening] = []
        self.gone: list[Listening] = []

    def tell(self, kind: ServiceEventKind, known: Known, before: Properties | None = None) -> None:
        for each in self.listening:
            each.expect(kind, known, before)

    def registered(
        self, several: list[type[Any] | str], properties: Properties, *, is_prototype: bool = False
    ) -> Known:
        service: Any = (lambda: [service]) if is_prototype else object()
        interface = several[0] if len(several) == 1 else several
        registration = self.registry.register(
            interface, service, properties, scope="prototype" if is_prototype else "singleton"
        )
        names = [*dict.fromkeys(map(interface_name, several))]
        assert registration.reference.interfaces == tuple(names)
        assert not self.there or registration.reference.id > max(each.reference.id for each in self.there)
        known = Known(registration, names, service, properties, is_prototype)
        self.there.append(known)
        self.tell(ServiceEventKind.REGISTERED, known)
        return known

    @rule(
        target=services,
        several=st.lists(interfaces, min_size=1, max_size=4),
        properties=properties_given,
        is_prototype=st.booleans(),
    )
    def register(self, several: list[type[Any] | str], properties: Properties, is_prototype: bool) -> Known:
        return self.registered(several, properties, is_prototype=is_prototype)

    @rule(target=services, count=st.integers(5, 30), step=st.integers(0, 2), properties=properties_given)
    def register_many(self, count: int, step: int, properties: Properties) -> Known:
        for number in range(count):
            several = [INTERFACES[number % 3], INTERFACES[3]][: 1 + number % 2]
            known = self.registered(several, {**properties, SERVICE_RANKING: number * step % 7})
        return known

    @rule(known=services, properties=properties_given)
    def update(self, known: Known, properties: Properties) -> None:
        if known not in self.there:
            with pytest.raises(ClosedError, match="unregistered"):
                known.registration.update(properties)
            return
        read, shown = known.reference.properties, dict(known.reference.properties)
        known.registration.update(properties)
        assert dict(read) == shown
        before, known.properties = known.properties, properties
        self.tell(ServiceEventKind.MODIFIED, known, before)

    @rule(known=services, ranking=rankings)
    def overtake(self, known: Known, ranking: int) -> None:
        self.update(known, {**known.properties, SERVICE_RANKING: ranking})

    @rule(known=services, bad=st.sampled_from(["high", 1.5, True, None]))
    def update_badly(self, known: Known, bad: Any) -> None:
        with pytest.raises(ArgumentError):
            known.registration.update({"x": 1, SERVICE_RANKING: bad})

    @rule(known=services)
    def unregister(self, known: Known) -> None:
        is_there = known in self.there
        assert known.registration.unregister() is is_there
        if is_there:
            self.there.remove(known)
            self.tell(ServiceEventKind.UNREGISTERING, known)
        assert self.registry.get(known.reference) is None

    @rule(share=st.integers(2, 4))
    def unregister_some(self, share: int) -> None:
        for known in self.there[::share]:
            self.unregister(known)

    @rule(target=listeners, interface=st.none() | interfaces, filter=filters, is_parsed=st.booleans())
    def listen(self, interface: type[Any] | str | None, filter: str | None, is_parsed: bool) -> Listening:  # noqa: A002
        listening = Listening(interface, filter)
        wanted = LdapFilter.parse(filter) if is_parsed and filter is not None else filter
        listening.handle = self.registry.add_listener(listening, interface, wanted)
        self.listening.append(listening)
        return listening

    @rule(listening=consumes(listeners))
    def stop_listening(self, listening: Listening) -> None:
        assert listening.handle is not None
        listening.handle.remove()
        self.listening.remove(listening)
        self.gone.append(listening)

    def fitting(self, interface: type[Any] | str | None, filter_: str | None) -> list[Known]:
        return sorted(
            (
                each
                for each in self.there
                if (interface is None or interface_name(interface) in each.names)
                and FILTERS[filter_](each.names, each.properties)
            ),
            key=lambda each: each.order,
        )

    @rule(interface=st.none() | interfaces | st.just("unknown"), filter=filters, is_parsed=st.booleans())
    def find(self, interface: type[Any] | str | None, filter: str | None, is_parsed: bool) -> None:  # noqa: A002
        expected = self.fitting(interface, filter)
        wanted = LdapFilter.parse(filter) if is_parsed and filter is not None else filter
        found = self.registry.find(interface, wanted)
        assert found == [each.reference for each in expected]
        assert self.registry.find_one(interface, wanted) is (found[0] if found else None)
        service = self.registry.service(interface, wanted)
        if not expected:
            assert service is None
        elif expected[0].is_prototype:
            assert service == [expected[0].service]
        else:
            assert service is expected[0].service

    @rule(known=services)
    def get(self, known: Known) -> None:
        is_there = known in self.there
        assert self.registry.is_registered(known.reference) is is_there
        service = self.registry.get(known.reference)
        if not is_there:
            assert service is None
        elif known.is_prototype:
            assert service == [known.service]
            assert service is not self.registry.get(known.reference)
        else:
            assert service is known.service
        # a reference tells what it was, also afterwards
        assert known.reference.ranking == known.properties.get(SERVICE_RANKING, 0)
        assert {name: known.reference.properties.get(name) for name in ("x", "colour")} == {
            name: known.properties.get(name) for name in ("x", "colour")
        }

    @invariant()
    def all_are_found_the_preferred_first(self) -> None:
        for interface in (None, *INTERFACES):
            assert self.registry.find(interface) == [each.reference for each in self.fitting(interface, None)]

    @invariant()
    def listeners_are_told_what_happens_while_they_listen(self) -> None:
        for each in (*self.listening, *self.gone):
            assert each.told == each.expected

    @invariant()
    def nothing_is_left_of_what_is_gone(self) -> None:
        names = {name for each in self.there for name in each.names}
        assert set(self.registry._index) == (names | {None} if names else set())
        assert len(self.registry._services) == len(self.there)
        assert len(self.registry._listeners) == len(self.listening)


TestRegistryAgainstModel = RegistryMachine.TestCase
TestRegistryAgainstModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
