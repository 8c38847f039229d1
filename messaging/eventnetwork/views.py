"""Snapshots of a member and of the others as it sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from messaging.eventnetwork.membership import Member


@dataclass(frozen=True, slots=True)
class MemberDTO:
    """A snapshot of another member."""

    id: str
    name: str
    framework: str | None
    #: seconds since it was last heard of
    silent: float
    is_lost: bool
    heartbeat: float
    #: topic filters that it wants and topics that it publishes, without the hidden ones
    interests: tuple[str, ...]
    offers: tuple[str, ...]
    qos: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeDTO:
    """A snapshot of one member, and of the others as it sees them."""

    member: str
    prefix: str
    is_connected: bool
    is_settled: bool
    members: tuple[MemberDTO, ...]
    #: number of events that were sent, that no member wanted, that arrived, and of messages that were refused
    sent: int
    unwanted: int
    received: int
    refused: int
    #: number of signed messages that arrived before: copies by the broker, and replays
    replayed: int = 0


def view_of(member: Member, now: float) -> MemberDTO:
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
