"""Waiting in tests: for a condition, for messages, for the end of a stream; each with one deadline.

::

    received = Recorder()
    m.on("sensors/+", received)  # or stream.subscribe(received), or received.append as any callback
    m.publish("sensors/attic", b"21.5").result(PATIENCE)
    received.wait_for(1)
    eventually(lambda: m.runtime.get_runtime_dto().subscriptions == (), "the subscription is gone")

A wait ends as soon as its condition holds, so a long deadline costs a failing test only. On a slow machine, set the
environment variable ``TEST_PATIENCE`` to a factor: ``TEST_PATIENCE=3`` triples every deadline. With a virtual clock
(:mod:`messaging.testing.clock`) deadlines are virtual seconds.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from reprlib import Repr
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar

from messaging.execution import clock

if TYPE_CHECKING:
    from reactivex import Observable
    from reactivex.abc import DisposableBase

    from messaging import MessageStream, Messaging

T = TypeVar("T")

#: multiplies every deadline of a test
FACTOR: Final = float(os.environ.get("TEST_PATIENCE", "1"))
#: how long a test waits for anything, seconds
PATIENCE: Final = 20.0 * FACTOR

#: bounds of the pause between two looks at a condition, seconds
_SHORTEST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.02


class _Changed(threading.Condition):
    """Notified by recorders, so that a wait for what they hold ends at once."""

    def forget_threads(self) -> None:
        """Begin anew in a forked child, where the threads of the parent are gone."""
        self.__init__()  # type: ignore[misc]


_changed: Final = _Changed()
os.register_at_fork(after_in_child=_changed.forget_threads)

_short: Final = Repr()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 20
_short.maxstring = _short.maxother = 200


def eventually(condition: Callable[[], T | None], what: object = "", *, patience: float = PATIENCE) -> T:
    """Wait until ``condition()`` is true, and return what it returned. On any thread without a running event loop.

    Args:
        condition: called again and again. An ``AssertionError`` or ``LookupError`` that it raises counts as "not yet":
            what it looks at may not have arrived.
        what: the expected state, for the error; a callable is called for it at the end.
        patience: the deadline, seconds.

    Raises:
        AssertionError: the deadline has passed. The error names the last result of the condition, and the values that
            it looks at.
    """
    attempt = _Attempt(condition, what, patience)
    while not attempt.holds():
        if clock.monotonic is time.monotonic:
            with _changed:
                _changed.wait(attempt.pause())
        else:  # with a virtual clock: then time passes if nothing else is left to do
            clock.pause(attempt.pause())
    return attempt.result


async def eventually_async(condition: Callable[[], T | None], what: object = "", *, patience: float = PATIENCE) -> T:
    """Wait as :func:`eventually` does, in a coroutine, without blocking its event loop."""
    attempt = _Attempt(condition, what, patience)
    while not attempt.holds():  # noqa: ASYNC110  # the condition may depend on anything
        await asyncio.sleep(attempt.pause())
    return attempt.result


async def within(awaitable: Awaitable[T], patience: float = PATIENCE) -> T:
    """Await ``awaitable`` for at most ``patience`` seconds.

    Raises:
        TimeoutError: the deadline has passed.
    """
    async with asyncio.timeout(patience):
        return await awaitable


class _Attempt(Generic[T]):
    """The looks at one condition until its deadline."""

    result: T

    def __init__(self, condition: Callable[[], T | None], what: object, patience: float) -> None:
        self._condition = condition
        self._what = what
        self._patience = patience
        self._deadline = clock.monotonic() + patience
        self._pause = _SHORTEST_PAUSE / 2
        self._last = ""

    def holds(self) -> bool:
        """Look at the condition.

        Raises:
            AssertionError: it does not hold, and the deadline has passed.
        """
        is_last = clock.monotonic() > self._deadline
        try:
            found = self._condition()
        except AssertionError as error:
            self._last = str(error)
        except LookupError as error:
            self._last = f"the condition raised {error!r}"
        else:
            if found:
                self.result = found
                return True
            self._last = f"the condition returned {_short.repr(found)}"
        if is_last:
            raise AssertionError(self._report())
        return False

    def pause(self) -> float:
        """Return how long to wait until the next look, seconds: longer each time."""
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        return self._pause

    def _report(self) -> str:
        what = self._what() if callable(self._what) else self._what
        lines = [f"waited {self._patience:g} s in vain" + (f" for: {what}" if what else ""), f"last seen: {self._last}"]
        lines += [f"  {name} = {_short.repr(value)}" for name, value in _names_of(self._condition).items()]
        return "\n".join(lines)


def _names_of(condition: Callable[[], object]) -> dict[str, object]:
    """Return the local variables of the surrounding function that a condition uses."""
    try:
        found = inspect.getclosurevars(condition)
    except (TypeError, ValueError):  # not a Python function, or a variable without a value yet
        return {}
    return {name: value for name, value in found.nonlocals.items() if not callable(value) or isinstance(value, list)}


class Recorder(list[T]):
    """A list of what a callback was given, in order, that a test can wait for. Thread safe for one-item operations.

    It is a handler (call it), an observer of RxPY (``on_next``, ``on_error``, ``on_completed``), and a list: ``append``
    is a callback, too.

    Args:
        act: called with each item before it is recorded, on the calling thread; may raise. The item is then not
            recorded.

    Attributes:
        error: what ``on_error`` was given, or ``None``.
        is_completed: whether ``on_completed`` was called.
    """

    #: without an annotation: a handler gets the message, and not its decoded content
    __signature__ = inspect.Signature([inspect.Parameter("item", inspect.Parameter.POSITIONAL_ONLY)])

    def __init__(self, act: Callable[[T], object] | None = None) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.is_completed = False
        self._act = act
        self._disposable: DisposableBase | None = None

    def append(self, item: T, /) -> None:
        """Record ``item`` and wake waiting tests."""
        if self._act is not None:
            self._act(item)
        super().append(item)
        _tell()

    def extend(self, items: Iterable[T], /) -> None:
        """Record each of ``items``."""
        for item in items:
            self.append(item)

    def __iadd__(self, items: Iterable[T], /) -> Self:  # type: ignore[misc, override]
        self.extend(items)
        return self

    def __call__(self, item: T, /) -> None:
        """Record ``item``: a recorder is a handler."""
        self.append(item)

    def on_next(self, item: T) -> None:
        """Record ``item``."""
        self.append(item)

    def on_error(self, error: Exception) -> None:
        """Record the end of the stream."""
        self.error = error
        _tell()

    def on_completed(self) -> None:
        """Record the end of the stream."""
        self.is_completed = True
        _tell()

    @property
    def payloads(self) -> list[Any]:
        """Return the payloads of the recorded messages."""
        return [getattr(item, "payload") for item in self]  # noqa: B009  # items are messages, T says nothing of it

    def wait_for(self, count: int, *, patience: float = PATIENCE) -> list[T]:
        """Wait until at least ``count`` items are recorded, and return the items so far.

        Raises:
            AssertionError: the deadline has passed.
        """
        eventually(lambda: len(self) >= count, lambda: f"{count} items; {self._state()}", patience=patience)
        return list(self)

    def wait_payloads(self, count: int, *, patience: float = PATIENCE) -> list[Any]:
        """Wait for ``count`` messages, and return the payloads of all so far; raise as :meth:`wait_for`."""
        self.wait_for(count, patience=patience)
        return self.payloads

    def wait_payload(self, payload: object) -> list[Any]:
        """Wait for a message with ``payload``, and return the payloads of all so far; raise as :meth:`wait_for`."""
        eventually(lambda: payload in self.payloads, lambda: f"{payload!r}; {self._state()}")
        return self.payloads

    def wait_until(self, condition: Callable[[list[T]], object], what: object = "") -> list[T]:
        """Wait until ``condition`` is true of the items so far, and return them; raise as :meth:`wait_for`."""
        eventually(lambda: condition(list(self)), lambda: f"{what}; {self._state()}")
        return list(self)

    def wait_error(self) -> Exception:
        """Wait for ``on_error``, and return its exception; raise as :meth:`wait_for`."""
        return eventually(lambda: self.error, lambda: f"an error; {self._state()}")

    def wait_completed(self) -> None:
        """Wait for ``on_completed``; raise as :meth:`wait_for`."""
        eventually(lambda: self.is_completed, lambda: f"the end; {self._state()}")

    def wait_ended(self) -> Exception | None:
        """Wait for the end of the stream, and return its error, if it had one; raise as :meth:`wait_for`."""
        eventually(lambda: self.is_completed or self.error is not None, lambda: f"the end; {self._state()}")
        return self.error

    def dispose(self) -> None:
        """End the subscription that :func:`subscribed` made."""
        if self._disposable is not None:
            self._disposable.dispose()

    def _state(self) -> str:
        return f"recorded {_short.repr(list(self))}, error {self.error!r}, completed {self.is_completed}"


def _tell() -> None:
    with _changed:
        _changed.notify_all()


def observed(stream: MessageStream | Observable[Any], act: Callable[[Any], object] | None = None) -> Recorder[Any]:
    """Subscribe a recorder to ``stream``, and return it when the broker has confirmed the subscription.

    Args:
        stream: what ``subscribe`` returned; or what its ``pipe`` returned, whose subscription waits by itself.
        act: see :class:`Recorder`.
    """
    recorder: Recorder[Any] = Recorder(act)
    recorder._disposable = stream.subscribe(recorder.on_next, recorder.on_error, recorder.on_completed)
    ready = getattr(stream, "ready", None)
    if ready is not None:
        ready.result(PATIENCE)
    return recorder


def subscribed(m: Messaging, channel: Any, *args: Any, **context: Any) -> Recorder[Any]:
    """Subscribe to ``channel``, and return a recorder of its messages when the broker has confirmed the subscription.

    Args:
        m: the instance.
        channel: as ``m.subscribe`` takes it.
        args, context: for ``m.subscribe``.
    """
    return observed(m.subscribe(channel, *args, **context))


def in_thread(function: Callable[..., T], *args: Any) -> Future[T]:
    """Call ``function`` in a thread of its own, and return a future of its result.

    ``results(in_thread(work, number) for number in range(8))`` runs eight calls at a time, and raises their errors.
    """
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001  # raised where the result is asked for
            outcome.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return outcome


class _Settled(Protocol):
    def result(self, timeout: float | None = None) -> Any: ...


def results(promises: Iterable[_Settled], patience: float = PATIENCE) -> list[Any]:
    """Return the results of ``promises``, in their order; each within ``patience`` seconds.

    A generator is exhausted first, so that what makes the promises does not wait in between.
    """
    return [promise.result(patience) for promise in [*promises]]
