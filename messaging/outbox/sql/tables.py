"""The tables of the outbox and the inbox, as SQLAlchemy tables that migrations can use.

``{outbox}``           a row for each message that is not deleted yet
``{outbox}_lease``     a row for each of the 64 buckets that the keys are spread over: the relay that has it, until when
``{outbox}_schema``    one row: the version of this schema
``{inbox}``            a row for each message that a consumer has handled

**The order of commits** with PostgreSQL is that of a trigger, which numbers the rows of a transaction when it commits.
A number that is given on insert does not tell the order of commits: a transaction that inserts first may commit last,
and a reader that has gone past its number would never see its row. A deferred constraint trigger runs when the
transaction commits. It locks the buckets of the transaction's keys, in ascending order, which excludes deadlocks among
such triggers, and numbers the rows from a sequence. The locks are released after the commit has become visible. So two
transactions with a key in common commit in the order of their numbers, and a reader that sees a row sees every row of
the same key with a smaller number. Transactions wait for each other only while they commit, not from ``enqueue`` on.

With SQLite the order of ids is the order of commits: a transaction that has written excludes other writers.
"""

from __future__ import annotations

import re
import zlib
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    DateTime,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    TypeDecorator,
    event,
    select,
    text,
)
from sqlalchemy.dialects import postgresql

from messaging.errors import ArgumentError, ConfigurationError
from messaging.errors.checks import check_instance
from messaging.errors.text import tolerant
from messaging.outbox.sql.connections import insert_or_ignore, transactional

#: version of the schema; a later version of this library says how to migrate from it
SCHEMA_VERSION: Final = 1

#: a relay holds the rows of a bucket, and so of all its keys, while they are in flight
BUCKETS: Final = 64

PENDING: Final = "pending"
SENT: Final = "sent"
DEAD: Final = "dead"

#: of the function of the trigger
_TRIGGER_BODY: Final = """
DECLARE
    slot integer;
BEGIN
    IF NOT EXISTS (SELECT 1 FROM {table} WHERE id = NEW.id AND position IS NULL) THEN
        RETURN NULL;  -- placed by an earlier call in this transaction, or deleted
    END IF;
    -- the first call is that of the lowest id: the bound skips what older transactions left in the index
    FOR slot IN SELECT DISTINCT bucket FROM {table} WHERE position IS NULL AND id >= NEW.id ORDER BY bucket LOOP
        PERFORM pg_advisory_xact_lock(hashtext({name}), slot);
    END LOOP;
    UPDATE {table} AS placed SET position = numbered.position
        FROM (SELECT own.id, nextval({sequence}) AS position
              FROM (SELECT id FROM {table} WHERE position IS NULL AND id >= NEW.id ORDER BY id) AS own) AS numbered
        WHERE placed.id = numbered.id;
    {notify}
    RETURN NULL;
END
"""
#: what the names of the trigger and its function end with
_COMMIT_ORDER: Final = "_commit_order"
_DIALECTS: Final = ("postgresql", "sqlite")
#: PostgreSQL shortens names to 63 bytes; the longest suffix of a derived name has 13
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,46}")


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC: ``timestamptz`` with PostgreSQL, text with SQLite, which has no time zones."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        """Return the type of the database."""
        return dialect.type_descriptor(DateTime(timezone=dialect.name != "sqlite"))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return ``value`` as the database gets it."""
        if value is None:
            return None
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Return ``value`` of the database with its time zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class OutboxTables:
    """The tables of one outbox and one inbox. Immutable, thread safe.

    Args:
        metadata: where the tables are defined, such as the ``metadata`` of your declarative base, so that migrations
            see them; a new ``MetaData`` by default.
        outbox: name of the outbox table, at most 47 ASCII letters, digits and underscores. The names of its companions
            begin with it.
        inbox: name of the inbox table, likewise.
        schema: the database schema that they are in; the default of the connection if not given.
        notify: whether a commit wakes the relays with ``NOTIFY`` (PostgreSQL). Commits that notify wait for each other
            in PostgreSQL: turn it off where thousands of transactions per second write to the outbox.

    Attributes:
        outbox: the table of messages.
        lease: the table of buckets and the relays that have them.
        version: the table with the version of the schema.
        inbox: the table of handled messages.

    Raises:
        ArgumentError: a name is not as described, or ``metadata`` is no ``MetaData``.
    """

    def __init__(
        self,
        metadata: MetaData | None = None,
        *,
        outbox: str = "messaging_outbox",
        inbox: str = "messaging_inbox",
        schema: str | None = None,
        notify: bool = True,
    ) -> None:
        if metadata is None:
            metadata = MetaData()
        check_instance("metadata", metadata, MetaData)
        names = {"outbox": outbox, "inbox": inbox} | ({} if schema is None else {"schema": schema})
        for name, value in names.items():
            if not (isinstance(value, str) and _NAME.fullmatch(value)):
                raise ArgumentError(
                    f"{name} must be a name of at most 47 ASCII letters, digits and underscores, not {value!r}"
                )
        self.metadata: Final = metadata
        self.notify: Final = notify
        self.outbox: Final = _outbox(outbox, metadata, schema)
        self.lease: Final = Table(
            f"{outbox}_lease",
            metadata,
            Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
            Column("owner", String(64)),
            Column("until", UtcDateTime, nullable=False),
            schema=schema,
        )
        self.version: Final = Table(
            f"{outbox}_schema",
            metadata,
            Column("version", Integer, primary_key=True, autoincrement=False),
            schema=schema,
        )
        self.inbox: Final = Table(
            inbox,
            metadata,
            Column("consumer", String(255), primary_key=True),
            Column("message_id", String(255), primary_key=True),
            Column("handled", UtcDateTime, nullable=False),
            Index(f"{inbox}_handled", "consumer", "handled"),
            schema=schema,
        )
        event.listen(self.outbox, "after_create", self._created)
        event.listen(self.outbox, "after_drop", self._dropped)

    @tolerant
    def __repr__(self) -> str:
        return f"OutboxTables({self.outbox.fullname!r}, {self.inbox.fullname!r})"

    def position(self, dialect: Dialect) -> Column[int]:
        """Return the column that has the order of the commits within each key."""
        column: Column[int] = self.outbox.c.position if dialect.name == "postgresql" else self.outbox.c.id
        return column

    def postgresql_statements(self) -> tuple[str, ...]:
        """Return the statements that a migration for PostgreSQL executes after it has created the tables.

        They create the sequence, the function and the trigger that number the rows in the order of the commits, and
        can be executed again.
        :func:`create_tables` and ``MetaData.create_all`` execute them by themselves.
        """
        table, sequence = _quoted(self.outbox), _quoted(self.outbox, "_position_seq")
        function, trigger = _quoted(self.outbox, _COMMIT_ORDER), f'"{trigger_name(self.outbox)}"'
        body = _TRIGGER_BODY.format(
            table=table,
            name=_literal(self.outbox.fullname),
            sequence=_literal(sequence),
            notify=f"PERFORM pg_notify({_literal(self.outbox.name)}, '');" if self.notify else "",
        )
        return (
            f"CREATE SEQUENCE IF NOT EXISTS {sequence} OWNED BY {table}.position",
            f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $order${body}$order$",
            f"DROP TRIGGER IF EXISTS {trigger} ON {table}",
            (
                f"CREATE CONSTRAINT TRIGGER {trigger} AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED "
                f"FOR EACH ROW EXECUTE FUNCTION {function}()"
            ),
        )

    def _created(self, _target: Table, connection: Connection, **_: Any) -> None:
        if connection.dialect.name == "postgresql":
            for statement in self.postgresql_statements():
                connection.execute(text(statement))

    def _dropped(self, _target: Table, connection: Connection, **_: Any) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"DROP FUNCTION IF EXISTS {_quoted(self.outbox, _COMMIT_ORDER)}()"))


def _outbox(name: str, metadata: MetaData, schema: str | None) -> Table:
    big = BigInteger().with_variant(Integer, "sqlite")  # the only type that SQLite numbers
    table = Table(
        name,
        metadata,
        Column("id", big, primary_key=True, autoincrement=True),
        #: PostgreSQL: order of the commits, set when the transaction commits
        Column("position", BigInteger),
        Column("bucket", SmallInteger, nullable=False),
        Column("key", Text, nullable=False),
        Column("channel", Text, nullable=False),
        Column("properties", Text, nullable=False),
        Column("payload", LargeBinary, nullable=False),
        Column("message_id", String(255), nullable=False),
        Column("created", UtcDateTime, nullable=False),
        Column("state", String(8), nullable=False, server_default=PENDING),
        #: refusals of the broker so far
        Column("attempts", Integer, nullable=False, server_default="0"),
        #: the key waits until then, after a refusal
        Column("retry_at", UtcDateTime),
        #: when the message was sent, or declared dead
        Column("settled_at", UtcDateTime),
        #: reason of the last refusal
        Column("error", Text),
        schema=schema,
        sqlite_autoincrement=True,  # an id is never used twice
    )
    pending = table.c.state == PENDING
    Index(
        f"{name}_ready", table.c.bucket, table.c.position, postgresql_where=pending
    ).ddl_if(dialect="postgresql")  # fmt: skip
    Index(f"{name}_ready_id", table.c.bucket, table.c.id, sqlite_where=pending).ddl_if(dialect="sqlite")
    waiting = pending & table.c.retry_at.is_not(None)
    Index(f"{name}_waiting", table.c.key, postgresql_where=waiting, sqlite_where=waiting)
    settled = table.c.state != PENDING
    Index(f"{name}_settled", table.c.state, table.c.settled_at, postgresql_where=settled, sqlite_where=settled)
    unplaced = table.c.position.is_(None)
    Index(f"{name}_unplaced", table.c.id, postgresql_where=unplaced).ddl_if(dialect="postgresql")
    return table


def _quoted(table: Table, suffix: str = "") -> str:
    """Return the name of a table, or of a companion of it, as an SQL identifier with its schema."""
    quote = postgresql.dialect().identifier_preparer.quote_identifier  # type: ignore[no-untyped-call]
    schema = f"{quote(table.schema)}." if table.schema else ""
    return f"{schema}{quote(f'{table.name}{suffix}')}"


def trigger_name(table: Table) -> str:
    """Return the name of the trigger."""
    return f"{table.name}{_COMMIT_ORDER}"


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def has_trigger(connection: Connection, table: Table) -> bool:
    """Return whether the table has its trigger, and the trigger is enabled."""
    found = connection.execute(
        text(
            "SELECT count(*) FROM pg_trigger WHERE tgrelid = to_regclass(:name) AND tgname = :trigger "
            "AND tgenabled <> 'D' AND NOT tgisinternal"
        ),
        {"name": _quoted(table), "trigger": trigger_name(table)},
    )
    return bool(found.scalar_one())


#: the tables that are used unless others are given
DEFAULT_TABLES: Final = OutboxTables()


def bucket_of(key: str) -> int:
    """Return the bucket of a key: the same number on every machine."""
    return zlib.crc32(key.encode()) % BUCKETS


def check_dialect(dialect: Dialect) -> None:
    """Refuse databases that the order of commits is not proved for.

    Raises:
        ConfigurationError: the database is neither PostgreSQL nor SQLite.
    """
    if dialect.name not in _DIALECTS:
        raise ConfigurationError(f"the outbox works with {' and '.join(_DIALECTS)}, not with {dialect.name}")


@transactional
def create_tables(connection: Connection, tables: OutboxTables = DEFAULT_TABLES) -> None:
    """Create the tables that are missing, within the transaction of the caller. Idempotent.

    Use it in tests and small programs. Programs with migrations give ``OutboxTables`` their own ``MetaData``, and
    execute :meth:`OutboxTables.postgresql_statements` in the migration.

    Args:
        connection: a ``Connection`` or ``Session``; with an ``AsyncConnection`` or ``AsyncSession`` the result is
            awaitable.
        tables: the tables.

    Raises:
        ConfigurationError: the database is neither PostgreSQL nor SQLite, or has an outbox of another version.
    """
    check_instance("tables", tables, OutboxTables)
    check_dialect(connection.dialect)
    own = [tables.outbox, tables.lease, tables.version, tables.inbox]
    tables.metadata.create_all(connection, tables=own)
    if connection.dialect.name == "postgresql" and not has_trigger(connection, tables.outbox):
        for statement in tables.postgresql_statements():
            connection.execute(text(statement))
    prepare(connection, tables)


def prepare(connection: Connection, tables: OutboxTables) -> None:
    """Check the version of the schema, and add the rows that the companions of the outbox begin with.

    Raises:
        ConfigurationError: the outbox has another version.
    """
    versions = set(connection.execute(select(tables.version.c.version)).scalars())
    if versions and versions != {SCHEMA_VERSION}:
        found = ", ".join(map(str, sorted(versions)))
        raise ConfigurationError(
            f"the tables of {tables.outbox.fullname} have version {found}; this version of messaging needs "
            f"{SCHEMA_VERSION}: migrate them, or use the version of messaging that made them"
        )
    if not versions:
        connection.execute(insert_or_ignore(connection.dialect, tables.version), [{"version": SCHEMA_VERSION}])
    known = set(connection.execute(select(tables.lease.c.bucket)).scalars())
    missing = [bucket for bucket in range(BUCKETS) if bucket not in known]
    if missing:
        epoch = datetime.fromtimestamp(0, UTC)
        rows = [{"bucket": bucket, "owner": None, "until": epoch} for bucket in missing]
        connection.execute(insert_or_ignore(connection.dialect, tables.lease), rows)
