"""A chain of third parties, each in a process of its own: generator -> filter -> agent -> mailbox.

    python examples/17_filter_agent_mailbox.py [URL]

This process generates events, and reads the mailbox at the end. No party knows more than the next one.
"""

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import messaging
from messaging import Messaging
from messaging.remoteevent import (
    EventGenerator,
    EventMailbox,
    EventServer,
    ListenerReference,
    MailboxServer,
    NotificationFilter,
    RemoteEvent,
    RemoteListener,
    RemoteMailbox,
    StoreAndForwardAgent,
)

TIMEOUT = 20


@dataclass(frozen=True, kw_only=True)
class Measured(RemoteEvent):
    celsius: float


def serve_until_the_end(server: EventServer | MailboxServer) -> None:
    server.ready.result(TIMEOUT)
    print("ready", flush=True)
    sys.stdin.read()  # until the first process closes it


def run_filter(m: Messaging, _folder: str, _registration: str) -> None:
    # The filter does not know the class of the events: it sees their data, and passes them on unchanged.
    hot = NotificationFilter(lambda event: event.data["celsius"] > 90, RemoteListener(m, "chain/agent"))
    with EventServer(m, "chain/filter", hot) as server:
        serve_until_the_end(server)


def run_agent(m: Messaging, folder: str, registration: str) -> None:
    mailbox = RemoteListener(m, ListenerReference("chain/mailbox", registration))
    with (
        StoreAndForwardAgent(f"{folder}/agent", target=mailbox) as agent,
        EventServer(m, "chain/agent", agent) as server,
    ):
        serve_until_the_end(server)


def run_mailbox(m: Messaging, folder: str, _registration: str) -> None:
    with (
        EventMailbox(f"{folder}/mailbox", messaging=m) as mailbox,
        MailboxServer(m, "chain/mailbox", mailbox) as server,
    ):
        serve_until_the_end(server)


PARTIES: dict[str, Any] = {"filter": run_filter, "agent": run_agent, "mailbox": run_mailbox}


def start(party: str, url: str, folder: str, registration: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, __file__, url, party, folder, registration]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def main(url: str) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        m = stack.enter_context(messaging.connect(url))
        stack.enter_context(start("mailbox", url, folder))
        box = RemoteMailbox(m, "chain/mailbox").register(3600.0).result(TIMEOUT)
        for party in ("agent", "filter"):
            stack.enter_context(start(party, url, folder, box.id))
        generator = stack.enter_context(
            EventGenerator("boiler", events=["measured"], path=f"{folder}/boiler", messaging=m)
        )
        generator.register("measured", {"room": "cellar"}, RemoteListener(m, "chain/filter"), 3600.0)
        for celsius in (20.0, 95.5, 60.0, 99.0):
            generator.generate("measured", Measured, celsius=celsius)
        iterator = box.remote_events().result(TIMEOUT)
        for _ in range(2):
            event = iterator.next(TIMEOUT)
            assert isinstance(event, Measured)
            print(f"event {event.sequence_number} in the {event.handback['room']}: {event.celsius} °C")
        iterator.close()


if __name__ == "__main__":
    url, *party = sys.argv[1:] or ["mqtt://localhost?version=5"]
    try:
        if party:
            with messaging.connect(url) as instance:
                PARTIES[party[0]](instance, *party[1:])
        else:
            main(url)
    except messaging.MessagingError as error:
        sys.exit(f"17: {error}; it needs a broker: give its URL")
