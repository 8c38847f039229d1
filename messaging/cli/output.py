"""Where things go: data to stdout, everything else to stderr.

Data is written unbuffered and whole, so that what :func:`write` returned from is in the hands of whoever reads.
Diagnostics go through logging, in single lines that start with the program's name.
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
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

from messaging.errors import MessagingError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from messaging import Message

logger = logging.getLogger(__name__)

PROGRAM: Final = "messaging"

#: how often to look whether stdout is read at all, seconds
LOOK: Final = 0.5
#: what looks like ``user:password@`` in a URL, and like a secret option
_USER_INFO: Final = re.compile(r"(?<=://)[^\s'\"]*@")
_SECRET: Final = re.compile(r"([\w-]*(?:pass|secret|token)[\w-]*=)[^&\s'\")]+", re.IGNORECASE)


class ExitCode(enum.IntEnum):
    """What the program ends with."""

    OK = 0
    #: at run time: no connection, refused, not confirmed
    FAILED = 1
    #: the command line or the input is wrong; nothing was sent
    USAGE = 2
    #: the timeout passed before enough messages came
    TIMED_OUT = 3
    #: SIGINT or SIGTERM
    INTERRUPTED = 130


class ReaderGoneError(Exception):
    """Whoever read our stdout has closed it, as ``head`` does: no failure, but nothing is left to do."""


# --- stdout


def write(data: bytes) -> None:
    """Write all of ``data`` to stdout; it is out when this returns.

    Raises:
        ReaderGoneError: nobody reads any more.
        OSError: it cannot be written for another reason, such as a full disk.
    """
    if sys.stdout is None:
        raise OSError(errno.EBADF, "stdout is closed")
    # Below the buffer, for what an interpreter that ends could not flush any more would be lost, and reported.
    buffered = sys.stdout.buffer
    raw: Any = getattr(buffered, "raw", buffered)
    rest = memoryview(data)
    try:
        while rest:
            written = raw.write(rest)
            if written is None:  # somebody made the pipe non-blocking, and it is full
                select.select([], [raw], [])
            else:
                rest = rest[written:]
    except BrokenPipeError:
        raise ReaderGoneError from None


def is_reader_gone() -> bool:
    """Whether stdout is a pipe or terminal that nobody reads any more, as far as can be told without writing."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))  # without asking for any event, only errors and hang-ups are told
    except (AttributeError, OSError, ValueError):
        return False  # no file, or a system without poll()


def wait_while_read(over: threading.Event, timeout: float | None = None) -> None:
    """Wait until ``over``, for at most ``timeout`` seconds.

    Raises:
        ReaderGoneError: nobody reads stdout any more: one who has enough does not wait for what comes next.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0 and not over.wait(min(left, LOOK)):
        if is_reader_gone():
            raise ReaderGoneError


def show(*renderables: RenderableType) -> None:
    """Write text, tables and the like: coloured and fitted to a terminal, plain and unbroken otherwise."""
    from rich.console import Console  # most commands write no tables

    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable)
    text = "\n".join(line.rstrip() for line in capture.get().splitlines())
    write((text + "\n").encode(console.encoding, "replace"))


def dump(value: Any) -> bytes:
    """``value`` as JSON in one line. Objects that JSON does not know are written as text.

    Raises:
        ValueError: there is something that has no form at all, such as a set as a key.
    """
    from pydantic_core import to_json

    line: bytes = to_json(value, bytes_mode="base64", inf_nan_mode="null", fallback=str) + b"\n"
    return line


def record(message: Message) -> dict[str, Any]:
    """A received message as plain data; what it does not have is left out."""
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
    found = {key: value for key, value in found.items() if value is not None}
    try:
        found["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        found["payload_base64"] = base64.b64encode(message.payload).decode()
    try:
        value = message.value() if context.content_type else _guessed(message)
    except MessagingError as error:
        logger.debug("message on %r has no value: %s", context.channel, error)
    else:
        if not isinstance(value, (str, bytes)):
            found["value"] = value
    if context.extensions:
        found["extensions"] = {key: plain(value) for key, value in context.extensions.items()}
    return found


def record_line(message: Message) -> bytes:
    """:func:`record` as a line of JSON."""
    found = record(message)
    try:
        return dump(found)
    except ValueError as error:
        # formats other than JSON have values, such as sets for keys, that JSON has no form for
        logger.debug("value of a message on %r: %s", message.context.channel, error)
        found.pop("value", None)
        return dump(found)


def payload_line(end: bytes, *, channel: bool = False) -> Callable[[Message], bytes]:
    """How to write the payload of a message as it came: with ``end`` behind it, and perhaps its channel before it."""

    def form(message: Message) -> bytes:
        before = f"{message.context.channel} ".encode() if channel else b""
        return before + message.payload + end

    return form


def _guessed(message: Message) -> Any:
    """The value of a message that does not say what it is: protocols without properties carry JSON all the same."""
    from messaging.codecs import codec_for

    return codec_for("application/json").decode(message.payload, None, {})


def plain(value: Any) -> Any:
    """Copy mappings and sequences of any kind to dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    return value


# --- stderr


def redacted(text: str) -> str:
    """``text`` without what looks like a secret.

    Errors and logs of this project hold none. What a command line parser quotes, or a library logs, may.
    """
    return _SECRET.sub(r"\1***", _USER_INFO.sub("***@", text))


def one_line(text: object) -> str:
    """``text`` fit for a terminal and a log: in one line, without control characters and secrets."""
    words = " ".join(str(text).split())
    return redacted("".join(char if char.isprintable() else ascii(char)[1:-1] for char in words))


def report(error: object) -> None:
    """Write the one line that says why the program fails."""
    with contextlib.suppress(OSError, AttributeError):  # stderr is closed: the exit code still tells
        sys.stderr.write(f"{PROGRAM}: error: {one_line(error)}\n")
        sys.stderr.flush()


class _Formatter(logging.Formatter):
    """One line each. Tracebacks are for ``--debug``: errors that are expected say what they are."""

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


class _Handler(logging.StreamHandler[TextIO]):
    """To whatever ``sys.stderr`` is at the time: a progress bar puts itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        if self.stream is not None:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the base class's name
        """Nobody reads stderr any more: no reason to stop."""


@contextlib.contextmanager
def diagnostics() -> Iterator[None]:
    """Log to stderr: warnings, and what this program itself has to say. ``set_verbosity`` changes that."""
    root, own = logging.getLogger(), logging.getLogger("messaging.cli")
    before = root.level, own.level
    handler = _Handler()
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
    """Log from ``level`` on."""
    logging.getLogger().setLevel(level)
    logging.getLogger("messaging.cli").setLevel(level)
