"""The command ``messaging``: publish, subscribe, request, reply and measure, for every broker URL.

Only :func:`main` is public. It needs the extra ``cli``, and reports an error if the extra is not installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from messaging.cli.signals import sigterm_interrupts
from messaging.errors import MissingExtraError

__all__ = ["main"]

#: the packages of the extra ``cli``
_EXTRA: Final = ("typer", "rich")

#: environment variable that holds the name of the shell that asks for completions
_COMPLETION: Final = "_MESSAGING_COMPLETE"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code (see ``messaging --help``).

    Args:
        arguments: the command line without the program's name; by default that of the process.
    """
    shell = os.environ.get(_COMPLETION)
    try:
        if shell is not None:
            return _complete(shell, sys.argv[1:] if arguments is None else arguments)
        with sigterm_interrupts():
            from messaging.cli.app import run

            return run(arguments)  # imports the modules of the command
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.stderr.write(f"messaging: error: {MissingExtraError('cli', 'the command line')}\n")
        return 2
    except KeyboardInterrupt:  # before the command started
        return 130


def _complete(shell: str, arguments: Sequence[str]) -> int:
    """Answer a shell that asks for completions. Errors are silent: the user is typing on that terminal."""
    from messaging.cli.app import app
    from messaging.cli.completion import Completer
    from messaging.cli.output import write

    try:
        found = Completer(app, shell, arguments).complete()
        write(f"{found}\n".encode(errors="surrogateescape") if found else b"")
    except Exception:  # noqa: BLE001  # a malformed file, a package that does not load, a shell that is gone
        return 1
    return 0
