"""A message of a route on its way: to the disk, and from there to the target."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol

from messaging.journal import RecordTemplate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from messaging.errors import MessagingError
    from messaging.gateway.destinations import Destination

#: begins the stored properties of a batch: what recognises the messages in it. Contexts are restored without it
_MEMBERS: Final = '{"members":['


class Owner(Protocol):
    """Where a message is stored. Called on the thread of the journal."""

    def note_stored(self, stored: Stored) -> object:
        """Accept a message that is on the disk."""

    def note_refused(self, stored: Stored, error: MessagingError) -> object:
        """Handle a message that is not stored."""


class Source(Protocol):
    """A message of the source: the context of a received message, say."""

    def settle(self, acknowledged: bool) -> object:
        """Acknowledge the message: it is on the disk, or was dropped as the policy says. On any thread."""


def with_members(properties: str, members: Sequence[str]) -> str:
    """Return the stored properties of a batch, with what recognises each of its messages.

    Args:
        properties: of the context of the batch, as ``stored_properties`` writes them.
        members: texts that need no escapes in JSON.
    """
    rest = f",{properties[1:]}" if properties else "}"
    listed = ",".join(f'"{each}"' for each in members)
    return f"{_MEMBERS}{listed}]{rest}"


def members_of(properties: str) -> Sequence[str]:
    """Return what recognises the messages of a stored batch; nothing for another message."""
    if not properties.startswith(_MEMBERS):
        return ()
    end = properties.find("]", len(_MEMBERS))
    return [each.strip('"') for each in properties[len(_MEMBERS) : end].split(",")]


def without_members(properties: str) -> str:
    """Return the stored properties of a context alone."""
    if not properties.startswith(_MEMBERS):
        return properties
    rest = properties[properties.find("]", len(_MEMBERS)) + 1 :]
    return "" if rest == "}" else "{" + rest.removeprefix(",")


class Stored:
    """A message of a route; for the journal an ``Append``.

    Attributes:
        offset: its place in the journal; -1 until it is stored.
        payload, destination, message_id: what is published, and where.
        timestamp: when it was stored, seconds since the epoch.
        attempts: how often the target has refused it.
        key: recognises the same message, if its source delivers it again; empty: its source cannot tell.
        members: of a batch, what recognises its messages.
    """

    __slots__ = (
        "_owner", "attempts", "destination", "key", "members", "message_id", "offset", "payload", "record", "sources",
        "timestamp",
    )  # fmt: skip
    count = 1
    #: with the policy ``block`` a record waits for room until the gateway stops
    deadline = math.inf

    def __init__(
        self,
        owner: Owner | None,
        payload: bytes,
        destination: Destination,
        message_id: str,
        sources: Sequence[Source] = (),
        members: Sequence[str] = (),
    ) -> None:
        self._owner = owner
        self.payload = payload
        self.destination = destination
        self.message_id = message_id
        self.sources = sources
        self.members = members
        self.record = b"" if owner is None else self._encoded()
        self.offset = -1
        self.timestamp = 0.0
        self.attempts = 0
        self.key = ""

    @property
    def all_keys(self) -> Sequence[str]:
        """Return what recognises the message, and the messages of a batch."""
        return (self.key, *self.members) if self.key else self.members

    def _encoded(self) -> bytes:
        destination = self.destination
        if not self.members:
            return destination.template.encode(self.payload, self.message_id)
        properties = with_members(destination.properties, self.members)
        return RecordTemplate(destination.channel, properties).encode(self.payload, self.message_id)

    def note_stored(self, offset: int) -> None:
        """See ``Append``."""
        self.offset = offset
        if self._owner is not None:
            self._owner.note_stored(self)

    def note_refused(self, error: MessagingError) -> None:
        """See ``Append``."""
        if self._owner is not None:
            self._owner.note_refused(self, error)
