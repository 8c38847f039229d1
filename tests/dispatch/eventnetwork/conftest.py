"""Members of event networks, their services, and peers that speak the protocol by hand."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

import messaging
from messaging.dispatch import DISTRIBUTED_EVENTS
from messaging.dispatch.eventdata import WireEvent, encode
from messaging.dispatch.eventnetwork import (
    DISPATCH,
    ArrivedEvent,
    DeliveryNotification,
    EventNetwork,
    EventNode,
    NodeService,
    TopicInterest,
)
from messaging.dispatch.eventnetwork.membership import MemberChanges
from messaging.dispatch.eventnetwork.other_members import OtherMember
from messaging.services import ServiceRegistry
from messaging.testing.waiting import PATIENCE, Recorder

#: heartbeats in tests, seconds: long enough for a machine under load
BEAT: Final = 0.5
_numbers: Final = itertools.count(1)


class Service(NodeService):
    """An event service that wants topics and keeps what it receives."""

    def __init__(self, *topics: str) -> None:
        #: topic filters, and interests with further fields
        self.topics: set[str | TopicInterest] = {*topics}
        self.arrived: Recorder[ArrivedEvent] = Recorder()
        self.lost: Recorder[str] = Recorder()
        self.changes = 0
        #: called with each arrival; may raise or wait
        self.act: Callable[[ArrivedEvent], object] = lambda arrival: arrival.notified and arrival.notified()

    def wanted(self) -> tuple[frozenset[TopicInterest], frozenset[str]]:
        return frozenset(TopicInterest(each) if isinstance(each, str) else each for each in self.topics), frozenset()

    def receive(self, arrival: ArrivedEvent) -> None:
        self.arrived.append(arrival)
        self.act(arrival)

    def on_interest(self) -> None:
        self.changes += 1

    def member_lost(self, member: str) -> None:
        self.lost.append(member)

    @property
    def values(self) -> list[Any]:
        return [each.event.value() for each in self.arrived]


class Participant:
    """A node with its service and its instance."""

    def __init__(self, instance: messaging.Messaging, topics: tuple[str, ...], settings: dict[str, Any]) -> None:
        self.instance = instance
        self.service = Service(*topics)
        self.node = EventNode(
            self.service, instance, EventNetwork(**{"heartbeat": BEAT, "linger": 1.0, **settings}),
            title=f"the member {instance.name!r}", name=instance.name, grammar=DISTRIBUTED_EVENTS,
        )  # fmt: skip
        self.node.ready.result(PATIENCE)

    @property
    def id(self) -> str:
        return self.node.member

    def knows(self, other: Participant, *topics: str) -> bool:
        """Whether it knows exactly these interests of another member, which lives."""
        return any(
            each.id == other.id and not each.is_lost and each.interests == tuple(sorted(topics))
            for each in self.node.get_dto().members
        )

    def live(self) -> set[str]:
        return {each.id for each in self.node.get_dto().members if not each.is_lost}

    def want(self, *topics: str | TopicInterest) -> None:
        self.service.topics = {*topics}
        self.node.refresh().result(PATIENCE)

    def send(self, topic: str, value: Any, notification: DeliveryNotification | None = None) -> Any:
        found = self.node.sender.send(WireEvent.of(topic, value), lambda: value, qos="1", notification=notification)
        if notification is not None:
            notification.release(DISPATCH)
        return found


Join = Callable[..., Participant]


@pytest.fixture
def join() -> Iterator[Join]:
    """``join(url, *topics, settings={}, **options)``: a member that leaves when the test ends."""
    services = ServiceRegistry()
    with ExitStack() as stack:

        def make(url: str, *topics: str, settings: dict[str, Any] | None = None, **options: Any) -> Participant:
            instance = messaging.connect(
                url, services=services, **{"reconnect_min": 0.02, "reconnect_max": 0.1, **options}
            )
            stack.callback(instance.close)
            made = Participant(instance, topics, settings or {})
            stack.callback(made.node.close)
            return made

        yield make


@pytest.fixture
def memory() -> str:
    """The URL of a network in this process."""
    return f"memory://network{next(_numbers)}"


def wire(topic: str, value: Any, **fields: Any) -> bytes:
    return encode(WireEvent.of(topic, value, **fields))


def resident() -> int:
    """Return the bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Silent(MemberChanges):
    """Hears of changes of the members, and does nothing."""

    def __init__(self) -> None: ...
    def joined(self, member: OtherMember) -> None: ...
    def changed(
        self, member: OtherMember, added: frozenset[TopicInterest], removed: frozenset[TopicInterest]
    ) -> None: ...
    def lost(self, member: OtherMember) -> None: ...
    def silent_again(self, member: OtherMember) -> None: ...
    def left(self, member: OtherMember) -> None: ...
    def settled(self) -> None: ...


class Gate:
    """Makes a service wait."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, _: object) -> None:
        assert self.opened.wait(PATIENCE)


__all__ = ["BEAT", "Gate", "Join", "Participant", "Service", "Silent", "wire"]
