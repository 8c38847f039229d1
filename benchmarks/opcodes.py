"""Counts the Python instructions of a message, or a typed event, by function: exact, and the same on any machine.

Run as a script in the tree to be measured: ``python benchmarks/opcodes.py ROOT``. It publishes one message after the
other to ``memory://`` and waits until each is processed and settled. Every instruction in ``messaging`` and
``adapters`` is traced on every thread. Of each function the median over all messages counts: timers and waits vary.

It uses nothing that an earlier revision lacks, so that two revisions can be compared.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

#: messages that count, and those before them that fill caches
MESSAGES = 60
WARM_UP = 10
#: how long after a message the verdict on it is passed on, seconds
SETTLED = 0.02


class Tracer:
    """Counts the executed instructions of functions whose file is below ``root``, on all threads."""

    def __init__(self, root: str) -> None:
        self._folders = tuple(f"{root}/{name}/" for name in ("messaging", "adapters"))
        self._is_ours: dict[CodeType, bool] = {}
        self.counts: Counter[CodeType] = Counter()

    def call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        ours = self._is_ours.get(code)
        if ours is None:
            ours = self._is_ours[code] = code.co_filename.startswith(self._folders)
        if not ours:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._inside

    def _inside(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "opcode":
            self.counts[frame.f_code] += 1
        return self._inside

    def median(self, send: Callable[[int], object]) -> dict[str, int]:
        """Return the instructions of a message by function; ``send`` returns when the message is processed."""
        rounds: list[Counter[CodeType]] = []
        for number in range(WARM_UP + MESSAGES):
            self.counts.clear()
            send(number)
            time.sleep(SETTLED)
            rounds.append(Counter(self.counts))
        several = rounds[WARM_UP:]
        functions = {code for each in several for code in each}
        found = {code: int(statistics.median_low([each[code] for each in several])) for code in functions}
        return {
            f"{code.co_filename.rpartition('/messaging/')[2] or code.co_filename} {code.co_qualname}": count
            for code, count in found.items()
            if count
        }


def measure(root: str) -> dict[str, dict[str, int]]:
    """Return the instructions of a message by function, by how it is consumed."""
    tracer = Tracer(root)
    threading.settrace(tracer.call)
    sys.settrace(tracer.call)
    import messaging

    globals()["messaging"] = messaging  # where the annotations of handlers are looked up
    arrived = threading.Event()
    found: dict[str, dict[str, int]] = {}

    def got(_: messaging.Message) -> None:
        arrived.set()

    async def got_async(_: messaging.Message) -> None:
        arrived.set()

    with messaging.connect("memory://opcodes") as m:
        message = messaging.Message(b"x" * 100, messaging.MessageContext("a/b"))

        def publish(_: int) -> None:
            arrived.clear()
            m.publisher.publish(message).result(10)
            arrived.wait(10)

        for name, handler in (("handler", got), ("coroutine", got_async)):
            with m.on("a/b", handler):
                found[name] = tracer.median(publish)
        with m.subscribe("a/b") as stream:
            stream.subscribe(got)
            found["observer"] = tracer.median(publish)
        with m.subscribe("a/b") as stream:

            def receive(_: int) -> None:
                m.publisher.publish(message).result(10)
                stream.receive(10)

            found["iterator"] = tracer.median(receive)

        async def consume() -> None:
            async with m.subscribe("a/b") as other:

                async def one() -> None:
                    await m.publisher.publish(message)
                    await anext(other)

                rounds: list[Counter[CodeType]] = []
                for _ in range(WARM_UP + MESSAGES):
                    tracer.counts.clear()
                    await one()
                    await asyncio.sleep(SETTLED)
                    rounds.append(Counter(tracer.counts))
                functions = {code for each in rounds[WARM_UP:] for code in each}
                found["async iterator"] = {
                    code.co_qualname: count
                    for code in functions
                    if (count := int(statistics.median_low([each[code] for each in rounds[WARM_UP:]])))
                }

        asyncio.run(consume())

        @m.reply("r")
        def answer(request: messaging.Message) -> messaging.Message:
            return request

        def request(_: int) -> None:
            m.request("r", b"1").result(10)

        found["request"] = tracer.median(request)
    found["typed"] = _typed(tracer)
    sys.settrace(None)
    return found


@dataclass
class Reading:
    """A typed event."""

    room: str
    celsius: float


def _typed(tracer: Tracer) -> dict[str, int]:
    """Return the instructions of a typed event to one handler."""
    from messaging.typedevent import TypedEventBus

    arrived = threading.Event()

    def got(_: Reading) -> None:
        arrived.set()

    with TypedEventBus() as bus:
        bus.on("plant/a")(got)
        event = Reading("a", 21.5)

        def deliver(_: int) -> None:
            arrived.clear()
            bus.deliver(event, "plant/a")
            arrived.wait(10)

        return tracer.median(deliver)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    print(json.dumps(measure(sys.argv[1])))
