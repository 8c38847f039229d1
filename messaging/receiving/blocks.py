"""The ``with`` and ``async with`` blocks of streams and registrations."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

from messaging.execution import may_block, wait_for, warn_in_loop
from messaging.receiving.consumers import in_observer

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.execution import Promise


class AsyncBlock:
    """An ``async with`` block that begins when the broker has confirmed a subscription.

    Attributes:
        ready: resolves when the broker has confirmed it.
    """

    __slots__ = ()

    ready: Promise[None]

    def end_block(self, failed: bool, /) -> Promise[None] | None:
        """End the subscription; return a promise of its end, unless that need not be waited for.

        Args:
            failed: the block ended with an exception that rejects the message in hand.
        """
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        try:
            await self.ready
        except BaseException:
            self.end_block(False)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_cancelled = kind is not None and issubclass(kind, (GeneratorExit, asyncio.CancelledError))
        closing = self.end_block(kind is not None and not is_cancelled)
        if closing is not None and not in_observer():
            await closing


class Block(AsyncBlock):
    """A block of both kinds. A thread that runs an event loop does not wait, but is warned."""

    #: for texts
    _noun: ClassVar[str]
    _channel: str
    _connection: Connection

    def __enter__(self) -> Self:
        try:
            if may_block():
                wait_for(self.ready, self._connection.settings.timeout, f"subscribing to {self._channel!r}")
            elif not self.ready.done():
                warn_in_loop("the broker has confirmed the subscription", "use `async with`")
            return self
        except BaseException:
            self.end_block(False)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failed = kind is not None and not issubclass(kind, GeneratorExit)
        try:
            closing = self.end_block(failed)
        except BaseException:  # an interrupt: nothing else would end it
            self.end_block(failed)
            raise
        if closing is not None and may_block() and not in_observer():
            timeout = self._connection.settings.close_timeout * 2
            wait_for(closing, timeout, f"closing the {self._noun} of {self._channel!r}")
