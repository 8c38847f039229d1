"""Faults that earlier commits mended, to be put back one by one: the simulation has to find each again.

``python -m tests.simulation.planted`` lists them. ``--verify`` puts each into a copy of the project, runs the existing
test that shows it, and names the faults that their tests do not notice; with texts after it, only the faults that have
one of them in their names. Each fault of ``PLANTED`` was seen to be noticed by its test in this way: the test passes
without the fault, and fails with it.

A runner that plants faults in a process of its own takes the texts from :func:`edited`, which writes no file.

The faults themselves are in :mod:`tests.simulation.plants`, by service. The subject of a fault is that of the commit
that mended it, or that brought the code which prevents it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.house import ROOT, say
from tests.mutations import copy
from tests.simulation.plants.agreements import LEASES, TRANSACTIONS
from tests.simulation.plants.amqp import AMQP
from tests.simulation.plants.devices import DEVICES
from tests.simulation.plants.events import DISTRIBUTED, TYPED_BUS
from tests.simulation.plants.gateway import GATEWAY
from tests.simulation.plants.memory import MEMORY
from tests.simulation.plants.messages import RECEIVING
from tests.simulation.plants.model import SERVICES, Edit, Planted
from tests.simulation.plants.mqtt import MQTT
from tests.simulation.plants.remote import REMOTE
from tests.simulation.plants.sending import OUTBOX, REQUESTS
from tests.simulation.plants.storage import INBOX, JOURNAL, SPARK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["PLANTED", "SERVICES", "Edit", "Planted", "apply", "edited", "find", "noticed", "revert", "verify"]

PLANTED: tuple[Planted, ...] = (
    *MQTT,
    *AMQP,
    *MEMORY,
    *RECEIVING,
    *REQUESTS,
    *OUTBOX,
    *INBOX,
    *DEVICES,
    *GATEWAY,
    *TYPED_BUS,
    *DISTRIBUTED,
    *REMOTE,
    *LEASES,
    *TRANSACTIONS,
    *SPARK,
    *JOURNAL,
)

#: of one test, seconds; a test that hangs has noticed the fault, too
TEST_LIMIT = 60
#: of one run of pytest, seconds
RUN_LIMIT = 240.0
#: a line of pytest's summary that names a failed test
FAILED = re.compile(r"^FAILED \S+\.py::.*", re.MULTILINE)


def find(name: str) -> Planted:
    """Return the fault with this name.

    Raises:
        KeyError: there is none.
    """
    for planted in PLANTED:
        if planted.name == name:
            return planted
    raise KeyError(name)


def edited(planted: Planted, root: Path = ROOT) -> dict[str, str]:
    """Return the new text of each file that a fault changes, by its path from the root. Writes nothing.

    Args:
        root: folder of the project whose texts are changed.

    Raises:
        ValueError: a text to replace does not stand in its file exactly once.
    """
    texts: dict[str, str] = {}
    for edit in planted.edits:
        if edit.file not in texts:
            texts[edit.file] = (root / edit.file).read_text(encoding="utf-8")
        text = texts[edit.file]
        if (count := text.count(edit.before)) != 1:
            raise ValueError(f"{edit.file}: the text that {planted.name!r} replaces stands there {count} times")
        texts[edit.file] = text.replace(edit.before, edit.after)
    return texts


def apply(planted: Planted, root: Path) -> None:
    """Put a fault into the copy of the project at ``root``.

    Raises:
        ValueError: as :func:`edited`; nothing is changed then.
    """
    for file, text in edited(planted, root).items():
        (root / file).write_text(text, encoding="utf-8")


def revert(planted: Planted, root: Path) -> None:
    """Give the files of a fault in the copy at ``root`` the text that they have in this project."""
    for file in dict.fromkeys(edit.file for edit in planted.edits):
        (root / file).write_text((ROOT / file).read_text(encoding="utf-8"), encoding="utf-8")


def run(root: Path, test: str) -> tuple[bool, str]:
    """Run a test in the copy at ``root``; return whether it passed, and the first failed test or the limit.

    Raises:
        RuntimeError: pytest ran no test, or failed outside of one.
    """
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--no-header", f"--timeout={TEST_LIMIT}"]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'adapters'}"}
    process = subprocess.Popen(
        [*command, *test.split()],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=RUN_LIMIT)
    except subprocess.TimeoutExpired:
        return False, f"the run took longer than {RUN_LIMIT:g} s"
    finally:
        with suppress(ProcessLookupError):  # also brokers and programs that a test has left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode == 0:
        return True, ""
    failed = FAILED.search(output)
    if process.returncode != 1 or failed is None:
        raise RuntimeError(f"pytest {test}: exit status {process.returncode}: {output[-2000:]}")
    return False, failed.group()[:200]


def noticed(planted: Planted, root: Path) -> str | None:
    """Put a fault into the copy at ``root``, run its test, and take the fault out again.

    Returns:
        the failed test; ``None`` if the test passes.

    Raises:
        RuntimeError: as :func:`run`.
        ValueError: as :func:`edited`.
    """
    apply(planted, root)
    try:
        passed, failure = run(root, planted.test)
    finally:
        revert(planted, root)
    return None if passed else failure


def verify(chosen: Iterable[Planted]) -> Iterator[tuple[Planted, str | None, str]]:
    """Run the test of each fault in a copy of the project, first without it and then with it.

    Yields:
        the fault, the failed test (``None``: the fault is not noticed), and what is wrong, or an empty text.
    """
    sound: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = copy(Path(folder))
        for planted in chosen:
            if planted.test not in sound:
                passed, failure = run(root, planted.test)
                sound[planted.test] = "" if passed else f"fails without the fault: {failure}"
            if sound[planted.test]:
                yield planted, None, sound[planted.test]
                continue
            found = noticed(planted, root)
            yield planted, found, "" if found else "NOT NOTICED"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted", description=__doc__)
    parser.add_argument(
        "--verify",
        metavar="NAME",
        nargs="*",
        help="run the tests of all faults, or of those with one of these texts in their name",
    )
    parser.add_argument("--service", default="", choices=["", *SERVICES], help="only the faults of this service")
    arguments = parser.parse_args()
    chosen = [each for each in PLANTED if arguments.service in ("", each.service)]
    if arguments.verify is None:
        for planted in chosen:
            say(f"{planted.service}: {planted.name} ({planted.subject})")
        return 0
    texts = arguments.verify or [""]
    chosen = [each for each in chosen if any(text in each.name for text in texts)]
    missed: list[Planted] = []
    begin = time.monotonic()
    for number, (planted, found, problem) in enumerate(verify(chosen), 1):
        took = time.monotonic() - begin
        say(f"{number}/{len(chosen)} {planted.service}: {planted.name}: {found or problem} ({took:.0f} s)")
        sys.stdout.flush()
        if found is None:
            missed.append(planted)
        begin = time.monotonic()
    say(f"{len(chosen) - len(missed)} of {len(chosen)} faults noticed")
    for planted in missed:
        say(f"not noticed: {planted.name}")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
