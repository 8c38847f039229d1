"""The inbox: which messages a consumer has handled, in the database that it writes to.

The row of a message is written in the transaction of the consumer. The effect of the message and the knowledge that it
was handled are committed together, or neither is.

The time of a row is never before that of an older one: an id that was noted while the clock was behind is kept as long
as the others. After the clock was ahead, rows stay until it has caught up, and the retention after that.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, overload

from sqlalchemy import ColumnElement, Connection, delete, func, literal, select, tuple_

from messaging.errors import ArgumentError
from messaging.errors.checks import check_instance
from messaging.errors.text import tolerant
from messaging.execution import clock, seconds
from messaging.model import Features, Message, check_text
from messaging.outbox.sql.connections import database_now, in_transaction, insert_or_ignore
from messaging.outbox.sql.tables import DEFAULT_TABLES, OutboxTables, check_dialect

if TYPE_CHECKING:
    from messaging.outbox.sql.connections import AnyConnection, AwaitedConnection, SyncConnection

#: how long an id is remembered by default, seconds: a week
RETENTION: Final = 7 * 24 * 3600.0
#: how often ``process_once`` forgets old ids, seconds, and how many at a time
_CLEANUP_INTERVAL: Final = 60.0
_CLEANUP_LIMIT: Final = 1_000


class Inbox:
    """The memory of one consumer: the ids of the messages that it has handled. Thread safe.

    Args:
        consumer: name of the consumer, at most 255 characters. Consumers with different names handle the same message
            independently; processes that share the work of one consumer share its name.
        retention: how long an id is remembered at least, seconds. A message that comes again later than that is
            handled again. Old ids are deleted by :meth:`process_once` from time to time, and by :meth:`cleanup`.
        tables: the tables.

    Raises:
        ArgumentError: a value is not as described.
    """

    def __init__(
        self, consumer: str = "default", *, retention: float = RETENTION, tables: OutboxTables = DEFAULT_TABLES
    ) -> None:
        check_text("consumer", consumer)
        if not 1 <= len(consumer) <= 255:
            raise ArgumentError("consumer must have 1 to 255 characters")
        self.retention: Final = seconds(retention, "retention")
        if not 0 < self.retention < 1e10:
            raise ArgumentError("retention must be a number of seconds above 0")
        check_instance("tables", tables, OutboxTables)
        self.consumer: Final = consumer
        self._tables = tables
        self._lock = threading.Lock()  # guards _cleanup_at
        self._cleanup_at = clock.monotonic() + _CLEANUP_INTERVAL

    @tolerant
    def __repr__(self) -> str:
        return f"Inbox({self.consumer!r}, retention={self.retention:g})"

    @overload
    def process_once(self, connection: SyncConnection, message: Message | str) -> bool: ...
    @overload
    def process_once(self, connection: AwaitedConnection, message: Message | str) -> Awaitable[bool]: ...
    def process_once(self, connection: AnyConnection, message: Message | str) -> bool | Awaitable[bool]:
        """Note that ``message`` is handled, within the transaction of ``connection``; return whether it is new.

        Call it first in the transaction that has the effect of the message, and skip the effect if it returns
        ``False``. Acknowledge the message after the commit. If the transaction rolls back, the message is new again.
        With PostgreSQL a second transaction with the same message waits here until the first has ended.

        Args:
            connection: a ``Connection`` or ``Session``; with an ``AsyncConnection`` or ``AsyncSession`` the result is
                awaitable.
            message: a received message with an id (extension ``messageId``), or the id itself.

        Raises:
            ArgumentError: the message has no id, or the connection no transaction.
            ConfigurationError: the database is neither PostgreSQL nor SQLite.
            sqlalchemy.exc.SQLAlchemyError: the database refused the statement.
        """
        message_id = _id_of(message)
        return in_transaction(connection, lambda each: self._note(each, message_id), self._tables.inbox)

    @overload
    def cleanup(self, connection: SyncConnection, limit: int = ...) -> int: ...
    @overload
    def cleanup(self, connection: AwaitedConnection, limit: int = ...) -> Awaitable[int]: ...
    def cleanup(self, connection: AnyConnection, limit: int = 10_000) -> int | Awaitable[int]:
        """Delete at most ``limit`` ids that are older than ``retention``; return how many there were.

        Rows that another transaction is deleting are left to it (PostgreSQL).
        """
        return in_transaction(connection, lambda each: self._cleanup(each, limit), self._tables.inbox)

    def _note(self, connection: Connection, message_id: str) -> bool:
        check_dialect(connection.dialect)
        if self._is_cleanup_due():
            self._cleanup(connection, _CLEANUP_LIMIT)
        inbox = self._tables.inbox
        # by the clock of the database: those of the consumers may differ. A clock that was set back makes no id older
        latest = select(func.max(inbox.c.handled)).where(inbox.c.consumer == self.consumer).scalar_subquery()
        handled: ColumnElement[datetime]
        if connection.dialect.name == "postgresql":
            handled = func.greatest(func.clock_timestamp(), latest)  # without NULL
        else:
            now = literal(database_now(connection), inbox.c.handled.type)
            handled = func.max(now, func.coalesce(latest, now))
        note = insert_or_ignore(connection.dialect, inbox).values(
            consumer=self.consumer, message_id=message_id, handled=handled
        )
        noted = connection.execute(note.returning(inbox.c.message_id))
        return noted.first() is not None

    def _is_cleanup_due(self) -> bool:
        with self._lock:
            now = clock.monotonic()
            if now < self._cleanup_at:
                return False
            self._cleanup_at = now + _CLEANUP_INTERVAL
            return True

    def _cleanup(self, connection: Connection, limit: int) -> int:
        inbox = self._tables.inbox
        old = (
            select(inbox.c.consumer, inbox.c.message_id)
            .where(
                inbox.c.consumer == self.consumer,
                inbox.c.handled < database_now(connection) - timedelta(seconds=self.retention),
            )
            .limit(limit)
            .with_for_update(skip_locked=True)  # SQLite has none and needs none
        )
        done = connection.execute(delete(inbox).where(tuple_(inbox.c.consumer, inbox.c.message_id).in_(old)))
        return done.rowcount


def _id_of(message: Message | str) -> str:
    if isinstance(message, str):
        message_id: object = message
    else:
        check_instance("message", message, Message)
        message_id = message.context.extensions.get(Features.EXTENSION_MESSAGE_ID)
        if message_id is None:
            raise ArgumentError(
                "the message has no id (extension messageId), so a duplicate cannot be recognized; its protocol may "
                "lack message ids, as MQTT 3.1.1 does without envelope"
            )
    if not isinstance(message_id, str) or not 1 <= len(message_id) <= 255:
        raise ArgumentError("the id of a message must be a str of 1 to 255 characters")
    check_text("the id of a message", message_id)
    return message_id


#: returns whether a message is new, as :meth:`Inbox.process_once` of the consumer ``default``
process_once: Final = Inbox().process_once
