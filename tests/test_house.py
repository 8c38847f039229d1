"""Each measure of the structure finds what is planted in a small tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from messaging.testing.tables import table
from tests.house import House, trace
from tests.house.measures import MEASURES

MANY_METHODS = "\n".join(
    [
        "class Mixin:",
        *(f"    def m{number}(self): ..." for number in range(12)),
        "class Large(Mixin[int]):",
        *(f"    def m{number}(self): ..." for number in range(11, 23)),
        "class Small(Mixin):",
        *(f"    def m{number}(self): ..." for number in range(22)),
    ]
)
CONSTRUCTORS = """
class Large:
    def __init__(self, a, b, c, d, e, f, g, h, *, i): ...
class Small:
    def __init__(self, a, b, c, d, e, f, g, *h): ...
"""
PROTOCOLS = """
class Lonely(Protocol):
    size: int
    def put(self, item): ...
class Shared(Protocol):
    def get(self): ...
class Callback(Protocol):
    def __call__(self): ...
class Base(ABC):
    @abstractmethod
    def run(self): ...
class One(Base):
    def __init__(self): self.size = 0
    def put(self, item): ...
    def get(self): ...
class Two:
    def get(self): ...
"""
FORWARDERS = """
class Owner:
    @property
    def size(self): return self._buffer.size
    @property
    def own(self): return self._own
    @property
    def computed(self): return self._buffer.size()
    def put(self, item, *more, key=None, **rest):
        '''Put.'''
        self._buffer.put(item, *more, key=key, **rest)
    async def flush(self, timeout): return await flush(timeout)
    def close(self): return self._buffer.close()
    def swapped(self, a, b): return self._buffer.put(b, a)
    def changed(self, a): return self._buffer.put(a + 1)
    def constant(self, a): return self._buffer.put(a, key=1)
    def renamed(self, a): return self._buffer.put(key=a)
    def chained(self): return self._buffer().close()
"""
FUNCTION = '''
@wraps
def f():
    """Return
    one.
    """
    # why

    return 1
'''
RUN = "\n".join(f"step({number})" for number in range(6))
SPACED_RUN = "def f():\n" + "\n\n    # why\n    import a\n".join(f"    step({number})" for number in range(6))
EXCEPTIONS = """
try: f()
except BaseException: g()
try: f()
except (ValueError, BaseException): g()
try: f()
except BaseExceptionGroup: g()
"""


def planted(root: Path, files: Mapping[str, str]) -> House:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return House(root)


@table(
    "measure, files, expected",
    [
        ("modules over 600 lines", {"a": "\n" * 601, "b": "\n" * 600}, ["messaging/a.py:1: 601 lines"]),
        ("modules under 60 lines", {"a": "\n" * 59, "b": "\n" * 60, "c/__init__": ""}, ["messaging/a.py:1: 59 lines"]),
        (
            "module names used several times",
            {"a/route": "", "b/route": "", "a/settings": "", "b/settings": "", "testing/route": ""},
            ["route (2): messaging/a/route.py:1, messaging/b/route.py:1"],
        ),
        ("import floors of messaging", {"a": "from messaging.b import c", "b": ""}, ["floor 1: b", "floor 2: a"]),
        ("classes over 22 methods", {"a": MANY_METHODS}, ["messaging/a.py:14: Large: 23 methods"]),
        ("constructors over 8 parameters", {"a": CONSTRUCTORS}, ["messaging/a.py:3: Large: 9 parameters"]),
        (
            "protocols with one implementation",
            {"a": PROTOCOLS, "testing/doubles": "class Double:\n    size = 0\n    def put(self, item): ..."},
            [
                "messaging/a.py:2: protocol Lonely: 1 implementations",
                "messaging/a.py:9: abstract class Base: 1 implementations",
            ],
        ),
        (
            "nouns with several classes",
            {"a": "class _Route: ...\nclass Own: ...\nclass Own: ...", "b": "class B:\n    class Route: ..."},
            ["Route (2): messaging/a.py:1, messaging/b.py:2"],
        ),
        (
            "pure forwarders",
            {"a": FORWARDERS},
            [
                "messaging/a.py:4: size -> self._buffer.size",
                "messaging/a.py:9: put -> self._buffer.put",
                "messaging/a.py:12: flush -> flush",
                "messaging/a.py:13: close -> self._buffer.close",
            ],
        ),
        (
            "pairs of places that share 6 lines",
            {"a": RUN, "b": SPACED_RUN, "c": RUN.replace("step(3)", "other")},
            ["6 lines: messaging/a.py:1 = messaging/b.py:2: step(0)"],
        ),
        (
            "except BaseException",
            {"a": EXCEPTIONS},
            ["messaging/a.py:3: except BaseException", "messaging/a.py:5: except (ValueError, BaseException)"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_measure_lists_its_places(
    measure: str, files: Mapping[str, str], expected: list[str], tmp_path: Path
) -> None:
    found = MEASURES[measure](planted(tmp_path, {f"messaging/{name}.py": text for name, text in files.items()}))
    assert isinstance(found, Sequence)
    assert list(map(str, found)) == expected


@table("measure, figure", [("mean lines of a function", 8), ("mean lines of code of a function", 3)])
def test_the_mean_length_of_functions(measure: str, figure: int, tmp_path: Path) -> None:
    assert MEASURES[measure](planted(tmp_path, {"messaging/a.py": FUNCTION})) == figure


@table(
    "files, module",
    {
        "a folder of packages": (["adapters/messaging_adapters/mqtt/wire.py"], "messaging_adapters.mqtt.wire"),
        "a package": (["adapters/__init__.py", "adapters/mqtt/wire.py"], "adapters.mqtt.wire"),
    },
)
def test_modules_are_named_as_they_are_imported(files: list[str], module: str, tmp_path: Path) -> None:
    assert module in planted(tmp_path, dict.fromkeys(files, "")).modules


FAKE = """
from messaging.steps import Face as connect
from adapters.fake import unused
"""
STEPS = """
class Face:
    def __init__(self, url): self.handlers = {}
    def __enter__(self): return self
    def __exit__(self, *_): ...
    def on(self, channel): return lambda handler: self.handlers.setdefault(channel, handler)
    reply = on
    def publish(self, channel, item):
        self.handlers[channel](item)
        return self
    def request(self, channel, item, model):
        for _ in range(2):
            self.check()
        return self.publish(channel, item)
    def check(self): ...
    def result(self, timeout): ...
"""


def test_the_trace_counts_the_modules_and_calls_of_a_message(tmp_path: Path) -> None:
    files = {
        "pyproject.toml": '[project.entry-points."messaging.adapters"]\nmemory = "adapters.fake:Adapter"',
        "messaging/__init__.py": FAKE,
        "messaging/steps.py": STEPS,
        "adapters/__init__.py": "",
        "adapters/fake.py": "def unused(): ...",
    }
    house = planted(tmp_path, files)
    assert trace.modules(house, "publish") == ["messaging/steps.py: 2 calls"]
    assert dict(trace.functions(house, "request")) == {
        "messaging/steps.py: Face.request": 1,
        "messaging/steps.py: Face.check": 2,
        "messaging/steps.py: Face.publish": 1,
        "messaging/steps.py: Face.result": 1,
    }
