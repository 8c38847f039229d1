"""Handlers: what they take, what calls them, the interceptors around them, and the work that they are given.

What a handler is (a plain function, a coroutine function, a generator function; the type of its argument) is found out
once, when it is registered. :meth:`RunnableHandler.start` is what calls it.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import enum
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from types import CoroutineType, SimpleNamespace
from typing import (
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from reactivex import Observable

from messaging.codecs import check_model
from messaging.errors import ArgumentError, CodecError
from messaging.errors.checks import is_coroutine
from messaging.execution import Promise, running_loop, workers
from messaging.interception import ProcessChain, Scope
from messaging.model import Message, maker

T = TypeVar("T")

#: the parameter has no annotation
NOT_ANNOTATED: Final[Any] = inspect.Parameter.empty


# --- where user code runs


class _InObserver(threading.local):
    #: the subscription whose observer runs on this thread; ``True`` for a message handler
    push: Any | Literal[True] | None = None


observing: Final = _InObserver()

#: the task that runs the coroutine of a message handler, in the context of this task and of those it starts
_handler_task: Final[ContextVar[asyncio.Task[Any] | None]] = ContextVar("messaging_handler_task", default=None)


def in_observer() -> bool:
    """Return whether the caller is an observer's callback or a message handler, which must not wait for its own end."""
    if observing.push is not None:
        return True
    task = _handler_task.get()
    return task is not None and running_loop() is not None and task is asyncio.current_task()


async def _await_inside(awaitable: Awaitable[T]) -> T:
    """Await a message handler in a task of its own; :func:`in_observer` returns true meanwhile."""
    _handler_task.set(asyncio.current_task())
    return await awaitable


# --- what handlers take


class MessageParameter(NamedTuple):
    """The annotation ``Message`` or ``Message[model]``: the handler takes the message itself."""

    model: Any = None

    def argument(self, message: Message) -> Message:
        """Return the message with its model.

        Raises:
            CodecError: the payload does not fit the model.
        """
        if self.model is not None:
            message = maker(message.default_content_type)(message.payload, message.context, self.model)
            message.value()
        return message


def parameter_of(function: Callable[..., Any], role: str, argument: str) -> Any:
    """Return the evaluated annotation of a handler's only parameter.

    Args:
        function: the handler.
        role, argument: names of the handler and of its argument, for the error message.

    Returns:
        ``None`` if the handler takes no argument, ``NOT_ANNOTATED`` if its parameter has no annotation, and a
        :class:`MessageParameter` if it takes the message.

    Raises:
        ArgumentError: the handler needs other arguments, or its annotation is not a type that pydantic can validate.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in that does not say
        return NOT_ANNOTATED
    parameters = signature.parameters.values()
    positional = [each for each in parameters if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    needed = [each for each in positional if each.default is each.empty and each.kind is not each.VAR_POSITIONAL]
    needs_keyword = any(each.kind is each.KEYWORD_ONLY and each.default is each.empty for each in parameters)
    name = getattr(function, "__qualname__", type(function).__name__)
    if len(needed) > 1 or needs_keyword:
        raise ArgumentError(f"{role} takes one argument, {argument}; {name}{signature} needs others")
    if not positional:
        return None
    parameter = (needed or positional)[0]
    if parameter.annotation is parameter.empty:
        return NOT_ANNOTATED
    try:
        annotation = evaluated(function, parameter.name, parameter.annotation)
    except Exception as error:
        raise ArgumentError(f"the annotation of {parameter.name!r} in {name} cannot be evaluated: {error}") from error
    if annotation is NOT_ANNOTATED:
        return annotation
    kind = get_origin(annotation) or annotation
    if isinstance(kind, type) and issubclass(kind, Message):
        (model,) = get_args(annotation) or (None,)
        if model is None or model is Any:
            return MessageParameter()
        check_model(model)
        return MessageParameter(model)
    check_model(annotation)
    return annotation


def evaluated(function: Callable[..., Any], name: str, annotation: Any) -> Any:
    """Return one annotation of a function, evaluated; its other annotations may name what does not exist."""
    plain = inspect.unwrap(function if inspect.isroutine(function) else function.__call__)  # type: ignore[operator]
    plain = getattr(plain, "__func__", plain)
    stub = SimpleNamespace(__annotations__={name: annotation})
    return get_type_hints(stub, getattr(plain, "__globals__", {}), _closure(plain), include_extras=True)[name]


def _closure(function: Any) -> dict[str, Any]:
    """Return the variables of the enclosing functions; variables without a value are left out."""
    found = {}
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # assigned later, such as the registration of the handler itself
            found[name] = cell.cell_contents
    return found


class TypedFunction:
    """A function of an application with at most one parameter: a handler of messages or of requests.

    Args:
        function: a function or coroutine function. It takes the message, its value, or nothing.
        role, argument: names of the handler and of its argument, for errors.
        model: what the value is validated against; without it, the annotation of the parameter.
        takes_message: whether a parameter without annotation and ``model`` gets the message, rather than its value.

    Raises:
        ArgumentError: ``function`` is not callable with one argument, or an annotation or ``model`` is not a type that
            pydantic can validate.
    """

    def __init__(
        self, function: Callable[..., Any], role: str, argument: str, model: Any = None, *, takes_message: bool = False
    ) -> None:
        if not callable(function):
            raise ArgumentError(f"{role} must be callable, not {type(function).__name__}")
        plain = function if inspect.isroutine(function) else function.__call__  # type: ignore[operator]
        self.function = function
        self.is_async = is_coroutine(function)
        self.is_generator = inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)
        takes = parameter_of(function, role, argument)
        self._takes_nothing = takes is None
        self._message: MessageParameter | None = None
        if isinstance(takes, MessageParameter):
            self._message = takes if model is None else MessageParameter(model)
        elif takes is NOT_ANNOTATED and model is None and takes_message:
            self._message = MessageParameter()
        self._model = takes if model is None and takes is not NOT_ANNOTATED else model

    @property
    def name(self) -> str:
        """Qualified name of the function, for logs."""
        return getattr(self.function, "__qualname__", None) or type(self.function).__qualname__

    def arguments(self, message: Message) -> tuple[Any, ...]:
        """Return the arguments for the function.

        Raises:
            CodecError: the payload does not fit.
        """
        if self._message is not None:
            if self._message.model is None:
                return (message,)
            return (self._message.argument(message),)
        if self._takes_nothing and self._model is None:
            return ()
        value = message.value(self._model)
        return () if self._takes_nothing else (value,)


# --- what runners call


class HandlerExhaustedError(Exception):
    """Raised by a coroutine handler that takes no more requests, before it has sent a reply.

    The request counts as not begun. It waits, with later ones, until the handler is unregistered.
    """


class InvalidPayloadError(Exception):
    """The payload does not fit the parameter of the handler, which was not called. The cause says why."""


class HandlingVerdict(enum.Enum):
    """How a handled message is settled at its broker."""

    ACCEPT = "accept"
    #: handle it again
    REFUSE = "refuse"
    #: leave it unsettled: its subscription is closing, and the broker requeues it with the others
    LEAVE = "leave"


class Work(abc.ABC):
    """One message or request in the hands of a runner.

    Attributes:
        origin: the ``HandlerConsumer`` that it came from.
        request: the message.
        is_over: whether the message is settled.
        is_stopped: whether its requester cancelled it.
        has_begun: whether a reply was sent: another handler would start again with the first.
        after: called on the loop when it is over, if the handler went on after its function had returned.
        was_cancelled: whether the asyncio task of the handler was cancelled, once.
        scope: the interceptors that its handler runs in; ``None`` before, and without interceptors.
    """

    origin: Any
    request: Message
    is_over = is_stopped = has_begun = was_cancelled = False
    after: Callable[[], object] | None = None
    scope: Scope | None = None

    @abc.abstractmethod
    def done(self) -> None:
        """Accept the message. From any thread."""

    @abc.abstractmethod
    def log(self, error: BaseException) -> None:
        """Log the exception of the handler."""

    @abc.abstractmethod
    def fault(self, error: BaseException) -> None:
        """Reject the message, or report the exception to the requester."""

    @abc.abstractmethod
    def failed(self, error: BaseException) -> None:
        """Log the exception of the handler, and reject the message. From any thread."""

    @abc.abstractmethod
    def requeue(self) -> None:
        """Requeue the message: the handler was cancelled before it had finished."""

    @abc.abstractmethod
    def finish(self, verdict: HandlingVerdict) -> None:
        """Settle a message that is not to be handled."""

    def leave_scope(self, error: BaseException | None) -> None:
        """Exit the interceptors; idempotent. Of an invalid payload they are given the cause."""
        if self.scope is not None:
            self.scope.leave(error.__cause__ if isinstance(error, InvalidPayloadError) else error)


def is_awaitable(found: Any) -> bool:
    """Return whether the result of a handler is awaited. An observable could be, but is subscribed to instead."""
    return found is not None and inspect.isawaitable(found) and not isinstance(found, Observable)


class ResultForm(enum.Enum):
    """How the result of a plain function is sent."""

    #: as it is
    FINAL = "final"
    #: when the promise is settled
    PROMISED = "promised"
    #: on an event loop, where it is awaited or iterated
    AWAITED = "awaited"
    #: as it emits: sending goes on after ``RunnableHandler.send`` has returned
    FORWARDED = "forwarded"


class RunnableHandler(abc.ABC):
    """A handler as runners call it, and how its results are handled.

    Attributes:
        is_async: whether it is a coroutine function.
        loop: the event loop it was registered on, if any.
        replies: whether its results are sent, rather than dropped.
    """

    __slots__ = ("is_async", "loop")

    replies = False

    def __init__(self, loop: asyncio.AbstractEventLoop | None, *, is_async: bool) -> None:
        self.is_async = is_async
        self.loop = loop

    @abc.abstractmethod
    def start(self, work: Any) -> Any:
        """Call the function and return its result, which may have to be awaited or iterated."""

    def form_of(self, found: Any) -> ResultForm:
        """Return how the result of a plain function is sent."""
        if found is None:
            return ResultForm.FINAL
        if isinstance(found, Promise):
            return ResultForm.PROMISED
        return ResultForm.AWAITED if is_awaitable(found) else ResultForm.FINAL

    def send(self, work: Any, found: Any) -> None:  # noqa: ARG002  # for subclasses
        """Finish ``work`` with the result of the function. On a thread."""
        work.done()

    async def send_async(self, work: Any, found: Any) -> None:  # noqa: ARG002  # for subclasses
        """Finish ``work`` with the awaited result of the function. On an event loop."""
        work.done()

    async def fail_async(self, work: Any, error: BaseException) -> None:
        """Log what the function raised, and fail ``work``. On an event loop."""
        work.log(error)
        work.fault(error)


class MessageHandler(RunnableHandler):
    """A handler of messages (``m.on``): its result is dropped.

    Args:
        function, model: see :class:`TypedFunction`.

    Raises:
        ArgumentError: as ``TypedFunction``, or ``function`` is a generator function.
    """

    def __init__(self, function: Callable[..., Any], model: Any = None) -> None:
        self.typed = TypedFunction(function, "a message handler", "the message", model, takes_message=True)
        if self.typed.is_generator:
            raise ArgumentError("a message handler must not be a generator function: its body would never run")
        super().__init__(running_loop(), is_async=self.typed.is_async)

    def start(self, work: Work) -> Any:
        """See ``RunnableHandler.start``; :func:`in_observer` returns true in the function.

        Raises:
            InvalidPayloadError: the payload does not fit.
        """
        if self.is_async:
            return self._start_async(work.request)
        typed = self.typed
        try:
            arguments = typed.arguments(work.request)
        except CodecError as error:
            raise InvalidPayloadError from error
        outer, observing.push = observing.push, True
        try:
            found = typed.function(*arguments)
        finally:
            observing.push = outer
        return _await_inside(found) if type(found) is CoroutineType else found

    async def _start_async(self, message: Message) -> Any:
        try:
            arguments = self.typed.arguments(message)
        except CodecError as error:
            raise InvalidPayloadError from error
        return await _await_inside(self.typed.function(*arguments))


class InterceptedHandler(RunnableHandler):
    """Wraps a handler in interceptors: they are exited when its result was sent, or as soon as it has raised."""

    __slots__ = ("_chain", "_handler")

    def __init__(self, handler: RunnableHandler, chain: ProcessChain) -> None:
        super().__init__(handler.loop, is_async=handler.is_async)
        self._handler = handler
        self._chain = chain

    def start(self, work: Work) -> Any:
        """See ``RunnableHandler.start``."""
        work.leave_scope(asyncio.CancelledError("the handler was stopped"))  # it was begun before, by another handler
        origin = work.origin
        scope = work.scope = Scope(self._chain, self._chain.inbound(work.request, origin.channel, origin.queue))
        found = scope.context.run(self._handler.start, work)
        return _awaited(work, scope, found) if is_awaitable(found) and not isinstance(found, Promise) else found

    def form_of(self, found: Any) -> ResultForm:
        """See ``RunnableHandler.form_of``."""
        return self._handler.form_of(found)

    def send(self, work: Work, found: Any) -> None:
        """See ``RunnableHandler.send``."""
        handler, scope = self._handler, work.scope
        if scope is None or not handler.replies:  # the work exits the interceptors when it is over
            handler.send(work, found)
        elif handler.form_of(found) is ResultForm.FORWARDED:
            after = work.after

            def ended() -> None:
                workers().submit(partial(work.leave_scope, None))  # interceptors do not run on the engine loop
                if after is not None:
                    after()

            work.after = ended
            scope.context.run(handler.send, work, found)
        else:
            scope.context.run(handler.send, work, found)
            work.leave_scope(None)

    async def send_async(self, work: Work, found: Any) -> None:
        """See ``RunnableHandler.send_async``."""
        if work.scope is None or not self._handler.replies:
            await self._handler.send_async(work, found)
        else:
            await work.scope.stepping(self._handler.send_async(work, found))
            work.leave_scope(None)

    async def fail_async(self, work: Work, error: BaseException) -> None:
        """See ``RunnableHandler.fail_async``."""
        try:
            await self._handler.fail_async(work, error)
        finally:
            work.leave_scope(error)


async def _awaited(work: Work, scope: Scope, found: Any) -> Any:
    """Await the result of a handler, in its scope, which is left at once if it is cancelled."""
    try:
        while is_awaitable(found):
            found = await scope.stepping(found)
    except asyncio.CancelledError as error:
        work.leave_scope(error)
        raise
    return found
