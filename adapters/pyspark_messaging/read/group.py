"""The group of a query: the name under which the broker keeps messages for it.

The group is the option ``group``, or else the group of the journal or of the checkpoint, or else derived from the id of
the journal. When the group changes, the broker keeps a session or a queue that nothing reads and that grows. Such a
change is refused here. When the journal was lost, the group is adopted.

MQTT: a persistent session whose client id is the group. Several receivers share the channels (``$share``). AMQP: a
durable queue of the group for each channel, which all receivers consume; or existing queues.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from messaging.errors import InvalidOptionError
from pyspark_messaging.errors import OPTION, DataLossError, JournalMismatchError, redacted
from pyspark_messaging.options import SESSION_EXPIRY, ReadOptions

if TYPE_CHECKING:
    from pyspark_messaging.journal.journal import Meta, RowJournal

logger = logging.getLogger(__name__)


def default_group(journal: str) -> str:
    """Return the default group of a query, derived from the id of its first journal."""
    return f"spark-{journal[:16]}"


def join_group(options: ReadOptions, opened: RowJournal, checkpoint: tuple[str, str | None] | None) -> str:
    """Return the group of the query, and record it in the journal.

    ``checkpoint`` holds the id of the journal and the group; it is ``None`` for a query without one.

    Raises:
        DataLossError: the checkpoint is of another journal, and ``failOnDataLoss`` is true.
        JournalMismatchError: the broker keeps messages for a group that the query would leave.
    """
    meta, path = opened.meta, opened.folder.path
    is_used = meta.query is not None or any(log.end for log in opened.logs)
    previous = meta.group or (default_group(meta.id) if is_used and options.group is None else None)
    if checkpoint is not None and checkpoint[0] != meta.id:
        left = checkpoint[1] or (default_group(checkpoint[0]) if options.group is None else None)
        if options.fail_on_data_loss:
            raise DataLossError(
                f"option 'journalPath' ({path}): the checkpoint is of journal {checkpoint[0]}, and this is {meta.id}; "
                "failOnDataLoss=false goes on with the rows in this one, and with the messages that the broker keeps "
                f"for group {left or options.group!r}"
            )
        if previous is not None and left not in (None, previous) and not options.adopt_journal:
            raise JournalMismatchError(
                redacted(path),
                f"the broker keeps messages of the checkpoint for group {left!r}, and messages of this journal for "
                f"group {previous!r}; set journalPath to an empty folder to receive the messages of {left!r}, or "
                f"adoptJournal=true and group={left} (or {previous}) to leave those of the other group at the broker",
                OPTION,
            )
        logger.warning(
            "journal %s: the journal %s of the checkpoint is gone, and with it the rows that were not processed; going "
            "on with the messages that the broker keeps for group %s",
            redacted(path), checkpoint[0], left or options.group,
        )  # fmt: skip
        previous = left or previous
    group = options.group or previous or default_group(meta.id)
    _check_change(options, path, previous, group)
    if left_behind := sorted(set(meta.sessions) - set(broker_sessions(options, group))):
        logger.warning(
            "journal %s: the broker goes on keeping messages for %s, which no query reads: delete it there",
            redacted(path), ", ".join(left_behind),
        )  # fmt: skip
    opened.note_group(group, broker_sessions(options, group))
    return group


def check_sessions(options: ReadOptions, path: str, meta: Meta) -> None:
    """Check that a query reads all sessions or queues in which the broker keeps messages for a journal.

    Raises:
        JournalMismatchError: it does not, and ``adoptJournal`` is false.
    """
    group = options.group or meta.group or default_group(meta.id)
    _check_change(options, path, meta.group, group)
    missing = sorted(set(meta.sessions) - set(broker_sessions(options, group)))
    if missing and not options.adopt_journal:
        raise JournalMismatchError(
            redacted(path),
            f"the broker keeps messages for {', '.join(map(repr, missing))}, and a query with {options.receivers} "
            "receivers does not read them; set receivers=1 to receive them, or adoptJournal=true to leave them at the "
            "broker",
            OPTION,
        )


def _check_change(options: ReadOptions, path: str, previous: str | None, group: str) -> None:
    if previous not in (None, group) and not options.adopt_journal:
        raise JournalMismatchError(
            redacted(path),
            f"the broker keeps messages for group {previous!r}, and option 'group' is {group!r}; set group={previous} "
            "to receive them, or adoptJournal=true to leave them at the broker",
            OPTION,
        )


# --- client ids, queues and extensions of the receivers


def broker_sessions(options: ReadOptions, group: str) -> Sequence[str]:
    """Return the names of the MQTT sessions, or of the group's AMQP queues, in which the broker keeps messages."""
    if options.required_broker.is_mqtt:
        return [_client_id(options, group, number) for number in range(options.receivers)]
    return [] if options.queues else _queues(options, group)


def connection_settings(options: ReadOptions, group: str, number: int) -> dict[str, Any]:
    """Return the keywords of ``messaging.connect`` for the receiver with a number. Holds secrets.

    Raises:
        InvalidOptionError: ``passwordFile`` cannot be read, or an option is given that the query sets itself.
    """
    broker = options.required_broker
    for setting in ("client_id", "clean_start"):
        if setting in broker.settings:
            raise InvalidOptionError(setting, f"option {setting!r} is set by the query itself; use 'group' to name it")
    own: dict[str, Any] = {"client_id": _client_id(options, group, number)}
    if broker.is_mqtt:
        own |= {"clean_start": False, "receive_maximum": options.prefetch}
        if broker.settings.get("version", "5") in ("5", "v5") and "session_expiry" not in broker.settings:
            own["session_expiry"] = SESSION_EXPIRY
    return broker.keywords(**own)


def subscriptions(options: ReadOptions, group: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the channel of each subscription of a receiver, and its extensions."""
    is_mqtt = options.required_broker.is_mqtt
    extensions: dict[str, Any] = {"qos": options.qos}
    if options.qos != "0":
        extensions |= {"prefetch": options.prefetch, "bufferSize": options.prefetch}
        if is_mqtt:
            extensions["packetId"] = True
    extensions |= options.extensions
    if is_mqtt:
        if options.receivers > 1:
            extensions["queue"] = group
        return [(channel, extensions) for channel in options.channels]
    if options.queue_type is not None:
        extensions["queueType"] = options.queue_type
    queues = options.queues or _queues(options, group)
    channels = options.channels or queues  # existing queues may have bindings of their own
    return [(channel, {**extensions, "queue": queue}) for channel, queue in zip(channels, queues, strict=True)]


def _client_id(options: ReadOptions, group: str, number: int) -> str:
    return group if options.receivers == 1 else f"{group}-{number}"


def _queues(options: ReadOptions, group: str) -> list[str]:
    if len(options.channels) == 1:
        return [group]
    return [f"{group}.{hashlib.sha256(channel.encode()).hexdigest()[:12]}" for channel in options.channels]
