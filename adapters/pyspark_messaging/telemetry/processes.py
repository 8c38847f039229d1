"""The processes of the pipeline: a private mosquitto, and the fleet. They end with this process, however it ends.

Each is in a session of its own, so that Ctrl-C on the terminal reaches this process alone, which then ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from messaging.errors import ConfigurationError, MessagingError
from messaging.testing.brokers import BrokerError, Mosquitto
from pyspark_messaging.telemetry import FleetPlan

#: how long any process may take to end, in seconds
_END: Final = 5.0

#: folders of mosquitto that are not on the PATH of a normal user
_MORE_PATHS: Final = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")
_MISSING: Final = (
    "mosquitto is not installed, and the pipeline needs a broker of its own: 'apt install mosquitto', "
    "'dnf install mosquitto' or 'brew install mosquitto'"
)
#: for bursts
_CONFIGURATION: Final = ("max_inflight_messages 100", "set_tcp_nodelay true")


class BrokerFailedError(MessagingError):
    """The private broker did not start. The message has the end of its log."""


class FleetFailedError(MessagingError):
    """The fleet could not publish."""


def check_mosquitto() -> None:
    """Raise ``ConfigurationError`` unless mosquitto is installed."""
    # with an empty PATH, search nowhere else
    paths = os.environ.get("PATH", os.defpath).split(os.pathsep)
    more = _MORE_PATHS if any(path in paths for path in ("/usr/bin", "/usr/local/bin", "/bin")) else ()
    if shutil.which("mosquitto", path=os.pathsep.join([*paths, *more])) is None:
        raise ConfigurationError(_MISSING)


@contextlib.contextmanager
def mosquitto() -> Iterator[str]:
    """Run a private mosquitto on the loopback interface; yield its URL."""
    check_mosquitto()
    with contextlib.ExitStack() as stack:
        try:
            broker = stack.enter_context(Mosquitto(_CONFIGURATION))
        except BrokerError as error:
            raise BrokerFailedError(str(error)) from None
        yield broker.url


def end(process: subprocess.Popen[Any]) -> None:
    """End a child process: SIGTERM, then SIGKILL if it does not end in time."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


class Fleet:
    """The publishing process; see :mod:`~pyspark_messaging.telemetry.fleet`. Leaving the context ends it.

    Attributes:
        accepted: messages that the broker has accepted so far.
        failed: messages that it has not accepted.
    """

    def __init__(self, url: str, plan: FleetPlan, ledger: Path, log: Path) -> None:
        self.accepted = 0
        self.failed = 0
        self._has_ended = False
        with log.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603  # a module of this package
                [
                    *(sys.executable, "-m", "pyspark_messaging.telemetry.fleet", url, str(ledger)),
                    *(f"--{name}={value}" for name, value in asdict(plan).items()),
                    "--end-with-stdin",
                ],
                stdin=subprocess.PIPE,  # closes with this process, which ends the fleet
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._log = log
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process)
        self._thread.join(_END)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            news = json.loads(line)
            self.accepted = news.get("accepted", self.accepted)
            self.failed = news.get("failed", self.failed)
            self._has_ended = self._has_ended or "ended" in news

    @property
    def is_running(self) -> bool:
        """Return whether it still publishes; ``FleetFailedError`` if it ended before its last message."""
        if self._process.poll() is None:
            return True
        self._thread.join(_END)
        if not self._has_ended:
            lines = self._log.read_text(errors="replace").splitlines() or ["no reason given"]
            raise FleetFailedError(f"the fleet failed (exit code {self._process.returncode}): {lines[-1]}")
        return False
