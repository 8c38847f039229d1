"""Which functions of the project a publish and a request enter, on all threads.

``python -P tests/house/trace.py ROOT URL`` traces the sources below ROOT, which have to be on the path, and prints the
functions and their calls as JSON. The script imports nothing else of the tests, and uses nothing that an earlier
revision lacks.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.house.sources import House

#: file, qualified name and number of calls of a function
Call = tuple[str, str, int]

URL = "memory://trace"
#: messages that count, and those before them that fill caches
MESSAGES = 30
WARM_UP = 5
#: how long after a message the acknowledgement of it is passed on, seconds
SETTLED = 0.02
TIMEOUT = 30.0


class Tracer:
    """Counts the calls of functions whose file is in the project, on all threads that start after it.

    A generator or coroutine that goes on counts as a call.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._folders = tuple(f"{root}/{name}/" for name in ("messaging", "adapters"))
        self._is_ours: dict[CodeType, bool] = {}
        self._calls: Counter[CodeType] = Counter()
        self._is_recording = False

    def entered(self, frame: FrameType, event: str, _argument: object) -> None:
        if self._is_recording and event == "call":
            code = frame.f_code
            ours = self._is_ours.get(code)
            if ours is None:
                ours = self._is_ours[code] = code.co_filename.startswith(self._folders)
            if ours:
                self._calls[code] += 1

    def calls(self, send: Callable[[], object]) -> list[Call]:
        """Return the functions that a message enters; ``send`` returns when the message is processed.

        The calls that nine messages of ten make at least count: timers and the order of threads vary.
        """
        rounds: list[Counter[CodeType]] = []
        for _ in range(WARM_UP + MESSAGES):
            self._calls = Counter()
            self._is_recording = True
            send()
            time.sleep(SETTLED)  # sleeps: the calls until the message is settled count as well
            self._is_recording = False
            rounds.append(self._calls)
        several = rounds[WARM_UP:]
        functions = {code for each in several for code in each}
        usual = {code: sorted(each[code] for each in several)[MESSAGES // 10] for code in functions}
        return [
            (os.path.relpath(code.co_filename, self._root), code.co_qualname, count)
            for code, count in usual.items()
            if count
        ]


@dataclasses.dataclass
class Order:
    item: str


def measure(root: str, url: str) -> dict[str, list[Call]]:
    """Trace a publish of an object to a handler of ``m.on``, and a request with its reply; both are typed."""
    tracer = Tracer(root)
    threading.setprofile(tracer.entered)
    sys.setprofile(tracer.entered)
    import messaging

    arrived = threading.Event()
    order = Order("nut")
    with messaging.connect(url) as m:

        @m.on("orders")
        def handle(_: Order) -> None:
            arrived.set()

        @m.reply("stock")
        def answer(request: Order) -> Order:
            return Order(request.item)

        def publish() -> None:
            arrived.clear()
            m.publish("orders", order).result(TIMEOUT)
            arrived.wait(TIMEOUT)

        def request() -> None:
            m.request("stock", order, Order).result(TIMEOUT)

        found = {"publish": tracer.calls(publish), "request": tracer.calls(request)}
    sys.setprofile(None)
    return found


def modules(house: House, what: str) -> list[str]:
    """Return the modules of which a ``publish`` or a ``request`` enters a function, each with its calls."""
    counts: Counter[str] = Counter()
    for file, _, calls in _traced(house)[what]:
        counts[file] += calls
    return [f"{file}: {calls} calls" for file, calls in sorted(counts.items())]


def functions(house: House, what: str) -> Counter[str]:
    """Return the functions that a ``publish`` or a ``request`` enters, and how often."""
    return Counter({f"{file}: {name}": calls for file, name, calls in _traced(house)[what]})


@functools.cache
def _traced(house: House) -> dict[str, list[Call]]:
    """Trace the sources of a house in a process of its own."""
    project = tomllib.loads((house.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]["messaging.adapters"]
    with tempfile.TemporaryDirectory() as folder:
        # what is installed may be another revision, with other entry points
        metadata = Path(folder) / "rx_messaging-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rx-messaging\nVersion: 0\n")
        lines = ["[messaging.adapters]", *(f"{scheme} = {adapter}" for scheme, adapter in points.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        path = os.pathsep.join(map(str, (folder, *house.import_roots)))
        command = [sys.executable, "-P", __file__, str(house.root), URL]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    found: dict[str, list[Call]] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(*sys.argv[1:])))
