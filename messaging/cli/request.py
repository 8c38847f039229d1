"""``messaging request``: send a request, and write its reply, or many."""

import contextlib
import math
import threading
from collections.abc import Callable
from typing import Annotated

from typer import Option

from messaging.cli import options
from messaging.cli.connecting import Broker, warn_of_memory
from messaging.cli.output import ExitCode, payload_line, record_line, report, wait_while_read, write
from messaging.cli.payload import Outgoing
from messaging.errors import ArgumentError, DeadlineError, UnroutableError
from messaging.instance import Messaging
from messaging.model import Message, check_name


@options.command
def request(
    topic: Annotated[
        str, Option("--topic", "-t", metavar="CHANNEL", show_default=False, help="Channel of the responder.")
    ],
    outgoing: Outgoing,
    broker: Broker,
    timeout: Annotated[
        float | None,
        Option(
            "--timeout",
            "-W",
            metavar="SECONDS",
            help="How long to wait for the reply, or for each of many; default: the setting timeout.",
        ),
    ] = None,
    many: Annotated[bool, Option("--many", help="Write each of many replies as it arrives.")] = False,
    count: Annotated[
        int | None, Option("--count", "-C", metavar="N", min=1, help="End after N of many replies.")
    ] = None,
    json: Annotated[bool, Option("--json", help="Write each reply as a JSON object on one line.")] = False,
    no_newline: options.NoNewline = False,
) -> int:
    """Send a request, wait for its reply, and write the payload and a newline to stdout, or JSON.

    If the responder fails, stderr shows its error. Interrupting cancels the request.

    Example: messaging request mqtt://localhost -t orders/price -m '{"id": 7}' --timeout 5
    """
    check_name(topic)
    if outgoing.sources != 1:
        raise ArgumentError("say what to send with exactly one of -m, -f, -s and -n")
    if count is not None and not many:
        raise ArgumentError("--count goes with --many: otherwise there is one reply")
    options.check_timeout(timeout)
    extensions = outgoing.extensions(timeout=timeout)
    _ = broker.target  # a missing URL is an error before a file is opened
    form = record_line if json else payload_line(b"" if no_newline else b"\n")
    with contextlib.ExitStack() as stack:
        source = outgoing.open_source(stack)
        m = stack.enter_context(broker.connect("request"))
        context = outgoing.context(m, topic, extensions)
        message = Message(outgoing.read(source, m.runtime.get_runtime_dto().max_message_size), context)
        try:
            if many:
                _write_replies(m, message, _Writer(form, count))
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
    """Send a request and return its reply.

    Raises:
        MessagingError: the request failed.
    """
    request = m.reply_to.publish_with_reply(message)
    try:
        reply: Message = request.result()
    finally:
        request.cancel()  # has no effect on a settled request
    return reply


class _Writer:
    """An observer that writes replies as they arrive.

    Attributes:
        over: set after the last reply.
        error: the error that ended the stream, or writing.
    """

    def __init__(self, form: Callable[[Message], bytes], count: int | None) -> None:
        self._form = form
        self._left = math.inf if count is None else count
        self.over = threading.Event()
        self.error: Exception | None = None

    def on_next(self, message: Message) -> None:
        """Write a reply, until ``count`` replies are written."""
        if self.over.is_set():
            return
        try:
            write(self._form(message))
        except Exception as error:  # noqa: BLE001  # the main thread raises it
            self.on_error(error)
            return
        self._left -= 1
        if not self._left:
            self.over.set()

    def on_error(self, error: Exception) -> None:
        """End with ``error``, unless the last reply is written."""
        if not self.over.is_set():
            self.error = error
            self.over.set()

    def on_completed(self) -> None:
        """End: the responder has sent its last reply."""
        self.over.set()


def _write_replies(m: Messaging, message: Message, writer: _Writer) -> None:
    """Send a request and write its replies. Leaving early tells the responder to stop.

    Raises:
        Exception: the stream of replies failed, or writing did.
    """
    with m.reply_to_many.publish_with_reply_many(message) as stream:
        stream.subscribe(writer)
        wait_while_read(writer.over)
    if writer.error is not None:
        raise writer.error
