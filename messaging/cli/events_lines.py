"""Events as lines: for people, as JSON, as their data alone, or in a format of ``messaging sub --format``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from messaging.cli.formats import UnformattableError, compiled
from messaging.cli.output import printable
from messaging.errors import ArgumentError, MessagingError
from messaging.eventdata import WireEvent, time_of, write_json
from messaging.model import Features, Message, MessageContext
from messaging.text import did_you_mean

if TYPE_CHECKING:
    from messaging.eventnetwork import Arrival

#: names of formats
FORMATS: Final = ("text", "json", "payload")
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
    arrival: Arrival | None = None


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
    return ("  ".join(map(printable, words)) + "\n").encode()


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
