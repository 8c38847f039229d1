"""Snapshots of a member and of the others as it sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from messaging.services.reporting import counter, gauge, identity, label, part

if TYPE_CHECKING:
    from messaging.dispatch.eventnetwork.membership import OtherMember


@dataclass(frozen=True, slots=True)
class MemberDTO:
    """A snapshot of another member."""

    id: str = field(metadata=identity())
    name: str = field(metadata=label("member"))
    framework: str | None
    silent: float = field(metadata=gauge("time since the member was last heard of", "seconds"))
    is_lost: bool = field(metadata=gauge("whether the member is lost", name="lost"))
    heartbeat: float = field(metadata=gauge("interval at which the member sends", "seconds"))
    #: topic filters that it wants and topics that it publishes, without the hidden ones
    interests: tuple[str, ...]
    offers: tuple[str, ...]
    qos: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeDTO:
    """A snapshot of one member, and of the others as it sees them."""

    member: str
    prefix: str
    is_connected: bool = field(metadata=gauge("whether this member is connected to the network", name="connected"))
    is_settled: bool = field(metadata=gauge("whether this member knows the others", name="settled"))
    members: tuple[MemberDTO, ...] = field(metadata=part("member"))
    sent: int = field(metadata=counter("events that were sent to other members", "events"))
    unwanted: int = field(metadata=counter("events that were not sent, because no member wanted them", "events"))
    received: int = field(metadata=counter("events that arrived from other members", "events"))
    refused: int = field(metadata=counter("messages that were refused", "messages"))
    replayed: int = field(
        default=0,
        metadata=counter("signed messages that arrived before: copies by the broker, and replays", "messages"),
    )


def view_of(member: OtherMember, now: float) -> MemberDTO:
    """Return a snapshot of another member; ``now`` is in monotonic seconds."""
    return MemberDTO(
        id=member.id,
        name=member.name,
        framework=member.framework,
        silent=max(0.0, now - member.heard),
        is_lost=member.is_lost,
        heartbeat=member.heartbeat,
        interests=tuple(sorted({each.topics for each in member.interests if not each.is_hidden})),
        offers=tuple(sorted(member.offers)),
        qos=member.qos,
    )
