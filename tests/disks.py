"""Full disks."""

from __future__ import annotations

import contextlib
from pathlib import Path


def ballast(disk: Path, leave: int = 0) -> Path:
    """Fill a disk, but for ``leave`` bytes; return the file to delete for more room."""
    file = disk / "ballast"
    with file.open("wb", buffering=0) as writing, contextlib.suppress(OSError):
        while True:
            writing.write(b"x" * 4096)
    if leave:
        with file.open("rb+") as cutting:
            cutting.truncate(max(0, file.stat().st_size - leave))
    return file
