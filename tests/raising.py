"""A log with a defect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _RaisingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise LookupError(f"cannot write {record.getMessage()}")


@contextmanager
def raising_log(name: str) -> Iterator[None]:
    """Have each logging call to the logger ``name``, or below it, raise a ``LookupError``."""
    logger, handler = logging.getLogger(name), _RaisingHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
