"""What devices sent to a gateway, what their broker confirmed, and what arrived at the other one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

#: text of the messages that are all equal
EQUAL: Final = "equal"
#: errors after which a message may arrive all the same
OPEN_OUTCOMES: Final = frozenset({"OutcomeUnknownError", "DeadlineError", "ClosedError", "killed"})


@dataclass(slots=True)
class Sent:
    """A message of a device.

    Attributes:
        device: name of its role.
        kind: of the message, which decides about its route.
        number: of the message among those of the device.
        qos: MQTT quality of service.
        state: ``sent``, ``confirmed``, ``killed``, or the name of an error.
        is_owed: a route was subscribed from before it was sent until it was confirmed.
        may_repeat: the device may have sent it twice, and its broker cannot tell.
        copies: how often the devices' broker has taken it: a device sends again what it has no confirm of.
        forgotten: how often the gateway may have lost its record of the message, by which it recognises it.
        is_bad: the route cannot handle it, so it becomes a dead letter.
        is_filtered: the route filters it out.
        at: when it was sent, virtual seconds.
        epoch: of the subscription when it was sent; -1: there was none.
    """

    device: str
    kind: str
    number: int
    qos: int
    at: float
    epoch: int
    state: str = "sent"
    is_owed: bool = False
    may_repeat: bool = False
    copies: int = 0
    forgotten: int = 0
    is_bad: bool = False
    is_filtered: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that arrived at the receiver.

    Attributes:
        message_id: its id, if the protocol carries one.
        is_redelivered: the broker of the target has sent it before.
        life: number of the life of the receiver.
    """

    message_id: str | None
    is_redelivered: bool


@dataclass(slots=True)
class Ledger:
    """All messages, by their texts; those that are equal have texts of their own here, and arrive as ``EQUAL``."""

    sent: dict[str, Sent] = field(default_factory=dict)
    #: by route and text, in the order of the first arrivals
    arrived: dict[tuple[str, str], list[Arrival]] = field(default_factory=dict)
    #: the dead letters of all routes, as far as they were seen: their texts
    dead: dict[str, None] = field(default_factory=dict)
    #: texts that have arrived by any route
    there: dict[str, None] = field(default_factory=dict)

    def arrive(self, route: str, text: str, arrival: Arrival) -> None:
        """Note an arrival."""
        self.arrived.setdefault((route, text), []).append(arrival)
        self.there[text] = None

    def equal(self) -> list[Sent]:
        """Return the messages that are equal."""
        return [sent for text, sent in self.sent.items() if text.startswith(EQUAL)]

    def equal_ids(self, route: str) -> set[str | None]:
        """Return the ids of the equal messages that arrived by a route."""
        return {each.message_id for each in self.arrived.get((route, EQUAL), ())}

    def is_there(self, text: str) -> bool:
        """Return whether a message has arrived, or is a dead letter."""
        return text in self.there or text in self.dead

    def repeated(self, route: str) -> int:
        """Return how many messages the gateway has published again on a route.

        "Copies that a device itself sends again pass" (``docs/gateway.md``): the gateway recognises "those that are
        marked as duplicates" (``docs/faults.md``).
        """
        count = 0
        for (each, text), arrivals in self.arrived.items():
            if each == route and text != EQUAL:
                ids = [arrival.message_id for arrival in arrivals if not arrival.is_redelivered]
                sent = self.sent.get(text)
                copies = 0 if sent is None else sent.copies
                count += max(0, len(ids) - max(copies, len({*ids})))
        return count
