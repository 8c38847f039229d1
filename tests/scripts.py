"""Python code in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: begins a script whose ``child(work)`` calls ``work`` in a forked process, and checks that it returned
FORK = """
import os, sys, threading, traceback
import messaging
from messaging.errors import MessagingError

def child(work):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with {status}"
"""


def run_script(script: str, *, first: Path | None = None, seconds: float = 30) -> subprocess.CompletedProcess[str]:
    """Run Python code that must succeed in a process of its own; ``first`` comes before the project on its path."""
    path = [str(folder) for folder in (first, ROOT) if folder is not None]
    done = subprocess.run(
        # a forked child of a program with threads is what these scripts are about
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
        cwd=first or ROOT,
        env={"PYTHONPATH": os.pathsep.join(path), "PATH": os.defpath},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
