"""``messaging request``: send a request, and write its reply, or many."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import Annotated

import typer

from messaging import Message, Messaging
from messaging.cli import options, payload
from messaging.cli.connecting import choose_target, connect, warn_of_memory
from messaging.cli.output import ExitCode, payload_line, record_line, report, wait_while_read, write
from messaging.errors import ArgumentError, DeadlineError, UnroutableError
from messaging.model import check_name

_Topic = Annotated[
    str, typer.Option("--topic", "-t", metavar="CHANNEL", show_default=False, help="Where requests are answered.")
]
_Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        "-W",
        metavar="SECONDS",
        help="How long to wait for the reply, or for each of many; by default the setting timeout.",
    ),
]
_Many = Annotated[bool, typer.Option("--many", help="Write each of many replies as it comes.")]
_Count = Annotated[
    int | None, typer.Option("--count", "-C", metavar="N", min=1, help="Of many replies, want no more than N.")
]
_Json = Annotated[bool, typer.Option("--json", help="A JSON object for each reply, in one line.")]


def request(
    topic: _Topic,
    url: options.Url = None,
    text: payload.Text = None,
    file: payload.File = None,
    stdin: payload.Stdin = False,
    null: payload.Null = False,
    timeout: _Timeout = None,
    many: _Many = False,
    count: _Count = None,
    json: _Json = False,
    no_newline: options.NoNewline = False,
    qos: options.Qos = None,
    content_type: payload.ContentType = None,
    encoding: payload.Encoding = None,
    routing_key: options.RoutingKey = None,
    correlation_id: payload.CorrelationId = None,
    reply_to: payload.ReplyTo = None,
    header: payload.Headers = None,
    extension: options.Extensions = None,
    url_option: options.UrlOption = None,
    client_id: options.ClientId = None,
    option: options.Settings = None,
    quiet: options.Quiet = False,  # noqa: ARG001  # its callback did it
    debug: options.Debug = False,  # noqa: ARG001
) -> int:
    """Send a request, wait for its reply, and write that to stdout: its payload as it came and a newline, or JSON.

    If the request went wrong where it was handled, stderr says how. Interrupting cancels it.

    Example: messaging request mqtt://localhost -t orders/price -m '{"id": 7}' --timeout 5
    """
    check_name(topic)
    if [text is not None, file is not None, stdin, null].count(True) != 1:
        raise ArgumentError("say what to send with exactly one of -m, -f, -s and -n")
    if count is not None and not many:
        raise ArgumentError("--count goes with --many: otherwise there is one reply")
    options.check_timeout(timeout)
    given = options.extensions(extension, qos=qos, timeout=timeout, headers=options.headers(header))
    broker = choose_target(url, url_option)
    form = record_line if json else payload_line(b"" if no_newline else b"\n")
    with contextlib.ExitStack() as stack:
        source = payload.open_source(stack, file, from_stdin=stdin)
        m = stack.enter_context(connect(broker, "request", client_id, option))
        builder = m.context_builder().channel(topic, routing_key).extensions(given)
        context = payload.context(builder, content_type, encoding, correlation_id, reply_to)
        data = payload.read_all(text, source, m.runtime.get_runtime_dto().max_message_size)
        message = Message(payload.encoded(data, content_type, encoding), context)
        try:
            if many:
                _write_each(m, message, _Writer(form, count))
            else:
                write(form(_reply(m, message)))
        except UnroutableError:
            warn_of_memory(m)
            raise
        except DeadlineError as error:
            warn_of_memory(m)
            report(error)
            return ExitCode.TIMED_OUT
    return ExitCode.OK


def _reply(m: Messaging, message: Message) -> Message:
    """The reply to a request.

    Raises:
        MessagingError: there is none.
    """
    request = m.reply_to.publish_with_reply(message)
    try:
        reply: Message = request.result()
    finally:
        request.cancel()  # unless it is settled
    return reply


def _write_each(m: Messaging, message: Message, writer: _Writer) -> None:
    """Write the replies to a request. Leaving early tells whoever answers to stop.

    Raises:
        Exception: what the stream of replies ended with, or writing.
    """
    with m.reply_to_many.publish_with_reply_many(message) as stream:
        stream.subscribe(writer)
        writer.wait()
    if writer.error is not None:
        raise writer.error


class _Writer:
    """Observes replies: writes them as they come, and knows when it is over.

    Attributes:
        error: what ended it before its time.
    """

    def __init__(self, form: Callable[[Message], bytes], count: int | None) -> None:
        self._form = form
        self._left = math.inf if count is None else count
        self._over = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        """Wait until it is over.

        Raises:
            ReaderGoneError: nobody reads any more.
        """
        wait_while_read(self._over)

    def on_next(self, message: Message) -> None:
        """Write a reply, unless there were enough."""
        if self._over.is_set():
            return
        try:
            write(self._form(message))
        except Exception as error:  # noqa: BLE001  # whatever it is, the main thread raises it
            self.on_error(error)
            return
        self._left -= 1
        if not self._left:
            self._over.set()

    def on_error(self, error: Exception) -> None:
        """End with ``error``, unless it is over."""
        if not self._over.is_set():
            self.error = error
            self._over.set()

    def on_completed(self) -> None:
        """There are no more."""
        self._over.set()
