"""``python -m benchmarks [name ...]``: run the benchmarks named, or those that need no broker."""

from __future__ import annotations

import argparse
import importlib

BENCHMARKS = {
    "memory": "publish to observer in one process, against reactivex.Subject and queue.SimpleQueue",
    "flat": "a slow subscriber with a million messages behind it: memory of the process",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items()),
    )
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], metavar="name", help=", ".join(BENCHMARKS))
    parser.add_argument("--runs", type=int, default=5, help="runs of each; the median is printed")
    parser.add_argument("--messages", type=int, default=None, help="messages in each run")
    parser.add_argument("--backends", default="memory,mqtt,amqp", help="backends of 'flat', separated by commas")
    arguments = parser.parse_args()
    for name in arguments.names or ["memory"]:
        importlib.import_module(f"benchmarks.{name}").run(arguments)


main()
