"""``messaging mailbox``: store remote events for devices that sleep, and take them out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from messaging.cli import options
from messaging.cli.connecting import BrokerOptions, following, identity, warn_of_memory
from messaging.cli.options import argument, option
from messaging.cli.output import ExitCode, dump, show_list, wait_while_read, write
from messaging.cli.signals import sigterm_stops
from messaging.errors import (
    ArgumentError,
    ConnectionLostError,
    DeadlineError,
    MessagingError,
    ReplyError,
    UnroutableError,
)

if TYPE_CHECKING:
    from messaging import Messaging
    from messaging.remoteevent import RemoteMailbox

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: how long to wait for the answer of a mailbox that must not be there, and of one that must be there, seconds
_PROBE: Final = 1.0
_ANSWER: Final = 4.0
#: how long requests that may be repeated are repeated, and the delay between two of them, seconds
_PATIENCE: Final = 60.0
_DELAY: Final = 0.2

#: default of ``--max-duration``, seconds
_MAX_DURATION: Final = 30 * 86_400.0

mailbox = options.CommandGroup("mailbox")


#: which events a registration keeps
Keep = Literal["all", "latest", "latest_and_count"]
#: what happens to an event that has no room
Full = Literal["refuse", "drop_oldest", "drop_newest"]

_Words = Annotated[list[str] | None, argument("CHANNEL", "Channel of the mailbox.")]
_ChannelAndId = Annotated[
    list[str] | None, argument("CHANNEL ID", "Channel of the mailbox, and id of the registration.")
]
_MaxEvents = Annotated[
    int | None, option("--max-events", "N", "Events of one registration; default: unlimited.", min=1)
]


_Full = Annotated[
    Full | None,
    option(
        "--full",
        "refuse|drop_oldest|drop_newest",
        "What happens to an event without room; default: that of the mailbox.",
    ),
]


@mailbox.command()
def run(
    broker: BrokerOptions,
    words: Annotated[list[str] | None, argument("CHANNEL PATH", "Channel of the mailbox, and its folder.")] = None,
    max_events: _MaxEvents = None,
    full: Annotated[
        Full, option("--full", "refuse|drop_oldest|drop_newest", "What happens to an event without room.")
    ] = "refuse",
    max_bytes: Annotated[
        int | None, option("--max-bytes", "N", "Bytes of one registration; default: 1 GiB.", min=1)
    ] = None,
    max_duration: Annotated[
        float, option("--max-duration", "SECONDS", "Longest lease of a registration.")
    ] = _MAX_DURATION,
) -> int:
    """Run a mailbox until interrupted. Its events are in a folder, and survive restarts.

    SIGTERM, with which service managers stop a service, ends it with exit code 0.

    A channel has one mailbox: the command fails if another one answers there.

    Example: messaging mailbox run mqtt://localhost mailboxes/field /var/lib/mailbox
    """
    from messaging.remoteevent import EventMailbox, MailboxServer
    from messaging.remoteevent.mailbox.mailbox import MAX_BYTES

    broker, (channel, path) = _following(broker, words, "CHANNEL PATH")
    if not path:
        raise ArgumentError("PATH must be the path of a folder, not empty")
    _check_seconds("--max-duration", max_duration)
    with sigterm_stops(), broker.connect("mailbox") as m:
        _refuse_other(m, channel)
        box = EventMailbox(
            path, messaging=m, max_events=max_events, max_bytes=max_bytes or MAX_BYTES, full=full,
            max_duration=max_duration, name=channel,
        )  # fmt: skip
        with box, MailboxServer(m, channel, box) as server:
            server.ready.result()
            logger.info("mailbox %s at %s: %d registrations in %s", channel, identity(m), len(box), path)
            warn_of_memory(m)
            wait_while_read(threading.Event())  # until the program is interrupted
    return ExitCode.OK


@mailbox.command()
def register(
    broker: BrokerOptions,
    words: _Words = None,
    duration: Annotated[float, option("--duration", "SECONDS", "Seconds to ask for; fewer may be granted.")] = 86_400.0,
    keep: Annotated[
        Keep, option("--keep", "all|latest|latest_and_count", "Which events of each kind are kept.")
    ] = "all",
    max_events: _MaxEvents = None,
    full: _Full = None,
    json: options.Json = False,
) -> int:
    """Register an owner of events, and write the id of the registration.

    The listener of the registration, for generators, is the channel of the mailbox with this id.

    Example: messaging mailbox register mqtt://localhost mailboxes/field --duration 604800
    """
    broker, (channel,) = _following(broker, words, "CHANNEL")
    _check_seconds("--duration", duration)
    with broker.connect("mailbox-register") as m:
        promise = _mailbox(m, channel).register(duration, keep=keep, max_events=max_events, full=full)
        registration = promise.result()
        if json:
            granted = registration.lease.duration
            seconds = None if granted == float("inf") else granted
            write(dump({"id": registration.id, "channel": channel, "duration": seconds}))
        else:
            write(f"{registration.id}\n".encode())
    return ExitCode.OK


@mailbox.command("list")
def list_registrations(broker: BrokerOptions, words: _Words = None, json: options.Json = False) -> int:
    """List the registrations of a mailbox: id, stored events, what is kept, target, the time that is left.

    Example: messaging mailbox list mqtt://localhost mailboxes/field
    """
    broker, (channel,) = _following(broker, words, "CHANNEL")
    with broker.connect("mailbox-list") as m:
        infos = _mailbox(m, channel).registrations().result()
    columns: dict[str, Callable[[Any], str]] = {
        "id": lambda each: each.id,
        "stored": lambda each: str(each.stored),
        "dropped": lambda each: str(each.dropped),
        "keep": lambda each: each.keep,
        "target": lambda each: each.target or "-",
        "left": lambda each: _left(each.remaining),
    }
    return show_list(infos, columns, _fields, json=json)


@mailbox.command()
def drain(
    broker: BrokerOptions,
    words: _ChannelAndId = None,
    count: Annotated[int | None, options.count("End after N events.")] = None,
    timeout: Annotated[
        float | None, options.timeout("Wait that long for further events; default: take the stored ones.")
    ] = None,
) -> int:
    """Write the stored events of a registration as JSON, one on each line, and remove them from the mailbox.

    An event is removed after it was written. If the command is killed, the next one writes some events again: their
    sequence numbers tell. After a loss of the connection the command goes on. It ends with exit code 3 if there were
    fewer events than --count.

    Example: messaging mailbox drain mqtt://localhost mailboxes/field 6f1c0a
    """
    from messaging.remoteevent.event import encode_event

    broker, (channel, registration_id) = _following(broker, words, "CHANNEL ID")
    options.check_timeout(timeout)
    with broker.connect("mailbox-drain") as m:
        registration = _mailbox(m, channel).registration(registration_id)
        iterator = _repeated(lambda: registration.remote_events().result())
        written = 0
        while count is None or written < count:
            event = _repeated(lambda: iterator.next(0.0 if timeout is None else timeout))
            if event is None:
                break
            write(encode_event(event) + b"\n")
            written += 1
        _repeated(iterator.close)  # acknowledges what was written; not called after a failure
    if count is not None and written < count:
        if timeout is None:
            logger.warning("only %d of %d events are stored", written, count)
        else:
            logger.warning("timeout: %d of %d events within %g s", written, count, timeout)
        return ExitCode.TIMED_OUT
    return ExitCode.OK


@mailbox.command()
def cancel(broker: BrokerOptions, words: _ChannelAndId = None) -> int:
    """End a registration: its events are deleted, and their senders are told that it is gone.

    Example: messaging mailbox cancel mqtt://localhost mailboxes/field 6f1c0a
    """
    broker, (channel, registration_id) = _following(broker, words, "CHANNEL ID")
    with broker.connect("mailbox-cancel") as m:
        _mailbox(m, channel).registration(registration_id).lease.cancel().result()
    return ExitCode.OK


# --- finding the mailbox


def _ask(m: Messaging, channel: str, timeout: float) -> int | None:
    """Return the number of registrations of the mailbox at a channel; ``None`` if none answers in time.

    Raises:
        ArgumentError: an object that is no mailbox answers.
    """
    from messaging.dispatch.calls import call

    try:
        found: int = call(m, channel, "mailbox", timeout=timeout).result()
    except (DeadlineError, UnroutableError):
        return None
    except (ArgumentError, ReplyError) as error:
        raise ArgumentError(f"the object at {channel!r} is no mailbox: {error}") from None
    return found


def _mailbox(m: Messaging, channel: str) -> RemoteMailbox:
    """Return the way to a mailbox, if one answers. Raises ``DeadlineError``."""
    from messaging.remoteevent import RemoteMailbox

    if _ask(m, channel, _ANSWER) is None:
        raise DeadlineError(f"no mailbox answers at {channel!r}; is `messaging mailbox run` running?")
    return RemoteMailbox(m, channel)


def _refuse_other(m: Messaging, channel: str) -> None:
    """Raise ``MessagingError`` if there is a mailbox at a channel: both would execute every request."""
    count = _ask(m, channel, _PROBE)
    if count is not None:
        raise MessagingError(
            f"another mailbox answers at {channel!r}, with {count} registrations: stop it, or choose another channel"
        )


def _repeated(request: Callable[[], T]) -> T:
    """Make a request that may be made again, until it is answered, for at most 60 s."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return request()
        except (DeadlineError, ConnectionLostError) as error:
            if time.monotonic() >= deadline:
                raise
            logger.debug("trying again: %s", error)
            time.sleep(_DELAY)


# --- arguments and output


def _following(broker: BrokerOptions, words: list[str] | None, names: str) -> tuple[BrokerOptions, list[str]]:
    """Return the broker, and the arguments that follow it, of which the first is a channel."""
    from messaging.model import check_name

    broker, found = following(broker, words, names)
    check_name(found[0])
    return broker, found


def _check_seconds(option: str, value: float) -> None:
    if not value > 0:
        raise ArgumentError(f"{option} must be a number of seconds above 0, not {value:g}")


def _left(seconds: float) -> str:
    """Return a time that is left, for people: its two largest units."""
    if seconds == float("inf"):
        return "for ever"
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    left = int(seconds)
    parts: list[str] = []
    for name, length in units:
        count, left = divmod(left, length)
        if parts or count:
            parts.append(f"{count} {name}")
    return " ".join(parts[:2]) or "0 s"


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
