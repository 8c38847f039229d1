"""One party of the chain of ``remote.py``: its arguments are ROLE URL FOLDER REGISTRATION LIFE.

A ledger line is written with one system call, which a kill of the process cannot undo: the generator writes a number
when the event is on its disk, the owner writes one before it acknowledges the event.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Final

import messaging
from messaging.errors import MessagingError
from messaging.leases import Landlord, Lease
from messaging.remoteevent import (
    EventGenerator,
    EventMailbox,
    EventServer,
    ListenerReference,
    ListenerServer,
    MailboxServer,
    RemoteEvent,
    RemoteListener,
    RemoteMailbox,
    RetryPolicy,
    StoreAndForwardAgent,
)

KINDS: Final = ("a", "b")
MAILBOX: Final = "chain/mailbox"
#: the file whose existence ends the generator
STOP: Final = "stop"
PROGRAM: Final = "from tests.faults import remote_party; remote_party.main()"
_AGENT: Final = "chain/agent"
_OWNER: Final = "chain/owner"
_RETRY: Final = RetryPolicy(first_delay=0.05, max_delay=0.5)
#: a party that was killed does not answer: its callers notice it after so many seconds
_TIMEOUT: Final = 2.0
#: pause between two events, seconds
_PAUSE: Final = 0.002


class Ledger:
    """A file to which lines are appended."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, line: str) -> None:
        """Append a line."""
        os.write(self._file, f"{line}\n".encode())


def generate(m: messaging.Messaging, folder: Path, _registration: str, _life: int) -> None:
    """Generate events of two kinds, and write down which are on the disk."""
    ledger = Ledger(folder / "generated")
    with EventGenerator(
        "generator",
        events=KINDS,
        path=folder / "generator",
        messaging=m,
        landlord=Landlord(max_duration=Lease.FOREVER),
        retry=_RETRY,
    ) as generator:
        for kind in KINDS:
            if not (folder / f"registered-{kind}").exists():
                generator.register(kind, None, RemoteListener(m, _AGENT, timeout=_TIMEOUT), Lease.FOREVER)
                (folder / f"registered-{kind}").touch()
        _up()
        stop = folder / STOP
        while not stop.exists():
            for kind in KINDS:
                ledger.write(f"{kind} {generator.generate(kind).result(30)}")
            time.sleep(_PAUSE)  # sleeps: the pace of the generator
        ledger.write("end 0")
        while True:  # what waits is delivered until the process is ended
            time.sleep(60)  # sleeps: until the process is killed


def forward(m: messaging.Messaging, folder: Path, registration: str, _life: int) -> None:
    """Keep events until the mailbox has them."""
    target = RemoteListener(m, ListenerReference(MAILBOX, registration), timeout=_TIMEOUT)
    with StoreAndForwardAgent(folder / "agent", target=target, retry=_RETRY) as agent, EventServer(m, _AGENT, agent):
        _up()
        sys.stdin.read()


def store(m: messaging.Messaging, folder: Path, _registration: str, _life: int) -> None:
    """Keep events until the owner wants them."""
    with EventMailbox(folder / "mailbox", messaging=m, retry=_RETRY) as mailbox, MailboxServer(m, MAILBOX, mailbox):
        _up()
        sys.stdin.read()


def own(m: messaging.Messaging, folder: Path, registration: str, life: int) -> None:
    """Take events: pulled in one life, pushed in the next."""
    ledger = Ledger(folder / "received")
    box = RemoteMailbox(m, MAILBOX, timeout=_TIMEOUT).registration(registration)

    def note(event: RemoteEvent) -> None:
        ledger.write(f"{event.id} {event.sequence_number}")

    if life % 2:
        with ListenerServer(m, _OWNER) as server:
            server.add(note, "owner")
            _up()
            while True:
                try:
                    box.enable_delivery(ListenerReference(_OWNER, "owner")).result(30)
                except MessagingError:  # the mailbox is being started
                    time.sleep(0.1)  # sleeps: until the mailbox is asked again
                else:
                    break
            sys.stdin.read()
    _up()
    while True:
        try:
            iterator = box.remote_events().result(30)
            while True:
                event = iterator.next(1.0)
                if event is not None:
                    note(event)
        except MessagingError:  # the mailbox was killed: its next life knows no iterators
            time.sleep(0.1)  # sleeps: until the mailbox is asked again


def _up() -> None:
    sys.stdout.write("up\n")
    sys.stdout.flush()


ROLES: Final = {"generator": generate, "agent": forward, "mailbox": store, "owner": own}


def main() -> None:
    """Run until killed; see the module."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    role, url, folder, registration, life = sys.argv[1:]
    with messaging.connect(url) as m:
        ROLES[role](m, Path(folder), registration, int(life))
