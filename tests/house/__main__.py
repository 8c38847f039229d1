"""Measure the structure of the sources: ``python -m tests.house [--before REVISION] [--show [NAME]]``.

With ``--before``, the measures of an earlier revision stand in a column of their own. With ``--show NAME``, only the
measures whose names contain NAME are taken, and each place is listed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.house.measures import MEASURES
from tests.house.sources import House, at, say


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--before", metavar="REVISION", help="an earlier revision to compare with")
    parser.add_argument(
        "--show", metavar="NAME", nargs="?", const="", help="list each place of these measures, or of all"
    )
    arguments = parser.parse_args()
    chosen = {name: measure for name, measure in MEASURES.items() if (arguments.show or "") in name}
    with tempfile.TemporaryDirectory() as folder:
        houses = [at(arguments.before, Path(folder)), House()] if arguments.before else [House()]
        for name, measure in chosen.items():
            found = [measure(house) for house in houses]
            say(f"{name:44}" + "".join(map(_figure, found)))
            if arguments.show is not None and isinstance(found[-1], Sequence):
                for each in found[-1]:
                    say(f"  {each}")


def _figure(found: Sequence[object] | float) -> str:
    figure = len(found) if isinstance(found, Sequence) else found
    return f"{figure:>9,.1f}" if isinstance(figure, float) else f"{figure:>9,}"


if __name__ == "__main__":
    main()
