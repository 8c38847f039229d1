"""Events as lines: for people, as JSON, as their data alone, or in a format of ``messaging sub --format``.

Past events are read from a folder, where a journal keeps them in layout 1. A record of an event has its topic as its
channel, and its sequence, if it has one, as its message id. A journal that keeps events for a broker has channels with
other first levels: the topic in the event counts, then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from messaging.cli.formats import UnformattableError, compiled
from messaging.cli.journal import read_records
from messaging.dispatch import TopicGrammar
from messaging.dispatch.eventdata import WireEvent, decode, time_of, write_json
from messaging.errors import ArgumentError, DecodeError, MessagingError
from messaging.errors.text import did_you_mean, visible
from messaging.journal import Journal, Record
from messaging.model import Features, Message, MessageContext

if TYPE_CHECKING:
    from messaging.dispatch.eventnetwork import ArrivedEvent

logger = logging.getLogger(__name__)

#: names of formats
FORMATS: Final = ("text", "json", "payload")
#: records that are no events and are named in the log
_NAMED: Final = 5
#: letters of formats that an event has a value for
_LETTERS: Final = frozenset("%CDIJjlPpRtUxX")


@dataclass(slots=True)
class EventLine:
    """An event that is to be written.

    Attributes:
        event: the event.
        received: when it arrived, seconds since the epoch; ``None`` for a recorded event.
        sender: id of the member that published it; ``None`` if unknown.
        sender_name: name of that member; ``None`` if unknown.
        sequence: its number in a history; ``None`` for an event that arrived.
        arrival: what it came with; ``None`` for one that did not arrive as an event.
    """

    event: WireEvent
    received: float | None = None
    sender: str | None = None
    sender_name: str | None = None
    sequence: int | None = None
    arrival: ArrivedEvent | None = None


Form = Callable[[EventLine], bytes]


def form_of(text: str | None, *, json: bool) -> Form:
    """Return the function that formats an event as a whole line.

    Args:
        text: ``text``, ``json``, ``payload``, or a format with sequences; ``None``: ``text``.
        json: whether ``--json`` is given.

    Returns:
        A function that raises ``UnformattableError`` for an event that cannot be written so.

    Raises:
        ArgumentError: the format is unknown, or given twice.
    """
    if json and text is not None:
        raise ArgumentError("--json and --format: give one of them")
    if json or text == "json":
        return _json_line
    if text is None or text == "text":
        return _text_line
    if text == "payload":
        return lambda line: _data(line) + b"\n"
    if "%" not in text:
        hint = did_you_mean(text, FORMATS) or f"there are {', '.join(FORMATS)}, and formats with %t, %p, …"
        raise ArgumentError(f"--format: unknown format {text!r}; {hint}")
    form, letters = compiled(text)
    for each in sorted(letters - _LETTERS):
        raise ArgumentError(f"--format: events have no %{each}; there are %{' %'.join(sorted(_LETTERS))}")
    return lambda line: form(_message(line)) + b"\n"


def _data(line: EventLine) -> bytes:
    """Return the data as JSON; empty for the end of a session."""
    return b"" if line.event.kind != "data" else _json(line, line.event.data)


def _json(line: EventLine, value: Any) -> bytes:
    try:
        return write_json(value)
    except MessagingError as error:
        raise UnformattableError(f"event on {line.event.topic!r:.200}: {error}") from None


def published(event: WireEvent) -> datetime | None:
    """Return when an event was published, as its sender says; ``None`` if it does not."""
    return None if event.time is None else time_of(event.time)


def _json_line(line: EventLine) -> bytes:
    event = line.event
    at, received = published(event), line.received
    found: dict[str, Any] = {
        "received": None if received is None else datetime.fromtimestamp(received, UTC).isoformat(),
        "time": None if at is None else at.isoformat(timespec="microseconds"),
        "topic": event.topic,
        "kind": event.kind,
        "sender": line.sender,
        "sender_name": line.sender_name or None,
        "origin": event.origin,
        "bundle": event.bundle,
        "id": event.id,
        "sequence": line.sequence,
        "session": event.session,
        "reply_to": event.reply_to,
        "correlation_id": event.correlation_id,
        "principal": event.principal,
        "error": None if event.error is None else {"type": event.error.type, "message": event.error.message},
    }
    found = {key: value for key, value in found.items() if value is not None}
    if event.kind == "data":
        found["data"] = event.data
    return _json(line, found) + b"\n"


def _text_line(line: EventLine) -> bytes:
    event = line.event
    at = published(event)
    if at is None and line.received is not None:
        at = datetime.fromtimestamp(line.received, UTC)
    words = [] if line.sequence is None else [str(line.sequence)]
    words += ["-" if at is None else at.isoformat(timespec="milliseconds"), event.topic]
    if line.sequence is None:
        words.append(line.sender_name or line.sender or "-")
    if event.kind == "data":
        words.append(_data(line).decode())
    elif event.error is not None:
        words.append(f"[session {event.session or '-'} failed: {event.error.type}: {event.error.message}]")
    else:
        words.append(f"[session {event.session or '-'} closed]")
    return ("  ".join(map(visible, words)) + "\n").encode()


def _message(line: EventLine) -> Message:
    """Return a message with the properties of an event, for a format of messages."""
    event = line.event
    at = published(event)
    headers = {
        "kind": event.kind,
        "sender": line.sender_name or line.sender,
        "session": event.session,
        "time": None if at is None else at.isoformat(timespec="microseconds"),
    }
    given = {key: value for key, value in headers.items() if value is not None}
    context = MessageContext(
        event.topic,
        None,
        "application/json",
        None,
        event.correlation_id,
        event.reply_to,
        {Features.EXTENSION_HEADERS: given},
    )
    return Message(_data(line), context)


# --- past events

#: whether an event is late enough
Since = Callable[[EventLine], bool]


def since_of(text: str | None) -> Since:
    """Return the condition of ``--since``: a sequence or a time in ISO 8601, both inclusive.

    Raises:
        ArgumentError: the text is neither.
    """
    if text is None:
        return lambda _: True
    if text.isascii() and text.isdigit():
        first = int(text)
        return lambda line: line.sequence is not None and line.sequence >= first
    try:
        start = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentError(
            f"--since must be a sequence or a time such as 2025-10-09T08:53:20Z, not {text!r:.80}"
        ) from None
    if start.tzinfo is None:
        start = start.astimezone()  # a time without a zone is local

    def is_late(line: EventLine) -> bool:
        at = published(line.event)
        return at is not None and at >= start

    return is_late


def past_events(
    path: str, topics: list[str], grammar: TopicGrammar[Any], since: Since, *, follow: bool
) -> Iterator[EventLine]:
    """Yield the events of a folder, the oldest first.

    Args:
        path: the folder.
        topics: topic filters; without one, all events.
        grammar: of the topic filters.
        since: whether an event is late enough.
        follow: go on with the events that are stored meanwhile, until interrupted.

    Raises:
        InvalidTopicError: a topic filter breaks the grammar.
        ArgumentError: the path is a URL.
        JournalError: the folder has no journal, or cannot be read.
    """
    filters = [grammar.parse(each) for each in topics]
    if "://" in path:
        raise ArgumentError("PATH must be the folder of a durable history, and no broker URL")
    with Journal.view(path) as view:
        skipped = 0
        for record in read_records(view, None, follow=follow):
            try:
                line = _line_of(record)
            except MessagingError as error:
                logger.debug("journal %s: offset %d: %s", view.path, record.offset, error)
                skipped += 1
                if skipped <= _NAMED:
                    logger.warning("journal %s: the record at offset %d is no event: skipped", view.path, record.offset)
                continue
            if (not filters or any(each.matches(line.event.topic) for each in filters)) and since(line):
                yield line
        if skipped > _NAMED:
            logger.warning("journal %s: skipped %d records that are no events", view.path, skipped)


def _line_of(record: Record) -> EventLine:
    try:
        event = decode(record.payload, record.channel)
    except DecodeError:
        event = decode(record.payload)  # its channel is not its topic
    if event.time is None:
        event.time = round(datetime.fromtimestamp(record.timestamp, UTC).timestamp() * 1_000_000)
    number = record.message_id
    sequence = int(number) if number is not None and number.isascii() and number.isdigit() else event.sequence
    return EventLine(event, sender=event.sender, sequence=record.offset if sequence is None else sequence)
