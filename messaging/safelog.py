"""The log of parts that go on when the application's logging is broken."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from typing import Any


class SafeLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that does not pass on what handlers and filters of the application's log raise.

    An exception of a logging handler must neither stop a stream or a delivery thread, nor leave a message unsettled. As
    :mod:`logging` does, this class writes such errors to stderr, unless ``logging.raiseExceptions`` is false. Thread
    safe.

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
