"""The log of the event services: it raises nothing."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from typing import Any


class EventLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that does not pass on what handlers and filters of the application's log raise.

    What is logged here is mostly that somebody misbehaves; that must not keep events from others, nor what is to
    follow from being done. As :mod:`logging` does, it writes such errors to stderr, unless
    ``logging.raiseExceptions`` is false. Thread safe.

    Args:
        name: of the logger.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: object, stacklevel: int = 1, **options: Any) -> None:
        """See :meth:`logging.Logger.log`."""
        try:
            # the caller is who called the caller of this
            super().log(level, msg, *args, stacklevel=stacklevel + 1, **options)
        except Exception:  # noqa: BLE001  # whatever they raise
            if logging.raiseExceptions and sys.stderr is not None:
                with contextlib.suppress(Exception):
                    traceback.print_exc()
