"""``messaging reply``: answer requests with what a command writes.

The shell sees nothing of a request: its payload is the command's stdin, and what else is known of it is in the
environment, so no request can become part of a command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Final, Self

import typer

from messaging import Features, Message, MessageContext
from messaging.cli import options
from messaging.cli.connecting import choose_target, connect, identity, warn_of_memory
from messaging.cli.output import ExitCode
from messaging.errors import ArgumentError
from messaging.execution import Flag, workers
from messaging.model import MAX_PREFETCH, as_text, check_pattern, check_printable
from messaging.receiving import HandlerExhaustedError

logger = logging.getLogger(__name__)

#: bytes read from a command at a time
_CHUNK: Final = 65_536
#: of the variables that tell a command about its request
_PREFIX: Final = b"REQUEST_"
#: names of user headers that can be part of the name of a variable
_HEADER: Final = re.compile(r"[A-Za-z0-9_-]+")

_UNWANTED: Final = "nobody wants the rest"
_ENDS: Final = "the responder ends"

_Exec = Annotated[
    str,
    typer.Option(
        "--exec",
        metavar="COMMAND",
        show_default=False,
        help="Run by the shell, once for each request: the payload is its stdin, its stdout the reply.",
    ),
]
_Lines = Annotated[bool, typer.Option("--lines", "-l", help="Each line of its stdout is one of many replies.")]
_Queue = Annotated[
    str | None,
    typer.Option("--queue", metavar="NAME", help="Share the requests with other responders of that queue."),
]
_Concurrency = Annotated[
    int,
    typer.Option(
        "--concurrency",
        metavar="N",
        min=1,
        max=MAX_PREFETCH,
        show_default=False,
        help="Run up to N commands at the same time; by default one, so that none has to expect another of its kind.",
    ),
]
_Timeout = Annotated[
    float | None,
    typer.Option("--timeout", "-W", metavar="SECONDS", help="Kill a command after that long; by default never."),
]
_Count = Annotated[int | None, typer.Option("--count", "-C", metavar="N", min=1, help="End after N requests.")]
_Type = Annotated[str | None, typer.Option("--content-type", metavar="TYPE", help="Of the replies; by default none.")]


def reply(
    topics: options.Topics,
    command: _Exec,
    url: options.Url = None,
    lines: _Lines = False,
    queue: _Queue = None,
    concurrency: _Concurrency = 1,
    timeout: _Timeout = None,
    count: _Count = None,
    content_type: _Type = None,
    qos: options.Qos = None,
    extension: options.Extensions = None,
    url_option: options.UrlOption = None,
    client_id: options.ClientId = None,
    option: options.Settings = None,
    quiet: options.Quiet = False,  # noqa: ARG001  # its callback did it
    debug: options.Debug = False,  # noqa: ARG001
) -> int:
    """Answer requests with what a command writes to its stdout, whole and as it is.

    What is known of a request is in the environment of the command, never in its command line:
    REQUEST_CHANNEL, REQUEST_CORRELATION_ID, REQUEST_CONTENT_TYPE, REQUEST_CONTENT_ENCODING,
    REQUEST_REPLY_TO, and user headers as REQUEST_HEADER_NAME.

    If the command fails, by its exit status, a signal or the timeout, so does the request, and its
    requester is told why.

    Says on stderr when it is ready. Runs until interrupted, unless told otherwise; commands that
    run then are killed.

    Example: messaging reply mqtt://localhost -t text/upper --exec 'tr a-z A-Z'
    """
    for topic in topics:
        check_pattern(topic)
    if not command.strip():
        raise ArgumentError("--exec is empty: say which command answers")
    options.check_timeout(timeout, threading.TIMEOUT_MAX)
    if content_type is not None:
        check_printable("--content-type", content_type)
    if count is not None:
        concurrency = min(concurrency, count)
    given = options.extensions(extension, **{Features.EXTENSION_QOS: qos, Features.EXTENSION_QUEUE: queue})
    if str(given.get(Features.EXTENSION_QOS)) != "0":
        # a request that waits here while a command runs could be with another responder
        given.setdefault(Features.EXTENSION_PREFETCH, concurrency)
    with connect(choose_target(url, url_option), "reply", client_id, option) as m:
        for topic in topics:
            m.subscription.check(topic, given)
        builder = m.context_builder()
        if content_type is not None:
            builder.content_type(content_type)
        limit = m.runtime.get_runtime_dto().max_message_size
        with _Responder(command, builder.build_context(), timeout, limit, count) as responder:
            handler = responder.lines if lines else responder.whole
            registration = m.reply(topics, handler, many=lines, concurrency=concurrency, **given)
            dto = m.runtime.get_runtime_dto()
            if all(each.request_channel.connected for each in dto.reply_to_subscriptions):
                logger.info("answering requests on %s at %s", ", ".join(topics), identity(m))
                warn_of_memory(m)
            responder.enough.wait()
            registration.unregister()
            m.whiteboard.ready().exception()  # requests that were not begun have gone back by then
    return ExitCode.OK


class CommandFailedError(Exception):
    """What a requester is told of a command that failed: this name, and the text."""


class _Responder:
    """Runs a command for each request. A context manager that kills those that run.

    Its handlers run on one event loop, everything else on the main thread.

    Attributes:
        enough: set when the last request is answered.
    """

    def __init__(
        self, command: str, context: MessageContext, timeout: float | None, limit: int | None, count: int | None
    ) -> None:
        self._command = command
        self._context = context
        self._timeout = timeout
        self._limit = math.inf if limit is None else limit
        #: requests yet to come; on the loop
        self._left = math.inf if count is None else count
        self._lock = threading.Lock()  # guards what follows
        self._running: set[_Command] = set()
        self._is_over = False
        self.enough = Flag()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over = True
            for command in self._running:
                command.kill(_ENDS)

    # --- handlers

    async def whole(self, request: Message) -> Message:
        """Answer with all that the command writes."""
        output = bytearray()
        async with self._run(request) as command:
            while chunk := await command.read():
                if len(output) + len(chunk) > self._limit:
                    command.kill(f"killed: output of more than {self._limit} bytes")
                else:
                    output += chunk
            await command.succeed()
        return Message(bytes(output), self._context)

    async def lines(self, request: Message) -> AsyncIterator[Message]:
        """Answer with each line that the command writes."""
        held = bytearray()
        async with self._run(request) as command:
            while chunk := await command.read():
                *complete, rest = chunk.split(b"\n")
                for line in complete:
                    held += line
                    if len(held) > self._limit:
                        break
                    yield Message(bytes(held), self._context)
                    held.clear()
                held += rest
                if len(held) > self._limit:
                    command.kill(f"killed: a line of more than {self._limit} bytes")
            await command.succeed()
            if held:
                yield Message(bytes(held), self._context)

    # --- commands

    @contextlib.asynccontextmanager
    async def _run(self, request: Message) -> AsyncIterator[_Command]:
        """Start a command; it ends with the block.

        Raises:
            HandlerExhaustedError: this request is one too many.
            CommandFailedError: the command cannot be started.
        """
        if not self._left:
            raise HandlerExhaustedError
        self._left -= 1
        command = None
        try:
            command = self._start(request)
            await command.open(request.payload, self._timeout)
            yield command
        finally:
            if command is not None:
                command.kill(_UNWANTED)
                await command.end()
            with self._lock:
                self._running.discard(command)
                is_last = not self._running and not self._left
            if is_last:
                # by then the reply is on its way: the handler ends without giving up the loop
                asyncio.get_running_loop().call_soon(self.enough.set)

    def _start(self, request: Message) -> _Command:
        with self._lock:
            if self._is_over:
                raise HandlerExhaustedError
            command = _Command(self._command, _environment(request))
            self._running.add(command)
        return command


class _Command:
    """One run of a command, with a process group of its own. On an event loop, but for :meth:`kill`.

    It is started as a process of ``subprocess``: asyncio's own would have a socket for stdin, which ``/dev/stdin`` does
    not open, and give its number free by itself.

    Args:
        line: for the shell.
        environment: all of it.

    Raises:
        CommandFailedError: it cannot be started.
    """

    def __init__(self, line: str, environment: Mapping[bytes, bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader()
        self._incoming: asyncio.ReadTransport | None = None
        self._outgoing: asyncio.WriteTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._exited = asyncio.Event()
        self._is_awaited = False
        self._lock = threading.Lock()  # guards _is_reaped: from then on its number may be that of another process
        self._is_reaped = False
        #: why it was killed, if it was
        self._killed: str | None = None
        try:
            self._process = subprocess.Popen(  # noqa: S602  # the user's own line; nothing of a request is in it
                line,
                shell=True,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise CommandFailedError(f"cannot be started: {error.strerror}") from error

    async def open(self, payload: bytes, timeout: float | None) -> None:
        """Give it ``payload``, and ``timeout`` seconds."""
        loop = self._loop
        if timeout is not None:
            self._timer = loop.call_later(timeout, self.kill, f"killed after {timeout:g} s")
        self._incoming, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), self._process.stdout
        )
        self._outgoing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._process.stdin)
        self._outgoing.write(payload)
        self._outgoing.close()  # when it has read all of that, or does not want it

    async def read(self) -> bytes:
        """What it has written to stdout; nothing at its end."""
        return b"" if self._killed is not None else await self._reader.read(_CHUNK)

    async def succeed(self) -> None:
        """Wait for its end.

        Raises:
            CommandFailedError: it was killed, or says that it failed.
        """
        status = await self.end()
        if self._killed is not None:
            raise CommandFailedError(self._killed)
        if status < 0:
            raise CommandFailedError(f"ended by {_signal_name(-status)}")
        if status:
            raise CommandFailedError(f"exit status {status}")

    def kill(self, why: str) -> None:
        """Kill it, and what it has started, unless it has ended. From any thread."""
        with self._lock:
            if self._is_reaped or self._killed is not None:
                return
            self._killed = why
            with contextlib.suppress(OSError):  # what runs as somebody else is not ours to kill
                os.killpg(self._process.pid, signal.SIGKILL)
        self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        """Read no more: what has left its process group may still hold the pipe."""
        if self._incoming is not None:
            self._incoming.close()
        if self._outgoing is not None and self._outgoing.get_write_buffer_size():
            self._outgoing.abort()

    async def end(self) -> int:
        """Wait until it has ended, and let go of it; its exit status."""
        if not self._is_awaited:
            self._is_awaited = True
            workers().submit(self._wait)
        await self._exited.wait()
        with self._lock:
            self._is_reaped = True
        if self._timer is not None:
            self._timer.cancel()
        self._close()
        return self._process.wait()

    def _wait(self) -> None:
        with contextlib.suppress(ChildProcessError):  # the system reaps, if somebody has it ignore SIGCHLD
            # it keeps its number: until it is reaped it can be killed, and what it has left behind
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._loop.call_soon_threadsafe(self._exited.set)


def _environment(request: Message) -> dict[bytes, bytes]:
    """Our own, and what is known of the request: nothing of it that comes from elsewhere."""
    context = request.context
    headers = context.extensions.get(Features.EXTENSION_HEADERS, {})
    known = {
        "CHANNEL": context.channel,
        "CONTENT_TYPE": context.content_type,
        "CONTENT_ENCODING": context.content_encoding,
        "CORRELATION_ID": context.correlation_id,
        "REPLY_TO": context.reply_to_channel,
    }
    # of headers whose names cannot be told apart as variables, none can be relied on
    named = [(f"HEADER_{name.upper().replace('-', '_')}", name) for name in headers if _HEADER.fullmatch(name)]
    times = Counter(variable for variable, _ in named)
    known |= {variable: as_text(headers[name]) for variable, name in named if times[variable] == 1}
    found = {name: value for name, value in os.environb.items() if not name.startswith(_PREFIX)}
    for variable, value in known.items():
        if value is not None and "\0" not in value:
            found[_PREFIX + variable.encode()] = value.encode(errors="replace")
    return found


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"
