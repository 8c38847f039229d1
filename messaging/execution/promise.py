"""Promise: the future outcome of an operation (the OSGi Promise of the RFC).

The engine resolves a promise once. ``result(timeout)`` waits on a thread, ``await`` in any event loop, and
``add_done_callback`` does not wait. A failure that is never retrieved is logged when the promise is garbage-collected.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any, Final, Generic, Self, TypeVar

from messaging.environment import forks
from messaging.environment.signals import attempt
from messaging.errors import ClosedError, DeadlineError, MessagingError, UnsupportedFeatureError
from messaging.errors.checks import check_procedure, check_result
from messaging.errors.text import SafeLog, printable, tolerant
from messaging.execution.mailboxes import mailbox
from messaging.execution.threads import call_back
from messaging.execution.waiting import Flag, may_block, refuse_in_loop, seconds

logger = SafeLog(__name__)

T = TypeVar("T")
U = TypeVar("U")

#: the value of a promise that has no outcome yet
PENDING: Final = object()
#: guards the first listener of each promise; held rarely and shortly, so one lock serves all promises
_listener_lock = threading.Lock()
forks.hold_over_fork(_listener_lock)


class Promise(Generic[T]):
    """The future outcome of an operation. Thread safe.

    Args:
        what: name of the operation in errors and logs, such as ``"publish to 'a/b'"``, or a function that returns the
            name on demand.
    """

    __slots__ = ("__weakref__", "_error", "_generation", "_listeners", "_value", "_what", "was_retrieved")

    def __init__(self, what: str | Callable[[], str] = "operation") -> None:
        self._what = what
        self._value: Any = PENDING
        self._error: MessagingError | None = None
        self._listeners: list[Callable[[], object]] | None = None
        self.was_retrieved = False
        self._generation = forks.generation

    @classmethod
    def resolved(cls, value: T, what: str | Callable[[], str] = "operation") -> Self:
        """Return a promise that has its value already. On any thread."""
        promise = cls(what)
        promise.resolve(value)
        return promise

    # --- waiting

    def done(self) -> bool:
        """Return whether the promise has its outcome."""
        return self._value is not PENDING or self._is_abandoned()

    def result(self, timeout: float | None = None) -> T:
        """Block the calling thread until the outcome, and return it.

        Args:
            timeout: seconds; ``None``: until the operation's own deadline.

        Raises:
            ArgumentError: ``timeout`` is no number.
            DeadlineError: ``timeout`` passed. The operation continues.
            WouldBlockError: the promise is pending, and the thread runs an event loop: ``await`` the promise.
            MessagingError: the operation failed. Each call raises the same error.
        """
        if timeout is not None:
            timeout = seconds(timeout)
        if self._value is PENDING:
            self._wait(timeout)
        self.was_retrieved = True
        if self._error is not None:
            # the error may be raised many times, and must not collect a longer traceback each time
            raise self._error.with_traceback(None)
        value: T = self._value
        return value

    def exception(self, timeout: float | None = None) -> MessagingError | None:
        """Wait as :meth:`result` does, and return the error, or ``None`` if the operation succeeded."""
        if timeout is not None:
            timeout = seconds(timeout)
        if self._value is PENDING:
            self._wait(timeout)
        self.was_retrieved = True
        return self._error

    def _wait(self, timeout: float | None) -> None:
        if timeout != 0 and not may_block():
            refuse_in_loop(f"the outcome of {self.what}", "`await` the promise")
        arrived = Flag()
        try:
            self.listen(arrived.set)
            if not arrived.wait(timeout):
                raise DeadlineError(f"no outcome of {self.what} within {timeout:g} s")
        finally:
            if self._value is PENDING:  # an interrupt, or the deadline
                self._take_back(arrived.set)

    def __await__(self) -> Generator[Any, None, T]:
        if self._value is PENDING:
            future = asyncio.get_running_loop().create_future()
            box = mailbox(future.get_loop())

            def arrived() -> None:
                if not future.done():
                    future.set_result(None)

            def listener() -> None:
                box.post(arrived)

            try:
                self.listen(listener)
                yield from future
            finally:
                if self._value is PENDING:  # cancelled, or closed
                    self._take_back(listener)
        return self.result()

    @property
    def stored(self) -> Promise[None]:
        """Return a promise that resolves when the message of this promise is stored (setting ``outbox_path``).

        Stored is what the setting ``outbox_fsync`` says. From then on the message is sent, also by a later instance
        with the same ``outbox_path``. The promise fails if the message was not accepted, and with
        ``UnsupportedFeatureError`` if its instance has no ``outbox_path``.
        """
        what = self.what
        unsupported: Promise[None] = Promise(f"store the message of {what}")
        unsupported.was_retrieved = True
        unsupported.reject(UnsupportedFeatureError("outbox_path", what, "only messages of a durable outbox are stored"))
        return unsupported

    def add_done_callback(self, callback: Callable[[Promise[T]], object]) -> None:
        """Call ``callback(self)`` on a worker thread after the outcome. Its exceptions are logged.

        Raises:
            ArgumentError: ``callback`` cannot be called, or is a coroutine function, which is not awaited here.

        Callbacks of all promises share a bounded number of threads (``threads.CALLBACK_THREADS``): a callback that
        blocks delays others.
        """
        check_procedure(callback, "a done callback")
        self.was_retrieved = True

        def run() -> None:
            error = attempt(lambda: check_result(callback(self), "a done callback"))
            if error is not None:
                logger.error("callback of %s raised", self.what, exc_info=error)

        self.listen(lambda: call_back(run))

    # --- the resolving side, internal to the project

    def peek(self) -> tuple[Any, MessagingError | None]:
        """Return value and error of a settled promise. They count as not retrieved by this call."""
        return self._value, self._error

    @property
    def what(self) -> str:
        """Return the name of the operation."""
        what = self._what
        return what if isinstance(what, str) else what()

    def resolve(self, value: T) -> bool:
        """Succeed with ``value``; return ``False`` if there is an outcome already. On the engine's thread only."""
        if self._value is not PENDING:
            return False
        self._value = value
        if self._listeners is not None:
            self.call_listeners()
        return True

    def reject(self, error: MessagingError, cause: BaseException | None = None) -> bool:
        """Fail with ``error``; return ``False`` if there is an outcome already. On the engine's thread only."""
        if self._value is not PENDING:
            return False
        if cause is not None:
            error.__cause__ = cause
        self._error = error
        self._value = None
        if self._listeners is not None:
            self.call_listeners()
        return True

    @property
    def is_inherited(self) -> bool:
        """Return whether a parent of this process made the promise: if it is pending, it stays so."""
        return self._generation != forks.generation

    def _is_abandoned(self) -> bool:
        """Fail a pending promise of a parent process; return whether it is one. Its listeners are the parent's."""
        if not self.is_inherited:
            return False
        error = ClosedError(f"{self.what}: begun by the parent of this process, which alone gets the outcome")
        with _listener_lock:
            if self._value is PENDING:
                self._listeners = None
                self.was_retrieved = True
                self._error = error
                self._value = None
        return True

    def listen(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` once: on the resolving thread, or on this one if the promise has its outcome.

        The listener may run on the engine's loop, so it must be quick and must not raise.
        """
        if self._value is PENDING:
            self._is_abandoned()
        with _listener_lock:
            if self._listeners is None:
                self._listeners = []
            listeners = self._listeners
        listeners.append(listener)
        # resolve() stores the outcome before it reads the listeners: one of the two sees the other
        if self._value is not PENDING and self._take_back(listener):
            listener()  # no others: an interrupt of this thread must not lose their calls

    def _take_back(self, listener: Callable[[], object]) -> bool:
        """Remove a listener; return ``False`` if another thread calls it or has called it."""
        try:
            if self._listeners is not None:
                self._listeners.remove(listener)
                return True
        except ValueError:
            pass
        return False

    def call_listeners(self) -> None:
        """Call the listeners, each once; the outcome must be stored."""
        listeners = self._listeners
        while listeners:
            try:
                listener = listeners.pop(0)  # atomic: of two racing threads one gets it
            except IndexError:
                return
            listener()

    def __del__(self) -> None:
        # an interrupt may have ended __init__ early
        if getattr(self, "_error", None) is not None and not self.was_retrieved:
            logger.error(
                "%s failed and its result was never retrieved: %s: %s",
                self.what,
                type(self._error).__name__,
                self._error,
            )

    @tolerant
    def __repr__(self) -> str:
        if self._value is PENDING:
            state = "pending"
        else:
            state = "resolved" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<Promise of {printable(self.what)}: {state}>"


def result_of(start: Callable[[], Promise[T]], what: str, instead: str) -> T:
    """Start an operation and return its result, for methods that block.

    Args:
        start: starts the operation; it is not called on a thread that runs an event loop.
        what: name of the awaited event.
        instead: the form that does not block, for the error.

    Raises:
        WouldBlockError: the thread runs an event loop. Nothing was done.
    """
    refuse_in_loop(what, instead)
    return start().result()


def converted(promise: Promise[T], convert: Callable[[T], U], what: str | Callable[[], str]) -> Promise[U]:
    """Return the promise of the result of another one in a different form.

    Args:
        promise: its failure is also that of the returned promise.
        convert: makes the result; runs on the resolving thread. A ``MessagingError`` that it raises is the failure.
        what: name of the operation.
    """
    made: Promise[U] = Promise(what)

    def settle() -> None:
        try:
            made.resolve(convert(promise.result(0)))
        except MessagingError as error:
            made.reject(error)

    promise.listen(settle)
    return made
