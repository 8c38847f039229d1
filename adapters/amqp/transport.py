"""Immediate closing of a transport, on every interpreter and event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


def cut(transport: asyncio.WriteTransport) -> None:
    """Close ``transport`` and discard its write buffer. Does nothing if its connection has ended."""
    try:
        transport.abort()
    except AttributeError:
        # asyncio's TLS transport releases its connection when it is closed after a loss. In Python 3.11.2, the
        # interpreter of Debian 12, its abort() then raises: "'NoneType' object has no attribute '_abort'".
        if not transport.is_closing():
            raise
