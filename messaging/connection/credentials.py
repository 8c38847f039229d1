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
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import SecretStr

from messaging.errors import ArgumentError, CredentialsError
from messaging.execution import handlers_loop, workers
from messaging.model.credentials import Credentials, Provider

if TYPE_CHECKING:
    from messaging.execution import Engine
    from messaging.model.settings import Settings

#: bytes of the largest password that a file or a command may hold
_MAX_BYTES: Final = 65_536
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
        #: the question that is being answered
        self._call: asyncio.Future[Credentials] | None = None

    @property
    def is_asking(self) -> bool:
        """Return whether a question waits for its answer."""
        return self._call is not None

    def overdue(self) -> CredentialsError:
        """Return the error of a question that is not answered in time."""
        return CredentialsError(f"{self._what}: no credentials within {self._timeout:g} s")

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
            done, _ = await asyncio.wait([call], timeout=self._timeout)
        except asyncio.CancelledError:
            self._abandon(call)
            raise
        if not done:
            self._abandon(call)
            raise self.overdue()
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
            lambda: _call(engine, provider),
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
        return CredentialsSource(
            "option 'password_file'",
            lambda: _on_worker(engine, lambda: read(path)),
            timeout,
            signature=lambda: signature(path),
        )
    return None


# --- callables and coroutine functions


def _call(engine: Engine, provider: Provider) -> asyncio.Future[Credentials]:
    if not provider.is_coroutine:
        return _on_worker(engine, lambda: _finished(provider.function(), provider))

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


def _finished(result: Any, provider: Provider) -> Any:
    """Return ``result``, or what it is awaited to if a plain callable returned an awaitable. On a worker thread."""
    if not inspect.isawaitable(result):
        return result

    async def ask() -> Any:
        return await result

    return _on_loop(ask, provider).result()


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
    answer: asyncio.Future[Credentials] = engine.loop.create_future()

    def settle(outcome: Credentials | CredentialsError) -> None:
        if answer.done():
            return
        if isinstance(outcome, Credentials):
            answer.set_result(outcome)
        else:
            answer.set_exception(outcome)

    def work() -> None:
        outcome: Credentials | CredentialsError
        try:
            outcome = as_credentials(function())
        except BaseException as error:  # noqa: BLE001  # it is the application's, and may hold a secret
            outcome = _failure(error)
        engine.call(settle, outcome)

    try:
        workers().submit(work)
    except RuntimeError:
        answer.set_exception(_SourceError("no thread can be started to ask for them"))
    return answer


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
    is_overdue = threading.Event()

    def stop() -> None:
        is_overdue.set()
        _kill(process)

    deadline = threading.Timer(timeout, stop)
    deadline.daemon = True
    try:
        deadline.start()
        with process:
            output = process.stdout.read(_MAX_BYTES + 1) if process.stdout is not None else b""
            if len(output) > _MAX_BYTES:
                _kill(process)
            code = process.wait()
    except BaseException:
        _kill(process)
        raise
    finally:
        deadline.cancel()
    if is_overdue.is_set():
        raise _SourceError(f"{program!r} was killed: it took longer than {timeout:g} s")
    if code and len(output) <= _MAX_BYTES:
        how = f"exit status {code}" if code > 0 else f"signal {-code}"
        raise _SourceError(f"{program!r} failed: {how}; run it by hand to see why")
    return _text(output, program)


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
