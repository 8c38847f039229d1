"""Shows that the simulation sees: plants mended faults one by one, and counts the seeds until one breaks a promise.

``python -m tests.simulation.proof`` plants all of :data:`tests.simulation.planted.PLANTED` whose service is simulated;
texts after it select those that have one of them in their names. A fault that no seed shows is named at the end.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from statistics import median
from typing import Final

from tests.house import ROOT, say
from tests.simulation.planted import PLANTED

#: where each part of the toolkit is simulated: services, and their protocols if not all
PLACES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "mqtt": (("streams", "messages", "sharing", "retained", "requests", "durable"), ("mqtt311", "mqtt5")),
    "amqp": (("messages", "streams", "sharing", "requests", "durable"), ("amqp",)),
    "memory": (("sharing", "streams", "messages", "retained"), ("memory",)),
    "receiving": (("sharing", "messages", "streams", "retained"), ()),
    "requests": (("requests",), ()),
    "outbox": (("durable", "messages"), ()),
    "inbox": (("durable",), ()),
    "devices": (("devices",), ()),
    "gateway": (("gateway",), ()),
    "typed bus": (("typedevents",), ()),
    "distributed admin": (("distributed",), ()),
    "remote events": (("mailbox", "agents"), ()),
    "leases": (("leases", "mailbox"), ()),
    "transactions": (("transactions",), ()),
    "spark": (("spark",), ()),
    "journal": (("journal", "durable"), ()),
}
_FAILED: Final = re.compile(r"^FAILED (\S+): (.*)", re.MULTILINE)
_RUNS: Final = re.compile(r"^([\d,]+) runs, ", re.MULTILINE)


def seek(name: str, service: str, seeds: int, limit: float) -> tuple[int, str] | None:
    """Return how many runs it took to notice a fault, and what was broken; ``None`` if none of ``seeds`` showed it."""
    services, protocols = PLACES[service]
    command = [sys.executable, "-m", "tests.simulation", "--plant", name, "--stop", "1", "--total", str(seeds)]
    for each in services:
        command += ["--service", each]
    for each in protocols:
        command += ["--protocol", each]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return None
    failed, runs = _FAILED.search(done.stdout), _RUNS.search(done.stdout)
    if failed is None or runs is None:
        if runs is None:
            say(f"  {name}: {done.stderr[-500:] or done.stdout[-500:]}")
        return None
    return int(runs[1].replace(",", "")), f"{failed[1]}: {failed[2][:100]}"


def main() -> int:
    """Plant the chosen faults; return 1 if one was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.proof", description=__doc__)
    parser.add_argument("names", nargs="*", help="only faults with one of these texts in their names, or of this part")
    parser.add_argument("--seeds", type=int, default=2000, help="runs for each fault")
    parser.add_argument("--limit", type=float, default=600.0, help="real seconds for each fault")
    arguments = parser.parse_args()
    found: list[int] = []
    missed: list[str] = []
    for planted in PLANTED:
        if arguments.names and not any(each in planted.name or each == planted.service for each in arguments.names):
            continue
        seen = seek(planted.name, planted.service, arguments.seeds, arguments.limit)
        if seen is None:
            missed.append(planted.name)
            say(f"not seen        {planted.service}: {planted.name}")
        else:
            found.append(seen[0])
            say(f"{seen[0]:6,} runs     {planted.service}: {planted.name}: {seen[1]}")
    say(f"{len(found)} of {len(found) + len(missed)} faults seen, in a median of {median(found or [0]):g} runs")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
