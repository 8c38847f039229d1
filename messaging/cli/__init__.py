"""The command ``messaging``: ``pub``, ``sub``, ``request``, ``reply``, ``info`` and ``demo`` for every broker URL.

Only :func:`main` is public. It needs the extra ``cli``, and says so if that is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from messaging.errors import MissingExtraError

__all__ = ["main"]

#: the modules the extra ``cli`` brings
_EXTRA: Final = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code (see ``messaging --help``).

    Args:
        arguments: the command line without the program's name; by default that of the process.
    """
    try:
        from messaging.cli.app import run
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.stderr.write(f"messaging: error: {MissingExtraError('cli', 'the command line')}\n")
        return 2
    return run(arguments)
