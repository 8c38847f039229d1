"""Point to point: workers compete for the jobs of one queue, and each job is done once.

python examples/05_work_queue.py [URL]
"""

import collections
import queue
import sys
import time
from collections.abc import Callable

import messaging
from messaging import Message

JOBS = 12


def main(url: str) -> None:
    done: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def worker(name: str) -> Callable[[Message], None]:
        def work(message: Message) -> None:
            time.sleep(0.02)  # the work. If it raised, the job would be rejected, and given to somebody else.
            done.put((name, message.value(int)))

        return work

    with messaging.connect(url) as m:
        # Subscriptions that name the same queue compete. prefetch=1: no job waits behind one in progress while another
        # worker is free. Here the workers are two streams; they may as well be two programs on two machines.
        for name in ("Ada", "Grace"):
            m.subscribe("examples/jobs", queue="examples-jobs", prefetch=1, qos=1).subscribe(worker(name))
        for number in range(JOBS):
            m.publish("examples/jobs", number, qos=1)
        finished = [done.get(timeout=20) for _ in range(JOBS)]

    for name, count in sorted(collections.Counter(name for name, _ in finished).items()):
        print(f"{name} did {count} jobs")
    print("done, each once:", sorted(number for _, number in finished) == list(range(JOBS)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples")
