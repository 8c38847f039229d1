"""The state of an outbox: counts of its rows, its dead rows, their retry and removal; removal of sent rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, delete, func, select, update

from messaging.errors import ArgumentError
from messaging.errors.checks import check_instance
from messaging.execution import seconds
from messaging.outbox.sql.connections import database_now, transactional
from messaging.outbox.sql.tables import DEAD, DEFAULT_TABLES, PENDING, SENT, OutboxTables


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """The rows of an outbox.

    Attributes:
        pending: rows that are to be published.
        retrying: pending rows that were refused at least once.
        oldest: when the oldest pending row was written; ``None`` if none is pending.
        sent: rows that were published and are kept.
        dead: rows that were given up.
        relays: names of the relays that hold rows at present.
    """

    pending: int
    retrying: int
    oldest: datetime | None
    sent: int
    dead: int
    relays: tuple[str, ...]


#: highest limit that every database takes
_MOST_ROWS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DeadRow:
    """A row that was given up.

    Attributes:
        id: of the row, for :func:`retry_dead` and :func:`discard_dead`.
        key, channel, message_id, created: as written.
        size: bytes of the payload.
        attempts: how often it was refused.
        dead_since: when it was given up.
        reason: of the last refusal.
    """

    id: int
    key: str
    channel: str
    message_id: str
    created: datetime
    size: int
    attempts: int
    dead_since: datetime | None
    reason: str


@transactional
def outbox_status(connection: Connection, tables: OutboxTables = DEFAULT_TABLES) -> OutboxStatus:
    """Return the state of the outbox; it reads every row that is not deleted."""
    check_instance("tables", tables, OutboxTables)
    outbox, lease = tables.outbox, tables.lease
    counts = {
        state: (count, oldest)
        for state, count, oldest in connection.execute(
            select(outbox.c.state, func.count(), func.min(outbox.c.created)).group_by(outbox.c.state)
        )
    }
    retrying = connection.execute(
        select(func.count()).select_from(outbox).where(outbox.c.state == PENDING, outbox.c.attempts > 0)
    ).scalar_one()
    now = database_now(connection)
    relays = connection.execute(
        select(lease.c.owner).where(lease.c.owner.is_not(None), lease.c.until > now).distinct().order_by(lease.c.owner)
    ).scalars()
    pending, oldest = counts.get(PENDING, (0, None))
    return OutboxStatus(
        pending=pending, retrying=retrying, oldest=oldest, sent=counts.get(SENT, (0, None))[0],
        dead=counts.get(DEAD, (0, None))[0], relays=tuple(relays),
    )  # fmt: skip


@transactional
def dead_rows(connection: Connection, limit: int = 100, tables: OutboxTables = DEFAULT_TABLES) -> Sequence[DeadRow]:
    """Return at most ``limit`` dead rows, the latest first."""
    check_instance("tables", tables, OutboxTables)
    _check_limit(limit)
    outbox = tables.outbox
    wanted = (
        select(
            outbox.c.id, outbox.c.key, outbox.c.channel, outbox.c.message_id, outbox.c.created,
            func.length(outbox.c.payload), outbox.c.attempts, outbox.c.settled_at, outbox.c.error,
        )
        .where(outbox.c.state == DEAD).order_by(outbox.c.settled_at.desc(), outbox.c.id.desc()).limit(limit)
    )  # fmt: skip
    return [DeadRow(*row) for row in connection.execute(wanted)]


@transactional
def retry_dead(connection: Connection, ids: Iterable[int] | None = None, tables: OutboxTables = DEFAULT_TABLES) -> int:
    """Have dead rows published again, within the transaction of ``connection``; return how many there were.

    They keep their message ids, and come after the messages of their key that were published meanwhile.

    Args:
        connection: as of :func:`~messaging.outbox.sql.enqueue`.
        ids: of the rows; all dead rows if not given.
        tables: the tables.
    """
    check_instance("tables", tables, OutboxTables)
    outbox = tables.outbox
    revived: dict[str, Any] = {"state": PENDING, "attempts": 0, "retry_at": None, "settled_at": None}
    statement = update(outbox).where(outbox.c.state == DEAD, *_among(outbox, ids)).values(revived)
    return connection.execute(statement).rowcount


@transactional
def discard_dead(
    connection: Connection, ids: Iterable[int] | None = None, tables: OutboxTables = DEFAULT_TABLES
) -> int:
    """Delete dead rows; otherwise as :func:`retry_dead`."""
    check_instance("tables", tables, OutboxTables)
    outbox = tables.outbox
    statement = delete(outbox).where(outbox.c.state == DEAD, *_among(outbox, ids))
    return connection.execute(statement).rowcount


@transactional
def delete_sent(
    connection: Connection,
    older_than: float = 0.0,
    tables: OutboxTables = DEFAULT_TABLES,
    limit: int | None = None,
) -> int:
    """Delete the rows that were sent more than ``older_than`` seconds ago; return how many there were.

    Args:
        connection: as of :func:`~messaging.outbox.sql.enqueue`.
        older_than: seconds.
        tables: the tables.
        limit: rows to delete at most, the oldest first; all of them if not given.
    """
    age = seconds(older_than, "older_than")
    if not 0 <= age < 1e10:
        raise ArgumentError("older_than must be a number of seconds, 0 or more")
    check_instance("tables", tables, OutboxTables)
    if limit is not None:
        _check_limit(limit)
    outbox = tables.outbox
    latest = database_now(connection) - timedelta(seconds=age)
    is_old: ColumnElement[bool] = (outbox.c.state == SENT) & (outbox.c.settled_at <= latest)
    if limit is not None:
        oldest = select(outbox.c.id).where(is_old).order_by(outbox.c.settled_at).limit(limit)
        is_old = outbox.c.id.in_(oldest.with_for_update(skip_locked=True))  # other relays delete, too
    return connection.execute(delete(outbox).where(is_old)).rowcount


def _check_limit(limit: object) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= _MOST_ROWS:
        raise ArgumentError(f"limit must be an int from 0 to {_MOST_ROWS}, not {limit!r:.80}")


def _among(outbox: Any, ids: Iterable[int] | None) -> tuple[Any, ...]:
    return () if ids is None else (outbox.c.id.in_([*ids]),)
