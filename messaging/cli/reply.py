"""``messaging reply``: answer requests with the output of a command.

The shell evaluates nothing of a request: the payload is the command's stdin, and the context is in its environment,
so no request can become part of a command line.
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
from typing import Annotated, Final

from messaging.cli import options
from messaging.cli.connecting import BrokerOptions, identity, warn_of_memory
from messaging.cli.options import flag, option
from messaging.cli.output import ExitCode
from messaging.errors import ArgumentError
from messaging.execution import Flag, workers
from messaging.model import MAX_PREFETCH, Features, Message, MessageContext, as_text, check_pattern, check_printable
from messaging.receiving import HandlerExhaustedError

logger = logging.getLogger(__name__)

#: bytes read from a command at a time
_CHUNK: Final = 65_536
#: of the environment variables that describe a request
_PREFIX: Final = b"REQUEST_"
#: names of user headers that can be part of the name of a variable
_HEADER: Final = re.compile(r"[A-Za-z0-9_-]+")


@options.command
def reply(
    topics: options.Topics,
    command: Annotated[
        str,
        option(
            "--exec", "COMMAND", "Run by the shell, once per request: its stdin is the payload, its stdout the reply."
        ),
    ],
    broker: BrokerOptions,
    lines: Annotated[bool, flag("--lines -l", "Send each line of its stdout as one of many replies.")] = False,
    queue: options.Queue = None,
    concurrency: Annotated[
        int,
        option(
            "--concurrency",
            "N",
            "Run up to N commands at the same time; default: 1, so that commands need not expect each other.",
            min=1,
            max=MAX_PREFETCH,
            show_default=False,
        ),
    ] = 1,
    timeout: Annotated[float | None, options.timeout("Kill a command after that long; default: never.")] = None,
    count: Annotated[int | None, options.count("End after N requests.")] = None,
    content_type: Annotated[str | None, options.content_type("Content type of the replies; default: none.")] = None,
    qos: options.Qos = None,
    extension: options.Extensions = None,
) -> int:
    """Answer requests with the stdout of a command, whole and unchanged.

    The context of a request is in the environment of the command, never in its command line:
    REQUEST_CHANNEL, REQUEST_CORRELATION_ID, REQUEST_CONTENT_TYPE, REQUEST_CONTENT_ENCODING,
    REQUEST_REPLY_TO, and user headers as REQUEST_HEADER_NAME.

    If the command fails, by its exit status, a signal or the timeout, the request fails, and the
    requester gets the reason.

    Reports on stderr when it is ready. Runs until interrupted, or until --count is reached;
    commands that are running then are killed.

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
    given = options.extensions(extension, qos=qos, queue=queue)
    if str(given.get(Features.EXTENSION_QOS)) != "0":
        # a request that waits here while a command runs could be served by another responder
        given.setdefault(Features.EXTENSION_PREFETCH, concurrency)
    with broker.connect("reply") as m:
        for topic in topics:
            m.subscription.check(topic, given)
        builder = m.context_builder()
        if content_type is not None:
            builder.content_type(content_type)
        limit = m.runtime.get_runtime_dto().max_message_size
        with contextlib.closing(_Responder(command, builder.build_context(), timeout, limit, count)) as responder:
            handler = responder.lines if lines else responder.whole
            registration = m.reply(topics, handler, many=lines, concurrency=concurrency, **given)
            dto = m.runtime.get_runtime_dto()
            if all(each.request_channel.connected for each in dto.reply_to_subscriptions):
                logger.info("answering requests on %s at %s", ", ".join(topics), identity(m))
                warn_of_memory(m)
            responder.enough.wait()
            registration.unregister()
            m.whiteboard.ready().exception()  # resolves after requests that were not begun are requeued
    return ExitCode.OK


class CommandFailedError(Exception):
    """A command failed. The requester gets this name and the text."""


class _Responder:
    """Runs a command for each request.

    The handlers run on one event loop, everything else on the main thread.

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
        #: requests that are still accepted; used on the loop
        self._left = math.inf if count is None else count
        self._lock = threading.Lock()  # guards the following
        self._running: set[_Command] = set()
        self._is_closed = False
        self.enough = Flag()

    def close(self) -> None:
        """Kill the running commands, and start no more."""
        with self._lock:
            self._is_closed = True
            for command in self._running:
                command.kill("the responder ends")

    # --- handlers

    async def whole(self, request: Message) -> Message:
        """Answer with the whole output of the command."""
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
        """Answer with each line of the output of the command."""
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
        """Run a command; it is killed at the end of the block, unless it has ended.

        Raises:
            HandlerExhaustedError: ``--count`` requests were served.
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
                command.kill("the requester cancelled the request")
                await command.end()
            with self._lock:
                self._running.discard(command)
                is_last = not self._running and not self._left
            if is_last:
                # runs after the reply is published: the handler returns without yielding to the loop
                asyncio.get_running_loop().call_soon(self.enough.set)

    def _start(self, request: Message) -> _Command:
        with self._lock:
            if self._is_closed:
                raise HandlerExhaustedError
            command = _Command(self._command, _environment(request))
            self._running.add(command)
        return command


class _Command:
    """One run of a command in its own process group. Its methods run on an event loop, except :meth:`kill`.

    The process is one of ``subprocess``, not of asyncio: asyncio's stdin is a socket, which ``/dev/stdin`` cannot
    open, and asyncio reaps a process, and so frees its id, by itself.

    Args:
        line: the command line for the shell.
        environment: the whole environment of the command.

    Raises:
        CommandFailedError: the command cannot be started.
    """

    def __init__(self, line: str, environment: Mapping[bytes, bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader()
        self._incoming: asyncio.ReadTransport | None = None
        self._outgoing: asyncio.WriteTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._exited = asyncio.Event()
        self._is_awaited = False
        self._lock = threading.Lock()  # guards _is_reaped: after that, its process id may belong to another process
        self._is_reaped = False
        #: reason for killing it, or ``None``
        self._killed: str | None = None
        try:
            self._process = subprocess.Popen(  # noqa: S602  # the line is the user's own; no part of a request is in it
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
        """Write ``payload`` to its stdin, and kill it after ``timeout`` seconds."""
        loop = self._loop
        if timeout is not None:
            self._timer = loop.call_later(timeout, self.kill, f"killed after {timeout:g} s")
        self._incoming, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), self._process.stdout
        )
        self._outgoing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._process.stdin)
        self._outgoing.write(payload)
        self._outgoing.close()  # after the command has read the payload, or has closed its stdin

    async def read(self) -> bytes:
        """Return the next part of its stdout; nothing at the end."""
        return b"" if self._killed is not None else await self._reader.read(_CHUNK)

    async def succeed(self) -> None:
        """Wait until the command has succeeded.

        Raises:
            CommandFailedError: it was killed, or its exit status is not 0.
        """
        status = await self.end()
        if self._killed is not None:
            raise CommandFailedError(self._killed)
        if status < 0:
            raise CommandFailedError(f"ended by {_signal_name(-status)}")
        if status:
            raise CommandFailedError(f"exit status {status}")

    def kill(self, why: str) -> None:
        """Kill the process group of the command, unless the command has ended. Thread safe."""
        with self._lock:
            if self._is_reaped or self._killed is not None:
                return
            self._killed = why
            with contextlib.suppress(OSError):  # the process runs as another user
                os.killpg(self._process.pid, signal.SIGKILL)
        self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        """Close the pipes: a process that has left the group may still hold them."""
        if self._incoming is not None:
            self._incoming.close()
        if self._outgoing is not None and self._outgoing.get_write_buffer_size():
            self._outgoing.abort()

    async def end(self) -> int:
        """Wait until the command has ended, reap it, and return its exit status."""
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
        with contextlib.suppress(ChildProcessError):  # the system reaps it where SIGCHLD is ignored
            # WNOWAIT keeps the process id: until the command is reaped, its process group can be killed
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._loop.call_soon_threadsafe(self._exited.set)


def _environment(request: Message) -> dict[bytes, bytes]:
    """Return the environment of this process, with the variables of ``request`` and no other ``REQUEST_*``."""
    context = request.context
    headers = context.extensions.get(Features.EXTENSION_HEADERS, {})
    known = {
        "CHANNEL": context.channel,
        "CONTENT_TYPE": context.content_type,
        "CONTENT_ENCODING": context.content_encoding,
        "CORRELATION_ID": context.correlation_id,
        "REPLY_TO": context.reply_to_channel,
    }
    # two headers that map to the same variable are both left out
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
