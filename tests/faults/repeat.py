"""Runs the fault tests again and again, until one fails.

``python -m tests.faults.repeat --times 20 [arguments for pytest]``; without arguments all of ``tests/faults`` but the
soak. Each time in two new processes, with brokers of their own. Ends with status 1 at the first failure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[2]
_DEFAULT: Final = ["tests/faults", "--ignore=tests/faults/test_soak.py"]
_PARALLEL: Final = ["--numprocesses", "2"]


def main() -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.repeat", description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    given, arguments = parser.parse_known_args()
    for number in range(1, given.times + 1):
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-x", *_PARALLEL, *(arguments or _DEFAULT)]
        done = subprocess.run(command, cwd=_ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        last = done.stdout.rstrip().rpartition("\n")[2]
        sys.stdout.write(f"{number}/{given.times} in {time.monotonic() - start:.0f} s: {last}\n")
        sys.stdout.flush()
        if done.returncode != 0:
            sys.stdout.write(done.stdout + done.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
