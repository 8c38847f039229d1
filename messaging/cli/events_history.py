"""``messaging events history``: the past events of a folder, where a journal keeps them in layout 1.

A record of an event has its topic as its channel, and its sequence, if it has one, as its message id. A journal that
keeps events for a broker has channels with other first levels: the topic in the event counts, then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from messaging.cli.events_lines import EventLine, published
from messaging.cli.journal import read_records
from messaging.errors import ArgumentError, DecodeError, MessagingError
from messaging.eventdata import decode
from messaging.journal import Journal

if TYPE_CHECKING:
    from messaging.dispatch import TopicGrammar
    from messaging.journal import JournalView, Record

logger = logging.getLogger(__name__)

#: records that are no events and are named in the log
_NAMED: Final = 5

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
        for line, offset in _lines(view, follow=follow):
            if line is None:
                skipped += 1
                if skipped <= _NAMED:
                    logger.warning("journal %s: the record at offset %d is no event: skipped", view.path, offset)
                continue
            if (not filters or any(each.matches(line.event.topic) for each in filters)) and since(line):
                yield line
        if skipped > _NAMED:
            logger.warning("journal %s: skipped %d records that are no events", view.path, skipped)


def _lines(view: JournalView, *, follow: bool) -> Iterator[tuple[EventLine | None, int]]:
    for record in read_records(view, None, follow=follow):
        try:
            yield _line(record), record.offset
        except MessagingError as error:
            logger.debug("journal %s: offset %d: %s", view.path, record.offset, error)
            yield None, record.offset


def _line(record: Record) -> EventLine:
    try:
        event = decode(record.payload, record.channel)
    except DecodeError:
        event = decode(record.payload)  # its channel is not its topic
    if event.time is None:
        event.time = round(datetime.fromtimestamp(record.timestamp, UTC).timestamp() * 1_000_000)
    number = record.message_id
    sequence = int(number) if number is not None and number.isascii() and number.isdigit() else event.sequence
    return EventLine(event, sender=event.sender, sequence=record.offset if sequence is None else sequence)
