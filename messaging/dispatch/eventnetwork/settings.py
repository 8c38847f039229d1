"""Settings of an event network, the same for every member."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from messaging.dispatch.eventnetwork.announcements import MAX_SECONDS, MAX_TEXT, MIN_HEARTBEAT
from messaging.dispatch.eventnetwork.channels import PREFIX
from messaging.dispatch.eventnetwork.signing import EventSigning
from messaging.errors import ArgumentError
from messaging.errors.checks import check_instance

#: bytes of the payload of an event that is read
MAX_EVENT_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EventNetwork:
    """How a distributed event admin, or a typed event bus, takes part in an event network. Immutable.

    Attributes:
        prefix: the first levels of the channels, equal for all members of the network.
        name: name of the member for people; by default that of its event service.
        heartbeat: seconds; after twice this time without a sign of life a member counts as lost.
        linger: seconds that the interests of a lost member remain in force. Longer than the time for which brokers keep
            the events of a member whose connection is lost.
        send_always: topic filters whose events are sent even if no member announced an interest: for plain programs
            that announce nothing.
        as_cbor: whether events are sent in CBOR instead of JSON (extra ``cbor``). Both are read.
        last_will: whether the broker announces the loss of the connection, where the instance has feature ``lastWill``:
            an instance has one last will. Setting it ends the connection once, to make another one.
        queue: name of a queue that keeps the events of this member while it is away, where the instance has feature
            ``queueRetention``. By default the queue ends with the connection.
        max_event_bytes: larger events of other members are refused; with ``signing``, larger signed messages.
        signing: the keys that sign what this member sends, and verify what arrives; see
            :mod:`messaging.dispatch.eventnetwork.signing`. All members sign, or none. By default none does: then the
            access control of the broker alone decides which program may speak for which member and principal.

    Raises:
        ArgumentError: a value is out of its range.
    """

    prefix: str = PREFIX
    name: str | None = None
    heartbeat: float = 5.0
    linger: float = 30.0
    send_always: Iterable[str] = ()
    as_cbor: bool = False
    last_will: bool = True
    queue: str | None = None
    max_event_bytes: int = MAX_EVENT_BYTES
    signing: EventSigning | None = None

    def __post_init__(self) -> None:
        _check_seconds("heartbeat", self.heartbeat, MIN_HEARTBEAT)
        _check_seconds("linger", self.linger, 0.0)
        if self.name is not None and (not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_TEXT):
            raise ArgumentError(f"name must be a str of 1 to {MAX_TEXT} characters, not {self.name!r:.80}")
        if isinstance(self.send_always, str):
            object.__setattr__(self, "send_always", (self.send_always,))
        elif isinstance(self.send_always, Iterable):
            object.__setattr__(self, "send_always", tuple(self.send_always))
        else:
            raise ArgumentError(f"send_always must be topic filters, not {type(self.send_always).__name__}")
        for name in ("as_cbor", "last_will"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} must be True or False, not {getattr(self, name)!r:.80}")
        if type(self.max_event_bytes) is not int or self.max_event_bytes < 1:
            raise ArgumentError(f"max_event_bytes must be an int of at least 1, not {self.max_event_bytes!r:.80}")
        if self.signing is not None:
            check_instance("signing", self.signing, EventSigning)


def _check_seconds(name: str, value: Any, least: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= MAX_SECONDS:
        raise ArgumentError(f"{name} must be seconds, from {least:g} to {MAX_SECONDS:g}, not {value!r:.80}")
