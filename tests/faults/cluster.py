"""A quorum queue that loses its majority, and with it its leader, while messages are published to it.

``python -m tests.faults.cluster --outages 2 --seconds 20 --window 1``: three RabbitMQ nodes on the loopback interface.
Publisher and consumer use one node; each outage kills the other two, the queue's first leader among them, and ends the
connections, so that the broker refuses messages (``basic.nack``) until the majority is back. Ends with status 1 if a
message was refused for good, a confirmed one did not arrive, or, with a window of one message, the first deliveries
are out of order. Takes two to three minutes; not part of the suite.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from typing import Final

import messaging
from messaging import Messaging, OutcomeUnknownError, Promise
from messaging.testing.brokers import RabbitMQ
from messaging.testing.waiting import eventually

#: deadline of a publish, seconds
DEADLINE: Final = 60.0
#: between two messages, seconds
PAUSE: Final = 0.005
CHANNEL: Final = "faults/cluster"


class Run:
    """Publishes numbers, and receives them from a quorum queue.

    Args:
        publisher, consumer: instances connected to the node that stays.
    """

    def __init__(self, publisher: Messaging, consumer: Messaging) -> None:
        self.promises: list[Promise[None]] = []
        self.received: list[int] = []
        self._publisher = publisher
        self._stream = consumer.subscribe(CHANNEL, queue="cluster", queue_type="quorum")
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._consume), threading.Thread(target=self._publish)]

    def start(self) -> None:
        """Begin to publish and to receive, each on a thread."""
        self._stream.ready.result(timeout=DEADLINE)
        for thread in self._threads:
            thread.start()

    def _consume(self) -> None:
        for message in self._stream:
            self.received.append(int(message.payload))

    def _publish(self) -> None:
        while not self._is_over.wait(PAUSE):
            self.promises.append(self._publisher.publish(CHANNEL, b"%d" % len(self.promises)))

    def finish(self) -> Counter[str]:
        """End publishing, and return what became of the messages: ``confirmed``, or the name of an error."""
        self._is_over.set()
        self._threads[1].join()
        errors = [promise.exception(timeout=DEADLINE + 10.0) for promise in self.promises]
        confirmed = {number for number, error in enumerate(errors) if error is None}
        with suppress(AssertionError):  # it is counted
            eventually(lambda: confirmed.issubset(self.received), patience=DEADLINE)
        self._stream.close()
        self._threads[0].join()
        outcomes = Counter("confirmed" if error is None else type(error).__name__ for error in errors)
        outcomes["confirmed and lost"] = len(confirmed.difference(self.received))
        return outcomes

    def misplaced(self) -> int:
        """Count first deliveries that came after one of a later message."""
        highest, count = -1, 0
        for number in dict.fromkeys(self.received):
            count += number < highest
            highest = max(highest, number)
        return count


def main() -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.cluster", description=__doc__)
    parser.add_argument("--outages", type=int, default=2, help="how often the majority is lost")
    parser.add_argument("--seconds", type=float, default=20.0, help="for how long")
    parser.add_argument("--window", type=int, default=1_000, help="setting publish_window of the publisher")
    given = parser.parse_args()
    with ExitStack() as stack:
        stays = stack.enter_context(RabbitMQ())
        others = [stack.enter_context(RabbitMQ(cluster=stays)) for _ in range(2)]
        # a queue has its first leader where it is declared
        with messaging.connect(others[0].url) as m, m.subscribe(CHANNEL, queue="cluster", queue_type="quorum"):
            pass
        publisher = messaging.connect(stays.url, publish_window=given.window, timeout=DEADLINE)
        run = Run(stack.enter_context(publisher), stack.enter_context(messaging.connect(stays.url)))
        run.start()
        for number in range(1, given.outages + 1):
            time.sleep(5.0)  # sleeps: traffic before the outage
            sys.stdout.write(f"outage {number}: {len(run.promises)} published, {len(run.received)} received\n")
            sys.stdout.flush()
            for node in others:
                node.kill()
            stays.ctl("close_all_connections", "outage")
            time.sleep(given.seconds)  # sleeps: the outage
            for node in others:
                node.start()
        time.sleep(5.0)  # sleeps: traffic after the last outage
        outcomes, misplaced = run.finish(), run.misplaced()
        twice = len(run.received) - len(set(run.received))
    sys.stdout.write(f"{outcomes}; delivered again: {twice}; first deliveries out of order: {misplaced}\n")
    unknown = outcomes[OutcomeUnknownError.__name__]
    is_right = outcomes["confirmed"] + unknown == len(run.promises) and not outcomes["confirmed and lost"]
    return 0 if is_right and not (given.window == 1 and misplaced) else 1


if __name__ == "__main__":
    sys.exit(main())
