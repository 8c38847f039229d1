"""Functions as request handlers: the argument is decoded from the request, the result is encoded as the reply."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from typing import Any

import reactivex
from reactivex import operators

from messaging.codecs import encode
from messaging.model import Message
from messaging.receiving import HandlerFunction, evaluated, is_awaitable
from messaging.replyto.deferred import DeferredReply
from messaging.replyto.served_request import Content


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
        self._typed = typed = HandlerFunction(function, "a request handler", "the request")
        self.function = function
        self.is_async = typed.is_async
        self.is_many = typed.is_generator or _returns_many(function) if many is None else many
        self._content_type = content_type

    def _reply(self, found: Any) -> Message | Content | DeferredReply:
        if isinstance(found, DeferredReply):
            return DeferredReply(found.promise, lambda _: self._content(found.reply()))
        return self._content(found)

    def _content(self, found: Any) -> Message | Content:
        if isinstance(found, Message):
            return found
        return Content(*encode(found, self._content_type))

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
        found = self.function(*self._typed.arguments(request))
        if isinstance(found, reactivex.Observable):
            return found.pipe(operators.map(self._content))
        if isinstance(found, AsyncIterable):
            return self._each_async(found)
        if inspect.isawaitable(found):
            return self._later(found)
        return self._each(found)

    def _each(self, found: Any) -> Iterator[Message | Content]:
        try:
            for each in found:
                yield self._content(each)
        finally:
            close = getattr(found, "close", None)
            if callable(close):
                close()

    async def _each_async(self, found: Any) -> AsyncIterator[Message | Content]:
        try:
            async for each in found:
                yield self._content(each)
        finally:
            close = getattr(found, "aclose", None)
            if callable(close):
                await close()

    async def _later(self, found: Any) -> Any:
        there = await found
        if isinstance(there, reactivex.Observable):
            return there.pipe(operators.map(self._content))
        return self._each_async(there) if isinstance(there, AsyncIterable) else self._each(there)


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
