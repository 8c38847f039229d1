"""Connections of the monitor that are bounded in time. On the event loop of the server."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import StreamingResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from messaging.execution import clock
from messaging.observability.monitor.viewers import SlowViewerError
from messaging.text import SafeLog

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from messaging.observability.monitor.viewers import Viewers

logger = SafeLog(__name__)

#: how long a client may take to send its request, or to take the rest of an answer, seconds
PATIENCE: Final = 10.0
#: key of the state of a request: aborts its connection
_ABORT: Final = "abort"


class TimedProtocol(H11Protocol):
    """Ends connections whose client sends no request, or does not take the rest of its answer.

    Without it such clients would take all connections of the server, without a token.

    Attributes:
        patience: seconds that the client has for either.
    """

    patience = PATIENCE

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See the base class."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, _ABORT: transport.abort}
        self._was_closing = False
        self._timer = clock.call_later(self.loop, self.patience, self._check)

    def _check(self) -> None:
        is_closing = self.transport.is_closing()
        if self.cycle is None or (is_closing and self._was_closing):
            self.transport.abort()
            return
        self._was_closing = is_closing
        self._timer = clock.call_later(self.loop, self.patience, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """See the base class."""
        self._timer.cancel()
        super().connection_lost(exc)


class EventStream(StreamingResponse):
    """Server-sent events to one client. One that takes nothing for too long is dropped.

    Args:
        events: makes the events.
        viewers: counts dropped viewers.
        on_end: awaited at the end, also if no event was sent and if the client has gone.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], viewers: Viewers, on_end: Callable[[], Awaitable[object]]
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events
        self._viewers = viewers
        self._on_end = on_end
        self._is_dropped = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See the base class."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            # not in the generator: it may not have begun, and where it is cancelled nothing can be awaited
            await self._on_end()
        if self._is_dropped:
            scope["state"][_ABORT]()  # closing it would wait for the client
            await asyncio.sleep(0)  # until the server knows

    async def stream_response(self, send: Any) -> None:
        """See the base class."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                message = {"type": "http.response.body", "body": data, "more_body": True}
                await self._viewers.send(partial(send, message))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except SlowViewerError:
            logger.debug("monitor: a viewer was too slow, and was dropped")
            self._is_dropped = True
        finally:
            await self._events.aclose()
