"""Programs that are forked from a process which has imported ``messaging``: an interpreter needs half a second for it.

A program ends with ``sys.exit``. Nothing is seen of the teardown of its interpreter, such as warnings.

``python -m tests.forking`` is that process. It takes requests, each with the files of a program, from its stdin.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]

#: imported before the fork: the modules that a program would import
_MODULES = [
    *(
        "messaging.codecs",
        "messaging.instance",
        "messaging_adapters.memory",
        "messaging_adapters.mqtt",
        "messaging_adapters.amqp",
        "uvloop",
    ),
    *(
        f"messaging.cli.{name}"
        for name in (
            *("app", "bench", "context", "demo", "events", "gateway", "info", "journal", "mailbox", "monitor"),
            *("outbox", "pub", "reply", "request", "sub"),
        )
    ),
    "messaging.outbox.sql",
    "psycopg",
]


class ForkedProcess:
    """A program, with the methods of ``subprocess.Popen`` that tests use. It may write no more to stdout than is read.

    Args:
        code: the program; in it ``sys.argv[1:]`` are the ``arguments``.
        stdout: a file, or ``PIPE``; stdin and stderr are pipes.
    """

    def __init__(
        self,
        code: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] = subprocess.PIPE,
    ) -> None:
        input_end, self.stdin = _pipe_to()
        self.stderr, error_end = _pipe_from()
        self.stdout: IO[bytes] | None = None
        output_end = None
        if isinstance(stdout, int):
            self.stdout, output_end = _pipe_from()
        self._status, status_end = _pipe_from()
        out = output_end if output_end is not None else stdout.fileno()  # type: ignore[union-attr]
        files = [input_end, out, error_end, status_end]
        request = json.dumps([code, arguments, dict(os.environ if environment is None else environment)])
        socket.send_fds(_server(), [request.encode()], files)
        for end in (input_end, output_end, error_end, status_end):
            if end is not None:
                os.close(end)
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit code, or the negative number of the signal that ended it."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float) -> tuple[int, str, str]:
        """Close its stdin, and wait for its end; return the exit code, and what it wrote to stdout and stderr."""
        assert self.stdout is not None
        self.stdin.close()
        with self.stdout, self.stderr:
            out, err = self.stdout.read(), self.stderr.read()
        return self.wait(timeout), out.decode(), err.decode()

    def poll(self) -> int | None:
        """Return the exit code, or ``None`` while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its end is not reported yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def _pipe_to() -> tuple[int, IO[bytes]]:
    reading, writing = os.pipe()
    return reading, os.fdopen(writing, "wb", buffering=0)


def _pipe_from() -> tuple[IO[bytes], int]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb", buffering=0), writing


@functools.cache
def _server() -> socket.socket:
    """Return the socket of the process that forks; it ends with this one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'adapters'}", "PYTHONWARNINGS": "error"}
    subprocess.Popen([sys.executable, "-m", __name__], cwd=ROOT, env=environment, stdin=its).returncode = 0
    its.close()
    atexit.register(ours.close)
    return ours


def _serve() -> str:
    """Fork for each request; return the code of a program in its process."""
    requests = socket.socket(fileno=os.dup(0))
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            break
        for file in files:
            os.close(file)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    # this process reports the end of the program, which is a child of its own
    code, arguments, environment = json.loads(message)
    status = files.pop()
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        os.write(status, b"%d\n" % pid)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.close(status)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    return str(code)


_exit_codes = [1]


def _end() -> None:
    """End here, after all other exit handlers: tearing down the interpreter takes longer than most runs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(_exit_codes[-1])


if __name__ == "__main__":
    atexit.register(_end)
    for module in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # a program does not collect the objects that it shares
    try:
        exec(compile(_serve(), "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        _exit_codes.append(int(ended.code or 0))
