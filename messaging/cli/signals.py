"""SIGTERM: ends a command as SIGINT does, or a service in good order.

Imported before everything else of the command line: it imports nothing of this project.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class _Stopped(KeyboardInterrupt):
    """SIGTERM, for a command that runs as a service."""


@contextlib.contextmanager
def sigterm_interrupts(error: type[KeyboardInterrupt] = KeyboardInterrupt) -> Iterator[None]:
    """Have SIGTERM raise ``error`` within the block: streams are closed and accepted messages are sent.

    Only the main thread can set that; on others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def sigterm_stops() -> Iterator[None]:
    """Have SIGTERM leave the block, in good order, as its regular end. SIGINT interrupts the command as before."""
    with contextlib.suppress(_Stopped), sigterm_interrupts(_Stopped):
        yield
