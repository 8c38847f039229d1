"""The program ``messaging`` as its users run it: a process of its own."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Self

ROOT = Path(__file__).parents[2]
#: how long to wait for anything, seconds
PATIENCE = 20.0

COMMAND = (sys.executable, "-m", "messaging.cli")


def environment(**more: str) -> dict[str, str]:
    """That of this process, without what configures the program."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MESSAGING_")}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "COLUMNS": "100"} | more


class Lines:
    """The lines of a pipe, read by a thread, so that waiting for one has a deadline."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.seen: list[bytes] = []
        self._arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._arrived.put(line)
        self._arrived.put(None)

    def until(self, wanted: Callable[[bytes], bool]) -> bytes:
        """The next line that is wanted."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                line = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"waited {PATIENCE:g} s in vain; there came {self.seen}") from None
            assert line is not None, f"ended without the line; there came {self.seen}"
            self.seen.append(line)
            if wanted(line):
                return line

    def rest(self) -> bytes:
        """Everything there was, once the pipe has ended."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the pipe has not ended"
        while (line := self._arrived.get()) is not None:
            self.seen.append(line)
        self._arrived.put(None)
        return b"".join(self.seen)


class Program:
    """A run of the program.

    Args:
        arguments: its command line.
        stdout: where that goes; by default to ``out``.
        variables: of the environment.
    """

    def __init__(
        self, *arguments: str, stdout: int | IO[bytes] = subprocess.PIPE, variables: dict[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=ROOT,
            env=environment(**(variables or {})),
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.PIPE,
        )
        assert self.process.stderr is not None
        self.err = Lines(self.process.stderr)
        self._out: Lines | None = None

    @property
    def out(self) -> Lines:
        """Its stdout. Nothing is read from it before this is asked for."""
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
        for pipe in (self.process.stdin, None if self._out else self.process.stdout):
            if pipe is not None:
                pipe.close()

    def says(self, text: str) -> str:
        """Wait for a line on stderr that contains ``text``."""
        return self.err.until(lambda line: text.encode() in line).decode()

    def send(self, data: bytes) -> None:
        """Write to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def end_input(self) -> None:
        """Close its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def signal(self, number: signal.Signals, *, elsewhere: bool = False) -> None:
        """Send it a signal. ``elsewhere`` one of its other threads takes it, as any may that is starting a process."""
        if not elsewhere:
            self.process.send_signal(number)
            return
        main = self.process.pid
        names = [path.name for path in Path(f"/proc/{main}/task").iterdir()]
        other = next(task for task in map(int, names) if task != main)
        assert ctypes.CDLL(None, use_errno=True).tgkill(main, other, number) == 0, os.strerror(ctypes.get_errno())

    def ended(self) -> int:
        """Wait for its end; its exit code."""
        return self.process.wait(PATIENCE)


def subscriber(*arguments: str, stdout: int | IO[bytes] = subprocess.PIPE) -> Program:
    """``messaging sub``, once it has subscribed."""
    program = Program("sub", *arguments, stdout=stdout)
    try:
        program.says("subscribed to")
    except BaseException:
        program.__exit__()
        raise
    return program


def lines(data: bytes) -> Iterator[bytes]:
    yield from data.splitlines()
