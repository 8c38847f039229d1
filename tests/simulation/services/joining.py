"""How the programs of ``distributed`` and ``typedevents`` join the network of events."""

from __future__ import annotations

from typing import Any

from messaging.dispatch.eventnetwork import EventNetwork, EventSigning, SigningKey


def network_of(member: Any) -> EventNetwork:
    """Return how a process joins; its messages are signed if the option ``is_signed`` of the plan says so.

    The clocks of machines are set, and queues keep messages for long: signatures are valid for as long.
    """
    settings = dict(member.form["network"])
    if member.simulation.plan.options["is_signed"]:
        key = SigningKey.hmac("all", b"a secret for the whole world")
        settings["signing"] = EventSigning(key, window=30 * 86_400.0, clock_skew=7 * 86_400.0)
    return EventNetwork(name=member.member, **settings)
