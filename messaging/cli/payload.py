"""The message that ``pub`` and ``request`` send: its options, its payload, and the outcome of publishing it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import messaging
from messaging.cli import options
from messaging.cli.options import flag, option
from messaging.errors import ArgumentError, MessagingError, PayloadTooLargeError

if TYPE_CHECKING:
    from messaging import MessageContext
    from messaging.execution import Promise


@dataclass(frozen=True)
class MessageOptions:
    """The options that give a message its payload and context."""

    text: Annotated[str | None, option("--message -m", "TEXT", "Send this text.")] = None
    file: Annotated[Path | None, option("--file -f", "PATH", "Send the content of a file.")] = None
    stdin: Annotated[bool, flag("--stdin -s", "Send all of stdin as one message.")] = False
    null: Annotated[bool, flag("--null -n", "Send an empty message.")] = False
    qos: options.Qos = None
    content_type: Annotated[str | None, options.content_type("Such as application/json.")] = None
    encoding: Annotated[
        str | None,
        option(
            "--encoding",
            "NAME",
            "Content encoding: gzip or zstd compress the payload.",
            autocompletion=lambda: ("gzip", "zstd"),
        ),
    ] = None
    routing_key: options.RoutingKey = None
    correlation_id: Annotated[str | None, option("--correlation-id", "ID", "Correlation id.")] = None
    reply_to: Annotated[str | None, option("--reply-to", "CHANNEL", "Channel for replies.")] = None
    header: Annotated[list[str] | None, option("--header -D", "KEY=VALUE", "A user header. Repeatable.")] = None
    extension: options.Extensions = None

    @property
    def sources(self) -> int:
        """Return the number of given options that name a payload."""
        return [self.text is not None, self.file is not None, self.stdin, self.null].count(True)

    def extensions(self, **flags: Any) -> dict[str, Any]:
        """Return the extensions of the context, as :func:`messaging.cli.options.extensions`."""
        headers = options.pairs(self.header, "--header") or None
        return options.extensions(self.extension, qos=self.qos, headers=headers, **flags)

    def context(self, channel: str, extensions: dict[str, Any]) -> MessageContext:
        """Return the context of the message."""
        texts = (self.content_type, self.encoding, self.correlation_id, self.reply_to)
        return messaging.MessageContext(channel, self.routing_key, *texts, extensions)

    def encoded(self, payload: bytes) -> bytes:
        """Return ``payload`` in the content encoding of the message."""
        if self.encoding is None:
            return payload
        from messaging.codecs import encode  # not at import: help and completion must be fast

        return encode(payload, self.content_type, self.encoding)[0]

    def open_source(self, stack: contextlib.ExitStack, *, from_stdin: bool = False) -> BinaryIO | None:
        """Open the source of the payload, before anything is connected; ``None`` for a text or an empty payload."""
        if self.stdin or from_stdin:
            if sys.stdin is None:
                raise ArgumentError("stdin is closed")
            return sys.stdin.buffer
        if self.file is None:
            return None
        try:
            return stack.enter_context(self.file.open("rb"))
        except OSError as error:
            raise ArgumentError(f"cannot read {str(self.file)!r}: {error.strerror}") from error

    def read(self, source: BinaryIO | None, limit: int | None) -> bytes:
        """Return the payload as it is sent.

        Raises:
            PayloadTooLargeError: ``source`` holds more than ``limit`` bytes; no more are read, since it may be endless.
        """
        if self.text is not None:
            return self.encoded(os.fsencode(self.text))
        data = b"" if source is None else source.read(-1 if limit is None else limit + 1)
        if limit is not None and len(data) > limit:
            raise PayloadTooLargeError(len(data), limit, "this instance; there may be more")
        return self.encoded(data)


def read_lines(source: BinaryIO | None, limit: int | None) -> Iterator[bytes]:
    """Yield the lines of ``source``, without their newlines, as they arrive.

    Raises:
        PayloadTooLargeError: a line is longer than ``limit`` bytes.
    """
    while source is not None and (line := source.readline(-1 if limit is None else limit + 1)):
        if limit is not None and len(line) > limit and not line.endswith(b"\n"):
            raise PayloadTooLargeError(len(line), limit, "this instance; the line may be longer")
        yield line.removesuffix(b"\n")


class Outcomes:
    """Counts the outcomes of promises. For one thread at a time.

    Attributes:
        succeeded: promises that resolved.
        failed: promises that were rejected, and failures that were added.
        error: the first failure.
    """

    def __init__(self) -> None:
        self._pending: deque[Promise[None]] = deque()
        self.succeeded = self.failed = 0
        self.error: MessagingError | None = None

    def add(self, promise: Promise[None], limit: int) -> None:
        """Add a promise, then wait until at most ``limit`` are pending."""
        self._pending.append(promise)
        self.settle(limit)

    def fail(self, error: MessagingError) -> None:
        """Count a message that could not be published."""
        self.failed += 1
        self.error = self.error or error

    def settle(self, limit: int = 0) -> None:
        """Wait until at most ``limit`` promises are pending. Each promise has its own deadline."""
        pending = self._pending
        while pending and (len(pending) > limit or pending[0].done()):
            error = pending[0].exception()
            pending.popleft()  # after the wait, which a signal can interrupt
            if error is None:
                self.succeeded += 1
            else:
                self.fail(error)
