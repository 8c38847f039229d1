"""A C client on libmosquitto, as the limit; built when it is needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).parent / "client.c"
_BUILT: Final = Path(__file__).parent.parent.parent.parent / ".cache" / "benchmarks" / "c_mqtt"


def build() -> Path:
    """The program, built anew if its source has changed.

    Raises:
        RuntimeError: there is no compiler, or no libmosquitto.
    """
    if _BUILT.exists() and _BUILT.stat().st_mtime > SOURCE.stat().st_mtime:
        return _BUILT
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("there is no C compiler (cc)")
    _BUILT.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-O2", "-Wall", "-Wextra", "-o", str(_BUILT), str(SOURCE), "-l:libmosquitto.so.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"it does not compile, perhaps for lack of libmosquitto: {done.stderr.strip()[-200:]}")
    return _BUILT
