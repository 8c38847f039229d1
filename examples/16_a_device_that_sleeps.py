"""A device that wakes once an hour and drains its mailbox.

    python examples/16_a_device_that_sleeps.py [URL]

A generator and a mailbox stay awake. The device registers once, goes to sleep, and takes its events each time it wakes.
Here the hour is a fraction of a second, and all parties are in one process; each uses a connection of its own, as three
machines would.
"""

import sys
import tempfile
import time

import messaging
from messaging.remoteevent import (
    EventGenerator,
    EventMailbox,
    EventServer,
    MailboxServer,
    RemoteGenerator,
    RemoteMailbox,
)


def register(url: str) -> str:
    """Register the device, and return what it keeps while it sleeps: the id of its registration."""
    with messaging.connect(url) as m:
        box = RemoteMailbox(m, "mailboxes/field").register(7 * 86_400.0, keep="all").result(10)
        interest = RemoteGenerator(m, "generators/boiler").register("overheated", "cellar", box.listener, 3600.0)
        box.renew_lease(interest.result(10).lease).result(10)  # the mailbox renews it while the device sleeps
        return box.id


def wake_up(url: str, registration: str) -> None:
    """Take the events that have come meanwhile, and renew the registration for another week."""
    with messaging.connect(url) as m:
        box = RemoteMailbox(m, "mailboxes/field").registration(registration)
        for event in box.drain():
            print(f"{event.handback}: event {event.sequence_number}")
        box.lease.renew(7 * 86_400.0).result(10)


def main(url: str) -> None:
    """Run the generator and the mailbox, and let the device wake up twice."""
    with (
        tempfile.TemporaryDirectory() as folder,
        messaging.connect(url) as m,
        messaging.connect(url) as n,
        EventMailbox(f"{folder}/mailbox", messaging=m) as mailbox,
        MailboxServer(m, "mailboxes/field", mailbox) as mailboxes,
        EventGenerator("boiler", events=["overheated"], path=f"{folder}/boiler", messaging=n) as boiler,
        EventServer(n, "generators/boiler", boiler) as generators,
    ):
        mailboxes.ready.result(10)
        generators.ready.result(10)
        registration = register(url)
        for _ in range(2):
            for _ in range(3):
                boiler.generate("overheated")
            box = mailbox.registration(registration)
            while len(box) < 3:  # a real device sleeps for an hour
                time.sleep(0.02)
            print("awake")
            wake_up(url, registration)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://16")
