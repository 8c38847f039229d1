"""A broker in this process, and a look behind the scenes: no state may be left when a test is over."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from messaging import Messaging
from messaging.replyto.request_route import RequestRoute
from messaging.testing.conformance.backends import Backend, MemoryBackend
from messaging.testing.conformance.conftest import m as m
from messaging.testing.conformance.conftest import responder as responder
from messaging.testing.conformance.helpers import eventually


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


def routes(m: Messaging) -> list[RequestRoute]:
    """The channels that requests are taken on."""
    return [*m.whiteboard.routes]


def in_hand(m: Messaging) -> int:
    """Requests that handlers have, or that wait for them."""
    return sum(len(route.in_hand) for route in routes(m))


def nothing_left(m: Messaging) -> None:
    """Wait until no request is open, and no state of an earlier one is kept."""

    def is_idle() -> bool:
        requests, replies = m._requests, m._replies
        own, given = requests.inboxes.own, requests.inboxes.given
        inboxes = [*given.values(), *([own] if own is not None else [])]
        return (
            m._connection.outbox.pending == 0
            and not requests.open
            and not given
            and not any(inbox.pending or inbox.early for inbox in inboxes)
            and not replies.streams
            and in_hand(m) == 0
        )

    eventually(is_idle, "nothing is left")
