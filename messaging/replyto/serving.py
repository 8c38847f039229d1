"""Request handlers: their terms, the functions that they are made of, and how runners call them (RFC 5.7.4)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import reactivex
from reactivex import Observable, operators

from messaging.codecs import encode
from messaging.errors import ArgumentError
from messaging.errors.checks import is_coroutine
from messaging.model import Features, Message, MessageContextBuilder, channels
from messaging.receiving import ResultForm, RunnableHandler, TypedFunction, evaluated, is_awaitable
from messaging.replyto import handlers, streaming
from messaging.replyto.replies import DeferredReply
from messaging.replyto.served_request import ReplyContent, ServedRequest, checked
from messaging.services import ServiceReference

PLAIN: Final = "plain"
SINGLE: Final = "single"
MANY: Final = "many"

#: requests that one handler works on at a time, by whether it is a coroutine function, unless its properties set them
CONCURRENCY: Final = {False: 8, True: 64}


class RequestHandler(RunnableHandler):
    """A handler service of one of the three interfaces.

    Args:
        kind: the interface: ``PLAIN``, ``SINGLE`` or ``MANY``.
        service: an object with the method of its interface, or a function.
        loop: the event loop it was registered on, if any.

    Raises:
        ArgumentError: ``service`` is neither.
    """

    __slots__ = ("call", "expected", "kind", "takes_builder")

    replies = True

    def __init__(self, kind: str, service: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        method = getattr(service, "handle_responses" if kind == MANY else "handle_response", None)
        call = method if callable(method) else service
        if not callable(call):
            raise ArgumentError(f"{type(service).__name__} is neither a function nor has the method of its interface")
        super().__init__(loop, is_async=is_coroutine(call) or bool(getattr(service, "is_async", False)))
        self.call = call
        self.kind = kind
        #: exceptions that are logged without a traceback, by the terms of the handler
        self.expected: tuple[type[Exception], ...] = ()
        self.takes_builder = kind != PLAIN and not getattr(service, "makes_content", False)

    def start(self, task: ServedRequest) -> Any:
        """See ``RunnableHandler.start``."""
        task.expected = self.expected
        if self.takes_builder:
            return self.call(task.request, _builder(task))
        return self.call(task.request)

    def form_of(self, found: Any) -> ResultForm:
        """See ``RunnableHandler.form_of``."""
        if self.kind == SINGLE and isinstance(found, (Message, ReplyContent)):  # nearly always
            return ResultForm.FINAL
        if self.kind == MANY and isinstance(found, Observable):
            return ResultForm.FORWARDED
        if self.kind == MANY and hasattr(found, "__aiter__"):
            return ResultForm.AWAITED
        return super().form_of(found)

    def send(self, task: ServedRequest, found: Any) -> None:
        """Send the replies of a function. See ``RunnableHandler.send``."""
        if self.kind == PLAIN:
            task.done()
        elif self.kind == MANY:
            streaming.send_all(task, found)
        elif isinstance(found, DeferredReply):
            task.defer(found, checked)
        else:
            task.reply(checked(found))

    async def send_async(self, task: ServedRequest, found: Any) -> None:
        """Send the replies of a coroutine function. See ``RunnableHandler.send_async``."""
        if self.kind == MANY:
            await streaming.send_all_async(task, found)
        else:
            await streaming.with_room(lambda: self.send(task, found))

    async def fail_async(self, task: ServedRequest, error: BaseException) -> None:
        """Report the exception of a handler to the requester. See ``RunnableHandler.fail_async``."""
        task.log(error)
        await streaming.with_room(lambda: task.fault(error))


def _builder(task: ServedRequest) -> MessageContextBuilder:
    """Return a builder of replies: channel and correlation id are set (RFC 5.7.3)."""
    builder = MessageContextBuilder()
    if task.reply_to is not None:
        builder.channel(task.reply_to)
    if task.correlation_id is not None:
        builder.correlation_id(task.correlation_id)
    return builder


#: keys of an example in the RFC that its table does not have
_MISTAKEN: Final = ("osgi.messaging.replyTo.channel", "messaging.name")


def channel_list(value: object, what: str) -> tuple[str, ...]:
    """Return the channels that ``value`` names, each once, in order.

    Args:
        value: a str, or an iterable of them.
        what: the name of ``value`` in errors.

    Raises:
        ArgumentError: ``value`` is neither, or names no channel.
        InvalidChannelError: a channel is malformed.
    """
    if isinstance(value, str):
        several: tuple[object, ...] = (value,)
    elif isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray, memoryview, Mapping)):
        several = tuple(value)
    else:
        raise ArgumentError(f"{what} must be a channel (str) or a list of channels, not {type(value).__name__}")
    if not several:
        raise ArgumentError(f"{what} is empty: name at least one channel to take requests from")
    return tuple(dict.fromkeys(channels.check_pattern(each) for each in several))  # type: ignore[arg-type]  # it checks


def expected_errors(value: object, what: str) -> tuple[type[Exception], ...]:
    """Return the classes of exceptions that ``value`` names: one, or a tuple of them.

    Raises:
        ArgumentError: ``value`` is neither. ``what`` is its name in the error.
    """
    several = value if isinstance(value, tuple) else (value,)
    for each in several:
        if not (isinstance(each, type) and issubclass(each, Exception)):
            found = each.__name__ if isinstance(each, type) else type(each).__name__
            raise ArgumentError(f"{what} must be a class of exceptions or a tuple of them, not {found}")
    return several


@dataclass(frozen=True, slots=True)
class HandlerTerms:
    """The properties of a request handler, checked."""

    channels: tuple[str, ...]
    reply_channel: str | None
    concurrency: int | None
    extensions: Mapping[str, Any]
    expected: tuple[type[Exception], ...]


def mistaken_key(properties: Mapping[str, Any]) -> str | None:
    """Return the key among ``properties`` that the RFC's example has and its table does not, or ``None``."""
    return next((key for key in _MISTAKEN if key in properties), None)


def read_terms(properties: Mapping[str, Any]) -> HandlerTerms:
    """Check the properties of a request handler, and return them.

    Raises:
        ArgumentError: a channel is missing, or a value has the wrong type or range.
        InvalidChannelError: a channel is malformed.
    """
    named = properties.get(handlers.CHANNEL)
    if named is None:
        mistaken = mistaken_key(properties)
        raise ArgumentError(f"it has no {handlers.CHANNEL}" + (f"; {mistaken!r} means nothing" if mistaken else ""))
    several = channel_list(named, handlers.CHANNEL)
    reply_channel = properties.get(handlers.REPLY_CHANNEL)
    if reply_channel is not None:
        channels.check_name(reply_channel)
    concurrency = properties.get(handlers.CONCURRENCY)
    if concurrency is not None and (
        isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1
    ):
        raise ArgumentError(f"{handlers.CONCURRENCY} must be an int of at least 1, not {concurrency!r}")
    extensions = properties.get(handlers.EXTENSIONS)
    if extensions is not None and not isinstance(extensions, Mapping):
        raise ArgumentError(f"{handlers.EXTENSIONS} must be a mapping, not {type(extensions).__name__}")
    expected = expected_errors(properties.get(handlers.EXPECTED, ()), handlers.EXPECTED)
    return HandlerTerms(several, reply_channel, concurrency, dict(extensions or {}), expected)


@dataclass(frozen=True, slots=True)
class RegisteredHandler:
    """A request handler of the service registry, and its terms."""

    reference: ServiceReference
    handler: RequestHandler
    terms: HandlerTerms
    ranking: int
    #: whether the handler answers its requests
    answers: bool

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the preferred handler first."""
        return -self.ranking, self.reference.id

    @property
    def queue(self) -> str | None:
        """The queue that the requests come from; ``None`` without one."""
        return self.terms.extensions.get(Features.EXTENSION_QUEUE)

    def preference(self, named: str | None) -> tuple[bool, int, int]:
        """Return the sort key for requests that name the reply channel ``named``, or none: the preferred first."""
        return named is not None and not self.answers, *self.order


class TypedHandler:
    """Wraps a function of one parameter, which is decoded from the request by the annotation of the parameter.

    A parameter annotated with ``Message`` is the request itself; without annotation, it is decoded by the content type.
    A function without a parameter gets nothing. The result is encoded by its type (``str`` as text, objects as JSON,
    bytes as they are), or by ``content_type``; a ``Message`` is sent as it is. A generator function, sync or async,
    answers with many replies; so does one whose return annotation is an iterator or an ``Observable``, or with
    ``many``. The result may also be a promise or a :class:`~messaging.replyto.DeferredReply` of such a value.

    Raises:
        ArgumentError: not callable with at most one argument, or the annotation is a type that pydantic cannot
            validate.
    """

    #: its result is content, not a message: it needs no builder
    makes_content = True

    def __init__(
        self, function: Callable[..., Any], content_type: str | None = None, *, many: bool | None = None
    ) -> None:
        self._typed = typed = TypedFunction(function, "a request handler", "the request")
        self.function = function
        self.is_async = typed.is_async
        self.is_many = typed.is_generator or _returns_many(function) if many is None else many
        self._content_type = content_type

    def _reply(self, found: Any) -> Message | ReplyContent | DeferredReply:
        if isinstance(found, Message):
            return found
        if isinstance(found, DeferredReply):
            return DeferredReply(found.promise, lambda _: self._content(found.reply()))
        return ReplyContent(*encode(found, self._content_type))

    def _content(self, found: Any) -> Message | ReplyContent:
        if isinstance(found, Message):
            return found
        return ReplyContent(*encode(found, self._content_type))

    def handle_response(self, request: Message) -> Any:
        """Answer with one reply."""
        found = self.function(*self._typed.arguments(request))
        if is_awaitable(found):
            return self._answer(found)
        return self._reply(found)

    async def _answer(self, found: Any) -> Any:
        while is_awaitable(found):
            found = await found
        return self._reply(found)

    def handle_responses(self, request: Message) -> Any:
        """Answer with many replies."""
        return self._replies(self.function(*self._typed.arguments(request)))

    def _replies(self, found: Any) -> Any:
        if isinstance(found, reactivex.Observable):
            return found.pipe(operators.map(self._content))
        if isinstance(found, AsyncIterable):
            return self._each_async(found)
        return self._later(found) if inspect.isawaitable(found) else self._each(found)

    async def _later(self, found: Any) -> Any:
        return self._replies(await found)

    def _each(self, found: Any) -> Iterator[Message | ReplyContent]:
        try:
            for each in found:
                yield self._content(each)
        finally:
            close = getattr(found, "close", None)
            if callable(close):
                close()

    async def _each_async(self, found: Any) -> AsyncIterator[Message | ReplyContent]:
        try:
            async for each in found:
                yield self._content(each)
        finally:
            close = getattr(found, "aclose", None)
            if callable(close):
                await close()


def _returns_many(function: Callable[..., Any]) -> bool:
    function = function if inspect.isroutine(function) else function.__call__  # type: ignore[operator]
    annotation = inspect.signature(function).return_annotation
    if annotation is inspect.Signature.empty:
        return False
    try:
        returned = evaluated(function, "return", annotation)
    except Exception:  # noqa: BLE001  # an annotation that cannot be evaluated says nothing
        return False
    origin = getattr(returned, "__origin__", returned)
    return isinstance(origin, type) and issubclass(
        origin, (reactivex.Observable, Iterator, AsyncIterator, AsyncIterable)
    )
