"""Promise: the outcome of something that happens later (what the RFC calls an OSGi Promise).

Resolved once, by the engine. It can be waited for from any side: ``result(timeout)`` on a thread, ``await`` in any
event loop, ``add_done_callback`` otherwise. A failure that nobody looks at is logged when the promise is forgotten.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any, Final, Generic, TypeVar

from messaging.errors import DeadlineError, MessagingError
from messaging.execution.mailboxes import mailbox
from messaging.execution.threads import call_back
from messaging.execution.waiting import Flag, refuse_in_loop, runs_loop, seconds
from messaging.forking import hold_over_fork
from messaging.text import SafeLog, printable, tolerant

logger = SafeLog(__name__)

T = TypeVar("T")

#: the value of a promise without outcome
PENDING: Final = object()
#: guards the first listener of any promise: rare and short, so one lock serves all
_listener_lock = threading.Lock()


hold_over_fork(_listener_lock)


class Promise(Generic[T]):
    """An outcome to come. Thread safe.

    Args:
        what: names the operation in errors and logs, such as ``"publish to 'a/b'"``; or a function that makes the
            name when it is needed.
    """

    __slots__ = ("__weakref__", "_error", "_listeners", "_looked_at", "_value", "_what")

    def __init__(self, what: str | Callable[[], str] = "operation") -> None:
        self._what = what
        self._value: Any = PENDING
        self._error: MessagingError | None = None
        self._listeners: list[Callable[[], object]] | None = None
        self._looked_at = False

    # --- waiting

    def done(self) -> bool:
        """Whether the outcome is there."""
        return self._value is not PENDING

    def result(self, timeout: float | None = None) -> T:
        """Wait for the outcome and return it; blocks the calling thread.

        Args:
            timeout: seconds; ``None`` waits as long as the operation's own deadline lets it take.

        Raises:
            ArgumentError: ``timeout`` is no number.
            DeadlineError: ``timeout`` passed. The operation goes on.
            WouldBlockError: the outcome is not there yet, and the thread runs an event loop: ``await`` the promise.
            MessagingError: the operation failed; the same error every time.
        """
        if timeout is not None:
            timeout = seconds(timeout)
        if self._value is PENDING:
            self._wait(timeout)
        self._looked_at = True
        if self._error is not None:
            # one error object may be raised often: its traceback must not grow with each time
            raise self._error.with_traceback(None)
        value: T = self._value
        return value

    def exception(self, timeout: float | None = None) -> MessagingError | None:
        """Wait for the outcome and return its error, or ``None`` if it succeeded. Parameters as :meth:`result`."""
        if timeout is not None:
            timeout = seconds(timeout)
        if self._value is PENDING:
            self._wait(timeout)
        self._looked_at = True
        return self._error

    def _wait(self, timeout: float | None) -> None:
        if timeout != 0 and runs_loop():
            refuse_in_loop(f"the outcome of {self.what}", "`await` the promise")
        arrived = Flag()
        try:
            self.listen(arrived.set)
            if not arrived.wait(timeout):
                raise DeadlineError(f"no outcome of {self.what} within {timeout:g} s")
        except BaseException:  # an interrupt, too
            self._take_back(arrived.set)
            raise

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
            except BaseException:
                self._take_back(listener)
                raise
        return self.result()

    def add_done_callback(self, callback: Callable[[Promise[T]], object]) -> None:
        """Call ``callback(self)`` once the outcome is there, on a worker thread. Its exceptions are logged.

        Callbacks of all promises share a bounded number of threads (``workers.CALLBACK_THREADS``): one that blocks
        holds up others.
        """
        self._looked_at = True

        def run() -> None:
            try:
                callback(self)
            except BaseException:  # whatever it is, nobody else is to suffer from it
                logger.exception("callback of %s raised", self.what)

        self.listen(lambda: call_back(run))

    # --- the resolving side, internal to the project

    @property
    def what(self) -> str:
        """What this is the outcome of, in words."""
        what = self._what
        return what if isinstance(what, str) else what()

    def resolve(self, value: T) -> bool:
        """Succeed with ``value``; ``False`` if there is an outcome already. On one thread only, the engine's."""
        if self._value is not PENDING:
            return False
        self._value = value
        if self._listeners is not None:
            self._notify()
        return True

    def reject(self, error: MessagingError, cause: BaseException | None = None) -> bool:
        """Fail with ``error``; otherwise as :meth:`resolve`."""
        if self._value is not PENDING:
            return False
        if cause is not None:
            error.__cause__ = cause
        self._error = error
        self._value = None
        if self._listeners is not None:
            self._notify()
        return True

    def abandon(self, error: MessagingError) -> None:
        """Fail without telling anybody: in a forked child those who listened are the parent's."""
        if self._value is PENDING:
            self._listeners = None
            self._looked_at = True
            self._error = error
            self._value = None

    def listen(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` once, on the resolving thread, or here and now if the outcome is there.

        Internal: it runs on the engine's loop, so it must be quick and must not raise.
        """
        with _listener_lock:
            if self._listeners is None:
                self._listeners = []
            listeners = self._listeners
        listeners.append(listener)
        # resolve() stores the outcome before it reads the listeners: one of the two sees the other
        if self._value is not PENDING and self._take_back(listener):
            listener()  # only this one: an interrupt of this thread must not cost others theirs

    def _take_back(self, listener: Callable[[], object]) -> bool:
        """Remove a listener; ``False`` if another thread is calling it, or has."""
        try:
            if self._listeners is not None:
                self._listeners.remove(listener)
                return True
        except ValueError:
            pass
        return False

    def _notify(self) -> None:
        listeners = self._listeners
        while listeners:
            try:
                listener = listeners.pop(0)  # atomic: of two racing threads one gets it
            except IndexError:
                return
            listener()

    def __del__(self) -> None:
        # an interrupt may have come before __init__ was through
        if getattr(self, "_error", None) is not None and not self._looked_at:
            logger.error("%s failed and nobody looked: %s: %s", self.what, type(self._error).__name__, self._error)

    @tolerant
    def __repr__(self) -> str:
        if self._value is PENDING:
            state = "pending"
        else:
            state = "resolved" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<Promise of {printable(self.what)}: {state}>"
