"""What was sent to shared queues, who had it in hand, and what became of it; judges each delivery at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.simulation.services.sharing import Sharing

CHANNEL: Final = "orders/new"
DEAD: Final = "orders/dead"
#: how far beyond its end the broker of an MQTT 5 subscriber may deliver a message: the time to live is "rounded up to
#: whole seconds" (``docs/mqtt.md``); and milliseconds of AMQP, seconds
_ROUNDED: Final = {"mqtt5": 1.0, "amqp": 0.001}

_MESSAGE: Final = re.compile(rb"publisher-\d+:\d+")


@dataclass(slots=True)
class Sent:
    """A message.

    Attributes:
        at: when ``publish`` was called, virtual seconds.
        ttl: its time to live, seconds; infinite without one.
        copies: how often the broker has taken it.
        taken: when the broker took it last.
        unrouted: groups that nobody belonged to when the broker took it.
        expired: queues or clients whose copy has expired at the broker; an empty text for any.
        gone: clients of MQTT whose session has ended with it in hand.
        is_malformed: whether it fits no model.
    """

    at: float
    ttl: float
    copies: int = 0
    taken: float = 0.0
    unrouted: dict[str, None] = field(default_factory=dict)
    expired: dict[str, None] = field(default_factory=dict)
    gone: dict[str, None] = field(default_factory=dict)
    is_malformed: bool = False


@dataclass(slots=True)
class Delivery:
    """A delivery of a message to a member of a group.

    Attributes:
        member: name of the role.
        life: of the member, and the number of its subscription in it.
        at: when it had the message.
        verdict: "", "acknowledged", "rejected", or, where the verdict came too late, "refused" or "rejected too late".
        settled: when.
    """

    member: str
    life: tuple[int, int]
    at: float
    verdict: str = ""
    settled: float = inf


class Ledger:
    """See the module. ``sent`` and ``due`` are as in ``messages.Ledger``."""

    def __init__(self, simulation: Sharing) -> None:
        self._simulation = simulation
        self._options: dict[str, Any] = simulation.plan.options
        self.sent: dict[str, str] = {}
        self.due: dict[str, float] = {}
        self.more: dict[str, Sent] = {}
        #: by group and message
        self.deliveries: dict[tuple[str, str], list[Delivery]] = {}
        self.handled: dict[tuple[str, str], int] = {}
        #: how often a message was a dead letter
        self.dead: dict[str, int] = {}
        #: when streams and instances were closed, and others were opened, by role
        self.closed: dict[str, list[float]] = {}
        #: ends of streams that are awaited, by role
        self.closing: dict[str, dict[Any, None]] = {}
        #: members without a subscription
        self.away: dict[str, None] = {}
        #: when the broker was killed or stopped last
        self.restarted = -inf
        #: when the first subscription to the dead letters was there
        self.letters_since = inf if self._options["has_late_letters"] else -inf

    def message(self, payload: bytes) -> str:
        """Return the message of a payload, which may be in an envelope."""
        found = _MESSAGE.search(payload)
        return "" if found is None else found[0].decode()

    # --- what the broker says

    def taken(self, message: str) -> None:
        """Note that the broker has taken a message from its publisher."""
        more = self.more.get(message)
        if more is None:
            return
        simulation, now = self._simulation, self._simulation.world.scheduler.now
        more.copies += 1
        more.taken = now
        late = now - more.at - more.ttl
        # "an expired message is not sent" (``docs/extensions.md``); it may be on its way
        if simulation.is_quick and late > 0.1:
            simulation.broken(f"{message} was sent {late:g} s after its time to live")

    def ended(self, message: str, owner: str, reason: str) -> None:
        """Note that the broker has dropped a message that ``owner``, a client or nobody known, did not get."""
        more = self.more.get(message)
        if more is None:
            return
        simulation, now = self._simulation, self._simulation.world.scheduler.now
        if reason == "expired":
            more.expired[owner] = None
            # AMQP tells it in whole milliseconds
            if now < more.at + more.ttl - 0.001:
                simulation.broken(f"{message} has expired {more.at + more.ttl - now:g} s too soon")
        elif reason == "session ended":
            more.gone[owner] = None

    def handed(self, message: str) -> None:
        """Check that a message that a broker delivers has not expired."""
        more = self.more.get(message)
        if more is None or more.ttl == inf:
            return
        simulation, now = self._simulation, self._simulation.world.scheduler.now
        if simulation.protocol not in _ROUNDED:
            return
        # "On its way back the broker removes the time to live" (``docs/amqp.md``), also from one that fits no model
        has_returned = more.is_malformed or any(self.rejections(group, message) for group in simulation.groups)
        if has_returned and simulation.delays_redelivery:
            return
        # "the broker, which is told what is left, delivers none": it counts from when it has taken the message
        # An AMQP broker reports what it has taken behind the first delivery: this one may be of a later copy.
        late = (now - more.taken if more.copies else 0.0) - self._told(more.ttl)
        is_of_later = simulation.protocol == "amqp" and simulation.has_broken(message.split(":")[0], more.at, now)
        if late > 1e-6 and not is_of_later:
            simulation.broken(f"the broker was told to deliver {message} {late:g} s after its time to live")
        late = now - more.at - more.ttl - _ROUNDED[simulation.protocol]
        if simulation.is_quick and late > 0.1:
            simulation.broken(f"{message} was delivered {late:g} s after its time to live")

    def _told(self, ttl: float) -> float:
        return ceil(ttl) if self._simulation.protocol == "mqtt5" else ttl + 0.001

    # --- what members say

    def has_trouble(self, group: str, begin: float) -> bool:
        """Return whether a member of a group has lost a connection, or closed a stream, since a moment."""
        simulation, now = self._simulation, self._simulation.world.scheduler.now
        members = simulation.members(group)
        return any(
            name in self.away
            or self.closing.get(name)
            or simulation.has_broken(name, begin, now)
            or any(begin <= each <= now for each in self.closed.get(name, ()))
            for name in members
        )

    def _has_waited(self, delivery: Delivery, seconds: float) -> bool:
        """Return whether a call of the member has ended in the last seconds before a delivery."""
        return any(
            each.member == delivery.member and delivery.at - seconds <= each.settled <= delivery.at
            for found in self.deliveries.values()
            for each in found
        )

    def delivered(self, group: str, message: str, delivery: Delivery, told: dict[str, Any]) -> None:
        """Judge a delivery: it may be one, and no other member has the message."""
        simulation = self._simulation
        sent, more = self.sent.get(message), self.more.get(message)
        if sent is None or more is None:
            simulation.broken(f"a message arrived that was not sent: {message!r}")
            return
        if more.is_malformed:
            simulation.broken(f"{message} came to {delivery.member}, although it does not fit the model")
        before = self.deliveries.setdefault((group, message), [])
        is_again = bool(told.get("redelivered"))
        simulation.note_delivery(group, message, delivery, is_again)
        before.append(delivery)
        if simulation.protocol == "memory" and more.ttl < inf and not self._options["hold_up"]:
            left = told.get("timeToLive", 0.0)
            late = simulation.world.scheduler.now - more.at - more.ttl
            # at least a millisecond is told, also to a message that is taken then, and waits for the calls before it
            is_late = left <= 0.001 and late > 0.001 and more.copies < 2 and not self._has_waited(delivery, late)
            if left > more.ttl + 1e-6 or is_late:
                simulation.broken(f"{message} arrived with {left:g} s to live of {more.ttl:g} s")
        earlier = before[:-1]
        if more.copies > 1 or simulation.may_duplicate(message):
            return
        # "The others stay, because private queues die with their connection" (``docs/guarantees.md``): a broker may
        # give them to another member, too
        is_kept = not self._options["has_session"] and simulation.has_broken(delivery.member, more.at, delivery.at)
        # a thread that is held up has had it before its stream was closed
        is_kept |= bool(self._options["hold_up"]) and any(
            more.at <= moment <= delivery.at for moment in self.closed.get(delivery.member, ())
        )
        for each in earlier:
            if not is_kept and not self._may_come_again(group, more.at, each, delivery):
                simulation.broken(
                    f"{message} came to {delivery.member} of {group} although {each.member} has it"
                    f" ({each.verdict or 'unsettled'})"
                )
        self._check_redelivered(group, message, earlier, is_again)

    def _may_come_again(self, group: str, begin: float, each: Delivery, delivery: Delivery) -> bool:
        if each.verdict == "rejected":
            return self._may_return(group, each)
        simulation, options = self._simulation, self._options
        if each.verdict == "acknowledged" and options["way"] == "manual" and simulation.is_calm:
            return False
        return (
            # it may have been handed out before the loss was noticed
            simulation.has_broken(each.member, begin, delivery.at)
            or each.member in self.away
            or any(each.at <= moment <= delivery.at for moment in self.closed.get(each.member, ()))
            or simulation.restarts
        )

    def _may_return(self, group: str, each: Delivery) -> bool:
        """Return whether a rejected message may come again: not behind a dead letter that something receives."""
        options = self._options["subscribe"]
        if "dead_letter_channel" not in options or "max_deliveries" in options or each.at <= self.letters_since:
            return True  # "Its message is kept and delivered again" (``docs/guarantees.md``)
        return self.has_trouble(group, each.at) or bool(self._simulation.plan.faults)

    def _check_redelivered(self, group: str, message: str, earlier: list[Delivery], is_again: bool) -> None:
        simulation = self._simulation
        if earlier and earlier[-1].verdict == "rejected" and not is_again and not simulation.plan.faults:
            simulation.broken(f"{message} came again, and is not marked as redelivered")
        is_first = not earlier and not simulation.restarts
        if is_first and is_again and not self.has_trouble(group, self.more[message].at):
            simulation.broken(f"{message} is marked as redelivered, and came for the first time")

    def rejections(self, group: str, message: str) -> int:
        """Return how often a message was rejected."""
        return sum(each.verdict == "rejected" for each in self.deliveries.get((group, message), ()))

    def is_rejected_too_late(self, message: str) -> bool:
        """Return whether a rejection of a message was refused: its connection was lost, or its stream had closed."""
        return any(
            each.verdict == "rejected too late"
            for group in self._simulation.groups
            for each in self.deliveries.get((group, message), ())
        )

    # --- at rest

    def is_through(self, group: str, message: str) -> bool:
        """Return whether a group has handled a message, or may be without it."""
        if (group, message) in self.handled or message in self.dead:
            return True
        more, simulation, options = self.more[message], self._simulation, self._options
        members = simulation.members(group)
        if any(each in more.expired for each in (*members, group, "")):
            return True
        now = simulation.world.scheduler.now
        # nothing says when memory:// and subscribers of the envelope drop what has expired
        is_silent = simulation.protocol in ("memory", "mqtt311") or simulation.restarts
        # "an expired message is not sent" (``docs/extensions.md``): of an earlier process no promise tells it
        is_silent = is_silent or not more.copies
        if is_silent and now > more.at + more.ttl:
            return True
        if simulation.protocol.startswith("mqtt") and self._is_lost_as_told(group, more, members):
            return True
        subscribe = options["subscribe"]
        if more.is_malformed and "dead_letter_channel" not in subscribe:
            return True  # skipped or discarded, where only logs and counters say so
        if "auto_acknowledge" in subscribe and self.has_trouble(group, more.at):
            # "acknowledged on arrival, end with the stream and are counted" (``docs/guarantees.md``)
            return True
        if "max_deliveries" in subscribe and "dead_letter_channel" not in subscribe:
            # "The message is discarded" (``docs/guarantees.md``)
            rejections = self.rejections(group, message)
            return rejections > 0 and (
                rejections >= subscribe["max_deliveries"] or (simulation.counts_unseen and self.has_trouble(group, 0.0))
            )
        return False

    def _is_lost_as_told(self, group: str, more: Sent, members: list[str]) -> bool:
        # "messages that arrive while the queue has no consumer: usually lost" (``docs/channels.md``)
        if group in more.unrouted:
            return True
        if self._options["has_session"]:
            return False
        # "MQTT without a session: dead-lettered if a dead-letter channel is set, otherwise lost and counted"
        # (``docs/guarantees.md``)
        return (
            more.taken <= self.restarted
            or any(each in more.gone for each in members)
            or any(moment >= more.at for name in members for moment in self.closed.get(name, ()))
        )
