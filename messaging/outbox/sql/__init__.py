"""A transactional outbox and an inbox in an SQL database, on SQLAlchemy Core; PostgreSQL and SQLite.

``enqueue`` writes a message into a table, within the transaction of the caller. A :class:`Relay` publishes the rows of
committed transactions, in the order of the commits for each key. ``process_once`` tells a consumer, within its own
transaction, whether it has handled a message before. See ``docs/outbox.md``.

Everything but the relay works with ``Connection`` and ``Session``, and with ``AsyncConnection`` and ``AsyncSession``:
with the latter two a function returns an awaitable of its result.

Needs the extra ``sql``.
"""

from messaging.errors import MissingExtraError as _MissingExtraError

try:
    import sqlalchemy as _sqlalchemy  # noqa: F401
except ImportError as error:
    raise _MissingExtraError("sql", "messaging.outbox.sql") from error

from messaging.outbox.sql.administration import (
    DeadRow,
    OutboxStatus,
    dead_rows,
    delete_sent,
    discard_dead,
    outbox_status,
    retry_dead,
)
from messaging.outbox.sql.database import database_url
from messaging.outbox.sql.enqueuing import enqueue
from messaging.outbox.sql.inbox import Inbox, process_once
from messaging.outbox.sql.relay import Relay, RelayCounters
from messaging.outbox.sql.tables import SCHEMA_VERSION, OutboxTables, create_tables

__all__ = [
    "SCHEMA_VERSION",
    "DeadRow",
    "Inbox",
    "OutboxStatus",
    "OutboxTables",
    "Relay",
    "RelayCounters",
    "create_tables",
    "database_url",
    "dead_rows",
    "delete_sent",
    "discard_dead",
    "enqueue",
    "outbox_status",
    "process_once",
    "retry_dead",
]
