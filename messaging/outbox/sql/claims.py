"""The statements of the relay: claim buckets of keys, fetch their rows, settle them.

A relay claims buckets with a lease, in one transaction with fetching their rows. While it has a bucket, no other relay
fetches rows of its keys, so a key is published by one relay at a time. It deletes the rows that the broker has
confirmed and gives the buckets back in one transaction, too: the next relay sees either all of it or nothing. The lease
of a relay that died runs out by the clock of the database. Two relays that claim at once do not wait for each other
(``SKIP LOCKED``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import LargeBinary, and_, cast, delete, exists, func, inspect, or_, select, text, union_all, update

from messaging.errors import ConfigurationError
from messaging.execution import clock, doubled, jitter
from messaging.outbox.sql.connections import database_now, refuse_autocommit
from messaging.outbox.sql.tables import BUCKETS, DEAD, PENDING, SENT, OutboxTables, has_trigger, prepare, trigger_name

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection

#: buckets of one claim: a second relay finds others to claim
_AT_ONCE: Final = BUCKETS // 4
_MAX_ERROR: Final = 500


@dataclass(frozen=True, slots=True)
class RelayPolicy:
    """How rows are claimed, published, tried again and kept.

    The attributes are arguments of :class:`~messaging.outbox.sql.Relay`; ``shortest`` and ``longest`` are its
    ``backoff``.
    """

    confirm_timeout: float
    in_flight_per_key: int
    max_attempts: int
    shortest: float
    longest: float
    lease: float
    poll_interval: float
    retention: float
    batch: int
    batch_bytes: int

    def retry_in(self, attempts: int) -> float | None:
        """Return the seconds until the next attempt after so many refusals, or ``None`` if there is none."""
        if attempts >= self.max_attempts:
            return None
        longest = doubled(self.shortest, self.longest, attempts - 1)
        return jitter(longest / 2, longest)


@dataclass(frozen=True, slots=True)
class Row:
    """A pending row."""

    id: int
    key: str
    channel: str
    properties: str
    payload: bytes
    message_id: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that was refused, and what follows.

    Attributes:
        row: the row.
        reason: of the refusal.
        retry_in: seconds until the next attempt; ``None`` if the row is dead.
    """

    row: Row
    reason: str
    retry_in: float | None


@dataclass(slots=True)
class Claim:
    """Buckets that this relay has, and the first of their rows in the order of commits.

    Attributes:
        buckets: the buckets; empty if there was nothing to claim.
        rows: the rows.
        until: end of the lease, monotonic seconds.
        is_full: whether there may be more buckets to claim.
    """

    buckets: Sequence[int]
    rows: Sequence[Row]
    until: float
    is_full: bool


class Claims:
    """The statements of one relay. Stateless; each method runs in a transaction of its caller.

    Args:
        tables: the tables.
        owner: identifies the relay among all that share the tables.
        policy: of the relay.
    """

    def __init__(self, tables: OutboxTables, owner: str, policy: RelayPolicy) -> None:
        self._tables = tables
        self._owner = owner
        self.policy = policy

    def check(self, connection: Connection) -> None:
        """Refuse a database without the tables.

        Raises:
            ConfigurationError: a table or the trigger is missing, or the schema has another version.
            ArgumentError: the engine commits each statement by itself.
        """
        refuse_autocommit(connection)
        tables = self._tables
        inspector = inspect(connection)
        for table in (tables.outbox, tables.lease, tables.version):
            if not inspector.has_table(table.name, schema=table.schema):
                raise ConfigurationError(
                    f"the database has no table {table.fullname}: create the tables with `messaging outbox "
                    "create-tables`, with messaging.outbox.sql.create_tables, or in a migration"
                )
        if connection.dialect.name == "postgresql" and not has_trigger(connection, tables.outbox):
            raise ConfigurationError(
                f"the table {tables.outbox.fullname} has no trigger {trigger_name(tables.outbox)}, which "
                "keeps the order of commits: execute the statements of OutboxTables.postgresql_statements() in a "
                "migration, or run `messaging outbox create-tables`"
            )
        prepare(connection, tables)

    def claim(self, connection: Connection) -> Claim:
        """Claim buckets with ready rows, and fetch their first rows."""
        began = clock.monotonic()
        outbox, lease = self._tables.outbox, self._tables.lease
        if connection.dialect.name == "postgresql":
            # a crash of the server may undo a claim: a row is then sent twice, which is allowed
            connection.execute(text("SET LOCAL synchronous_commit TO off"))
        now = database_now(connection)
        ready = exists().where(
            outbox.c.bucket == lease.c.bucket,
            outbox.c.state == PENDING,
            ~self._is_waiting(outbox, now),
        )
        # a bucket without owner is free, also when the clock of the database was set back after it was given back
        is_free = or_(lease.c.owner.is_(None), lease.c.until <= now)
        free = (
            select(lease.c.bucket)
            .where(is_free, ready)
            .order_by(lease.c.until)  # the bucket that was served longest ago comes first
            .limit(_AT_ONCE)
            .with_for_update(skip_locked=True, of=lease)
        )
        candidates = list(connection.execute(free).scalars())
        if not candidates:
            return Claim((), (), began, is_full=False)
        claimed = connection.execute(
            update(lease)
            .where(lease.c.bucket.in_(candidates), is_free)  # SQLite locks no rows
            .values(owner=self._owner, until=now + timedelta(seconds=self.policy.lease))
            .returning(lease.c.bucket)
        )
        buckets = sorted(claimed.scalars())
        rows = self._fetch(connection, buckets, now) if buckets else []
        if not rows:
            self.release(connection, buckets)
        return Claim(buckets if rows else (), rows, began + self.policy.lease, is_full=len(candidates) == _AT_ONCE)

    def _is_waiting(self, outbox: Any, now: datetime) -> ColumnElement[bool]:
        """Return whether a row waits for its retry; not for longer than a pause lasts: the clock was set back since."""
        retry_at, latest = outbox.c.retry_at, now + timedelta(seconds=self.policy.longest)
        return and_(retry_at.is_not(None), retry_at > now, retry_at <= latest)

    def _fetch(self, connection: Connection, buckets: Sequence[int], now: datetime) -> list[Row]:
        """Return the first rows of the buckets, without those of keys that wait for a retry."""
        outbox = self._tables.outbox
        position = self._tables.position(connection.dialect)
        other = outbox.alias("other")
        waits = exists().where(other.c.key == outbox.c.key, other.c.state == PENDING, self._is_waiting(other, now))
        any_waits = exists().where(outbox.c.state == PENDING, self._is_waiting(outbox, now))
        # mostly no key waits, and a look at each row is half the cost of the statement
        ready = [~waits] if connection.execute(select(any_waits)).scalar_one() else []
        # more than an even share, for buckets with few rows beside buckets with many
        limit = min(self.policy.batch, -(-4 * self.policy.batch // len(buckets)))
        # the first rows of each bucket are at the begin of a range of the index; sorting all pending rows is slow
        first = [
            select(
                select(outbox.c.id, position.label("place"))
                .where(outbox.c.bucket == bucket, outbox.c.state == PENDING, *ready)
                .order_by(position)
                .limit(limit)
                .subquery()
            )
            for bucket in buckets
        ]
        merged = union_all(*first).subquery()
        chosen = select(merged.c.id, merged.c.place).order_by(merged.c.place).limit(self.policy.batch).subquery()
        size: ColumnElement[int] = func.length(outbox.c.payload)
        # SQLite keeps text as text in a column of bytes: a row that another program wrote
        payload = cast(outbox.c.payload, LargeBinary).label("payload")
        columns = [
            outbox.c.id, outbox.c.key, outbox.c.channel, outbox.c.properties, payload, outbox.c.message_id,
            outbox.c.attempts,
        ]  # fmt: skip
        sized = (
            select(
                *columns,
                chosen.c.place,
                func.sum(size).over(order_by=chosen.c.place).label("total"),
                size.label("size"),
            )
            .join(chosen, chosen.c.id == outbox.c.id)
            .subquery()
        )
        wanted = (
            select(*[sized.c[column.name] for column in columns])
            .where((sized.c.total <= self.policy.batch_bytes) | (sized.c.total == sized.c.size))
            .order_by(sized.c.place)
        )
        return [Row(each[0], each[1], each[2], each[3], bytes(each[4]), each[5], each[6])
                for each in connection.execute(wanted)]  # fmt: skip

    def renew(self, connection: Connection, buckets: Sequence[int]) -> int:
        """Begin the lease of buckets anew; return how many of them this relay still has."""
        lease = self._tables.lease
        done = connection.execute(
            update(lease)
            .where(lease.c.bucket.in_(buckets), lease.c.owner == self._owner)
            .values(until=database_now(connection) + timedelta(seconds=self.policy.lease))
        )
        return done.rowcount

    def settle(
        self, connection: Connection, buckets: Sequence[int], sent: Sequence[int], refused: Sequence[Refusal]
    ) -> None:
        """Delete or mark the sent rows, note the refusals, and give the buckets back."""
        outbox = self._tables.outbox
        now = database_now(connection)
        if sent and self.policy.retention:
            connection.execute(
                update(outbox).where(outbox.c.id.in_(sent)).values(state=SENT, settled_at=now, retry_at=None)
            )
        elif sent:
            connection.execute(delete(outbox).where(outbox.c.id.in_(sent)))
        for each in refused:
            values: dict[str, Any] = {"attempts": outbox.c.attempts + 1, "error": each.reason[:_MAX_ERROR]}
            if each.retry_in is None:
                values |= {"retry_at": None, "state": DEAD, "settled_at": now}
            else:
                values["retry_at"] = now + timedelta(seconds=each.retry_in)
            connection.execute(
                update(outbox).where(outbox.c.id == each.row.id, outbox.c.state == PENDING).values(values)
            )
        self.release(connection, buckets)

    def release(self, connection: Connection, buckets: Sequence[int]) -> None:
        """Give buckets back that this relay still has."""
        lease = self._tables.lease
        connection.execute(
            update(lease)
            .where(lease.c.bucket.in_(buckets), lease.c.owner == self._owner)
            .values(owner=None, until=database_now(connection))
        )

    def next_retry(self, connection: Connection) -> float | None:
        """Return the seconds until the first key stops waiting; ``None`` if none waits."""
        outbox = self._tables.outbox
        first = connection.execute(
            select(func.min(outbox.c.retry_at)).where(outbox.c.state == PENDING, outbox.c.retry_at.is_not(None))
        ).scalar_one()
        return None if first is None else max(0.0, (first - database_now(connection)).total_seconds())
