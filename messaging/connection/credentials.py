"""Sources of credentials that change: a callable or coroutine function, a command, or a file.

==========================  ==========================================================================================
callable                    runs on a worker thread
coroutine function          runs on the event loop that was running when ``connect`` was called, or on the loop of
                            handlers
command                     runs on a worker thread, without a shell, in a process group of its own, which is killed at
                            the deadline
file                        is read on a worker thread
==========================  ==========================================================================================

The deadline of an answer is the setting ``connect_timeout``. A provider is asked one question at a time: while a
callable hangs, the next question waits for the same call, so that at most one thread hangs with it.

No text of an error repeats what a provider returned, raised or printed, because any of it may hold a secret.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import os
import selectors
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Any, Final

from pydantic import SecretStr

from messaging.environment.signals import attempt
from messaging.errors import ArgumentError, CredentialsError
from messaging.execution import Engine, Flag, clock, handlers_loop, on_worker
from messaging.model.credentials import Credentials, Provider
from messaging.model.settings import Settings

#: bytes of the largest password that a file or a command may hold
_MAX_BYTES: Final = 65_536
#: longest wait for the end of a command that was killed, seconds
_KILLED: Final = 1.0
#: what a callable may return, for errors
_EXPECTED: Final = "return messaging.Credentials, a pair of user name and password, or a password"


class _SourceError(CredentialsError):
    """An error of this module, whose text holds no secret."""


class CredentialsSource:
    """Asks a provider for credentials. On the engine loop.

    Args:
        what: names the provider in errors, as in ``option 'credentials'``.
        start: asks; returns the future of the answer. It fails with ``CredentialsError``.
        timeout: deadline of an answer, seconds.
        is_cancellable: whether cancelling the future ends the question.
        signature: returns a value that changes with the credentials; ``None`` unless they can be watched. Blocks.

    Attributes:
        seen: the signature when the credentials were last read.
    """

    def __init__(
        self,
        what: str,
        start: Callable[[], asyncio.Future[Credentials]],
        timeout: float,
        *,
        is_cancellable: bool = False,
        signature: Callable[[], object] | None = None,
    ) -> None:
        self._what = what
        self._start = start
        self._timeout = timeout
        self._is_cancellable = is_cancellable
        self.signature = signature
        self.seen: object = None
        #: the question that is being answered
        self._call: asyncio.Future[Credentials] | None = None

    async def ask(self) -> Credentials:
        """Return new credentials.

        Raises:
            CredentialsError: the provider failed, returned something else, or did not answer in time.
        """
        call = self._call
        if call is None:
            call = self._call = self._start()
            call.add_done_callback(self._answered)
        try:
            done, _ = await clock.wait([call], timeout=self._timeout)
        except asyncio.CancelledError:
            self._abandon(call)
            raise
        if not done:
            self._abandon(call)
            raise CredentialsError(f"{self._what}: {_overdue(self._timeout)}")
        return self._result(call)

    def _result(self, call: asyncio.Future[Credentials]) -> Credentials:
        failure: str
        try:
            return call.result()
        except CredentialsError as error:
            failure = str(error)
        except asyncio.CancelledError:
            failure = "the question was cancelled"
        # outside of the handlers: the frames of the context may hold secrets
        raise CredentialsError(f"{self._what}: {failure}")

    def _abandon(self, call: asyncio.Future[Credentials]) -> None:
        if self._is_cancellable:
            call.cancel()

    def _answered(self, call: asyncio.Future[Credentials]) -> None:
        self._call = None
        if not call.cancelled():
            call.exception()  # marks it as retrieved: its question may have been given up


def as_credentials(value: object) -> Credentials:
    """Return what a provider returned as credentials.

    Raises:
        CredentialsError: it is something else, or a user name or password is malformed.
    """
    failure = f"the provider returned {type(value).__name__}: {_EXPECTED}"
    try:
        if isinstance(value, Credentials):
            return value
        if isinstance(value, str | SecretStr):
            return Credentials(None, value)
        if isinstance(value, tuple | list) and len(value) == 2:
            return Credentials(value[0], value[1])
    except ArgumentError as error:
        failure = f"the provider returned no valid credentials: {error}"
    raise _SourceError(failure)


def source_of(engine: Engine, settings: Settings) -> CredentialsSource | None:
    """Return the source that the settings name; ``None`` if the credentials do not change."""
    timeout = settings.connect_timeout
    if settings.credentials is not None:
        provider: Provider = settings.credentials
        return CredentialsSource(
            "option 'credentials'",
            lambda: _call(engine, provider, timeout),
            timeout,
            is_cancellable=provider.is_coroutine,
        )
    if settings.password_command is not None:
        command: tuple[str, ...] = settings.password_command
        return CredentialsSource(
            "option 'password_command'", lambda: _on_worker(engine, lambda: run(command, timeout)), timeout
        )
    if settings.password_file is not None:
        path: Path = settings.password_file

        def look() -> str:
            source.seen = signature(path)  # before it is read: a change meanwhile is a change
            return read(path)

        source = CredentialsSource(
            "option 'password_file'", lambda: _on_worker(engine, look), timeout, signature=lambda: signature(path)
        )
        return source
    return None


# --- callables and coroutine functions


def _call(engine: Engine, provider: Provider, timeout: float) -> asyncio.Future[Credentials]:
    if not provider.is_coroutine:
        return _on_worker(engine, lambda: _finished(provider.function(), provider, timeout))

    async def ask() -> Credentials:
        failure: CredentialsError
        try:
            return as_credentials(await provider.function())
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001  # it is the application's, and may hold a secret
            failure = _failure(error)
        raise failure

    return asyncio.wrap_future(_on_loop(ask, provider), loop=engine.loop)


def _finished(result: Any, provider: Provider, timeout: float) -> Any:
    """Return ``result``, or what it is awaited to if a plain callable returned an awaitable. On a worker thread.

    The awaitable is cancelled after ``timeout`` seconds.
    """
    if not inspect.isawaitable(result):
        return result

    async def ask() -> Any:
        return await result

    answer = _on_loop(ask, provider)
    ended = Flag()
    answer.add_done_callback(lambda _: ended.set())
    try:
        if not ended.wait(timeout):
            raise _SourceError(_overdue(timeout))
        return answer.result()
    finally:
        answer.cancel()  # unless it is done


def _on_loop(ask: Callable[[], Awaitable[Any]], provider: Provider) -> concurrent.futures.Future[Any]:
    loop = provider.loop or handlers_loop()
    coroutine: Any = ask()
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
    failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
    failed.set_exception(_SourceError("the event loop that was running at connect() is closed"))
    return failed


def _on_worker(engine: Engine, function: Callable[[], Any]) -> asyncio.Future[Credentials]:
    def work() -> Credentials:
        answer: list[Credentials] = []
        error = attempt(lambda: answer.append(as_credentials(function())))
        if error is None:
            return answer[0]
        failure = _failure(error)
        del error  # it is the application's, and may hold a secret
        raise failure

    try:
        return on_worker(work)
    except RuntimeError:
        answer: asyncio.Future[Credentials] = engine.loop.create_future()
        answer.set_exception(_SourceError("no thread can be started to ask for them"))
        return answer


def _overdue(timeout: float) -> str:
    return f"no credentials within {timeout:g} s"


def _failure(error: BaseException) -> CredentialsError:
    """Return the error for an exception of a provider: its type and place, without text, cause and frames."""
    if isinstance(error, _SourceError):
        return CredentialsError(str(error))
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = "" if at is None else f" ({at.tb_frame.f_code.co_filename}, line {at.tb_lineno})"
    return CredentialsError(f"the provider raised {type(error).__name__}{where}")


# --- commands


def run(command: tuple[str, ...], timeout: float) -> str:
    """Run ``command`` and return its output without the last line end. Blocks.

    Its stderr is discarded, since it may hold secrets. At the deadline the command is killed, with the processes that
    it started.

    Raises:
        CredentialsError: it cannot be started, fails, takes longer than ``timeout`` seconds, or prints no password.
    """
    program = command[0]
    try:
        process = subprocess.Popen(  # noqa: S603  # the command is the application's own setting
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        failure = f"cannot run {program!r}: {_reason(error)}"
    else:
        return _output_of(process, program, timeout)
    raise _SourceError(failure)


def _output_of(process: subprocess.Popen[bytes], program: str, timeout: float) -> str:
    deadline = clock.monotonic() + timeout
    try:
        output = _read(process.stdout, deadline)
        code = 0 if len(output) > _MAX_BYTES else process.wait(max(0.0, deadline - clock.monotonic()))
    except subprocess.TimeoutExpired:
        failure = f"{program!r} was killed: it took longer than {timeout:g} s"
    else:
        if not code:
            return _text(output, program)
        how = f"exit status {code}" if code > 0 else f"signal {-code}"
        failure = f"{program!r} failed: {how}; run it by hand to see why"
    finally:
        if process.returncode is None:  # until it is waited for, no other process group has its number
            _kill(process)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a device: reaped later
                process.wait(_KILLED)
        if process.stdout is not None:
            process.stdout.close()
    raise _SourceError(failure)


def _read(pipe: IO[bytes] | None, deadline: float) -> bytes:
    """Return the bytes up to the end of a pipe, or more than ``_MAX_BYTES`` of them.

    A process that has left the process group of the command may keep the pipe open.

    Raises:
        subprocess.TimeoutExpired: the pipe did not end before ``deadline``, in monotonic time.
    """
    content = bytearray()
    if pipe is None:
        return b""
    with selectors.DefaultSelector() as readable:
        readable.register(pipe, selectors.EVENT_READ)
        while len(content) <= _MAX_BYTES:
            left = deadline - clock.monotonic()
            if left <= 0 or not readable.select(left):
                raise subprocess.TimeoutExpired((), 0)
            chunk = os.read(pipe.fileno(), _MAX_BYTES)
            if not chunk:
                break
            content += chunk
    return bytes(content)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


# --- files


def read(path: Path) -> str:
    """Return the password in a file, without line ends after it. Blocks.

    Raises:
        CredentialsError: the file cannot be read, or holds no password.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        failure = f"cannot read {str(path)!r}: {_reason(error)}"
    else:
        return _text(content, str(path))
    raise _SourceError(failure)


def signature(path: Path) -> object:
    """Return a value that changes when the file is written, replaced, or reached by other symbolic links. Blocks."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _text(content: bytes, what: str) -> str:
    """Return the password in the output of a command or the content of a file."""
    failure = "it is not UTF-8"
    with contextlib.suppress(UnicodeDecodeError):
        password = content.decode().rstrip("\r\n")
        if password and len(content) <= _MAX_BYTES:
            return password
        failure = f"more than {_MAX_BYTES} bytes" if password else "it is empty"
    raise _SourceError(f"no password from {what!r}: {failure}")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
