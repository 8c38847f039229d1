"""``messaging events topics`` and ``members``: what the members of an event network say of themselves."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from messaging.cli.events_member import Observer, joined, settings_of
from messaging.cli.output import ExitCode, dump, one_line, show_table, wait_while_read, write
from messaging.distributedeventing.views import topics_of

if TYPE_CHECKING:
    from messaging.cli.connecting import Broker
    from messaging.cli.events_options import NetworkOptions
    from messaging.eventnetwork import EventNode, MemberDTO, NodeDTO


def show_topics(broker: Broker, network: NetworkOptions, *, json: bool) -> ExitCode:
    """Write the listed topics and topic filters, with their publishers and consumers."""
    found = topics_of((), (), _asked(broker, network))
    if json:
        write(dump([dataclasses.asdict(each) for each in found]))
    elif found:
        rows = [[each.topic, _several(each.publishers), _several(each.consumers)] for each in found]
        show_table(["topic", "publishers", "consumers"], rows)
    return ExitCode.OK


def show_members(broker: Broker, network: NetworkOptions, *, json: bool) -> ExitCode:
    """Write the other members."""
    members = sorted(_asked(broker, network).members, key=lambda each: (each.name, each.id))
    if json:
        write(dump([_fields(each) for each in members]))
    elif members:
        rows = [
            [
                each.name or "-",
                each.id,
                _state(each),
                f"{each.silent:.1f} s",
                _several(each.interests),
                _several(each.offers),
                _several(each.qos),
            ]
            for each in members
        ]
        show_table(["name", "id", "state", "silent", "wants", "publishes", "qos"], rows)
    return ExitCode.OK


def watch_members(broker: Broker, network: NetworkOptions, *, json: bool) -> ExitCode:
    """Write a line for each member that is there, joins, changes, is lost, or leaves; until interrupted."""
    observer, never = Observer(), threading.Event()
    settings_of(network)
    with broker.connect("events-members") as m, joined(m, network, observer) as node:
        observer.settled(node)
        before: dict[str, MemberDTO] = {}
        is_first = True
        while True:
            now = {each.id: each for each in node.get_dto().members}
            for what, member in _changes(before, now, is_first=is_first):
                write(_change_line(what, member, json=json))
            before, is_first = now, False
            wait_while_read(never, _interval(node))


def _interval(node: EventNode) -> float:
    """Return how long to wait until the next look at the members, seconds."""
    shortest = min((each.heartbeat for each in node.get_dto().members if each.heartbeat), default=1.0)
    return min(0.25, shortest / 2)


def _changes(
    before: dict[str, MemberDTO], now: dict[str, MemberDTO], *, is_first: bool
) -> Iterator[tuple[str, MemberDTO]]:
    for member, each in now.items():
        known = before.get(member)
        if known is None:
            yield ("lost" if each.is_lost else "there" if is_first else "joined"), each
        elif each.is_lost != known.is_lost:
            yield ("lost" if each.is_lost else "back"), each
        elif _told(each) != _told(known):
            yield "changed", each
    for member, each in before.items():
        if member not in now:
            yield "left", each


def _told(member: MemberDTO) -> tuple[Any, ...]:
    return member.name, member.interests, member.offers, member.qos


def _change_line(what: str, member: MemberDTO, *, json: bool) -> bytes:
    at = datetime.now(UTC)
    if json:
        return dump({"time": at.isoformat(timespec="microseconds"), "change": what, **_fields(member)})
    text = f"{at.isoformat(timespec='milliseconds')}  {what:7}  {member.name or '-'}  {member.id}"
    if what in ("there", "joined", "changed"):
        text += f"  wants: {_several(member.interests)}; publishes: {_several(member.offers)}"
    return f"{one_line(text)}\n".encode()


def _asked(broker: Broker, network: NetworkOptions) -> NodeDTO:
    observer = Observer()
    settings_of(network)
    with broker.connect("events") as m, joined(m, network, observer) as node:
        return observer.settled(node)


def _fields(member: MemberDTO) -> dict[str, Any]:
    return {
        "name": member.name or None,
        "id": member.id,
        "state": _state(member),
        "silent": round(member.silent, 3),
        "heartbeat": member.heartbeat,
        "framework": member.framework,
        "interests": list(member.interests),
        "offers": list(member.offers),
        "qos": list(member.qos),
    }


def _state(member: MemberDTO) -> str:
    return "lost" if member.is_lost else "live"


def _several(texts: Any) -> str:
    return ", ".join(map(str, texts)) or "-"
