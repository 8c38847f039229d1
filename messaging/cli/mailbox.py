"""``messaging mailbox``: store remote events for devices that sleep, and take them out.

The modules behind it are imported when a command runs: help and completion must be fast.
"""

from __future__ import annotations

import enum
import logging
import threading
from typing import Annotated, Any

import typer
from typer import Argument, Option

from messaging.cli import options
from messaging.cli.connecting import Broker, identity, split, warn_of_memory
from messaging.cli.leases import seconds_text
from messaging.cli.output import ExitCode, dump, show_table, wait_while_read, write
from messaging.errors import ArgumentError

logger = logging.getLogger(__name__)

mailbox = typer.Typer(name="mailbox", add_completion=False, pretty_exceptions_enable=False)


class Keep(enum.StrEnum):
    """Which events a registration keeps."""

    ALL = "all"
    LATEST = "latest"
    LATEST_AND_COUNT = "latest_and_count"


class Full(enum.StrEnum):
    """What happens to an event that has no room."""

    REFUSE = "refuse"
    DROP_OLDEST = "drop_oldest"
    DROP_NEWEST = "drop_newest"


_Words = Annotated[
    list[str] | None,
    Argument(metavar="CHANNEL", show_default=False, help="Channel of the mailbox."),
]
_Json = Annotated[bool, Option("--json", help="Write JSON on one line.")]
_MaxEvents = Annotated[
    int | None, Option("--max-events", metavar="N", min=1, help="Events of one registration; default: unlimited.")
]


@mailbox.callback()
def main() -> None:
    """Store remote events for devices that sleep, and take them out."""


@mailbox.command()
@options.command
def run(
    broker: Broker,
    words: Annotated[
        list[str] | None,
        Argument(metavar="CHANNEL PATH", show_default=False, help="Channel of the mailbox, and its folder."),
    ] = None,
    max_events: _MaxEvents = None,
    full: Annotated[
        Full, Option("--full", metavar="refuse|drop_oldest|drop_newest", help="What happens to an event without room.")
    ] = Full.REFUSE,
    max_duration: Annotated[
        float, Option("--max-duration", metavar="SECONDS", help="Longest lease of a registration.")
    ] = 30 * 86_400.0,
) -> int:
    """Run a mailbox until interrupted. Its events are in a folder, and survive restarts.

    Example: messaging mailbox run mqtt://localhost mailboxes/field /var/lib/mailbox
    """
    from messaging.remoteevent import EventMailbox, MailboxServer

    broker, found = split(broker, words or [])
    channel, path = _exactly(found, "CHANNEL PATH", 2)
    with (
        broker.connect("mailbox") as m,
        EventMailbox(
            path, messaging=m, max_events=max_events, full=full.value, max_duration=max_duration, name=channel
        ) as box,
        MailboxServer(m, channel, box) as server,
    ):
        server.ready.result()
        logger.info("mailbox %s at %s: %d registrations in %s", channel, identity(m), len(box), path)
        warn_of_memory(m)
        never = threading.Event()
        while True:
            wait_while_read(never)


@mailbox.command()
@options.command
def register(
    broker: Broker,
    words: _Words = None,
    duration: Annotated[
        float, Option("--duration", metavar="SECONDS", help="Seconds to ask for; fewer may be granted.")
    ] = 86_400.0,
    keep: Annotated[
        Keep, Option("--keep", metavar="all|latest|latest_and_count", help="Which events of each kind are kept.")
    ] = Keep.ALL,
    max_events: _MaxEvents = None,
    json: _Json = False,
) -> int:
    """Register an owner of events, and write the id of the registration.

    The listener of the registration, for generators, is the channel of the mailbox with this id.

    Example: messaging mailbox register mqtt://localhost mailboxes/field --duration 604800
    """
    from messaging.remoteevent import RemoteMailbox

    broker, found = split(broker, words or [])
    (channel,) = _exactly(found, "CHANNEL", 1)
    with broker.connect("mailbox-register") as m:
        registration = RemoteMailbox(m, channel).register(duration, keep=keep.value, max_events=max_events).result()
        if json:
            granted = registration.lease.duration
            seconds = None if granted == float("inf") else granted
            write(dump({"id": registration.id, "channel": channel, "duration": seconds}))
        else:
            write(f"{registration.id}\n".encode())
    return ExitCode.OK


@mailbox.command("list")
@options.command
def list_registrations(broker: Broker, words: _Words = None, json: _Json = False) -> int:
    """List the registrations of a mailbox: id, stored events, what is kept, target, the time that is left.

    Example: messaging mailbox list mqtt://localhost mailboxes/field
    """
    from messaging.remoteevent import RemoteMailbox

    broker, found = split(broker, words or [])
    (channel,) = _exactly(found, "CHANNEL", 1)
    with broker.connect("mailbox-list") as m:
        infos = RemoteMailbox(m, channel).registrations().result()
    if json:
        write(dump([_fields(each) for each in infos]))
    elif infos:
        rows = [
            [each.id, str(each.stored), str(each.dropped), each.keep, each.target or "-", seconds_text(each.remaining)]
            for each in infos
        ]
        show_table(["id", "stored", "dropped", "keep", "target", "left"], rows)
    return ExitCode.OK


@mailbox.command()
@options.command
def drain(
    broker: Broker,
    words: Annotated[
        list[str] | None,
        Argument(metavar="CHANNEL ID", show_default=False, help="Channel of the mailbox, and id of the registration."),
    ] = None,
    count: Annotated[int | None, options.count_option("End after N events.")] = None,
    timeout: Annotated[
        float | None, options.timeout_option("Wait that long for further events; default: take the stored ones.")
    ] = None,
) -> int:
    """Write the stored events of a registration as JSON, one on each line, and remove them from the mailbox.

    An event is removed after it was written. If the command is killed, the next one writes some events again: their
    sequence numbers tell.

    Example: messaging mailbox drain mqtt://localhost mailboxes/field 6f1c0a
    """
    from messaging.remoteevent import RemoteMailbox
    from messaging.remoteevent.layout import encode_event

    broker, found = split(broker, words or [])
    channel, registration_id = _exactly(found, "CHANNEL ID", 2)
    options.check_timeout(timeout)
    with broker.connect("mailbox-drain") as m:
        iterator = RemoteMailbox(m, channel).registration(registration_id).remote_events().result()
        written = 0
        while count is None or written < count:
            event = iterator.next(0.0 if timeout is None else timeout)
            if event is None:
                break
            write(encode_event(event) + b"\n")
            written += 1
        iterator.close()  # acknowledges what was written; not called after a failure
    if count is not None and written < count and timeout is not None:
        logger.warning("timeout: %d of %d events within %g s", written, count, timeout)
        return ExitCode.TIMED_OUT
    return ExitCode.OK


def _exactly(words: list[str], names: str, count: int) -> list[str]:
    if len(words) < count:
        raise ArgumentError(f"arguments are missing: URL {names}")
    if len(words) > count:
        raise ArgumentError(f"one argument more than URL {names}: {words[count]!r}")
    return words


def _fields(info: Any) -> dict[str, Any]:
    return {
        "id": info.id,
        "stored": info.stored,
        "dropped": info.dropped,
        "keep": info.keep,
        "target": info.target,
        "refused": [list(each) for each in info.refused],
        "remaining": None if info.remaining == float("inf") else round(info.remaining, 3),
        "expiration": None if info.expiration is None else info.expiration.isoformat(),
    }
