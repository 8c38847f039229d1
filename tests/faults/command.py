"""The commands behind ``make kills``, ``make distributed``, …: one run for each protocol, and what it found."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol


class Outcome(Protocol):
    """What a run showed; ``problems`` in words."""

    problems: list[str]


def parser(text: str | None, protocols: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that all commands have."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--protocol", choices=[*protocols, "all"], default="all")
    made.add_argument("--seed", type=int, default=random.randrange(10_000))
    made.add_argument("--keep", type=Path, help="folder for the journals and ledgers")
    made.set_defaults(protocols=protocols)
    return made


def run_all(given: argparse.Namespace, run: Callable[[str, Path], Outcome]) -> int:
    """Run each protocol in a folder of its own, and print what it showed; return the exit code.

    Args:
        given: what :func:`parser` has parsed.
        run: called with the protocol and the folder.
    """
    failed = False
    for protocol in given.protocols if given.protocol == "all" else (given.protocol,):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) if given.keep is None else given.keep / protocol
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                sys.exit(f"{folder} is not empty: the ledgers of two runs cannot be told apart")
            outcome = run(protocol, folder)
        told = f"{protocol}, seed {given.seed}, {time.monotonic() - began:.0f} s: {outcome}"
        sys.stdout.write("\n  ".join([told, *(f"BROKEN: {each}" for each in outcome.problems)]) + "\n")
        failed = failed or bool(outcome.problems)
    return int(failed)


def progress(line: str) -> None:
    """Print a line about the progress of a run."""
    sys.stderr.write(f"{line}\n")
