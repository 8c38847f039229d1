"""``python -m benchmarks [name ...]``: run the benchmarks named, or all that compare with others."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks import contenders

BENCHMARKS = {
    "memory": "publish to observer in one process, against reactivex.Subject and queue.SimpleQueue",
    "filter": "a million evaluations of an LDAP filter with three terms, against the same by hand",
    "mqtt": "publisher to subscriber through mosquitto, against other clients",
    "amqp": "publishing with confirms, consuming with acknowledgements, both, against other clients",
    "events": "event buses within a process: dispatch and latency, against other buses",
    "distributed": "events between two processes, against messages on the same adapter and iPOPO's MQTT bridge",
    "remote": "remote events, directly and through agent and mailbox, against requests and the journal's appends",
    "latency": "from due to received, idle and under load, against other clients",
    "requests": "request to reply, at several concurrencies, against other clients",
    "footprint": "memory and processor time of publisher and subscriber, against other clients",
    "durable": "publishing through a durable outbox, against the outbox in memory",
    "outbox": "rows a second from PostgreSQL to a broker by a transactional outbox, against a loop by hand",
    "gateway": "messages a second through a gateway with its journal, against bare adapters and a bridge of mosquitto",
    "journal": "durable appends from 1 and 64 threads, against SQLite and persist-queue",
    "observability": "processor time with metrics, monitor, interceptors and tracing, against none of them",
    "spark": "rows a second into Spark: from a journal and from brokers, against other data sources; latency",
    "spark_flat": "Spark reads MQTT for minutes: memory of the driver, size of the journal",
    "flat": "a slow subscriber with a million messages behind it: memory of the process",
    "journal_flat": "a million records behind a cursor: memory; opening a journal of 2 GB",
    "remote_flat": "a million events in a mailbox that was killed: opening it; 100,000 leases: renewing them",
    "gateway_flat": "a million messages in the buffer of a gateway: its memory",
    "report": "writes the figures of docs/performance.md anew, from the reference results",
}
#: not part of a run of everything
_BY_NAME = ("spark_flat", "flat", "journal_flat", "remote_flat", "gateway_flat", "report")


def _names(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items()),
    )
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], metavar="name", help=", ".join(BENCHMARKS))
    parser.add_argument("--runs", type=int, default=5, help="runs of each; the median is printed")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long a run should take")
    parser.add_argument("--messages", type=int, help="messages in each run, rather than by --seconds")
    parser.add_argument("--quick", action="store_true", help="short runs and few: to see that it works")
    parser.add_argument(
        "--peers", type=_names, help="who takes part, separated by commas, or 'all' (see contenders.py)"
    )
    parser.add_argument("--payload", type=int, nargs="+", help="bytes, at least 8")
    parser.add_argument("--qos", type=int, nargs="+", choices=[0, 1, 2], help="of MQTT")
    parser.add_argument("--versions", nargs="+", choices=["3.1.1", "5"], help="of MQTT")
    parser.add_argument("--operations", nargs="+", choices=["publish", "consume", "both"], help="of 'amqp'")
    parser.add_argument("--protocols", nargs="+", choices=["mqtt", "amqp"], default=["mqtt", "amqp"],
                        help="of 'latency', 'requests', 'footprint', 'distributed' and 'remote'")  # fmt: skip
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 10, 100], help="of 'requests'")
    parser.add_argument("--rate", type=float, default=1000.0, help="load of 'latency', messages a second")
    parser.add_argument("--instructions", action="store_true",
                        help="'footprint' also counts instructions a message: takes minutes for each peer")  # fmt: skip
    parser.add_argument("--reference", action="store_true", help="save as the reference of docs/performance.md")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where to save")
    parser.add_argument(
        "--parts", nargs="+", choices=["journal", "mqtt", "backlog", "queue", "stream", "latency"], help="of 'spark'"
    )
    parser.add_argument("--sinks", nargs="+", choices=["noop", "parquet"], help="of 'spark' from a journal")
    parser.add_argument("--minutes", type=float, default=5.0, help="of 'spark_flat': how long")
    parser.add_argument(
        "--backends", default="memory,mqtt,amqp", help="backends of 'flat', 'durable' and 'outbox', separated by commas"
    )
    arguments = parser.parse_args()
    unknown = {*(arguments.peers or ())} - {"all"} - contenders.names()
    if unknown:
        parser.error(f"--peers: nobody is called {', '.join(sorted(unknown))}")
    for name in arguments.names or [name for name in BENCHMARKS if name not in _BY_NAME]:
        importlib.import_module(f"benchmarks.{name}").run(arguments)


main()
