"""The interface of interceptors, and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from messaging.errors import ArgumentError
from messaging.errors.checks import check_mapping
from messaging.errors.text import tolerant
from messaging.model import Features, Message

#: what an outgoing message is
OutboundOperation = Literal["publish", "request", "reply"]
#: what a received message is
InboundOperation = Literal["message", "request", "reply"]
#: what becomes of a received message, see ``InboundMessage.outcome``
Settled = Literal["acknowledged", "rejected", "pending"]

_HEADERS: Final = Features.EXTENSION_HEADERS
_NO_HEADERS: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """The instance that an intercepted message belongs to.

    Attributes:
        name: its ``osgi.messaging.name``.
        scheme: of its URL, such as ``mqtt``.
        host, port: of the first host of its URL; ``port`` is ``None`` for the default of the scheme.
        client_id: the setting of that name, or ``None`` if the adapter has none or it is generated.
    """

    name: str
    scheme: str
    host: str
    port: int | None = None
    client_id: str | None = None


@dataclass(slots=True, eq=False, repr=False)
class OutboundMessage:
    """A message that is about to be published. Not thread safe: an interceptor uses it until its method returns.

    Attributes:
        instance: publishes it.
        operation: ``publish``; ``request`` for a message whose reply is awaited; ``reply`` for the reply to a request,
            or for the report of a failed request handler.
        message: with the context that it is published with. Assign another message to replace it: payload, channel,
            extensions. The channel of a reply is the reply channel of its request, unless the handler chose another.
        request: the request that a reply answers; otherwise ``None``.
        carries_headers: whether the instance can send headers.
        added: the headers that were added, by name.
    """

    instance: InstanceInfo
    operation: OutboundOperation
    message: Message
    request: Message | None = field(default=None, kw_only=True)
    carries_headers: bool = field(default=True, kw_only=True)
    added: dict[str, str] = field(default_factory=dict, init=False)

    @property
    def headers(self) -> Mapping[str, Any]:
        """Return the headers of the message, with the added ones. Read-only."""
        own = self.message.context.extensions.get(_HEADERS)
        if not isinstance(own, Mapping):  # refused when the message is checked
            own = _NO_HEADERS
        return MappingProxyType({**own, **self.added}) if self.added else own

    def add_headers(self, headers: Mapping[str, str]) -> bool:
        """Add headers to the message: much faster than to replace it. A header of the same name is replaced.

        Returns:
            Whether they travel with the message; ``False``, without effect, if the instance cannot send headers.

        Raises:
            ArgumentError: ``headers`` is no mapping of ``str`` to ``str``.
        """
        if not self.carries_headers:
            return False
        for name, value in check_mapping("headers", headers).items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ArgumentError(
                    f"a header of an interceptor must be a str with a str as name, not {type(name).__name__} and "
                    f"{type(value).__name__}"
                )
        self.added.update(headers)
        return True

    @tolerant
    def __repr__(self) -> str:
        return f"<OutboundMessage {self.operation!a} {self.message!r}>"


@dataclass(slots=True, eq=False, repr=False)
class Outcome:
    """The outcome of publishing a message, or of a request.

    Attributes:
        error: ``None`` if it succeeded. For ``publish`` and ``reply``: the broker has taken responsibility, or with
            QoS 0 the bytes were handed to the socket. For ``request``: the reply arrived, or all replies did.
        reply: the reply to a request, if it has one; ``None`` for many replies.
        message_id: the id that the message was sent with, if any.
        correlation_id: of the message, also if it was generated.
        at: time of the outcome, nanoseconds since the epoch.
    """

    error: BaseException | None
    at: int
    reply: Message | None = None
    message_id: str | None = None
    correlation_id: str | None = None

    @tolerant
    def __repr__(self) -> str:
        return f"<Outcome: {'succeeded' if self.error is None else type(self.error).__name__}>"


@dataclass(slots=True, eq=False, repr=False)
class InboundMessage:
    """A received message that is about to be processed.

    Attributes:
        instance: received it.
        operation: ``message``; ``request`` if a request handler processes it; ``reply`` for one of many replies.
        message: the message.
        subscription: the channel or pattern of the subscription.
        queue: the queue of the subscription, which several subscribers share; ``None`` without.
        is_pulled: whether the body of a loop processes it, in the context of the code around the loop; otherwise a
            handler or an observer does, on a thread or in a task of its own.
        is_manual: whether the code that processes it acknowledges it, at any time.
        outcome: set before the context managers are exited. ``acknowledged`` and ``rejected``: it was settled so, or
            will be as soon as they are exited. ``pending``: it is settled later, by other code. A request whose handler
            failed is acknowledged, too: the failure is reported to the requester.
    """

    instance: InstanceInfo
    operation: InboundOperation
    message: Message
    subscription: str
    queue: str | None = None
    is_pulled: bool = field(default=False, kw_only=True)
    is_manual: bool = field(default=False, kw_only=True)
    outcome: Settled | None = field(default=None, init=False)

    @tolerant
    def __repr__(self) -> str:
        return f"<InboundMessage {self.operation!a} {self.message!r}>"


class Interceptor:
    """Sees each outgoing message, and wraps the processing of each received message. Override one method or both.

    Methods are called on many threads, several at a time. They must not block: a publisher waits for them, maybe on an
    event loop.
    """

    def intercept_publish(
        self,
        outbound: OutboundMessage,  # noqa: ARG002  # for subclasses
    ) -> Callable[[Outcome], object] | None:
        """See an outgoing message before it is checked; change it, or refuse it by raising.

        Called on the thread that publishes, for messages, requests and replies. It is not called for messages that
        the project itself sends on its own thread: dead letters, and the signals that begin, end and cancel a stream of
        replies. A message that is published inside this method is not intercepted.

        Args:
            outbound: the message.

        Returns:
            A function that is called once with the outcome; ``None``: the outcome is not needed. It is called on a
            worker thread, in the order of the outcomes, or on the thread that publishes if the message was not
            accepted or many outcomes are waiting. What it raises is logged.

        Raises:
            MessagingError: the message is not sent. The caller of ``publish`` gets this error.
            Exception: likewise; the caller gets an ``InterceptorError``.
        """
        return None

    def intercept_process(
        self,
        inbound: InboundMessage,  # noqa: ARG002  # for subclasses
    ) -> AbstractContextManager[object] | None:
        """Return a context manager that is entered before a received message is processed and exited afterwards.

        Both happen on the thread that processes the message, in one :class:`contextvars.Context`: context variables
        that are set when it is entered are set in the handler, observer or body of the loop, also after an ``await``.
        If another thread closes the stream of a loop, it is exited there, in the same context, while the body may
        still be running.

        ============================  ==============================================================================
        processed by                  exited
        ============================  ==============================================================================
        function or coroutine         when it has returned or raised
        request handler               when it has returned and its reply was handed over, or it raised
        many replies                  after the last of them
        observer of a stream          when it has returned or raised
        body of a loop, ``receive``   when the next message is asked for, or the stream is closed
        ============================  ==============================================================================

        The exception, if any, is given to ``__exit__``, which cannot suppress it.

        An exception of the interceptor is logged, and the interceptor is skipped for this message: the message is
        processed and settled as without it.

        Args:
            inbound: the message; see its ``outcome``.

        Returns:
            ``None``: this message does not interest the interceptor.
        """
        return None
