"""The interceptors of outgoing messages, and how they are told outcomes.

**Threads.** Interceptors run on the thread that publishes. Outcomes are known on the engine loop, where no user code
runs: they are queued, and one worker at a time tells them, a burst of them after one wake-up. If more than
``_MOST`` are waiting, a publishing thread tells some of them itself before it publishes: interceptors that are slow
slow down their publishers.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from messaging.environment.signals import on_failure
from messaging.errors import InterceptorError, MessagingError
from messaging.errors.checks import check_procedure, check_result
from messaging.errors.text import SafeLog
from messaging.execution import Promise, Serial, clock, engine
from messaging.interception.interceptor import InstanceInfo, Interceptor, OutboundMessage, OutboundOperation, Outcome
from messaging.model import Features, Message

if TYPE_CHECKING:
    from messaging.adapter import Adapter

logger = SafeLog(__name__)

P = TypeVar("P", bound=Promise[Any])

#: is called with an outcome
Told = Callable[[Outcome], object]

#: outcomes that wait for a worker, and how many a publishing thread tells if there are more
_MOST: Final = 4096
_SOME: Final = 64
_HEADERS: Final = Features.EXTENSION_HEADERS


class _Inside(threading.local):
    #: an interceptor runs on this thread
    is_set = False


_inside = _Inside()


class PublishChain:
    """The interceptors of the outgoing messages of one instance. Thread safe.

    Args:
        interceptors: the outermost first.
        instance: for interceptors.
        adapter: says whether headers can be sent.
    """

    def __init__(self, interceptors: Sequence[Interceptor], instance: InstanceInfo, adapter: Adapter) -> None:
        self._interceptors = tuple(interceptors)
        self._instance = instance
        self._adapter = adapter
        self._engine = engine()
        self._outcomes: deque[Callable[[], object]] = deque()
        self._serial = Serial(lambda: self._tell(len(self._outcomes)), lambda: self._outcomes)

    def is_bypassed(self) -> bool:
        """Return whether messages of this thread are not intercepted: the engine's, or an interceptor runs on it."""
        return _inside.is_set or self._engine.is_current_thread()

    def outbound(
        self, operation: OutboundOperation, message: Message, request: Message | None = None
    ) -> OutboundMessage:
        """Return what interceptors are given of a message."""
        carries_headers = _HEADERS in self._adapter.capabilities.features
        return OutboundMessage(self._instance, operation, message, carries_headers=carries_headers, request=request)

    def send(self, outbound: OutboundMessage, publish: Callable[[], P], of: Callable[[Any], dict[str, Any]]) -> P:
        """Call the interceptors, then ``publish``, and tell them the outcome of the promise that it returns.

        Args:
            outbound: the message. ``publish`` reads it again: the interceptors may have replaced it.
            publish: publishes it.
            of: returns further arguments of the ``Outcome``, given the promise.

        Raises:
            InterceptorError, MessagingError: an interceptor failed or refused the message, or ``publish`` did.
        """
        told = self._begin(outbound)
        with on_failure(_tell_failure, told):
            promise = publish()
        if told:
            promise.listen(partial(self._settled, promise, told, of))
        return promise

    def _begin(self, outbound: OutboundMessage) -> list[Told]:
        """Call the interceptors; return who wants to know the outcome, the outermost first.

        Raises:
            InterceptorError, MessagingError: an interceptor refused the message, or failed.
        """
        if len(self._outcomes) > _MOST:
            self._tell(_SOME)
        told: list[Told] = []
        each: Interceptor | None = None
        with on_failure(_tell_failure, told):
            _inside.is_set = True
            try:
                for each in self._interceptors:
                    callback = each.intercept_publish(outbound)
                    if callback is not None:
                        if not callable(callback):
                            raise TypeError(f"it returned {type(callback).__name__}, which is not callable")
                        check_procedure(callback, "the callback it returned")
                        told.append(callback)
                    if not isinstance(outbound.message, Message):
                        raise TypeError(f"it set the message to {type(outbound.message).__name__}")
            except MessagingError:
                raise
            except Exception as error:
                channel = outbound.message.context.channel if isinstance(outbound.message, Message) else None
                raise InterceptorError(
                    f"{outbound.operation} to {channel!r}: interceptor {type(each).__name__} failed: "
                    f"{type(error).__name__}: {error}; the message was not sent"
                ) from error
            finally:
                _inside.is_set = False
        return told

    # --- outcomes

    def _settled(self, promise: Promise[Any], told: Sequence[Told], of: Callable[[Any], dict[str, Any]]) -> None:
        """Queue an outcome. On the loop, usually."""
        self._outcomes.append(partial(_tell_outcome, promise, told, of, clock.wall_ns()))
        try:
            self._serial.wake()
        except RuntimeError:  # no thread can be started: the next outcome tries again
            logger.warning("interceptors of '%s': cannot start a thread; outcomes are told later", self._instance.name)

    def _tell(self, most: int) -> None:
        outcomes = self._outcomes
        for _ in range(most):
            try:
                tell = outcomes.popleft()
            except IndexError:  # a publishing thread was faster
                return
            tell()


def _tell_failure(told: Sequence[Told]) -> None:
    """Tell that a message was not accepted, see ``on_failure``. On the thread that publishes."""
    if told:
        _call(told, Outcome(sys.exception(), clock.wall_ns()))


def _tell_outcome(promise: Promise[Any], told: Sequence[Told], of: Callable[[Any], dict[str, Any]], at: int) -> None:
    _, error = promise.peek()
    _call(told, Outcome(error, at, **of(promise)))


def _call(told: Sequence[Told], outcome: Outcome) -> None:
    """Tell an outcome, the innermost interceptor first."""
    for callback in reversed(told):
        try:
            check_result(callback(outcome), "an interceptor's callback")
        except Exception:
            logger.exception("an interceptor raised on the outcome of a message; it is skipped")
