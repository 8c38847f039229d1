"""What is sent: the options that say it, and reading it. For ``pub`` and ``request``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from messaging.codecs import encode
from messaging.errors import ArgumentError, PayloadTooLargeError

if TYPE_CHECKING:
    from messaging import MessageContext, MessageContextBuilder

Text = Annotated[str | None, typer.Option("--message", "-m", metavar="TEXT", help="Send this text.")]
File = Annotated[Path | None, typer.Option("--file", "-f", metavar="PATH", help="Send what the file holds.")]
Stdin = Annotated[bool, typer.Option("--stdin", "-s", help="Send all of stdin as one message.")]
Null = Annotated[bool, typer.Option("--null", "-n", help="Send an empty message.")]
ContentType = Annotated[str | None, typer.Option("--content-type", metavar="TYPE", help="Such as application/json.")]
Encoding = Annotated[
    str | None,
    typer.Option("--encoding", metavar="NAME", help="Content encoding: gzip or zstd compress the payload first."),
]
CorrelationId = Annotated[str | None, typer.Option("--correlation-id", metavar="ID", help="Correlation id.")]
ReplyTo = Annotated[str | None, typer.Option("--reply-to", metavar="CHANNEL", help="Channel for replies.")]
Headers = Annotated[
    list[str] | None, typer.Option("--header", "-D", metavar="KEY=VALUE", help="A user header. Repeatable.")
]


def context(
    builder: MessageContextBuilder,
    content_type: str | None,
    encoding: str | None,
    correlation_id: str | None,
    reply_to: str | None,
) -> MessageContext:
    """What ``builder`` builds, with those properties that were given."""
    for setter, value in (
        (builder.content_type, content_type),
        (builder.content_encoding, encoding),
        (builder.correlation_id, correlation_id),
        (builder.reply_to, reply_to),
    ):
        if value is not None:
            setter(value)
    return builder.build_context()


def encoded(payload: bytes, content_type: str | None, encoding: str | None) -> bytes:
    """``payload`` as it is to travel."""
    return encode(payload, content_type, encoding)[0] if encoding is not None else payload


def open_source(stack: contextlib.ExitStack, file: Path | None, *, from_stdin: bool) -> BinaryIO | None:
    """What to read from; opened before anything is connected."""
    if from_stdin:
        if sys.stdin is None:
            raise ArgumentError("stdin is closed")
        return sys.stdin.buffer
    if file is None:
        return None
    try:
        return stack.enter_context(file.open("rb"))
    except OSError as error:
        raise ArgumentError(f"cannot read {str(file)!r}: {error.strerror}") from error


def read_all(text: str | None, source: BinaryIO | None, limit: int | None) -> bytes:
    """The text; or all of the source, but no more than can be published: it may be endless. Without both, nothing."""
    if text is not None:
        return os.fsencode(text)
    if source is None:
        return b""
    data = source.read(-1 if limit is None else limit + 1)
    if limit is not None and len(data) > limit:
        raise PayloadTooLargeError(len(data), limit, "this instance; there may be more")
    return data


def read_lines(source: BinaryIO | None, limit: int | None) -> Iterator[bytes]:
    """Line by line, as they come."""
    while source is not None and (line := source.readline(-1 if limit is None else limit + 1)):
        if limit is not None and len(line) > limit and not line.endswith(b"\n"):
            raise PayloadTooLargeError(len(line), limit, "this instance; the line may be longer")
        yield line.removesuffix(b"\n")
