"""Instances at one broker, and listeners."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging.remoteevent import EventMailbox
from tests.journal.conftest import in_memory as in_memory
from tests.journal.conftest import tmp_path as tmp_path
from tests.leases.conftest import channel as channel
from tests.leases.conftest import connect as connect
from tests.leases.conftest import url_of
from tests.remoteevent.helpers import FAST, Box, OpenMailbox, Recorder


@pytest.fixture
def m(request: pytest.FixtureRequest) -> Iterator[messaging.Messaging]:
    """An instance at a broker of its own in this process."""
    with messaging.connect(url_of("memory", request)) as made:
        yield made


@pytest.fixture
def target() -> Recorder:
    return Recorder()


@pytest.fixture
def other() -> Recorder:
    return Recorder()


@pytest.fixture
def reopen(tmp_path: Path, target: Recorder, other: Recorder) -> Iterator[OpenMailbox]:
    """Opens a mailbox, after closing it if it is open."""
    listeners = {"target": target, "other": other}
    with ExitStack() as stack:

        def make(**options: Any) -> EventMailbox:
            stack.close()
            opened = EventMailbox(tmp_path / "mailbox", listeners=listeners, retry=FAST, **options)
            return stack.enter_context(opened)

        yield make


@pytest.fixture
def mailbox(reopen: OpenMailbox) -> EventMailbox:
    return reopen()


@pytest.fixture
def box(mailbox: EventMailbox) -> Box:
    return mailbox.register(100.0)
