"""``messaging leases``: show the leases that are served at a broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from messaging.cli import options
from messaging.cli.connecting import BrokerOptions, split
from messaging.cli.options import argument
from messaging.cli.output import ExitCode, dump, show_table, write
from messaging.errors import ArgumentError

if TYPE_CHECKING:
    from messaging.leases import LeaseInfo

leases = options.CommandGroup("leases")

#: how long to wait for the answers of all objects, seconds
WAIT = 1.0


@leases.command("list")
def list_leases(
    broker: BrokerOptions,
    channel: Annotated[
        str | None, argument("CHANNEL", "Of one object; default: ask all objects at the broker.")
    ] = None,
    timeout: Annotated[
        float | None, options.timeout("How long to wait for answers; default: 1, of one object 10.")
    ] = None,
    json: options.Json = False,
) -> int:
    """List the leases of all objects at a broker, or of one: id, what is leased, the time that is left.

    Example: messaging leases list mqtt://localhost
    """
    from messaging.leases import find_leases, remote_leases

    broker, words = split(broker, [] if channel is None else [channel])
    if len(words) > 1:
        raise ArgumentError("one argument more than CHANNEL")
    options.check_timeout(timeout, most=3600.0)
    with broker.connect("leases") as m:
        if words:
            found = [(words[0], remote_leases(m, words[0], timeout=10.0 if timeout is None else timeout).result())]
        else:
            found = find_leases(m, WAIT if timeout is None else timeout)
    if json:
        write(dump([{"channel": channel, "leases": [_fields(each) for each in infos]} for channel, infos in found]))
        return ExitCode.OK
    rows = [
        [channel, each.id, each.about or "-", seconds_text(each.remaining), time_text(each)]
        for channel, infos in found
        for each in infos
    ]
    if rows:
        show_table(["channel", "id", "about", "left", "expires"], rows)
    return ExitCode.OK


def seconds_text(seconds: float) -> str:
    """Return seconds for people."""
    return "for ever" if seconds == float("inf") else f"{seconds:.0f} s"


def time_text(lease: Any) -> str:
    """Return the expiration of a lease for people."""
    if lease.expiration is None:
        return "-"
    try:
        return str(lease.expiration.astimezone().isoformat(sep=" ", timespec="seconds"))
    except (OSError, OverflowError, ValueError):  # beyond the years that the local time zone has
        return str(lease.expiration)


def _fields(lease: LeaseInfo) -> dict[str, Any]:
    is_endless = lease.remaining == float("inf")
    return {
        "id": lease.id,
        "about": lease.about,
        "duration": None if lease.duration == float("inf") else lease.duration,
        "remaining": None if is_endless else round(lease.remaining, 3),
        "expiration": None if lease.expiration is None else lease.expiration.isoformat(),
    }
