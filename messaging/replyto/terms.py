"""The terms of a request handler: its properties, checked (RFC 5.7.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ArgumentError
from messaging.model import Features, channels
from messaging.replyto import handlers, serving

if TYPE_CHECKING:
    from messaging.replyto.serving import RequestHandler
    from messaging.services import ServiceReference

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
    answers: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "answers", self.handler.kind != serving.PLAIN)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the preferred handler first."""
        return -self.ranking, self.reference.id

    @property
    def reply_channel(self) -> str | None:
        """The reply channel that requests have to name; ``None`` for any."""
        return self.terms.reply_channel

    @property
    def queue(self) -> str | None:
        """The queue that the requests come from; ``None`` without one."""
        return self.terms.extensions.get(Features.EXTENSION_QUEUE)

    def preference(self, named: str | None) -> tuple[bool, int, int]:
        """Return the sort key for requests that name the reply channel ``named``, or none: the preferred first."""
        return named is not None and not self.answers, *self.order
