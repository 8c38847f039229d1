"""Write data to stdout, and everything else to stderr.

Data is written unbuffered and whole: when :func:`write` returns, the reader of stdout can read all of it. Diagnostics
go through logging, in single lines that start with the program's name.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import errno
import logging
import math
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar

from messaging.errors import MessagingError
from messaging.errors.text import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from messaging.model import Message

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROGRAM: Final = "messaging"

#: how often to check whether stdout still has a reader, seconds
LOOK: Final = 0.5
#: text that looks like ``user:password@`` in a URL, and like a secret option
_USER_INFO: Final = re.compile(r"(?<=://)[^\s'\"]*@")
_SECRET: Final = re.compile(r"([\w-]*(?:pass|secret|token)[\w-]*=)[^&\s'\")]+", re.IGNORECASE)


class ExitCode(enum.IntEnum):
    """The exit codes of the program."""

    OK = 0
    #: failed at run time: no connection, refused, not confirmed
    FAILED = 1
    #: the command line or the input is wrong; nothing was sent
    USAGE = 2
    #: the timeout passed before enough messages arrived
    TIMED_OUT = 3
    #: SIGINT or SIGTERM
    INTERRUPTED = 130


class ReaderGoneError(Exception):
    """The reader of stdout has closed it, as ``head`` does: no failure, but nothing is left to do."""


# --- stdout


def write(data: bytes) -> None:
    """Write all of ``data`` to stdout, unbuffered.

    Raises:
        ReaderGoneError: the reader of stdout has closed it.
        OSError: writing failed for another reason, such as a full disk.
    """
    if sys.stdout is None:
        raise OSError(errno.EBADF, "stdout is closed")
    # bypass the buffer: an interpreter that exits would lose unflushed data, and report that
    buffered = sys.stdout.buffer
    raw: Any = getattr(buffered, "raw", buffered)
    rest = memoryview(data)
    try:
        while rest:
            written = raw.write(rest)
            if written is None:  # the pipe is non-blocking and full
                select.select([], [raw], [])
            else:
                rest = rest[written:]
    except BrokenPipeError:
        raise ReaderGoneError from None


def is_reader_gone() -> bool:
    """Return whether the reader of stdout has closed it, as far as that is known without writing."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))  # without requested events, poll() reports errors and hang-ups only
    except (AttributeError, OSError, ValueError):
        return False  # stdout is not a file, or the system has no poll()


def wait_while_read(over: threading.Event, timeout: float | None = None) -> None:
    """Wait until ``over`` is set, for at most ``timeout`` seconds.

    Raises:
        ReaderGoneError: the reader of stdout has closed it, so no further data can be written.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0 and not over.wait(min(left, LOOK)):
        if is_reader_gone():
            raise ReaderGoneError


def show(*renderables: RenderableType) -> None:
    """Write text and tables to stdout: coloured and wrapped on a terminal, plain and unwrapped otherwise."""
    from rich.console import Console  # most commands write no tables, and importing it is slow

    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable)
    text = "\n".join(line.rstrip() for line in capture.get().splitlines())
    write((text + "\n").encode(console.encoding, "replace"))


def show_table(columns: list[str], rows: list[list[str]]) -> None:
    """Write a table to stdout, as :func:`show` does."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(one_line(each), overflow="fold") for each in row))
    show(table)


def show_pairs(pairs: Mapping[str, object]) -> None:
    """Write names and values to stdout, aligned; ``-`` for a value that is missing."""
    width = max(map(len, pairs))
    show(*(f"{name:{width}}  {'-' if value in (None, '') else value}" for name, value in pairs.items()))


def show_list(
    items: Sequence[T], columns: Mapping[str, Callable[[T], str]], fields: Callable[[T], Any], *, json: bool
) -> ExitCode:
    """Write a list to stdout.

    Args:
        items: the listed objects; an empty list has no table.
        columns: title of a column -> returns the text of an item in it.
        fields: returns an item for JSON.
        json: write JSON on one line.
    """
    if json:
        write(dump([fields(each) for each in items]))
    elif items:
        show_table([*columns], [[text_of(each) for text_of in columns.values()] for each in items])
    return ExitCode.OK


def show_outcome(found: Mapping[str, Any], text: str, *, json: bool) -> ExitCode:
    """Report what a command has done: as JSON on stdout, or as ``text`` on stderr, with fields as ``{name}``."""
    if json:
        write(dump(found))
    else:
        logger.info("%s", text.format_map(found))
    return ExitCode.OK


def dump(value: Any) -> bytes:
    """Return ``value`` as JSON on one line. Objects without a JSON form are written as text.

    Raises:
        ValueError: a part has no form at all, such as a set as a key.
    """
    from pydantic_core import to_json

    line: bytes = to_json(value, bytes_mode="base64", inf_nan_mode="null", fallback=_plain) + b"\n"
    return line


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def record_line(message: Message) -> bytes:
    """Return a received message as a line of JSON, without the properties that it lacks."""
    context = message.context
    found: dict[str, Any] = {
        "received": datetime.now(UTC).isoformat(timespec="microseconds"),
        "channel": context.channel,
        "channel_extension": context.channel_extension,
        "content_type": context.content_type,
        "content_encoding": context.content_encoding,
        "correlation_id": context.correlation_id,
        "reply_to": context.reply_to_channel,
    }
    found = {key: value for key, value in found.items() if value is not None} | payload_fields(message.payload)
    extensions = {"extensions": context.extensions} if context.extensions else {}
    try:
        if context.content_type:
            value = message.value()
        else:  # JSON is common on protocols without content types
            from messaging.codecs import codec_for

            value = codec_for("application/json").decode(message.payload, None, {})
        if not isinstance(value, (str, bytes)):
            return dump({**found, "value": value, **extensions})
    except (MessagingError, ValueError) as error:  # not decodable, or a value without a form in JSON: a set as a key
        logger.debug("message on %r has no value: %s", context.channel, error)
    return dump(found | extensions)


def payload_fields(payload: bytes) -> dict[str, str]:
    """Return the payload as a field of a JSON object: as text, or in base 64 if it is not UTF-8."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def payload_line(end: bytes, *, channel: bool = False) -> Callable[[Message], bytes]:
    """Return a function that formats a message as its payload and ``end``, after its channel if ``channel``."""

    def form(message: Message) -> bytes:
        before = f"{message.context.channel} ".encode() if channel else b""
        return before + message.payload + end

    return form


# --- stderr


def redacted(text: str) -> str:
    """Return ``text`` with everything masked that looks like a secret.

    Errors and logs of this project hold no secrets, but messages of the command line parser and of libraries may.
    """
    return _SECRET.sub(r"\1***", _USER_INFO.sub("***@", text))


def one_line(text: object) -> str:
    """Return ``text`` for a terminal and a log: on one line, without control characters and secrets."""
    return redacted(visible(" ".join(str(text).split())))


def report(error: object) -> None:
    """Write the line on stderr that says why the program fails."""
    with contextlib.suppress(OSError, AttributeError):  # stderr is closed: the exit code remains
        sys.stderr.write(f"{PROGRAM}: error: {one_line(error)}\n")
        sys.stderr.flush()


class _Formatter(logging.Formatter):
    """Formats each record as one line. Only ``--debug`` adds tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info is not None and record.exc_info[1] is not None:
            text += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        if logging.getLogger().level > logging.DEBUG:
            return f"{PROGRAM}: {level}{one_line(text)}"
        line = f"{PROGRAM}: {record.relativeCreated / 1000:.3f} {level}{record.name}: {one_line(text)}"
        if record.exc_info is not None:
            line += "\n" + redacted(self.formatException(record.exc_info))
        return line


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``, which a progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        if self.stream is not None:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the base class's name
        """Ignore the error: stderr is closed, which must not stop the program."""


@contextlib.contextmanager
def diagnostics() -> Iterator[None]:
    """Log warnings, and the program's own messages, to stderr. ``set_verbosity`` changes the level."""
    root, own = logging.getLogger(), logging.getLogger("messaging.cli")
    before = root.level, own.level
    handler = _StderrHandler()
    handler.setFormatter(_Formatter())
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    own.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        own.setLevel(before[1])


def set_verbosity(level: int) -> None:
    """Log records of ``level`` and above."""
    logging.getLogger().setLevel(level)
    logging.getLogger("messaging.cli").setLevel(level)


def set_formatter(formatter: logging.Formatter) -> None:
    """Write log records in another format than that for people, until :func:`diagnostics` ends."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _StderrHandler):
            handler.setFormatter(formatter)
