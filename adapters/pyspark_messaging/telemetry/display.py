"""The output of a run: a line for each stage and, on a terminal, a status line below."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Self, TypeVar

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from messaging.cli.output import one_line, show
from messaging.errors import MessagingError
from messaging.execution import Flag, start_thread
from pyspark_messaging.errors import first_line
from pyspark_messaging.telemetry.session import SparkFailedError

#: interval of the status line on a terminal, and of status lines elsewhere, in seconds
TICK: Final = 0.25
_TELL: Final = 5.0
#: timeout of each step of Spark, in seconds
_STEP_TIMEOUT: Final = 180.0

T = TypeVar("T")


class Display:
    """Lines with the time since the start, and a status line that changes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told = 0.0
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_working = False
        self._spinner = Spinner("dots")
        console = Console(highlight=False, emoji=False)
        is_terminal = console.is_terminal and sys.stdout is not None
        self._live = Live(console=console, refresh_per_second=8, transient=True) if is_terminal else None

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        line = Text.assemble((f"{self.seconds:5.1f} s  ", "dim"), one_line(text))
        if self._live is not None:
            self._live.console.print(line)
        else:
            show(line)

    def status(self, text: str, *, quietly: bool = False) -> None:
        """Redraw the status line; without a terminal print one every few seconds, unless ``quietly``."""
        if self._live is not None:
            self._spinner.update(text=Text(f"{self.seconds:4.0f} s  {one_line(text)}"))
            self._live.update(self._spinner)
        elif not quietly and self.seconds - self._told >= _TELL:
            self._told = self.seconds
            self.say(text)

    def wait(self, function: Callable[[], T], tick: Callable[[], None]) -> T:
        """Call ``function`` in another thread, call ``tick`` here until it returns, and return its result.

        An interrupt ends this wait, but not a call of Spark. The other thread is always the same: Spark binds its
        session to it.

        Raises:
            SparkFailedError: ``function`` failed, or has not returned within ``_STEP_TIMEOUT``.
        """
        until = time.monotonic() + _STEP_TIMEOUT
        outcome: list[T] = []
        failure: list[MessagingError] = []
        done = Flag()

        def work() -> None:
            try:
                outcome.append(function())
            except MessagingError as error:
                failure.append(error)
            except BaseException as error:  # noqa: BLE001  # raised in the calling thread
                failure.append(SparkFailedError(first_line(error)))  # while Spark can still describe it
            done.set()

        if not self._is_working:
            start_thread(self._run, "messaging-pipeline")
            self._is_working = True
        self._work.put(work)
        while not done.is_set():
            if time.monotonic() > until:
                raise SparkFailedError(f"Spark has not finished within {_STEP_TIMEOUT:g} s")
            tick()
            done.wait(TICK)
        if failure:
            raise failure[0]
        return outcome[0]

    def _run(self) -> None:
        while True:
            self._work.get()()
