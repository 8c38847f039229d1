"""``messaging info --watch``: the states of a connection, one line each, until interrupted."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from messaging.cli.connecting import Target, connect
from messaging.cli.output import LOOK, ExitCode, ReaderGoneError, dump, is_reader_gone, write
from messaging.errors import BrokerError

if TYPE_CHECKING:
    from messaging import Messaging
    from messaging.connection import ConnectionState


def watch(target: Target, client_id: str | None, settings: Iterable[str] | None, *, json: bool) -> int:
    """Write each state as it comes. A broker that is not there yet is waited for.

    Raises:
        MessagingError: there can be no connection, and none is tried any more.
        ReaderGoneError: nobody reads any more.
    """
    states: queue.SimpleQueue[ConnectionState] = queue.SimpleQueue()

    async def start() -> Messaging:
        # with an event loop around, connect() returns before there is a connection
        return connect(target, "info", client_id, settings, tell=False, retry_connect="true")

    with asyncio.run(start()) as m:
        m.connection_state.subscribe(states.put)
        while True:
            try:
                state = states.get(timeout=LOOK)
            except queue.Empty:
                if is_reader_gone():
                    raise ReaderGoneError from None
                continue
            write(_as_json(state) if json else _as_text(state))
            if state.name == "closed":
                if state.cause is not None:
                    raise state.cause
                return ExitCode.OK


def _as_text(state: ConnectionState) -> bytes:
    when = datetime.fromtimestamp(state.since, UTC).isoformat(timespec="milliseconds")
    return f"{when} {state}\n".encode()


def _as_json(state: ConnectionState) -> bytes:
    cause = state.cause
    return dump(
        {
            "state": state.name,
            "since": state.since,
            "cause": None if cause is None else str(cause),
            "error": None if cause is None else type(cause).__name__,
            "code": cause.code if isinstance(cause, BrokerError) else None,
        }
    )
