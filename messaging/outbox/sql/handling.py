"""What a relay does with a claim: publish its rows, renew its lease meanwhile, settle it.

A claim does not wait for its slowest key. After a second the rows that are done are settled, and their buckets given
back; only the buckets of the other keys stay claimed. The relay goes on with other claims meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from messaging.errors import DatabaseError
from messaging.errors.text import SafeLog
from messaging.execution import clock
from messaging.outbox.sql.delivery import Delivered, Delivery
from messaging.outbox.sql.tables import bucket_of

if TYPE_CHECKING:
    from messaging.outbox.sql.claims import Claim, Claims, Refusal
    from messaging.outbox.sql.database import Database
    from messaging.outbox.sql.state import RunState

logger = SafeLog(__name__)

#: a claim publishes no more rows after so many seconds, so that its buckets can be claimed by another relay
_LONGEST_CLAIM: Final = 5.0
#: seconds after which finished keys wait no longer for unfinished ones
_SLOW: Final = 1.0
#: claims that wait for slow keys at a time; then the relay waits for one of them
_MOST_SLOW: Final = 8
#: rows that are logged one by one, of each claim
_LOGGED: Final = 20


class Handling:
    """Publishes and settles the claims of one run. On one event loop.

    Args:
        state: of the run.
        database: of the outbox.
        claims: the statements.
        delivery: publishes rows.
        lease: seconds.
    """

    def __init__(self, state: RunState, database: Database, claims: Claims, delivery: Delivery, lease: float) -> None:
        self._state = state
        self._database = database
        self._claims = claims
        self._delivery = delivery
        self._lease = lease
        #: claims that wait for slow keys
        self._slow: set[asyncio.Task[None]] = set()

    async def handle(self, claim: Claim) -> None:
        """Publish the rows of a claim and settle them; slow keys may be settled after the return.

        Raises:
            MessagingError: the run is one until idle, and the database or the broker failed.
        """
        self._state.count(claims=1)
        end = clock.monotonic() + _LONGEST_CLAIM

        def may_send() -> bool:
            now = clock.monotonic()
            return not self._state.is_stopping and now < claim.until and now < end

        delivered = Delivered()
        delivering = asyncio.create_task(self._delivery.deliver(claim.rows, may_send, delivered))
        renewing = asyncio.create_task(self._renew(claim))
        try:
            await clock.wait((delivering,), timeout=None if self._state.until_idle else _SLOW)
            if not delivering.done():
                await self._settle_part(claim, delivered)
                while len(self._slow) >= _MOST_SLOW:
                    await asyncio.wait(self._slow, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:  # a cancellation, too
            delivering.cancel()
            renewing.cancel()
            raise
        if not delivering.done():
            task = asyncio.create_task(self._finish(claim, delivered, delivering, renewing))
            self._slow.add(task)
            task.add_done_callback(self._ended)
            return
        await self._finish(claim, delivered, delivering, renewing)
        if delivered.has_stuck:
            await self._state.pause()

    async def finish(self) -> None:
        """Wait for the claims with slow keys."""
        if self._slow:
            await asyncio.wait({*self._slow})

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._slow.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("outbox relay '%s': a claim failed; it ends with its lease", self._state.name, exc_info=error)

    def cancel(self) -> None:
        """Cancel the claims with slow keys."""
        for each in self._slow:
            each.cancel()

    async def _settle_part(self, claim: Claim, delivered: Delivered) -> None:
        """Settle the rows that are done, and give back the buckets of the keys that are."""
        busy = {bucket_of(key) for key in delivered.keys}
        free = [bucket for bucket in claim.buckets if bucket not in busy]
        claim.buckets = [bucket for bucket in claim.buckets if bucket in busy]
        await self._settle(free, *delivered.take())

    async def _finish(
        self, claim: Claim, delivered: Delivered, delivering: asyncio.Task[None], renewing: asyncio.Task[None]
    ) -> None:
        """Await the rows of a claim that are not done, and settle them."""
        try:
            await delivering
        finally:
            delivering.cancel()
            renewing.cancel()
        is_settled = await self._settle(claim.buckets, *delivered.take())
        self._state.count(open=delivered.open)
        if delivered.cause is None:
            if is_settled:
                self._state.note_recovery()
            return
        if self._state.until_idle:
            raise delivered.cause
        logger.warning(
            "outbox relay '%s': %d rows were not published or not confirmed: %s; they are published again",
            self._state.name, delivered.open, delivered.cause,
        )  # fmt: skip

    async def _settle(self, buckets: Sequence[int], sent: Sequence[int], refused: Sequence[Refusal]) -> bool:
        """Settle rows, as soon as the database is there; return ``False`` if the run is to stop before."""
        while True:
            try:
                await self._database.run(lambda each: self._claims.settle(each, buckets, sent, refused))
            except DatabaseError as error:
                if self._state.is_stopping or self._state.until_idle:
                    logger.warning(
                        "outbox relay '%s': %d published messages could not be removed from the outbox: %s; they will "
                        "be published again, with the same ids", self._state.name, len(sent), error,
                    )  # fmt: skip
                    if self._state.until_idle:
                        raise
                    return False
                await self._state.after_failure(error)
            else:
                break
        dead = [each for each in refused if each.retry_in is None]
        self._state.count(published=len(sent), dead=len(dead), refused=len(refused) - len(dead))
        self._log(refused, dead)
        return True

    async def _renew(self, claim: Claim) -> None:
        """Renew the lease of a claim in time; end the claim if another relay has taken a bucket over."""
        while True:
            await clock.sleep(self._lease / 3)
            began, buckets = clock.monotonic(), claim.buckets
            try:
                kept = await self._database.run(partial(self._claims.renew, buckets=buckets))
            except DatabaseError:  # the lease runs out meanwhile
                continue
            if kept >= len(buckets):
                claim.until = began + self._lease
            elif claim.buckets is buckets:  # not given back meanwhile
                claim.until = 0.0
                logger.warning("outbox relay '%s': lost its lease; publishing no more of this claim", self._state.name)
                return

    def _log(self, refused: Sequence[Refusal], dead: Sequence[Refusal]) -> None:
        for each in dead[:_LOGGED]:
            logger.error(
                "outbox relay '%s': row %d to %r is dead after %d attempts: %s; see `messaging outbox status --dead`",
                self._state.name, each.row.id, each.row.channel, each.row.attempts + 1, each.reason,
            )  # fmt: skip
        if len(dead) > _LOGGED:
            logger.error("outbox relay '%s': %d more rows are dead", self._state.name, len(dead) - _LOGGED)
        first = [each for each in refused if each.retry_in is not None and each.row.attempts == 0]
        for each in first[:_LOGGED]:
            logger.warning(
                "outbox relay '%s': row %d to %r was refused: %s; its key waits, next attempt in %.1f s",
                self._state.name, each.row.id, each.row.channel, each.reason, each.retry_in,
            )  # fmt: skip
