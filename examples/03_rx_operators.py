"""Filter, transform and combine a stream with the operators of RxPY: a stream is an observable.

python examples/03_rx_operators.py [URL]
"""

import sys
import threading

from reactivex import operators as ops

import messaging
from messaging import Message

MEASURED = [20.5, 20.9, 87.0, 21.4, 21.8, 22.3, -60.0, 22.6]


def celsius(message: Message) -> float:
    return message.value(float)


def is_plausible(celsius: float) -> bool:
    return -40 < celsius < 60


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main(url: str) -> None:
    done = threading.Event()
    with messaging.connect(url) as m:
        stream = m.subscribe("examples/attic/temperature", qos=1)
        means = stream.pipe(
            ops.map(celsius),
            ops.filter(is_plausible),  # drops the values of a broken sensor
            ops.buffer_with_count(2),
            ops.map(mean),
            ops.take(3),  # completes after three values, which ends the subscription at the broker
        )
        # Returns when the broker has confirmed the subscription. The callbacks run on a worker thread, one message at a
        # time. A message is acknowledged when it has passed all operators, and rejected if a function raises.
        means.subscribe(
            on_next=lambda mean: print(f"mean of two: {mean:.1f}"),
            on_error=lambda error: print(f"failed: {error}"),
            on_completed=done.set,
        )
        for measured in MEASURED:
            m.publish("examples/attic/temperature", measured, qos=1)
        done.wait(timeout=20)
    print("completed" if done.is_set() else "timed out")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples")
