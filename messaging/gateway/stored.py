"""A message of a route on its way: to the disk, and from there to the target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from messaging.errors import MessagingError
from messaging.gateway.destinations import Destination
from messaging.journal import RecordTemplate

#: begins the stored properties of a batch: what recognises the messages in it. Contexts are restored without it
_MEMBERS: Final = '{"members":['


class Settleable(Protocol):
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


class StoredMessage:
    """A message of a route; for the journal an ``Append``.

    Args:
        payload, destination, message_id: the content to publish, and where.
        sources: acknowledged when the message is on the disk.
        key: recognises the same message, if its source delivers it again; empty: its source cannot tell.
        members: of a batch, what recognises its messages.
        offset: its place in the journal; -1 until it is stored.

    Attributes:
        keys: recognise the message, and the messages of a batch.
        timestamp: when it was stored, seconds since the epoch.
        attempts: how often the target has refused it.
        on_outcome: called on the thread of the journal with the message, and with the error if it is not stored.
    """

    __slots__ = (
        "attempts", "destination", "keys", "message_id", "offset", "on_outcome", "payload", "record", "sources",
        "timestamp",
    )  # fmt: skip
    count = 1
    #: with the policy ``block`` a record waits for room until the gateway stops
    deadline = math.inf

    def __init__(
        self,
        payload: bytes,
        destination: Destination,
        message_id: str,
        sources: Sequence[Settleable] = (),
        key: str = "",
        members: Sequence[str] = (),
        offset: int = -1,
    ) -> None:
        self.payload = payload
        self.destination = destination
        self.message_id = message_id
        self.sources = sources
        self.keys: Sequence[str] = (key, *members) if key else members
        template = destination.template
        if members:
            template = RecordTemplate(destination.channel, with_members(destination.properties, members))
        self.record = b"" if offset >= 0 else template.encode(payload, message_id)
        self.offset = offset
        self.timestamp = 0.0
        self.attempts = 0
        self.on_outcome: Callable[[StoredMessage, MessagingError | None], object]

    def note_stored(self, offset: int) -> None:
        """See ``Append``."""
        self.offset = offset
        self.on_outcome(self, None)

    def note_refused(self, error: MessagingError) -> None:
        """See ``Append``."""
        self.on_outcome(self, error)
