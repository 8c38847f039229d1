"""``messaging sub``: write every message that arrives to stdout."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Final, Literal

from typer import Option

import messaging
from messaging.cli import options
from messaging.cli.connecting import BrokerOptions, identity, warn_of_memory
from messaging.cli.formats import UnformattableError, is_retained, message_form
from messaging.cli.options import flag, option
from messaging.cli.output import ExitCode, ReaderGoneError, wait_while_read, write
from messaging.cli.payload import Outcomes
from messaging.errors import ArgumentError, MessagingError, UnsupportedFeatureError

if TYPE_CHECKING:
    from messaging import Message
    from messaging.instance import Messaging

logger = logging.getLogger(__name__)

#: removals of retained messages that may be unconfirmed
_UNCONFIRMED: Final = 500
#: channels whose removal is recognised when the broker sends it back
_REMEMBERED: Final = 10_000


#: when a message is acknowledged
Ack = Literal["written", "arrival", "never"]


@options.command
def sub(
    topics: options.Topics,
    broker: BrokerOptions,
    qos: options.Qos = None,
    count: Annotated[int | None, options.count("End after N messages.")] = None,
    timeout: Annotated[float | None, options.timeout("End that long after subscribing (see exit codes).")] = None,
    json: Annotated[bool, flag("--json", "Write each message as a JSON object on one line.")] = False,
    verbose: options.Verbose = False,
    format_: options.Format = None,
    no_newline: options.NoNewline = False,
    filter_out: Annotated[
        list[str] | None, option("--filter-out -T", "PATTERN", "Skip these channels. Repeatable.")
    ] = None,
    no_retained: Annotated[bool, flag("--no-retained -R", "Skip messages that the broker had retained.")] = False,
    retained_only: Annotated[
        bool, flag("--retained-only", "Write retained messages only, and end at the first other one.")
    ] = False,
    remove_retained: Annotated[
        bool, flag("--remove-retained", "Remove retained messages from the broker, except those of --filter-out.")
    ] = False,
    queue: options.Queue = None,
    routing_key: options.RoutingKey = None,
    ack: Annotated[
        Ack,
        Option(
            "--ack",
            help="When to acknowledge: once written to stdout, on arrival, or never (messages return to the broker).",
        ),
    ] = "written",
    extension: options.Extensions = None,
) -> int:
    """Write every message that arrives to stdout: its payload unchanged and a newline, JSON, or in a format.

    Reports on stderr when it has subscribed. Runs until interrupted, or until --count or --timeout is reached. A
    message that was not written is not acknowledged: the broker redelivers it where it can.

    Example: messaging sub amqp://localhost -t 'a/#' --count 3 --timeout 10 --json
    """
    from messaging.model import check_pattern  # not at import: help and completion must be fast

    for topic in topics:
        check_pattern(topic)
    options.check_timeout(timeout)
    form, wanted = message_form(format_, json=json, verbose=verbose, no_newline=no_newline)
    select = _Filter(filter_out or (), live_only=no_retained, retained_only=retained_only)
    given = wanted | options.extensions(
        extension, qos=qos, queue=queue, autoAcknowledge=True if ack == "arrival" else None
    )
    writer = _MessageWriter(form, select, count, ack)
    with broker.connect("sub") as m:
        for option_name, is_given in (("--retained-only", retained_only), ("--remove-retained", remove_retained)):
            if is_given:
                _require_retain(m, option_name, queue=queue is not None)
        if remove_retained:
            writer.removal, writer.is_single = _Removal(m), len(topics) == 1
        builder = m.context_builder()
        if messaging.Features.ACKNOWLEDGE in m.features:  # manually
            builder = m.acknowledge_context_builder().message_context_builder()
        builder.extensions(given)
        streams = []
        for topic in topics:
            stream = m.subscription.subscribe(builder.channel(topic, routing_key).build_context())
            streams.append(stream)
            stream.subscribe(writer.on_next, writer.fail)  # returns when the broker has confirmed the subscription
        # the writer gets the error of a stream that could not subscribe
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


class _Filter:
    """Decides on each message.

    Args:
        out: patterns of channels that are not written.
        live_only: skip messages that the broker had retained.
        retained_only: write only messages that the broker had retained; end at the first other one.

    Raises:
        ArgumentError: a pattern is malformed, or no message could pass.
    """

    def __init__(self, out: Iterable[str], *, live_only: bool, retained_only: bool) -> None:
        if live_only and retained_only:
            raise ArgumentError("--no-retained and --retained-only: give one of them")
        from messaging.model import check_pattern, matcher  # not at import: help and completion must be fast

        self._out: list[Callable[[str], bool]] = [matcher(check_pattern(pattern)) for pattern in out]
        self._live_only = live_only
        self._retained_only = retained_only

    def ends(self, message: Message) -> bool:
        """Return whether neither ``message`` nor any later one is written."""
        return self._retained_only and not is_retained(message)

    def skips(self, message: Message) -> bool:
        """Return whether ``message`` is not written."""
        return (self._live_only and is_retained(message)) or self.excludes(message)

    def excludes(self, message: Message) -> bool:
        """Return whether the channel of ``message`` is filtered out."""
        channel = message.context.channel
        return channel is not None and any(matches(channel) for matches in self._out)


class _Removal:
    """Removes retained messages from the broker. For one thread at a time.

    Attributes:
        outcomes: counts the confirmed and the failed removals.
    """

    def __init__(self, m: Messaging) -> None:
        self._m = m
        #: channels of the latest removals
        self._channels: dict[str | None, None] = {}
        self.outcomes = Outcomes()

    def remove(self, message: Message) -> None:
        """Remove the retained message of the channel of ``message``."""
        context = message.context
        self._channels[context.channel] = None
        if len(self._channels) > _REMEMBERED:
            del self._channels[next(iter(self._channels))]
        builder = self._m.context_builder().channel(str(context.channel), context.channel_extension)
        builder.extensions(
            {messaging.Features.EXTENSION_RETAIN: True, messaging.Features.EXTENSION_GUARANTEED_DELIVERY: True}
        )
        try:
            promise = self._m.publisher.publish(builder.content(b"").build_message())
        except MessagingError as error:
            self.outcomes.fail(error)
        else:
            self.outcomes.add(promise, _UNCONFIRMED)

    def is_echo(self, message: Message) -> bool:
        """Return whether ``message`` is a removal of this instance that the broker sends to its subscribers."""
        return not message.payload and message.context.channel in self._channels and not is_retained(message)


def _require_retain(m: Messaging, option: str, *, queue: bool) -> None:
    """Refuse an option for retained messages where none can arrive.

    Raises:
        UnsupportedFeatureError: the instance has no retained messages.
        ArgumentError: subscribers that share a queue get none.
    """
    if messaging.Features.EXTENSION_RETAIN not in m.features:
        raise UnsupportedFeatureError(messaging.Features.EXTENSION_RETAIN, m.name, f"{option} needs it")
    if queue:
        raise ArgumentError(f"{option} does not go with --queue: retained messages go to no queue")


class _MessageWriter:
    """Writes the messages of all streams as they arrive. Thread safe.

    Acknowledging is manual: a message that was not written must neither be acknowledged nor rejected, since a
    rejected one may be dead-lettered.

    Attributes:
        removal: removes retained messages, or ``None``.
        is_single: whether there is a single stream.
        over: set when no more messages are written.
    """

    def __init__(self, form: Callable[[Message], bytes], select: _Filter, count: int | None, ack: Ack) -> None:
        self._form = form
        self._filter = select
        self.removal: _Removal | None = None
        self.is_single = True
        self._count = count
        self._acknowledge = ack == "written"
        self._lock = threading.Lock()  # one line at a time; guards the fields below
        self._written = 0
        #: whether a message ended the output, see _Filter.ends
        self._is_complete = False
        self._error: Exception | None = None
        self.over = threading.Event()

    def wait(self, timeout: float | None) -> None:
        """Wait until the output is over, for at most ``timeout`` seconds."""
        try:
            wait_while_read(self.over, timeout)
        except ReaderGoneError as error:
            self.fail(error)

    def on_next(self, message: Message) -> None:
        """Write a message, and acknowledge it."""
        context = message.context
        with self._lock:
            if self.over.is_set():
                return
            is_echo = self.removal is not None and self.removal.is_echo(message)
            # the broker sends the retained messages of a pattern before any echo
            if self._filter.ends(message) and (self.is_single or not is_echo):
                self._is_complete = True
                self.over.set()
                return
            try:
                if not is_echo and not self._filter.skips(message):
                    write(self._form(message))
                    self._written += 1
            except UnformattableError as error:
                logger.warning("%s", error)
            except Exception as error:  # noqa: BLE001  # the main thread raises it
                self.fail(error)
                return
            if self.removal is not None and is_retained(message) and not self._filter.excludes(message):
                self.removal.remove(message)
            if self._acknowledge and isinstance(context, messaging.AcknowledgeMessageContext):
                context.acknowledge_handler.acknowledge()
            if self._written == self._count:
                self.over.set()

    def finish(self) -> None:
        """Wait until every removal of a retained message is settled."""
        with self._lock:
            if self.removal is not None:
                self.removal.outcomes.settle()
                logger.info("removed %d retained messages", self.removal.outcomes.succeeded)

    def fail(self, error: Exception) -> None:
        """End with ``error``, unless the output is over."""
        if not self.over.is_set():
            self._error = error
            self.over.set()

    def result(self, timeout: float | None) -> ExitCode:
        """Return the exit code.

        Raises:
            Exception: a stream, writing or a removal failed.
        """
        if self._error is not None:
            raise self._error
        if self.removal is not None and self.removal.outcomes.error is not None:
            raise self.removal.outcomes.error
        if self._count is not None and self._written < self._count and not self._is_complete:
            logger.warning("timeout: %d of %d messages within %g s", self._written, self._count, timeout)
            return ExitCode.TIMED_OUT
        return ExitCode.OK
