"""Contexts and messages from the keywords of the short forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

from messaging.adapter import Adapter
from messaging.codecs import encode
from messaging.codecs.cache import BoundedCache
from messaging.errors import ArgumentError, InvalidExtensionError, UnknownKeywordError
from messaging.errors.text import did_you_mean, exact
from messaging.model import (
    CHECKS,
    Features,
    Message,
    MessageContext,
    MessageContextBuilder,
    MessageContextProvider,
    PublishKeywords,
    ReplyKeywords,
    RequestKeywords,
    RequestManyKeywords,
    SubscribeKeywords,
    as_message,
    publishing_only,
    subscribing_only,
)
from messaging.receiving import Acknowledge, HandlerOnInvalid, OnInvalid

V = TypeVar("V")

#: a will or a birth, as ``connect`` takes it
Announced: TypeAlias = "Message | MessageContextProvider | Mapping[str, Any]"

#: keywords that are values of the context; the others are extensions in snake case
_CONTEXT_KEYWORDS: Final = frozenset({"content_type", "content_encoding", "correlation_id", "reply_to"})


class SubscribeArguments(SubscribeKeywords, total=False):
    """The keyword arguments of ``subscribe``, for its overloads."""

    on_invalid: OnInvalid | None
    keep_subscription: bool
    acknowledge: Acknowledge


class HandlerArguments(SubscribeKeywords, total=False):
    """The keyword arguments of ``on``, for its overloads."""

    model: Any
    concurrency: int
    on_invalid: HandlerOnInvalid | None
    keep_subscription: bool


class RequestArguments(RequestKeywords, total=False):
    """The keyword arguments of ``request``, for its overloads."""

    timeout: float | None


class RequestManyArguments(RequestManyKeywords, total=False):
    """The keyword arguments of ``request_many``, for its overloads."""

    timeout: float | None


class ReplyArguments(ReplyKeywords, total=False):
    """The keyword arguments of ``reply``, for its overloads."""

    content_type: str | None
    many: bool | None
    reply_channel: str | None
    concurrency: int | None
    expected: type[Exception] | tuple[type[Exception], ...]
    ranking: int


#: the parameters of each short form
_PARAMETERS: Final = {
    "publish": ("channel", "content", *PublishKeywords.__annotations__),
    "request": ("channel", "content", "model", *RequestArguments.__annotations__),
    "request_many": ("channel", "content", "model", *RequestManyArguments.__annotations__),
    "subscribe": ("channel", "model", *SubscribeArguments.__annotations__),
    "declare": ("name", *SubscribeKeywords.__annotations__),
    "on": ("channel", "handler", *HandlerArguments.__annotations__),
    "reply": ("channel", "handler", *ReplyArguments.__annotations__),
}


def extension_key(keyword: str) -> str:
    """Return the key of the extension that ``keyword`` names in snake case."""
    head, *tail = keyword.split("_")
    return head + "".join(word.capitalize() for word in tail)


#: keys of the extensions that any short form has a keyword for; an instance may lack them
_KEYS: Final = frozenset(
    extension_key(each)
    for kind in (PublishKeywords, RequestManyKeywords, SubscribeKeywords)
    for each in kind.__annotations__
)


class Contexts:
    """Builds the contexts of one instance. Thread safe."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        #: so that publishing the same way again checks nothing twice
        self._known: BoundedCache[Any, MessageContext] = BoundedCache()

    def message(
        self,
        channel: str,
        content: Any,
        keywords: Mapping[str, Any],
        allowed: frozenset[str] = frozenset(),
        call: str = "publish",
    ) -> Message:
        """Return a message to publish; ``allowed`` are the extensions of subscribing that it may have.

        Raises:
            UnknownKeywordError: ``call``, which takes these keywords, has no such keyword.
            ArgumentError: a value is not accepted.
        """
        try:
            # with the types, because True and 1 are equal and have different meanings
            if type(channel) is not str and isinstance(channel, str):
                channel = exact(channel)  # a subclass of str could equal another channel, and get its context
            key = (channel, allowed, *keywords.items(), *map(type, keywords.values()))
            context = self._known.get(key)
        except TypeError:  # a value is not hashable, such as headers
            key, context = None, None
        if context is None:
            self.check(call, keywords)
            context = _build(channel, keywords, subscribing_only(self._adapter.capabilities) - allowed, "subscribing")
            if keywords.get("message_id") is not None:  # an id is for one message
                key = None
            if key is not None:
                self._known[key] = context
        if type(content) is bytes:
            return Message(content, context)
        if isinstance(content, (bytes, bytearray, memoryview)):
            return Message(bytes(content), context)
        payload, content_type = encode(content, context.content_type, context.content_encoding)
        if context.content_type is None and Features.MESSAGE_PROPERTIES in self._adapter.capabilities.features:
            # the application did not set it: it is left out where the protocol cannot carry it
            typed_key = None if key is None else (content_type, key)
            typed = self._known.get(typed_key)
            if typed is None:
                typed = MessageContextBuilder().with_context(context).content_type(content_type).build_context()
                if typed_key is not None:
                    self._known[typed_key] = typed
            context = typed
        return Message(payload, context)

    def announced(self, what: str, given: Announced | None) -> Message | None:
        """Return the message that ``connect`` was given as ``will`` or ``birth``.

        Raises:
            ArgumentError: it is no message, or has no channel.
        """
        if given is None:
            return None
        if isinstance(given, Mapping):
            keywords = dict(given)
            channel, content = keywords.pop("channel", None), keywords.pop("content", b"")
            if not isinstance(channel, str):
                raise ArgumentError(f"{what} needs 'channel', and beside 'content' the keywords of publish()")
            return self.message(channel, content, keywords)
        message = as_message(given, what)
        if message.context.channel is None:
            raise ArgumentError(f"{what} needs a channel: give its context one")
        return message

    def check(self, call: str, keywords: Mapping[str, Any]) -> None:
        """Refuse keywords that neither the short form ``call`` nor any instance has.

        Raises:
            UnknownKeywordError: a keyword is unknown; the text names the nearest one.
        """
        own = self._adapter.capabilities
        for keyword in keywords:
            key = extension_key(keyword)
            if not (
                keyword in _CONTEXT_KEYWORDS
                or key in _KEYS
                or key in CHECKS
                or key in own.publish_extensions
                or key in own.subscribe_extensions
            ):
                raise UnknownKeywordError(call, keyword, own.name, did_you_mean(keyword, _PARAMETERS[call]))

    def subscribing(self, channel: str, keywords: Mapping[str, Any], call: str = "subscribe") -> MessageContext:
        """Return a context to subscribe with; raises as :meth:`message`."""
        self.check(call, keywords)
        return _build(channel, keywords, publishing_only(self._adapter.capabilities), "publishing")


def _build(channel: str, keywords: Mapping[str, Any], refused: frozenset[str], other_side: str) -> MessageContext:
    builder = MessageContextBuilder().channel(channel, keywords.get("channel_extension"))
    for keyword, value in keywords.items():
        if value is None:
            continue  # unset
        if keyword in _CONTEXT_KEYWORDS:
            getattr(builder, keyword)(value)
        elif keyword != "channel_extension":
            key = extension_key(keyword)
            if key in refused:
                raise InvalidExtensionError(key, f"{keyword}= is for {other_side}")
            builder.extension_entry(key, value)
    return builder.build_context()


def checked(argument: str, check: Callable[[Any], V], value: Any) -> V:
    """Return ``check(value)``; its ``ValueError`` becomes an ``ArgumentError`` that names ``argument``."""
    try:
        return check(value)
    except ValueError as error:
        raise ArgumentError(f"{argument} {error}") from None
