"""The monitor: a live page of instances, streams, buffers, event buses, journals and gateways.

::

    server      Monitor: the page, its API, and its viewers
    publisher   SnapshotPublisher: publishes the snapshots of a process at a broker; receives those of others
    snapshot    the reports of a process at one time, and their form in JSON
    plain       reports as plain, bounded values; masks secrets
    board       the newest snapshot of each process, its rates and charts
    views       how reports are shown, and the increases of counters
    inspector   shows messages of a channel
    access      tokens, and the rules for hosts and origins

``docs/monitor.md`` is for users.
"""

from messaging.observability.monitor.publisher import SnapshotPublisher

__all__ = ["SnapshotPublisher"]
