"""A client in a process of its own, to be stopped or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

_PROGRAM = """
import sys, threading
import messaging
url, channel, settings, context = sys.argv[1], sys.argv[2], eval(sys.argv[3]), eval(sys.argv[4])
m = messaging.connect(url, **settings)
m.publish(channel, b"victim", last_will=True, **context).result(10)
print("up", flush=True)
threading.Event().wait()
"""


class Victim:
    """Connects with ``b"victim"`` on ``channel`` as its last will, and does nothing else.

    Args:
        url: of the broker.
        channel: of the will.
        will: the will's context, beside its channel.
        settings: of the instance; it pings every second unless they say otherwise.
    """

    def __init__(self, url: str, channel: str, will: dict[str, Any] | None = None, **settings: Any) -> None:
        self._command = [
            sys.executable, "-c", _PROGRAM, url, channel, repr({"keepalive": 1, **settings}), repr(will or {}),
        ]  # fmt: skip

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=Path(__file__).parents[2], text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def stop(self) -> None:
        """It does nothing more, pings included, and its connection stays."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL, and wait. Idempotent."""
        self._process.kill()
        self._process.wait(10)
