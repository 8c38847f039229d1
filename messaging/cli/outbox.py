"""``messaging outbox``: relay the messages of a transactional outbox, show its state, settle its dead rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from messaging.cli import options
from messaging.cli.connecting import BrokerOptions, identity, warn_of_memory
from messaging.cli.options import argument, flag, option
from messaging.cli.output import LOOK, ExitCode, dump, show, show_pairs, write
from messaging.errors import ArgumentError, MessagingError

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from messaging.outbox.sql import DeadRow, OutboxTables

logger = logging.getLogger(__name__)

T = TypeVar("T")

outbox = options.CommandGroup("outbox")


#: sent rows that ``cleanup`` deletes in one transaction
_AT_ONCE = 10_000


@dataclass(frozen=True)
class DatabaseOptions:
    """The options that name the database and its tables."""

    database: Annotated[
        str | None,
        option(
            "--database",
            "URL",
            "Database URL, such as postgresql://user@host/name or sqlite:///file.db; "
            "default: $MESSAGING_DATABASE, or the file $MESSAGING_DATABASE_FILE.",
        ),
    ] = None
    database_file: Annotated[
        Path | None,
        option(
            "--database-file",
            "FILE",
            "File with the database URL: other users of this machine see the arguments of a command.",
        ),
    ] = None
    table: Annotated[str, option("--table", "NAME", "Name of the outbox table.")] = "messaging_outbox"
    inbox_table: Annotated[str, option("--inbox-table", "NAME", "Name of the inbox table.")] = "messaging_inbox"
    schema: Annotated[str | None, option("--schema", "NAME", "Database schema of the tables.")] = None

    @property
    def url(self) -> str:
        """Return the URL; raises ``ConfigurationError`` if none is given, or more than one."""
        from messaging.outbox.sql import database_url

        return database_url(self.database, self.database_file)

    @property
    def tables(self) -> OutboxTables:
        """Return the tables; raises ``ArgumentError`` for a malformed name."""
        from messaging.outbox.sql import OutboxTables

        return OutboxTables(outbox=self.table, inbox=self.inbox_table, schema=self.schema)

    def run(self, function: Callable[[Connection, OutboxTables], T]) -> T:
        """Call ``function`` in a transaction, and return its result.

        Raises:
            DatabaseError: the database failed.
        """
        import asyncio

        from messaging.outbox.sql.database import SqlDatabase

        tables = self.tables
        database = SqlDatabase(self.url)

        async def run() -> T:
            try:
                return await database.run(lambda connection: function(connection, tables))
            finally:
                await database.close()

        return asyncio.run(run())


_Json = Annotated[bool, flag("--json", "Write JSON.")]
_Ids = Annotated[list[int] | None, argument("[ID]...", "Ids of dead rows.")]
_All = Annotated[bool, flag("--all", "All dead rows.")]


@outbox.command()
def relay(
    broker: BrokerOptions,
    database: DatabaseOptions,
    once: Annotated[bool, flag("--once", "Publish the rows that are ready, and end.")] = False,
    batch: Annotated[int, option("--batch", "N", "Most rows of a claim.", min=1, max=10_000)] = 500,
    in_flight_per_key: Annotated[
        int,
        option(
            "--in-flight-per-key",
            "N",
            "Unconfirmed messages of one key at a time; with more than 1, a refused message may be overtaken.",
            min=1,
        ),
    ] = 1,
    confirm_timeout: Annotated[
        float, option("--confirm-timeout", "SECONDS", "How long the broker may take to confirm.")
    ] = 30.0,
    lease: Annotated[
        float, option("--lease", "SECONDS", "When the rows of a relay that died are claimed by others.")
    ] = 15.0,
    poll_interval: Annotated[
        float, option("--poll-interval", "SECONDS", "Time between two looks at the outbox.")
    ] = 1.0,
    max_attempts: Annotated[int, option("--max-attempts", "N", "Refusals after which a row is dead.", min=1)] = 10,
    retention: Annotated[
        float, option("--retention", "SECONDS", "How long sent rows are kept; 0 deletes them at once.")
    ] = 0.0,
) -> int:
    """Publish the rows of an outbox, in the order of the commits for each key, until interrupted.

    A row is deleted after the broker has confirmed the message. Several relays may work on one outbox. The broker is
    connected first; it and the database may go away and come back later.

    Example: messaging outbox relay amqp://localhost --database postgresql://localhost/shop
    """
    from messaging.outbox.sql import Relay

    url, tables = database.url, database.tables
    _ = broker.target  # a missing URL is an error before anything is connected
    with broker.connect("relay") as m:
        running = Relay(
            url, m, tables=tables, batch=batch, in_flight_per_key=in_flight_per_key, confirm_timeout=confirm_timeout,
            lease=lease, poll_interval=poll_interval, max_attempts=max_attempts, retention=retention,
        )  # fmt: skip
        warn_of_memory(m)
        try:
            if once:
                running.drain()
            else:
                with running:
                    logger.info("relaying %s to %s", tables.outbox.fullname, identity(m))
                    while not running.wait(LOOK):  # it raises if the relay ended by itself
                        pass
        finally:
            counters = running.counters
            logger.info("published %d messages, %d rows are dead", counters.published, counters.dead)
    return ExitCode.OK


@outbox.command()
def status(
    database: DatabaseOptions,
    json: _Json = False,
    dead: Annotated[bool, flag("--dead", "List the dead rows: id, channel, attempts, reason.")] = False,
    limit: Annotated[int, option("--limit", "N", "Most dead rows of a list.", min=1)] = 100,
) -> int:
    """Show how many rows are pending, refused, sent and dead, or list the dead rows.

    Example: messaging outbox status --database postgresql://localhost/shop --dead
    """
    from messaging.outbox.sql import dead_rows, outbox_status

    if dead:
        rows = database.run(lambda connection, tables: dead_rows(connection, limit, tables))
        if json:
            for each in rows:
                write(dump(_fields(each)))
        elif rows:
            show(*map(_line, rows))
        return ExitCode.OK
    found = database.run(outbox_status)
    fields = _fields(found)
    if found.oldest is not None:
        fields["oldest_seconds"] = round((datetime.now(UTC) - found.oldest).total_seconds(), 3)
    if json:
        write(dump(fields))
    else:
        show_pairs({name: ", ".join(value) if isinstance(value, tuple) else value for name, value in fields.items()})
    return ExitCode.OK


def _fields(found: Any) -> dict[str, Any]:
    return {name: getattr(found, name) for name in type(found).__slots__}


def _line(row: DeadRow) -> str:
    since = "-" if row.dead_since is None else row.dead_since.isoformat(timespec="seconds")
    return f"{row.id}  {since}  {row.channel}  key {row.key}  {row.size} bytes  {row.attempts} attempts  {row.reason}"


@outbox.command()
def retry(database: DatabaseOptions, ids: _Ids = None, every: _All = False) -> int:
    """Have dead rows published again, after their cause was removed.

    Example: messaging outbox retry 17 18 --database sqlite:///shop.db
    """
    from messaging.outbox.sql import retry_dead

    return _settle(database, retry_dead, ids, every, "to be published again")


@outbox.command()
def discard(database: DatabaseOptions, ids: _Ids = None, every: _All = False) -> int:
    """Delete dead rows.

    Example: messaging outbox discard --all --database sqlite:///shop.db
    """
    from messaging.outbox.sql import discard_dead

    return _settle(database, discard_dead, ids, every, "deleted")


def _settle(
    database: DatabaseOptions, settle: Callable[..., int], ids: list[int] | None, every: bool, outcome: str
) -> ExitCode:
    """Settle dead rows by ``settle``, all or those with ``ids``; report how many."""
    if bool(ids) == every:
        raise ArgumentError("name the dead rows by their ids, or all of them by --all")
    wanted = None if every else ids
    found = database.run(lambda connection, tables: settle(connection, wanted, tables))
    logger.info("%d dead rows are %s", found, outcome)
    missing = 0 if wanted is None else len({*wanted}) - found
    if missing:
        raise MessagingError(f"{missing} of the ids name no dead row; `messaging outbox status --dead` lists them")
    return ExitCode.OK


@outbox.command()
def cleanup(
    database: DatabaseOptions,
    sent: Annotated[float | None, option("--sent", "SECONDS", "Delete sent rows that are older than this.")] = None,
    inbox: Annotated[float | None, option("--inbox", "SECONDS", "Delete handled ids that are older than this.")] = None,
    consumer: Annotated[str, option("--consumer", "NAME", "The consumer whose ids --inbox deletes.")] = "default",
) -> int:
    """Delete old rows: those of sent messages, and the ids in the inbox of a consumer.

    Example: messaging outbox cleanup --sent 86400 --inbox 604800 --database postgresql://localhost/shop
    """
    from messaging.outbox.sql import Inbox, delete_sent

    if sent is None and inbox is None:
        raise ArgumentError("say what to delete: --sent SECONDS, --inbox SECONDS, or both")
    if sent is not None:
        rows = 0
        while deleted := database.run(lambda connection, tables: delete_sent(connection, sent, tables, _AT_ONCE)):
            rows += deleted
        logger.info("deleted %d sent rows", rows)
    if inbox is not None:
        ids = 0
        memory = Inbox(consumer, retention=inbox, tables=database.tables)
        while deleted := database.run(lambda connection, _: memory.cleanup(connection)):
            ids += deleted
        logger.info("deleted %d ids of consumer %r", ids, consumer)
    return ExitCode.OK


@outbox.command("create-tables")
def create_tables_command(
    database: DatabaseOptions,
    sql: Annotated[bool, flag("--sql", "Write the statements for PostgreSQL to stdout; change nothing.")] = False,
) -> int:
    """Create the tables of outbox and inbox that are missing. Programs with migrations create them there.

    Example: messaging outbox create-tables --database postgresql://localhost/shop
    """
    from messaging.outbox.sql import create_tables

    if sql:
        write(_statements(database.tables).encode())
        return ExitCode.OK
    database.run(lambda connection, tables: create_tables(connection, tables))
    logger.info("the tables of %s are there", database.tables.outbox.fullname)
    return ExitCode.OK


def _statements(tables: OutboxTables) -> str:
    from sqlalchemy.dialects import postgresql
    from sqlalchemy.schema import CreateIndex, CreateTable

    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    found: list[str] = []
    for table in (tables.outbox, tables.lease, tables.version, tables.inbox):
        indexes = [each for each in table.indexes if "ready_id" not in str(each.name)]  # that one is SQLite's
        made: list[Any] = [CreateTable(table), *map(CreateIndex, sorted(indexes, key=lambda each: str(each.name)))]
        found.extend(str(each.compile(dialect=dialect)).strip() for each in made)
    return "".join(f"{each};\n\n" for each in (*found, *tables.postgresql_statements()))
