"""``messaging pub``: publish one message, or many."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Annotated, Final

import typer

import messaging
from messaging.cli import options, payload
from messaging.cli.connecting import choose_target, connect, warn_of_memory
from messaging.cli.output import ExitCode, report
from messaging.errors import ArgumentError
from messaging.model import check_name

logger = logging.getLogger(__name__)

#: promises that are open at the same time; the outbox, which is bounded too, holds the messages
_IN_FLIGHT: Final = 2_000
#: a high rate is kept in small bursts, since no sleep is as short as the time between two messages, seconds
_SHORTEST_SLEEP: Final = 0.001

_Topic = Annotated[str, typer.Option("--topic", "-t", metavar="CHANNEL", show_default=False, help="Where to publish.")]
_Lines = Annotated[bool, typer.Option("--lines", "-l", help="Send each line of stdin, without its newline.")]
_Retain = Annotated[bool, typer.Option("--retain", "-r", help="Have the broker keep it for later subscribers.")]
_Repeat = Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="Publish the same message N times.")]
_Rate = Annotated[float | None, typer.Option("--rate", metavar="N", help="Publish at most N messages per second.")]
_Progress = Annotated[
    bool | None,
    typer.Option("--progress/--no-progress", help="Progress bar on stderr; by default for many, on a terminal."),
]


def pub(
    topic: _Topic,
    url: options.Url = None,
    text: payload.Text = None,
    file: payload.File = None,
    stdin: payload.Stdin = False,
    lines: _Lines = False,
    null: payload.Null = False,
    qos: options.Qos = None,
    retain: _Retain = False,
    content_type: payload.ContentType = None,
    encoding: payload.Encoding = None,
    routing_key: options.RoutingKey = None,
    correlation_id: payload.CorrelationId = None,
    reply_to: payload.ReplyTo = None,
    header: payload.Headers = None,
    extension: options.Extensions = None,
    repeat: _Repeat = 1,
    rate: _Rate = None,
    progress: _Progress = None,
    url_option: options.UrlOption = None,
    client_id: options.ClientId = None,
    option: options.Settings = None,
    quiet: options.Quiet = False,  # noqa: ARG001  # its callback did it
    debug: options.Debug = False,  # noqa: ARG001
) -> int:
    """Publish a message: text, a file, stdin, each line of stdin, or an empty one.

    Ends when every message is settled: handed to the socket with QoS 0, taken by the broker otherwise.

    Example: messaging pub mqtt://localhost -t a/b -m hello -q 1 -r
    """
    check_name(topic)
    if [text is not None, file is not None, stdin, lines, null].count(True) != 1:
        raise ArgumentError("say what to publish with exactly one of -m, -f, -s, -l and -n")
    if lines and repeat > 1:
        raise ArgumentError("--repeat does not go with -l: stdin can be read once only")
    if rate is not None and not 0 < rate < float("inf"):
        raise ArgumentError("--rate must be a number of messages above 0")
    given = options.extensions(extension, qos=qos, retain=retain or None, headers=options.headers(header))
    broker = choose_target(url, url_option)
    with contextlib.ExitStack() as stack:
        source = payload.open_source(stack, file, from_stdin=stdin or lines)
        m = stack.enter_context(connect(broker, "pub", client_id, option))
        builder = m.context_builder().channel(topic, routing_key).extensions(given)
        context = payload.context(builder, content_type, encoding, correlation_id, reply_to)
        limit = m.runtime.get_runtime_dto().max_message_size

        def ready(data: bytes) -> bytes:
            return payload.encoded(data, content_type, encoding)

        if lines:
            payloads: Iterable[bytes] = map(ready, payload.read_lines(source, limit))
        else:
            payloads = [ready(payload.read_all(text, source, limit))] * repeat
        run = _Run(m, context)
        many = lines or repeat > 1
        with _shown(run, None if lines else repeat, progress) if many else contextlib.nullcontext():
            interrupted = run.publish(payloads, rate)
        warn_of_memory(m)
        # closing sends what was accepted, and settles every promise
        stack.close()
        run.collect(0)
    return run.summary(many=many, interrupted=interrupted)


def _shown(run: _Run, total: int | None, wanted: bool | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a progress bar is shown: if ``wanted``, or on a terminal."""
    if wanted is False or not (wanted or (sys.stderr is not None and sys.stderr.isatty())):
        return contextlib.nullcontext()
    from messaging.cli.progress import progress  # takes longer to import than a message to publish

    return progress(lambda: run.published + run.failed, total)


class _Run:
    """The messages of one command: publishes them, and looks at every promise."""

    def __init__(self, m: messaging.Messaging, context: messaging.MessageContext) -> None:
        self._publisher = m.publisher
        self._context = context
        self._promises: deque[messaging.Promise[None]] = deque()
        self._first_error: messaging.MessagingError | None = None
        self._started = time.monotonic()
        self.published = 0
        self.failed = 0

    def publish(self, payloads: Iterable[bytes], rate: float | None) -> bool:
        """Publish, at most ``rate`` messages a second, and wait for the outcomes; whether it was interrupted.

        A message that is refused counts as failed, and so does what ends the input before its end.

        Raises:
            MessagingError: it was the first one, so nothing was sent.
        """
        attempted = 0
        try:
            for data in payloads:
                if not attempted:
                    self._started = time.monotonic()
                if rate is not None:
                    ahead = self._started + attempted / rate - time.monotonic()
                    if ahead > _SHORTEST_SLEEP:
                        time.sleep(ahead)
                try:
                    self._promises.append(self._publisher.publish(messaging.Message(data, self._context)))
                except messaging.MessagingError as error:
                    if not attempted:
                        raise
                    self._failure(error)
                attempted += 1
                self.collect(_IN_FLIGHT)
            self.collect(0)
        except messaging.MessagingError as error:
            if not attempted:
                raise
            self._failure(error)
        except KeyboardInterrupt:
            return True
        return False

    def collect(self, allowed: int) -> None:
        """Look at outcomes until no more than ``allowed`` are open."""
        promises = self._promises
        while promises and (len(promises) > allowed or promises[0].done()):
            error = promises[0].exception()
            promises.popleft()  # not before: the wait can be interrupted
            if error is None:
                self.published += 1
            else:
                self._failure(error)

    def _failure(self, error: messaging.MessagingError) -> None:
        self.failed += 1
        if self._first_error is None:
            self._first_error = error

    def summary(self, *, many: bool, interrupted: bool) -> ExitCode:
        """Say on stderr how it went, and return what to exit with."""
        if many:
            seconds = max(time.monotonic() - self._started, 1e-6)
            logger.info("published %d messages in %.2f s (%.0f/s)", self.published, seconds, self.published / seconds)
        if self.failed:
            total = self.published + self.failed
            report(f"{self.failed} of {total} messages failed: {self._first_error}" if many else self._first_error)
        if interrupted:
            return ExitCode.INTERRUPTED
        return ExitCode.FAILED if self.failed else ExitCode.OK
