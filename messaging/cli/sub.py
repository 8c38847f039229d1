"""``messaging sub``: write what arrives to stdout."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from typing import Annotated

import typer

from messaging import AcknowledgeMessageContext, Features, Message, MessageContext, MessageStream, Messaging
from messaging.channels import check_pattern
from messaging.cli import options
from messaging.cli.connecting import choose_target, connect, context_builder, identity, warn_of_memory
from messaging.cli.output import ExitCode, ReaderGoneError, payload_line, record_line, wait_while_read, write

logger = logging.getLogger(__name__)


class Ack(enum.StrEnum):
    """When a message is acknowledged."""

    WRITTEN = "written"
    ARRIVAL = "arrival"
    NEVER = "never"


_Count = Annotated[int | None, typer.Option("--count", "-C", metavar="N", min=1, help="End after N messages.")]
_Timeout = Annotated[
    float | None,
    typer.Option("--timeout", "-W", metavar="SECONDS", help="End that long after subscribing; see the exit codes."),
]
_Json = Annotated[bool, typer.Option("--json", help="A JSON object for each message, in one line.")]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Write the channel and a space before the payload.")]
_Queue = Annotated[
    str | None,
    typer.Option("--queue", metavar="NAME", help="Compete with other subscribers of that queue: one of them gets it."),
]
_Acknowledge = Annotated[
    Ack,
    typer.Option(
        "--ack",
        help="When to acknowledge: once written to stdout, on arrival, or never: then the broker gets it all back.",
    ),
]


def sub(
    topics: options.Topics,
    url: options.Url = None,
    qos: options.Qos = None,
    count: _Count = None,
    timeout: _Timeout = None,
    json: _Json = False,
    verbose: _Verbose = False,
    no_newline: options.NoNewline = False,
    queue: _Queue = None,
    routing_key: options.RoutingKey = None,
    ack: _Acknowledge = Ack.WRITTEN,
    extension: options.Extensions = None,
    url_option: options.UrlOption = None,
    client_id: options.ClientId = None,
    option: options.Settings = None,
    quiet: options.Quiet = False,  # noqa: ARG001  # its callback did it
    debug: options.Debug = False,  # noqa: ARG001
) -> int:
    """Write every message that arrives to stdout: its payload as it came and a newline, or JSON.

    Says on stderr when it has subscribed. Runs until interrupted, unless told otherwise. A message that was not
    written is not acknowledged: the broker delivers it again, as far as it can.

    Example: messaging sub amqp://localhost -t 'a/#' --count 3 --timeout 10 --json
    """
    for topic in topics:
        check_pattern(topic)
    options.check_timeout(timeout)
    given = options.extensions(
        extension,
        **{
            Features.EXTENSION_QOS: qos,
            Features.EXTENSION_QUEUE: queue,
            Features.EXTENSION_AUTO_ACKNOWLEDGE: True if ack is Ack.ARRIVAL else None,
        },
    )
    writer = _Writer(record_line if json else payload_line(b"" if no_newline else b"\n", channel=verbose), count, ack)
    with connect(choose_target(url, url_option), "sub", client_id, option) as m:
        builder = context_builder(m, manual=True).extensions(given)
        streams = [writer.listen(m, builder.channel(topic, routing_key).build_context()) for topic in topics]
        # whatever kept one of them from it, the writer is told
        if all(stream.ready.done() and stream.ready.exception() is None for stream in streams):
            logger.info("subscribed to %s at %s", ", ".join(topics), identity(m))
            warn_of_memory(m)
        try:
            writer.wait(timeout)
        finally:
            writer.over.set()
            dropped = sum(stream.counters.dropped for stream in streams)
            if dropped:
                logger.warning("%d messages were dropped: they came faster than they could be written", dropped)
    return writer.result(timeout)


class _Writer:
    """Writes messages as they come, from all streams, and knows when it is over. Thread safe.

    Acknowledging is manual: a message that was not written must neither be acknowledged nor rejected, since a
    rejected one may end in a dead-letter channel.
    """

    def __init__(self, form: Callable[[Message], bytes], count: int | None, ack: Ack) -> None:
        self._form = form
        self._count = count
        self._acknowledge = ack is Ack.WRITTEN
        self._lock = threading.Lock()  # one line at a time; guards the fields below
        self._written = 0
        self._error: Exception | None = None
        #: set when nothing is to be written any more
        self.over = threading.Event()

    def listen(self, m: Messaging, context: MessageContext) -> MessageStream:
        """Subscribe; returns when the broker has confirmed it, or when it is over."""
        stream = m.subscription.subscribe(context)
        stream.subscribe(self._write, self._fail)
        return stream

    def wait(self, timeout: float | None) -> None:
        """Wait until it is over, for at most ``timeout`` seconds."""
        try:
            wait_while_read(self.over, timeout)
        except ReaderGoneError as error:
            self._fail(error)

    def _write(self, message: Message) -> None:
        context = message.context
        with self._lock:
            if self.over.is_set():
                return
            try:
                write(self._form(message))
            except Exception as error:  # noqa: BLE001  # whatever it is, the main thread raises it
                self._fail(error)
                return
            if self._acknowledge and isinstance(context, AcknowledgeMessageContext):
                context.acknowledge_handler.acknowledge()
            self._written += 1
            if self._written == self._count:
                self.over.set()

    def _fail(self, error: Exception) -> None:
        if not self.over.is_set():
            self._error = error
            self.over.set()

    def result(self, timeout: float | None) -> ExitCode:
        """What to exit with.

        Raises:
            Exception: what a stream ended with, or writing.
        """
        if self._error is not None:
            raise self._error
        if self._count is not None and self._written < self._count:
            logger.warning("timeout: %d of %d messages within %g s", self._written, self._count, timeout)
            return ExitCode.TIMED_OUT
        return ExitCode.OK
