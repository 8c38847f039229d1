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

from messaging.outbox.sql.administration import DeadRow as DeadRow
from messaging.outbox.sql.administration import OutboxStatus as OutboxStatus
from messaging.outbox.sql.administration import dead_rows as dead_rows
from messaging.outbox.sql.administration import delete_sent as delete_sent
from messaging.outbox.sql.administration import discard_dead as discard_dead
from messaging.outbox.sql.administration import outbox_status as outbox_status
from messaging.outbox.sql.administration import retry_dead as retry_dead
from messaging.outbox.sql.database import database_url as database_url
from messaging.outbox.sql.enqueuing import enqueue as enqueue
from messaging.outbox.sql.inbox import Inbox as Inbox
from messaging.outbox.sql.inbox import process_once as process_once
from messaging.outbox.sql.relay import Relay as Relay
from messaging.outbox.sql.relay import RelayCounters as RelayCounters
from messaging.outbox.sql.tables import SCHEMA_VERSION as SCHEMA_VERSION
from messaging.outbox.sql.tables import OutboxTables as OutboxTables
from messaging.outbox.sql.tables import create_tables as create_tables

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
