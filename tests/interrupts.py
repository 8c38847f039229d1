"""Raises an exception at every place of this project's code where a signal handler could.

Python looks for signals where a function is entered, after a call of a function that is not written in Python, and at
the end of each round of a loop. :class:`Interrupter` raises after those calls, and besides at the start of every line,
which covers the rest and more. Not where a ``with`` statement calls ``__exit__``, at a ``try:``, and where an exception
begins or ends to be handled: there Python looks for no signals.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Self, TypeVar

import messaging

T = TypeVar("T")

#: what a line may begin with though no handler covers it: ``try:``, and the bounds of the handling of an exception
_UNCOVERED = frozenset({"NOP", "PUSH_EXC_INFO", "POP_EXCEPT"})

#: modules that a message comes through between the buffer and the adapter
RECEIVING_MODULES = (
    "receiving/buffer.py",
    "receiving/handout.py",
    "receiving/settlement.py",
    "receiving/subscription.py",
    "consumers.py",
    "threads.py",
    "connection/subscribed.py",
)

_FOLDER = str(Path(messaging.__file__).parent)


class InterruptError(BaseException):
    """What a signal handler raises."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where to raise: before an instruction of a function."""

    code: CodeType
    offset: int
    line: int

    def __str__(self) -> str:
        return f"{Path(self.code.co_filename).name}:{self.line} {self.code.co_qualname} +{self.offset}"


@dataclass(frozen=True, slots=True)
class _Instructions:
    names: dict[int, str]
    #: where a ``with`` statement begins to call ``__exit__``
    exits: frozenset[int]
    #: the handler of exceptions of each instruction
    handlers: dict[int, int]


@cache
def _instructions(code: CodeType) -> _Instructions:
    bytecode = dis.Bytecode(code)
    all_of = [each for each in bytecode if each.opname != "CACHE"]
    exits = set()
    for first, second, third, after in zip(all_of, all_of[1:], all_of[2:], all_of[3:], strict=False):
        if after.opname in ("PRECALL", "CALL") and all(
            each.opname == "LOAD_CONST" and each.argval is None for each in (first, second, third)
        ):
            exits.add(first.offset)
            for before in reversed(all_of[: all_of.index(first)]):
                if before.opname != "SWAP":  # of the value that the block returns
                    break
                exits.add(before.offset)
    entries: Any = bytecode.exception_entries  # type: ignore[attr-defined]
    handlers = {
        each.offset: next((entry.target for entry in entries if entry.start <= each.offset < entry.end), -1)
        for each in all_of
    }
    return _Instructions({each.offset: each.opname for each in all_of}, frozenset(exits), handlers)


#: not empty while the code that runs is ready for an interrupt
_ready: list[None] = []


@contextlib.contextmanager
def ready() -> Iterator[None]:
    """The code in the block is ready for an interrupt."""
    _ready.append(None)
    try:
        yield
    finally:
        _ready.pop()


def again(call: Callable[[], T]) -> T:
    """Call until no interrupt comes."""
    while True:
        try:
            with ready():
                return call()
        except InterruptError:
            pass


class Interrupter:
    """While entered, raises :class:`InterruptError` once, when the calling thread, :func:`ready`, comes to ``place``.

    Attributes:
        places: where it could have raised so far, in order, each once.
        has_raised: whether it has.
    """

    def __init__(self, place: Place | None = None) -> None:
        self.place = place
        self.places: dict[Place, None] = {}
        self.has_raised = False
        #: the instruction that each frame has executed last
        self._last: dict[FrameType, int] = {}
        #: whose last call was of a function written in Python
        self._called_python: set[FrameType | None] = set()

    def __enter__(self) -> Self:
        sys.settrace(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.settrace(None)
        self._last.clear()
        self._called_python.clear()

    def _called(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        # Python ignores what a finalizer raises, and CPython 3.11 trips over it
        if not frame.f_code.co_filename.startswith(_FOLDER) or frame.f_code.co_name == "__del__":
            return None
        if self.place is not None and frame.f_code is not self.place.code:
            # only whether its caller called Python counts
            frame.f_trace_lines = False
            return self._returns
        frame.f_trace_opcodes = True
        return self._comes_to

    def _returns(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "return":
            self._called_python.add(frame.f_back)
        return self._returns

    def _comes_to(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "return":
            self._last.pop(frame, None)
            self._called_python.discard(frame)
            self._called_python.add(frame.f_back)
        elif event == "line":
            code = _instructions(frame.f_code)
            if frame.f_lasti not in code.exits and code.names[frame.f_lasti] not in _UNCOVERED:
                self._may_raise(frame)
        elif event == "opcode":
            code, offset = _instructions(frame.f_code), frame.f_lasti
            before = self._last.get(frame)
            self._last[frame] = offset
            called_python = frame in self._called_python
            self._called_python.discard(frame)
            if called_python:
                return self._comes_to
            # where it is handled otherwise, Python has looked before
            if (
                before is not None
                and code.names[before].startswith("CALL")
                and (code.handlers[before] == code.handlers[offset])
            ):
                self._may_raise(frame)
        return self._comes_to

    def _may_raise(self, frame: FrameType) -> None:
        if not _ready:
            return
        place = Place(frame.f_code, frame.f_lasti, frame.f_lineno)
        self.places[place] = None
        if place == self.place and not self.has_raised:
            self.has_raised = True
            raise InterruptError


def interrupt_everywhere(run: Callable[[], None], check: Callable[[], None], *modules: str) -> int:
    """Call ``run`` again and again, each time with an interrupt at another place; ``check`` after each.

    Interrupts come where ``run`` is :func:`ready` for them. Code that is only run after one is not interrupted.

    Args:
        run, check: see above.
        modules: ends of the paths of the modules that are interrupted; without any, all are. Each must exist.

    Returns:
        How many places there were.
    """
    files = [str(file) for file in Path(_FOLDER).rglob("*.py")]
    for module in modules:
        assert any(file.endswith(module) for file in files), f"there is no module {module}"
    with Interrupter() as all_places:
        run()
    check()
    places = [each for each in all_places.places if each.code.co_filename.endswith(modules or "")]
    for place in places:
        with Interrupter(place):
            try:
                run()
            except BaseException as error:
                error.add_note(f"interrupted at {place}")
                raise
        assert sys.exc_info() == (None, None, None), f"the interpreter takes {place} for an exception that is handled"
        try:
            check()
        except AssertionError as error:
            error.add_note(f"interrupted at {place}")
            raise
    return len(places)


@contextlib.contextmanager
def breakable_waits() -> Iterator[set[str]]:
    """Collect the methods of ``threading`` that the calling thread enters and that an interrupt can break.

    They are those of ``Condition`` and of the classes that use it, see :mod:`messaging.execution.waiting`.
    """
    found: set[str] = set()

    def entered(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename == threading.__file__:
            kind, _, name = code.co_qualname.partition(".")
            if kind == "Condition" and name != "__init__":
                found.add(code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        yield found
    finally:
        sys.setprofile(before)
