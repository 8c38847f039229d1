"""Structured logs: one JSON object on one line for each record.

::

    from messaging.observability.logs import configure_logging

    configure_logging("info", "json")

| key | content |
|---|---|
| ``time`` | RFC 3339, UTC, milliseconds |
| ``level`` | ``debug``, ``info``, ``warning``, ``error``, ``critical`` |
| ``logger`` | name of the logger |
| ``message`` | the text |
| ``component``, ``name`` | of texts such as ``route 'telemetry': …``: ``route`` and ``telemetry`` |
| ``exception`` | class, text and traceback |
| ``thread`` | name of the thread |
| ``trace_id``, ``span_id`` | of the current OpenTelemetry span, if there is one |

Values given as ``extra=`` are added under their names. A record that cannot be formatted becomes a line that says so.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

from messaging.errors import ArgumentError

#: what texts of components begin with: ``mqtt 'plant' (broker:1883): …``
_COMPONENT: Final = re.compile(r"([a-z][a-z ]{0,30}) '([^']{1,200})'(?: \([^)]{0,300}\))?[^:]{0,80}: ")
#: attributes that every record has
_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
#: characters of a text; what is beyond is cut
_MAX_TEXT: Final = 16_384
_FORMATS: Final = ("text", "json")
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line. Never raises. Thread safe."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a newline."""
        try:
            return json.dumps(self._fields(record), default=_text, ensure_ascii=False)
        except Exception as error:  # noqa: BLE001  # of an argument's __str__, say
            return json.dumps(_head(record, f"a log record cannot be formatted: {type(error).__name__}"))

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        message = _cut(record.getMessage())
        fields = _head(record, message)
        found = _COMPONENT.match(message)
        if found is not None:
            fields["component"], fields["name"] = found.groups()
        fields["thread"] = record.threadName
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, trace = record.exc_info
            fields["exception"] = {
                "class": kind.__name__,
                "message": _cut(str(error)),
                "traceback": _cut("".join(traceback.format_exception(kind, error, trace))),
            }
        fields |= _span()
        for key, value in vars(record).items():
            if key not in _PLAIN and not key.startswith("_"):
                fields.setdefault(key, value)
        return fields


def configure_logging(
    level: str = "info", format: Literal["text", "json"] | str = "text", stream: TextIO | None = None  # noqa: A002
) -> logging.Handler:  # fmt: skip
    """Have the root logger write to a stream, in place of its present handlers. For programs, before they start.

    Args:
        level: least level that is written: ``debug``, ``info``, ``warning``, ``error`` or ``critical``.
        format: ``text``, or ``json`` for :class:`JsonFormatter`.
        stream: stderr by default.

    Returns:
        The handler.

    Raises:
        ArgumentError: the level or the format is none of these.
    """
    number = level_number(level)
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(formatter(format))
    root = logging.getLogger()
    for each in [*root.handlers]:
        root.removeHandler(each)
    root.addHandler(handler)
    root.setLevel(number)
    return handler


def level_number(level: str) -> int:
    """Return the number of a level's name. Raises ``ArgumentError``."""
    if not isinstance(level, str) or level.lower() not in _LEVELS:
        raise ArgumentError(f"log level must be one of {', '.join(_LEVELS)}, not {level!r:.40}")
    return logging.getLevelNamesMapping()[level.upper()]


def formatter(format: str) -> logging.Formatter:  # noqa: A002
    """Return the formatter of a format's name. Raises ``ArgumentError``."""
    if format == "json":
        return JsonFormatter()
    if format == "text":
        return logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise ArgumentError(f"log format must be one of {', '.join(_FORMATS)}, not {format!r:.40}")


def _head(record: logging.LogRecord, message: str) -> dict[str, Any]:
    """Return the fields that every line has."""
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": message}


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _text(value: object) -> str:
    return _cut(str(value))


def _span() -> dict[str, str]:
    """Return the ids of the current span; nothing where OpenTelemetry is not loaded or no span is current."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
