"""Folders of the user, by the XDG specification."""

from __future__ import annotations

import os
from pathlib import Path


def base_directory(variable: str, default: Path) -> Path:
    """Return a base directory of the user. The XDG specification demands that relative paths are ignored."""
    given = os.environ.get(variable, "")
    return Path(given) if given.startswith("/") else default
