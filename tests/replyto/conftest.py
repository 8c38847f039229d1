"""A broker in this process, and a look behind the scenes: no state may be left when a test is over."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from messaging import Messaging
from messaging.replyto.request_channel import RequestChannel
from messaging.testing.conformance.backends import Backend, MemoryBackend
from messaging.testing.conformance.conftest import m as m
from messaging.testing.conformance.conftest import responder as responder
from messaging.testing.waiting import eventually
from tests.doubles.fake import on_loop


@pytest.fixture
def backend(caplog: pytest.LogCaptureFixture) -> Iterator[Backend]:
    caplog.set_level(logging.INFO, logger="messaging")
    backend = MemoryBackend("memory")
    try:
        yield backend
    finally:
        backend.close()
    died = [record for record in caplog.records if record.getMessage() in ("worker job failed",)]
    died += [record for record in caplog.records if record.getMessage().startswith("engine task")]
    assert not died


def routes(m: Messaging) -> list[RequestChannel]:
    """The channels that requests are taken on."""
    return [*m.whiteboard.routes.values()]


def in_hand(m: Messaging) -> int:
    """Requests that handlers have, or that wait for them."""
    return sum(len(route.in_hand) for route in routes(m))


def held(m: Messaging) -> dict[str, int]:
    """What an instance holds for requests that are under way: nothing, if none is. On the loop."""
    connection, requests = m._connection, m._requests
    own, given = requests.own, requests.given
    inboxes = [*given.values(), *([own] if own is not None else [])]
    return {
        "open": len(requests.open),
        "given": len(given),
        "awaited": len(requests.awaited),
        "expiring": len(requests.streams),
        "named by": sum(len(inbox.named_by) for inbox in inboxes),
        "early": sum(len(inbox.early) for inbox in inboxes),
        "streams": len(m._replies.streams),
        "in hand": in_hand(m),
        "departures": len(connection.endings.tasks),
        "outbox": connection.outbox.pending,
        "in flight": len([*connection.outbox.outstanding()]),
    }


def nothing_left(m: Messaging) -> None:
    """Wait until no request is open, and no state of an earlier one is kept."""
    #: may wait for a connection that a test has taken away
    waiting = {"departures", "in flight"}
    eventually(lambda: not any(n for what, n in on_loop(held, m).items() if what not in waiting), "nothing is left")
