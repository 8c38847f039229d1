"""The processes of the pipeline: a private mosquitto, and the fleet. They end with this process, however it ends.

Each runs in a session of its own, so that Ctrl-C on the terminal reaches this process alone, which then ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ConfigurationError, MessagingError

if TYPE_CHECKING:
    from pyspark_messaging.telemetry.fleet import FleetPlan

_HOST: Final = "127.0.0.1"
#: how long mosquitto may take to start, and any process to end, in seconds
_START: Final = 10.0
_END: Final = 5.0

#: folders of mosquitto that are not on the PATH of a normal user
_MORE_PATHS: Final = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")
_MISSING: Final = (
    "mosquitto is not installed, and the pipeline needs a broker of its own: 'apt install mosquitto', "
    "'dnf install mosquitto' or 'brew install mosquitto'"
)
#: without limits for bursts. As root, mosquitto would change to a user who may have no access to the folder
_CONFIGURATION: Final = """\
listener {port} {host}
allow_anonymous true
user root
max_inflight_messages 100
max_queued_messages 0
max_queued_bytes 0
set_tcp_nodelay true
"""
#: waits on a pipe that this process holds open; ends the broker if this process ended without doing so
_GUARD: Final = """trap '' HUP INT TERM; read -r _ && exit 0; kill "$1" """


class BrokerFailedError(MessagingError):
    """The private broker did not start. The message has the end of its log."""


class FleetFailedError(MessagingError):
    """The fleet could not publish."""


def find_mosquitto() -> str:
    """Return the path of mosquitto; raise ``ConfigurationError`` if it is not installed."""
    # with an empty PATH, search nowhere else
    paths = os.environ.get("PATH", os.defpath).split(os.pathsep)
    more = _MORE_PATHS if any(path in paths for path in ("/usr/bin", "/usr/local/bin", "/bin")) else ()
    found = shutil.which("mosquitto", path=os.pathsep.join([*paths, *more]))
    if found is None:
        raise ConfigurationError(_MISSING)
    return found


@contextlib.contextmanager
def mosquitto(folder: Path) -> Iterator[str]:
    """Run a private mosquitto on the loopback interface, with its log in ``folder``; yield its URL."""
    binary = find_mosquitto()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "mosquitto.log"
    config = folder / "mosquitto.conf"
    with socket.create_server((_HOST, 0)) as probe:
        port = probe.getsockname()[1]
    config.write_text(_CONFIGURATION.format(host=_HOST, port=port))
    with log.open("ab") as output:
        process = _start([binary, "-c", str(config)], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    guard = _start(["/bin/sh", "-c", _GUARD, "guard", str(process.pid)], stdin=subprocess.PIPE)
    try:
        if not _answers(port, process):
            raise BrokerFailedError(f"mosquitto did not start: {log.read_text(errors='replace')[-500:]}")
        yield f"mqtt://{_HOST}:{port}"
    finally:
        end(process)
        with contextlib.suppress(OSError):
            guard.communicate(b"\n", timeout=_END)


def _answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
            return process.poll() is None
        time.sleep(0.02)
    return False


def _start(command: list[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own."""
    return subprocess.Popen(command, start_new_session=True, **streams)  # noqa: S603  # programs of this module


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
            self._process = _start(
                [
                    *(sys.executable, "-m", "pyspark_messaging.telemetry.fleet", url, str(ledger)),
                    *(f"--{name}={value}" for name, value in asdict(plan).items()),
                    "--end-with-stdin",
                ],
                stdin=subprocess.PIPE,  # closes with this process, which ends the fleet
                stdout=subprocess.PIPE,
                stderr=errors,
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
