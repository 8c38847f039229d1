"""The order of commits with PostgreSQL: a trigger that numbers the rows of a transaction when it commits.

A number that is given on insert does not tell the order of commits: a transaction that inserts first may commit last,
and a reader that has gone past its number would never see its row. A deferred constraint trigger runs when the
transaction commits. It locks the buckets of the transaction's keys, in ascending order, which excludes deadlocks among
such triggers, and numbers the rows from a sequence. The locks are released after the commit has become visible. So two
transactions with a key in common commit in the order of their numbers, and a reader that sees a row sees every row of
the same key with a smaller number. Transactions wait for each other only while they commit, not from ``enqueue`` on.

With SQLite the order of ids is the order of commits: a transaction that has written excludes other writers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import text
from sqlalchemy.dialects import postgresql

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

_BODY: Final = """
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


class _Names:
    def __init__(self, table: Table) -> None:
        preparer = postgresql.dialect().identifier_preparer  # type: ignore[no-untyped-call]
        schema = f"{preparer.quote_identifier(table.schema)}." if table.schema else ""

        def quoted(name: str) -> str:
            return f"{schema}{preparer.quote_identifier(name)}"

        self.table = quoted(table.name)
        self.sequence = quoted(f"{table.name}_position_seq")
        self.function = quoted(f"{table.name}_commit_order")
        self.trigger = preparer.quote_identifier(trigger_name(table))


def trigger_name(table: Table) -> str:
    """Return the name of the trigger."""
    return f"{table.name}_commit_order"


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def statements(table: Table, *, notify: bool) -> tuple[str, ...]:
    """Return the statements that install the trigger, each once; all can be executed again."""
    names = _Names(table)
    body = _BODY.format(
        table=names.table,
        name=_literal(table.fullname),
        sequence=_literal(names.sequence),
        notify=f"PERFORM pg_notify({_literal(table.name)}, '');" if notify else "",
    )
    return (
        f"CREATE SEQUENCE IF NOT EXISTS {names.sequence} OWNED BY {names.table}.position",
        f"CREATE OR REPLACE FUNCTION {names.function}() RETURNS trigger LANGUAGE plpgsql AS $order${body}$order$",
        f"DROP TRIGGER IF EXISTS {names.trigger} ON {names.table}",
        (
            f"CREATE CONSTRAINT TRIGGER {names.trigger} AFTER INSERT ON {names.table} DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW EXECUTE FUNCTION {names.function}()"
        ),
    )


def removal(table: Table) -> tuple[str, ...]:
    """Return the statements that remove what :func:`statements` leaves behind when the table is dropped."""
    return (f"DROP FUNCTION IF EXISTS {_Names(table).function}()",)


def is_installed(connection: Connection, table: Table) -> bool:
    """Return whether the table has its trigger, and the trigger is enabled."""
    found = connection.execute(
        text(
            "SELECT count(*) FROM pg_trigger WHERE tgrelid = to_regclass(:name) AND tgname = :trigger "
            "AND tgenabled <> 'D' AND NOT tgisinternal"
        ),
        {"name": _Names(table).table, "trigger": trigger_name(table)},
    )
    return bool(found.scalar_one())
