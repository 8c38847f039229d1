"""The interceptors of received messages, and the scopes in which messages are processed.

A scope has a :class:`contextvars.Context` of its own: context managers of interceptors are entered and exited in it, on
whatever thread, so that they can reset the context variables that they set. Handlers and observers run in it, too. The
body of a loop cannot: there, the variables that the interceptors set are set in the context of the caller, and restored
when the scope is left.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager
from contextvars import Context, ContextVar, Token, copy_context
from typing import Any, Final, TypeVar

from messaging.environment.signals import on_failure
from messaging.errors.text import SafeLog
from messaging.interception.interceptor import InboundMessage, InboundOperation, InstanceInfo, Interceptor
from messaging.model import AcknowledgeType, Message, context_of

logger = SafeLog(__name__)

T = TypeVar("T")

_RECEIVED: Final = AcknowledgeType.RECEIVED
_REJECTED: Final = AcknowledgeType.REJECTED
_MISSING: Final = object()

Managers = list[AbstractContextManager[object]]


class ProcessChain:
    """The interceptors of the received messages of one instance. Thread safe.

    Args:
        interceptors: the outermost first.
        instance: for interceptors.
        operation: what the messages are.
    """

    def __init__(
        self, interceptors: Sequence[Interceptor], instance: InstanceInfo, operation: InboundOperation
    ) -> None:
        self._interceptors = tuple(interceptors)
        self._instance = instance
        self._operation = operation

    def inbound(
        self,
        message: Message,
        subscription: str,
        queue: str | None,
        *,
        is_pulled: bool = False,
        is_manual: bool = False,
    ) -> InboundMessage:
        """Return what interceptors are given of a message."""
        return InboundMessage(
            self._instance, self._operation, message, subscription, queue, is_pulled=is_pulled, is_manual=is_manual
        )

    def enter(self, inbound: InboundMessage) -> Managers:
        """Enter the context managers of the interceptors, in the current context; return the entered ones."""
        entered: Managers = []
        with on_failure(lambda: self.exit(entered, inbound, sys.exception())):  # an interrupt
            for each in self._interceptors:
                try:
                    manager = each.intercept_process(inbound)
                    if manager is not None:
                        type(manager).__enter__(manager)
                        entered.append(manager)
                except Exception as error:  # noqa: BLE001  # of the interceptor
                    _log_skipped(inbound, each, error)
        return entered

    def exit(self, entered: Managers, inbound: InboundMessage, error: BaseException | None) -> None:
        """Exit context managers, in the current context."""
        if inbound.is_manual:
            inbound.outcome = "pending"
        elif error is None or self._operation == "request":  # its failure is reported to the requester
            inbound.outcome = "acknowledged"
        else:
            inbound.outcome = "rejected"
        state = getattr(context_of(inbound.message), "state", _RECEIVED)
        if state is _REJECTED:
            inbound.outcome = "rejected"
        elif state is AcknowledgeType.ACKNOWLEDGED:
            inbound.outcome = "acknowledged"
        kind = None if error is None else type(error)
        traceback = None if error is None else error.__traceback__
        while entered:
            manager = entered.pop()
            try:
                type(manager).__exit__(manager, kind, error, traceback)
            except Exception as raised:  # noqa: BLE001  # of the interceptor, or the one it was given
                if raised is not error:
                    _log_skipped(inbound, manager, raised)


def _log_skipped(inbound: InboundMessage, what: object, error: Exception) -> None:
    logger.error(
        "%s: interceptor %s raised on a message of %r; it is skipped",
        inbound.instance.name, type(what).__name__, inbound.message.context.channel, exc_info=error,
    )  # fmt: skip


class Scope:
    """The processing of one message, inside the interceptors, which are entered when it is made."""

    __slots__ = ("_chain", "_entered", "context", "inbound")

    def __init__(self, chain: ProcessChain, inbound: InboundMessage) -> None:
        self._chain = chain
        self.inbound = inbound
        #: in which the handler is called
        self.context: Context = copy_context()
        #: the entered managers, in a list of their own: the thread that pops it exits them
        self._entered: list[Managers] = [self.context.run(chain.enter, inbound)]

    def run_beside(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call ``function`` in a copy of the context: also while the scope is running, or after it was left."""
        return self.context.copy().run(function, *arguments)

    @types.coroutine
    def stepping(self, awaitable: Awaitable[T]) -> Generator[Any, Any, T]:
        """Return an awaitable that runs each step of ``awaitable`` in the context of the scope."""
        run = self.context.run
        steps: Any = run(awaitable.__await__)
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                if error is not None:
                    thrown, error = error, None
                    yielded = run(steps.throw, thrown)
                elif value is None:
                    yielded = run(next, steps)
                else:
                    yielded = run(steps.send, value)
            except StopIteration as end:
                found: T = end.value
                return found
            try:
                value = yield yielded
            except GeneratorExit:
                run(steps.close)
                raise
            except BaseException as raised:  # noqa: BLE001  # for the awaitable
                error = raised

    def leave(self, error: BaseException | None) -> None:
        """Exit the interceptors; idempotent. From any thread, while nothing runs in the context."""
        try:
            entered = self._entered.pop()
        except IndexError:
            return
        try:
            self.context.run(self._chain.exit, entered, self.inbound, error)
        except RuntimeError:  # this thread is running in the context
            self._chain.exit(entered, self.inbound, error)


class PulledScope(Scope):
    """The scope of a message whose processing is the body of a loop, in the context of the loop."""

    __slots__ = ("_set",)

    def __init__(self, chain: ProcessChain, inbound: InboundMessage) -> None:
        super().__init__(chain, inbound)
        self._set: list[tuple[ContextVar[Any], Any, Token[Any]]] = [
            (variable, value, variable.set(value))
            for variable, value in self.context.items()
            if variable.get(_MISSING) is not value
        ]

    def leave(self, error: BaseException | None) -> None:
        """Restore the context of the loop, and exit the interceptors; idempotent."""
        self.restore()
        super().leave(error)

    def restore(self) -> None:
        """Restore the variables that the interceptors set, where the body of the loop has not set others."""
        while self._set:
            variable, value, token = self._set.pop()
            if variable.get(_MISSING) is value:
                try:
                    variable.reset(token)
                except ValueError:  # another task or thread goes on with the stream
                    if token.old_value is not Token.MISSING:
                        variable.set(token.old_value)
