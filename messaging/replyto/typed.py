"""Functions as request handlers: the payload is decoded for them, and what they return is encoded (the short way)."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, get_type_hints

import reactivex
from reactivex import operators

from messaging.codecs import check_model, encode
from messaging.coroutines import is_coroutine
from messaging.errors import ArgumentError
from messaging.message import Message
from messaging.replyto.exchange import Content
from messaging.replyto.streaming import is_promise

_NOTHING: Any = inspect.Parameter.empty


class TypedHandler:
    """Wraps a function of one parameter: what its annotation says, decoded from the request.

    Annotated with ``Message`` it gets the request itself; without annotation, what the content type yields; without a
    parameter, nothing. What it returns is encoded by its type (``str`` as text, objects as JSON, bytes as they are), or
    by ``content_type``; a ``Message`` is sent as it is. A generator function, sync or async, answers with many replies;
    so does one whose return annotation is an iterator or an ``Observable``, or with ``many``.

    Raises:
        ArgumentError: not callable with at most one argument, or annotated with what pydantic cannot validate.
    """

    #: what it returns is content, not a message: it needs no builder
    makes_content = True

    def __init__(
        self, function: Callable[..., Any], content_type: str | None = None, *, many: bool | None = None
    ) -> None:
        if not callable(function):
            raise ArgumentError(f"a request handler must be callable, not {type(function).__name__}")
        self.function = function
        self._content_type = content_type
        self._takes = _parameter(function)
        self.is_async = is_coroutine(function)
        plain = function if inspect.isroutine(function) else function.__call__  # type: ignore[operator]
        if many is None:
            is_generator = inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)
            many = is_generator or _returns_many(plain)
        self.is_many = many

    def _arguments(self, request: Message) -> tuple[Any, ...]:
        takes = self._takes
        if takes is None:
            return ()
        if takes is Message:
            return (request,)
        return (request.value() if takes is _NOTHING else request.value(takes),)

    def _content(self, found: Any) -> Message | Content:
        if isinstance(found, Message):
            return found
        return Content(*encode(found, self._content_type))

    def handle_response(self, request: Message) -> Any:
        """Answer with one reply."""
        found = self.function(*self._arguments(request))
        if is_promise(found):
            return self._answer(found)
        return self._content(found)

    async def _answer(self, found: Any) -> Any:
        while is_promise(found):
            found = await found
        return self._content(found)

    def handle_responses(self, request: Message) -> Any:
        """Answer with many."""
        found = self.function(*self._arguments(request))
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


def _parameter(function: Callable[..., Any]) -> Any:
    """The annotation of the only parameter; ``None`` if there is none, ``_NOTHING`` without annotation."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in that does not say
        return _NOTHING
    needed = [
        each
        for each in signature.parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
    ]
    optional = [
        each
        for each in signature.parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.VAR_POSITIONAL) and each not in needed
    ]
    only_keywords = [
        each.name
        for each in signature.parameters.values()
        if each.kind is each.KEYWORD_ONLY and each.default is each.empty
    ]
    name = getattr(function, "__qualname__", type(function).__name__)
    if len(needed) > 1 or only_keywords:
        raise ArgumentError(f"a request handler takes one argument, the request; {name}{signature} needs others")
    if not needed and not optional:
        return None
    parameter = (needed or optional)[0]
    if parameter.annotation is parameter.empty:
        return _NOTHING
    try:
        annotation = _evaluated(function, parameter.name, parameter.annotation)
    except Exception as error:
        raise ArgumentError(f"the annotation of {parameter.name!r} in {name} cannot be evaluated: {error}") from error
    if annotation is Message or annotation is _NOTHING:
        return annotation
    check_model(annotation)
    return annotation


def _evaluated(function: Callable[..., Any], name: str, annotation: Any) -> Any:
    """One annotation of a function; the others may name what is not there."""
    plain = inspect.unwrap(function if inspect.isroutine(function) else function.__call__)  # type: ignore[operator]
    plain = getattr(plain, "__func__", plain)
    closure = inspect.getclosurevars(plain).nonlocals if inspect.isfunction(plain) else {}
    stub = SimpleNamespace(__annotations__={name: annotation})
    return get_type_hints(stub, getattr(plain, "__globals__", {}), closure, include_extras=True)[name]


def _returns_many(function: Callable[..., Any]) -> bool:
    annotation = inspect.signature(function).return_annotation
    if annotation is inspect.Signature.empty:
        return False
    try:
        returned = _evaluated(function, "return", annotation)
    except Exception:  # noqa: BLE001  # then it does not say
        return False
    origin = getattr(returned, "__origin__", returned)
    return isinstance(origin, type) and issubclass(
        origin, (reactivex.Observable, Iterator, AsyncIterator, AsyncIterable)
    )
