"""``messaging journal``: show, read, verify, repair, export, trim and purge a journal of messages on disk."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

from messaging.cli import options
from messaging.cli.options import argument, flag, option
from messaging.cli.output import (
    ExitCode,
    ReaderGoneError,
    dump,
    is_reader_gone,
    payload_fields,
    show_outcome,
    show_pairs,
    write,
)
from messaging.errors import ArgumentError, MessagingError
from messaging.errors.text import visible
from messaging.journal import Journal, JournalView, Record, outline, verify
from messaging.journal import repair as repair_identity
from messaging.model import check_pattern, matcher

logger = logging.getLogger(__name__)

#: how often to look for new records with --follow, seconds
_LOOK: Final = 0.2
#: rounds without a record after which the reader of stdout is looked for
_ROUNDS: Final = 3
#: most characters of a payload in a line for people
_SHOWN: Final = 200

journal = options.CommandGroup("journal")

_Directory = Annotated[Path, argument("DIRECTORY", "Folder of the journal, with its journal.json.")]
_Json = Annotated[bool, flag("--json", "Write JSON: one object on one line; for read, one per record.")]
_From = Annotated[int | None, option("--from", "OFFSET", "First offset; default: the oldest record.", min=0)]
_Limit = Annotated[int | None, option("--limit -n", "N", "Write at most N records.", min=1)]
_Channel = Annotated[str | None, option("--channel -t", "PATTERN", "Only records of these channels, with + and #.")]


@journal.command()
def info(directory: _Directory, json: _Json = False) -> int:
    """Show offsets, sizes, cursors and known damage of a journal; also of a Spark query. Reads no records.

    Example: messaging journal info /var/lib/plant/outbox
    """
    found = outline(directory)
    if json:
        write(dump(found))
        return ExitCode.OK
    rows = {
        "path": found["path"],
        "kind": found["kind"],
        "id": found["id"],
        "size": f"{found['bytes']} bytes in {found['segments']} segments",
    }
    for each in found["partitions"]:
        name = "offsets" if len(found["partitions"]) == 1 else f"partition {each['partition']}"
        rows[name] = f"{each['begin']} to {each['end']}"
    for name, position in found.get("cursors", {}).items():
        behind = found["partitions"][0]["end"] - position
        rows[f"cursor {visible(name)}"] = f"{position}, {max(0, behind)} behind"
    for name in ("dropped", "dead_letters"):
        if name in found:
            rows[name.replace("_", " ")] = str(found[name])
    for each in found["damage"]:
        rows[f"damage at {each['first']}"] = _range(each)
    show_pairs(rows)
    return ExitCode.OK


@journal.command()
def read(
    directory: _Directory,
    start: _From = None,
    limit: _Limit = None,
    channel: _Channel = None,
    cursor: Annotated[
        str | None, option("--cursor", "NAME", "Begin where this cursor stands. It is not moved.")
    ] = None,
    follow: Annotated[
        bool, flag("--follow -f", "Go on with the records that are appended, until interrupted.")
    ] = False,
    dead_letters: Annotated[
        bool, flag("--dead-letters", "Write the records that could not be processed, with the reason.")
    ] = False,
    json: _Json = False,
) -> int:
    """Write records, also while another process appends: offset, time, channel, and the payload as text.

    Example: messaging journal read /var/lib/plant/outbox --from 100 --limit 10
    """
    if dead_letters and (follow or start is not None or cursor is not None):
        raise ArgumentError("--dead-letters does not go with --from, --cursor and --follow")
    if start is not None and cursor is not None:
        raise ArgumentError("--from and --cursor: give one of them")
    is_wanted = _filter(channel)
    with Journal.view(directory) as view:
        if dead_letters:
            letters = (each for each in view.read_dead_letters() if is_wanted(each.stored))
            for letter in itertools.islice(letters, limit):
                fields = {"reason": letter.reason, "failed": _time(letter.at), **_fields(letter.stored)}
                write(dump(fields) if json else _line(letter.stored, f"  ({letter.reason})"))
            return ExitCode.OK
        if cursor is not None:
            start = max(view.begin, _position(view, cursor))
        for record in itertools.islice(filter(is_wanted, read_records(view, start, follow=follow)), limit):
            write(dump(_fields(record)) if json else _line(record))
    return ExitCode.OK


@journal.command("verify")
def verify_journal(directory: _Directory, json: _Json = False) -> int:
    """Read every byte and report damage; also of the journal of a Spark query. Changes nothing.

    Exit code 1: there is damage that no writer has found and copied to quarantine/ yet.

    Example: messaging journal verify /var/lib/plant/outbox
    """
    found = verify(directory)
    unknown = found.unknown
    if json:
        damage = [each._asdict() for each in found.damage]
        quarantined = [each._asdict() for each in found.quarantined]
        write(dump({**found._asdict(), "damage": damage, "quarantined": quarantined}))
    else:
        lines = [f"{found.records} intact records, {found.bytes} bytes in {found.segments} segments"]
        if found.unfinished:
            lines.append(f"{found.unfinished} bytes of an unfinished write at the end: no stored record is lost")
        for each in found.damage:
            known = "" if each in unknown else "; copied to quarantine"
            lines.append(f"{each.segment}: {_range(each._asdict())}: {each.reason}{known}")
        write("".join(f"{line}\n" for line in lines).encode())
    if unknown:
        logger.error("journal %s: %d places are damaged; the rest is readable", found.path, len(unknown))
    if found.state is not None:
        logger.error("%s; the records do not need it", found.state)
    return ExitCode.FAILED if unknown or found.state is not None else ExitCode.OK


@journal.command()
def repair(directory: _Directory, json: _Json = False) -> int:
    """Restore a damaged journal.json, so that the journal opens again; also that of a Spark query.

    No process may have the journal open. The damaged file is kept beside the new one.

    Example: messaging journal repair /var/lib/plant/outbox
    """
    done = repair_identity(directory)
    return show_outcome({"path": str(directory), "done": done}, "journal {path}: {done}", json=json)


@journal.command()
def export(
    directory: _Directory,
    start: _From = None,
    limit: _Limit = None,
    channel: _Channel = None,
    payloads: Annotated[
        bool, flag("--payloads", "Write payloads alone, each with a newline: the input of pub -l.")
    ] = False,
) -> int:
    """Write records as lines of JSON, with the whole context; a payload that is not UTF-8 in base 64.

    Example: messaging journal export outbox -t a/b --payloads | messaging pub mqtt://localhost -t a/b -l
    """
    is_wanted = _filter(channel)
    with Journal.view(directory) as view:
        for record in itertools.islice(filter(is_wanted, read_records(view, start, follow=False)), limit):
            if not payloads:
                write(dump(_fields(record)))
            elif b"\n" in record.payload:
                raise ArgumentError(f"--payloads: the payload at offset {record.offset} has a newline; export JSON")
            else:
                write(record.payload + b"\n")
    return ExitCode.OK


@journal.command()
def trim(
    directory: _Directory,
    before: Annotated[int | None, option("--before", "OFFSET", "Delete the records before this offset.", min=0)] = None,
    cursor: Annotated[
        str | None, option("--cursor", "NAME", "Delete the records that this cursor has acknowledged.")
    ] = None,
    json: _Json = False,
) -> int:
    """Delete the oldest segments of a journal that no process has open. Cursors keep what they have not acknowledged.

    Only segments whose records are all before the offset are deleted.

    Example: messaging journal trim /var/lib/plant/outbox --before 100000
    """
    if (before is None) == (cursor is None):
        raise ArgumentError("say what to delete with exactly one of --before and --cursor")
    with _opened(directory) as opened:
        at = before if before is not None else _position(opened, str(cursor))
        begin, kept = opened.begin, opened.cursors()
        found = {"deleted": opened.trim(at) - begin, "begin": opened.begin, "end": opened.end}
    show_outcome(found, "deleted {deleted} records; {begin} to {end} are there", json=json)
    slowest = min(kept, key=lambda name: kept[name], default=None)
    if slowest is not None and kept[slowest] < at:
        logger.warning("cursor %r keeps the records from %d on", slowest, kept[slowest])
    return ExitCode.OK


@journal.command()
def purge(directory: _Directory, json: _Json = False) -> int:
    """Delete all records of a journal that no process has open, acknowledged or not. Cursors move to the end.

    Example: messaging journal purge /var/lib/plant/outbox
    """
    with _opened(directory) as opened:
        found = {"deleted": opened.purge(), "begin": opened.begin, "end": opened.end}
    return show_outcome(found, "deleted {deleted} records; the next one has the offset {end}", json=json)


def _opened(directory: Path) -> Journal:
    """Open a journal that exists: nothing is created."""
    Journal.view(directory).close()
    return Journal.open(directory)


# --- records


def _filter(channel: str | None) -> Callable[[Record], bool]:
    if channel is None:
        return lambda _: True
    is_match = matcher(check_pattern(channel))
    return lambda record: is_match(record.channel)


def _position(view: JournalView, cursor: str) -> int:
    positions = view.cursors()
    if cursor not in positions:
        known = ", ".join(sorted(positions)) or "none"
        raise ArgumentError(f"--cursor: there is no cursor {cursor!r}; there are: {known}")
    return positions[cursor]


def read_records(view: JournalView, start: int | None, *, follow: bool) -> Iterator[Record]:
    """Yield records from offset ``start`` on, or from the oldest one on.

    Args:
        view: the journal.
        start: the first offset, or ``None``.
        follow: go on with the records that are appended, until interrupted.

    Raises:
        ReaderGoneError: the reader of stdout has closed it.
        JournalError: a file cannot be read.
    """
    following = view.begin if start is None else start
    rounds = 0
    while True:
        rounds += 1
        for record in view.read(max(following, view.begin) if follow else following):
            yield record
            rounds = 0
        following = max(following, view.end)
        if not follow:
            return
        if rounds >= _ROUNDS and is_reader_gone():
            raise ReaderGoneError
        time.sleep(_LOOK)
        view.refresh()


def _time(timestamp: float) -> str:
    try:
        return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return str(timestamp)


def _fields(record: Record) -> dict[str, Any]:
    """Return a record as an object of JSON, without the properties that it lacks."""
    found: dict[str, Any] = {
        "offset": record.offset,
        "timestamp": _time(record.timestamp),
        "channel": record.channel,
        "message_id": record.message_id,
    }
    try:
        context = record.context
    except MessagingError:
        found["properties"] = record.properties  # of a newer version, or of a program with properties of its own
    else:
        found |= {
            "channel_extension": context.channel_extension,
            "content_type": context.content_type,
            "content_encoding": context.content_encoding,
            "correlation_id": context.correlation_id,
            "reply_to": context.reply_to_channel,
            "extensions": dict(context.extensions) or None,
        }
    return {key: value for key, value in found.items() if value is not None} | payload_fields(record.payload)


def _line(record: Record, more: str = "") -> bytes:
    """Return a record as a line for people, without control characters."""
    try:
        payload = record.payload.decode()
    except UnicodeDecodeError:
        payload = f"({len(record.payload)} bytes)"
    shown = visible(payload[:_SHOWN]) + ("…" if len(payload) > _SHOWN else "")
    text = f"{record.offset}  {_time(record.timestamp)}  {visible(record.channel)}  {shown}{visible(more)}"
    return f"{text}\n".encode()


def _range(damage: dict[str, Any]) -> str:
    lost = damage["until"] - damage["first"]
    records = f"{lost} records are lost, offsets {damage['first']} to {damage['until'] - 1}"
    return f"bytes {damage['position']} to {damage['end']}, {records if lost else 'no stored record is lost'}"
