"""The program ``messaging`` in a process of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.forking import ForkedProcess

ROOT = Path(__file__).parents[2]

COMMAND = (sys.executable, "-m", "messaging.cli")


def process(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end with these environment variables."""
    return subprocess.run(
        command, cwd=ROOT, env=environment(**variables), capture_output=True, encoding="utf-8", check=False,
        timeout=3 * PATIENCE,
    )  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    """The environment of this process, without the variables that configure the program."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MESSAGING_")}
    path = f"{ROOT}{os.pathsep}{ROOT / 'adapters'}"
    return kept | {"PYTHONPATH": path, "PYTHONWARNINGS": "error", "COLUMNS": "100"} | more


class Lines:
    """The lines of a pipe, read by a thread, so that waiting for one has a deadline."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.seen: list[bytes] = []
        self._arrived: Recorder[bytes] = Recorder()
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._arrived(line)
        self._arrived.on_completed()

    def until(self, wanted: Callable[[bytes], bool]) -> bytes:
        """Return the next line that is ``wanted``."""
        while True:
            eventually(lambda: len(self._arrived) > len(self.seen) or self._arrived.is_completed, lambda: self.seen)
            assert len(self._arrived) > len(self.seen), f"ended without the line; there came {self.seen}"
            self.seen.append(self._arrived[len(self.seen)])
            if wanted(self.seen[-1]):
                return self.seen[-1]

    def rest(self) -> bytes:
        """Wait for the end of the pipe; return all its lines."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the pipe has not ended"
        self.seen = [*self._arrived]
        return b"".join(self.seen)


class Program:
    """A run of the program.

    Args:
        arguments: its command line.
        stdout: where its stdout goes; by default to ``out``.
        variables: environment variables.
    """

    def __init__(
        self, *arguments: str, stdout: int | IO[bytes] = subprocess.PIPE, variables: dict[str, str] | None = None
    ) -> None:
        code = "import sys; from messaging.cli import main; sys.exit(main())"
        self.process = ForkedProcess(code, arguments, environment(**(variables or {})), stdout)
        self.err = Lines(self.process.stderr)
        self._out: Lines | None = None

    @property
    def out(self) -> Lines:
        """Its stdout, which is not read before this is called."""
        if self._out is None:
            assert self.process.stdout is not None
            self._out = Lines(self.process.stdout)
        return self._out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)
        self.process.stdin.close()
        if self.process.stdout is not None and self._out is None:
            self.process.stdout.close()

    def says(self, text: str) -> str:
        """Wait for a line on stderr that contains ``text``."""
        return self.err.until(lambda line: text.encode() in line).decode()

    def send(self, data: bytes) -> None:
        """Write to its stdin."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.process.stdin.write(rest) :]

    def end_input(self) -> None:
        """Close its stdin."""
        self.process.stdin.close()

    def signal(self, number: signal.Signals, *, elsewhere: bool = False) -> None:
        """Send it a signal; with ``elsewhere`` to another thread than the main one."""
        if not elsewhere:
            self.process.send_signal(number)
            return
        main = self.process.pid
        names = [path.name for path in Path(f"/proc/{main}/task").iterdir()]
        other = next(task for task in map(int, names) if task != main)
        assert ctypes.CDLL(None, use_errno=True).tgkill(main, other, number) == 0, os.strerror(ctypes.get_errno())

    def ended(self) -> int:
        """Wait for its end; return its exit code."""
        return self.process.wait(PATIENCE)


def ready(text: str, *arguments: str, **options: Any) -> Program:
    """Run the program and wait until it writes ``text`` to stderr."""
    program = Program(*arguments, **options)
    try:
        program.says(text)
    except BaseException:
        program.__exit__()
        raise
    return program


def subscriber(*arguments: str, **options: Any) -> Program:
    """Run ``messaging sub`` and wait until it has subscribed."""
    return ready("subscribed to", "sub", *arguments, **options)
