"""``messaging request``: send a request, and write its reply, or many."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import messaging
from messaging.cli import options
from messaging.cli.connecting import BrokerOptions, warn_of_memory
from messaging.cli.options import flag, option
from messaging.cli.output import ExitCode, payload_line, record_line, report, wait_while_read, write
from messaging.cli.payload import MessageOptions  # typer evaluates annotations
from messaging.errors import ArgumentError, DeadlineError, UnroutableError

if TYPE_CHECKING:
    from messaging import Message, Messaging


@options.command
def request(
    topic: Annotated[str, option("--topic -t", "CHANNEL", "Channel of the responder.")],
    outgoing: MessageOptions,
    broker: BrokerOptions,
    timeout: Annotated[
        float | None,
        options.timeout("How long to wait for the reply, or for each of many; default: the setting timeout."),
    ] = None,
    many: Annotated[bool, flag("--many", "Write each of many replies as it arrives.")] = False,
    count: Annotated[int | None, options.count("End after N of many replies.")] = None,
    json: Annotated[bool, flag("--json", "Write each reply as a JSON object on one line.")] = False,
    no_newline: options.NoNewline = False,
) -> int:
    """Send a request, wait for its reply, and write the payload and a newline to stdout, or JSON.

    If the responder fails, stderr shows its error. Interrupting cancels the request.

    Example: messaging request mqtt://localhost -t orders/price -m '{"id": 7}' --timeout 5
    """
    from messaging.model import check_name  # not at import: help and completion must be fast

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
        context = outgoing.context(topic, extensions)
        message = messaging.Message(outgoing.read(source, m.runtime.get_runtime_dto().max_message_size), context)
        try:
            if many:
                _write_replies(m, message, form, count)
            else:
                reply = m.reply_to.publish_with_reply(message)
                stack.callback(reply.cancel)  # has no effect on a settled request
                write(form(reply.result()))
        except UnroutableError:
            warn_of_memory(m)
            raise
        except DeadlineError as error:
            warn_of_memory(m)
            report(error)
            return ExitCode.TIMED_OUT
    return ExitCode.OK


def _write_replies(m: Messaging, message: Message, form: Callable[[Message], bytes], count: int | None) -> None:
    """Send a request and write ``count`` replies, or all. Leaving early tells the responder to stop.

    Raises:
        Exception: the stream of replies failed, or writing did.
    """
    over = threading.Event()
    errors: list[Exception] = []

    def fail(error: Exception) -> None:
        errors.append(error)
        over.set()

    def write_reply(reply: Message) -> None:
        try:
            if not over.is_set():
                write(form(reply))
        except Exception as error:  # noqa: BLE001  # the main thread raises it
            fail(error)

    with m.reply_to_many.publish_with_reply_many(message) as stream:
        from reactivex import operators as ops  # not at import: help and completion must be fast

        replies = stream if count is None else stream.pipe(ops.take(count))
        replies.subscribe(write_reply, fail, over.set)
        wait_while_read(over)
    if errors:
        raise errors[0]
