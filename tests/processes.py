"""Processes that a test did not start itself: whether they have ended."""

from __future__ import annotations

from pathlib import Path


def has_ended(pid: int | str) -> bool:
    """Return whether a process has ended. Without a parent that waits for it, it remains as a zombie.

    Its file is missing after its end; a process that ends while the file is read makes the read fail, which is no
    ``FileNotFoundError``.
    """
    try:
        status = Path(f"/proc/{int(pid)}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"
