"""``messaging sub``: write what arrives to stdout."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from typing import Annotated, Any

import typer

from messaging import AcknowledgeMessageContext, Features, Message, MessageContext, MessageStream, Messaging
from messaging.cli import options
from messaging.cli.connecting import choose_target, connect, context_builder, identity, warn_of_memory
from messaging.cli.filters import Filter, Removal, Verdict, is_retained, require_retain
from messaging.cli.formats import PACKET_ID, UnformattableError, compiled
from messaging.cli.output import ExitCode, ReaderGoneError, payload_line, record_line, wait_while_read, write
from messaging.errors import ArgumentError
from messaging.model import check_pattern

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
_Format = Annotated[
    str | None,
    typer.Option(
        "--format", "-F", metavar="FORMAT", help="As of mosquitto_sub: %t channel, %p payload, %j JSON, %I time, …"
    ),
]
_FilterOut = Annotated[
    list[str] | None,
    typer.Option("--filter-out", "-T", metavar="PATTERN", help="Write nothing of these channels. Repeatable."),
]
_NoRetained = Annotated[
    bool, typer.Option("--no-retained", "-R", help="Write no messages that the broker had retained.")
]
_RetainedOnly = Annotated[
    bool, typer.Option("--retained-only", help="Write retained messages, and end at the first other one.")
]
_RemoveRetained = Annotated[
    bool,
    typer.Option("--remove-retained", help="Remove retained messages from the broker, but those of --filter-out."),
]
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
    format_: _Format = None,
    no_newline: options.NoNewline = False,
    filter_out: _FilterOut = None,
    no_retained: _NoRetained = False,
    retained_only: _RetainedOnly = False,
    remove_retained: _RemoveRetained = False,
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
    """Write every message that arrives to stdout: its payload as it came and a newline, JSON, or in a format.

    Says on stderr when it has subscribed. Runs until interrupted, unless told otherwise. A message that was not
    written is not acknowledged: the broker delivers it again, as far as it can.

    Example: messaging sub amqp://localhost -t 'a/#' --count 3 --timeout 10 --json
    """
    for topic in topics:
        check_pattern(topic)
    options.check_timeout(timeout)
    if json and (format_ is not None or verbose):
        raise ArgumentError(f"--json and {'--verbose' if format_ is None else '--format'}: give one of them")
    form, wanted = _form(format_, json=json, verbose=verbose, end=b"" if no_newline else b"\n")
    select = Filter(filter_out or (), live_only=no_retained, retained_only=retained_only)
    given = options.extensions(
        extension,
        **{
            Features.EXTENSION_QOS: qos,
            Features.EXTENSION_QUEUE: queue,
            Features.EXTENSION_AUTO_ACKNOWLEDGE: True if ack is Ack.ARRIVAL else None,
        },
    )
    given = wanted | given
    writer = _Writer(form, select, count, ack)
    with connect(choose_target(url, url_option), "sub", client_id, option) as m:
        for option_name, is_given in (("--retained-only", retained_only), ("--remove-retained", remove_retained)):
            if is_given:
                require_retain(m, option_name, queue=queue is not None)
        if remove_retained:
            writer.removal, writer.is_single = Removal(m), len(topics) == 1
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
            writer.finish()
    return writer.result(timeout)


def _form(
    format_: str | None, *, json: bool, verbose: bool, end: bytes
) -> tuple[Callable[[Message], bytes], dict[str, Any]]:
    """Return what writes a message, and the extensions that it needs of the subscription."""
    if json:
        return record_line, {}
    if format_ is None:
        return payload_line(end, channel=verbose), {}
    form, letters = compiled(format_)
    return lambda message: form(message) + end, {PACKET_ID: True} if "m" in letters else {}


class _Writer:
    """Writes messages as they come, from all streams, and knows when it is over. Thread safe.

    Acknowledging is manual: a message that was not written must neither be acknowledged nor rejected, since a
    rejected one may end in a dead-letter channel.
    """

    def __init__(self, form: Callable[[Message], bytes], select: Filter, count: int | None, ack: Ack) -> None:
        self._form = form
        self._filter = select
        self.removal: Removal | None = None
        #: whether there is one stream only
        self.is_single = True
        self._count = count
        self._acknowledge = ack is Ack.WRITTEN
        self._lock = threading.Lock()  # one line at a time; guards the fields below
        self._written = 0
        #: a message said that there are no more
        self._ended_itself = False
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
            verdict = self._filter.verdict(message)
            if self.removal is not None and self.removal.is_echo(message):
                # what a broker has retained for one pattern, it sends before any of these
                verdict = verdict if verdict is Verdict.END and self.is_single else Verdict.SKIP
            if verdict is Verdict.END:
                self._ended_itself = True
                self.over.set()
                return
            try:
                if verdict is Verdict.WRITE:
                    write(self._form(message))
                    self._written += 1
            except UnformattableError as error:
                logger.warning("%s", error)
            except Exception as error:  # noqa: BLE001  # whatever it is, the main thread raises it
                self._fail(error)
                return
            if self.removal is not None and is_retained(message) and not self._filter.excludes(message):
                self.removal.remove(message)
            if self._acknowledge and isinstance(context, AcknowledgeMessageContext):
                context.acknowledge_handler.acknowledge()
            if self._written == self._count:
                self.over.set()

    def finish(self) -> None:
        """Wait until the broker has confirmed every removal, once it is over."""
        with self._lock:
            if self.removal is not None:
                self.removal.settle()
                logger.info("removed %d retained messages", self.removal.removed)

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
        if self.removal is not None and self.removal.error is not None:
            raise self.removal.error
        if self._count is not None and self._written < self._count and not self._ended_itself:
            logger.warning("timeout: %d of %d messages within %g s", self._written, self._count, timeout)
            return ExitCode.TIMED_OUT
        return ExitCode.OK
