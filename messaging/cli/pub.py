"""``messaging pub``: publish one message, or many."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final

import messaging
from messaging.cli import options
from messaging.cli.connecting import BrokerOptions, warn_of_memory
from messaging.cli.options import flag, option
from messaging.cli.output import ExitCode, report
from messaging.cli.payload import MessageOptions, Outcomes, read_lines
from messaging.errors import ArgumentError, MessagingError

if TYPE_CHECKING:
    from messaging.instance import Messaging
    from messaging.model import MessageContext

logger = logging.getLogger(__name__)

#: promises that may be pending; the outbox, which is bounded too, holds the messages
_IN_FLIGHT: Final = 2_000
#: a high rate is kept in small bursts, since the interval between two messages is shorter than any sleep, seconds
_SHORTEST_SLEEP: Final = 0.001


@options.command
def pub(
    topic: Annotated[str, option("--topic -t", "CHANNEL", "Channel.")],
    outgoing: MessageOptions,
    broker: BrokerOptions,
    lines: Annotated[bool, flag("--lines -l", "Send each line of stdin, without its newline.")] = False,
    retain: Annotated[bool, flag("--retain -r", "Let the broker keep it for later subscribers.")] = False,
    repeat: Annotated[int, option("--repeat", "N", "Publish the same message N times.", min=1)] = 1,
    rate: Annotated[float | None, option("--rate", "N", "Publish at most N messages per second.")] = None,
    progress: Annotated[
        bool | None,
        flag(
            "--progress/--no-progress",
            "Progress bar on stderr; default: for --lines and --repeat, if stderr is a terminal.",
        ),
    ] = None,
) -> int:
    """Publish a message: text, a file, stdin, each line of stdin, or an empty one.

    Ends when every message is settled: handed to the socket with QoS 0, confirmed by the broker otherwise.

    Example: messaging pub mqtt://localhost -t a/b -m hello -q 1 -r
    """
    from messaging.model import check_name  # not at import: help and completion must be fast

    check_name(topic)
    if outgoing.sources + lines != 1:
        raise ArgumentError("say what to publish with exactly one of -m, -f, -s, -l and -n")
    if lines and repeat > 1:
        raise ArgumentError("--repeat does not go with -l: stdin can be read once only")
    options.check_rate(rate)
    extensions = outgoing.extensions(retain=retain or None)
    _ = broker.target  # a missing URL is an error before a file is opened
    with contextlib.ExitStack() as stack:
        source = outgoing.open_source(stack, from_stdin=lines)
        m = stack.enter_context(broker.connect("pub"))
        context = outgoing.context(topic, extensions)
        limit = m.runtime.get_runtime_dto().max_message_size
        payloads: Iterable[bytes]
        if lines:
            payloads = map(outgoing.encoded, read_lines(source, limit))
        else:
            payloads = [outgoing.read(source, limit)] * repeat
        outcomes = Outcomes()
        many = lines or repeat > 1
        with _progress_bar(outcomes, None if lines else repeat, progress) if many else contextlib.nullcontext():
            interrupted, started = _publish(m, context, payloads, rate, outcomes)
        warn_of_memory(m)
        stack.close()  # sends the accepted messages, and settles every promise
        outcomes.settle()
    return _summary(outcomes, many=many, interrupted=interrupted, started=started)


def _progress_bar(
    outcomes: Outcomes, total: int | None, wanted: bool | None
) -> contextlib.AbstractContextManager[None]:
    """Return a context that shows a progress bar if it is ``wanted``, or if stderr is a terminal."""
    if wanted is False or not (wanted or (sys.stderr is not None and sys.stderr.isatty())):
        return contextlib.nullcontext()
    from messaging.cli.progress import progress  # importing it takes longer than publishing a message

    return progress(lambda: outcomes.succeeded + outcomes.failed, total)


def _publish(
    m: Messaging, context: MessageContext, payloads: Iterable[bytes], rate: float | None, outcomes: Outcomes
) -> tuple[bool, float]:
    """Publish at most ``rate`` messages per second and wait for the outcomes.

    A refused message counts as failed, and so does an error that ends the input early.

    Returns:
        Whether it was interrupted, and when the first message was published, by the monotonic clock.

    Raises:
        MessagingError: the first message failed, so nothing was sent.
    """
    send = m.publisher.publish
    attempted, started = 0, time.monotonic()
    try:
        for data in payloads:
            if not attempted:
                started = time.monotonic()
            if rate is not None:
                ahead = started + attempted / rate - time.monotonic()
                if ahead > _SHORTEST_SLEEP:
                    time.sleep(ahead)
            try:
                promise = send(messaging.Message(data, context))
            except MessagingError as error:
                if not attempted:
                    raise
                outcomes.fail(error)
            else:
                outcomes.add(promise, _IN_FLIGHT)
            attempted += 1
        outcomes.settle()
    except MessagingError as error:
        if not attempted:
            raise
        outcomes.fail(error)
    except KeyboardInterrupt:
        return True, started
    return False, started


def _summary(outcomes: Outcomes, *, many: bool, interrupted: bool, started: float) -> ExitCode:
    """Report the outcome on stderr and return the exit code."""
    published, failed = outcomes.succeeded, outcomes.failed
    if many:
        seconds = max(time.monotonic() - started, 1e-6)
        logger.info("published %d messages in %.2f s (%.0f/s)", published, seconds, published / seconds)
    if failed:
        report(f"{failed} of {published + failed} messages failed: {outcomes.error}" if many else outcomes.error)
    if interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED if failed else ExitCode.OK
