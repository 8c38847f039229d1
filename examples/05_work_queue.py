"""Share the jobs of one queue between workers, so that each job is done once.

python examples/05_work_queue.py [URL]
"""

import collections
import queue
import sys
import time
from collections.abc import Callable

import messaging

JOBS = 12


def main(url: str) -> None:
    done: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def worker(name: str) -> Callable[[int], None]:
        def work(number: int) -> None:
            time.sleep(0.02)  # The work. If it raised, the job would be rejected and redelivered.
            done.put((name, number))

        return work

    with messaging.connect(url) as m:
        # Handlers of the same queue compete for its messages. prefetch=1: no job waits behind a job in progress while
        # the other worker is free. Both workers are in this program; two programs on two machines work the same way.
        # m.on() returns when the broker has confirmed. A job is acknowledged when its handler returns.
        for name in ("Ada", "Grace"):
            m.on("examples/jobs", worker(name), queue="examples-jobs", prefetch=1, qos=1)
        for number in range(JOBS):
            m.publish("examples/jobs", number, qos=1)
        finished = [done.get(timeout=20) for _ in range(JOBS)]

    for name, count in sorted(collections.Counter(name for name, _ in finished).items()):
        print(f"{name} did {count} jobs")
    print("done, each once:", sorted(number for _, number in finished) == list(range(JOBS)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples")
