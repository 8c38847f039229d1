"""The short forms of an instance's services: ``publish``, ``subscribe``, ``on``, ``request``, ``reply``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, overload

from messaging.adapter import Adapter
from messaging.connection.properties import NAME_PROPERTY, announced
from messaging.errors import ArgumentError, DeadlineError
from messaging.execution import Promise, may_block
from messaging.instance.contexts import (
    Contexts,
    HandlerArguments,
    ReplyArguments,
    RequestArguments,
    RequestManyArguments,
    SubscribeArguments,
    checked,
    extension_key,
)
from messaging.instance.services import InstanceServices
from messaging.model import (
    MAX_PREFETCH,
    Features,
    PublishKeywords,
    ReceivedMessage,
    ReplyKeywords,
    RequestKeywords,
    RequestManyKeywords,
    SubscribeKeywords,
    check_name,
    integer,
)
from messaging.model.settings import Settings
from messaging.publishing import MessagePublisher
from messaging.receiving import (
    Acknowledge,
    HandlerOnInvalid,
    HandlerRegistration,
    MessageHandler,
    MessageStream,
    MessageSubscription,
    OnInvalid,
)
from messaging.replyto import (
    CHANNEL,
    CONCURRENCY,
    EXPECTED,
    EXTENSIONS,
    REPLY_CHANNEL,
    TARGET,
    ReplyRegistration,
    ReplyToManySubscriptionHandler,
    ReplyToSingleSubscriptionHandler,
    TypedHandler,
    channel_list,
    expected_errors,
)
from messaging.services import SERVICE_RANKING, escaped

if TYPE_CHECKING:
    from messaging.replyto import ReplyToManyPublisher, ReplyToPublisher, ReplyToWhiteboard, Request

F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")

#: extensions of subscribing that the stream of many replies has, too
_OF_STREAMS: Final = frozenset(
    {Features.EXTENSION_BUFFER_SIZE, Features.EXTENSION_OVERFLOW, Features.EXTENSION_PREFETCH}
)


class Shortcuts:
    """The base of :class:`~messaging.instance.Messaging` with its short forms; the instance sets the attributes."""

    name: str
    publisher: MessagePublisher
    subscription: MessageSubscription
    reply_to: ReplyToPublisher
    reply_to_many: ReplyToManyPublisher
    whiteboard: ReplyToWhiteboard
    _adapter: Adapter
    _settings: Settings
    _contexts: Contexts
    _registered: InstanceServices

    def publish(self, channel: str, content: Any = b"", **context: Unpack[PublishKeywords]) -> Promise[None]:
        """Publish ``content`` to ``channel``.

        Args:
            channel: where to.
            content: bytes as they are (already in ``content_encoding``, if one is named), or an object for the codec of
                ``content_type`` (by default ``text/plain`` for a str and ``application/json`` for anything else).
            **context: ``content_type``, ``content_encoding``, ``correlation_id``, ``reply_to``, ``channel_extension``,
                or an extension in snake case, such as ``qos=1``, ``time_to_live=5.0``, ``headers={...}``.
                ``None`` means unset.

        Returns:
            The promise of :meth:`MessagePublisher.publish <messaging.MessagePublisher.publish>`, which also lists
            the errors; besides, ``CodecError`` if ``content`` does not become bytes.
        """
        return self.publisher.publish(self._contexts.message(channel, content, context))

    @overload
    def request(
        self, channel: str, content: Any = b"", model: None = None, **arguments: Unpack[RequestArguments]
    ) -> Request[ReceivedMessage]: ...
    @overload
    def request(
        self, channel: str, content: Any = b"", model: type[V] = ..., **arguments: Unpack[RequestArguments]
    ) -> Request[V]: ...
    @overload
    def request(
        self, channel: str, content: Any, model: Any, **arguments: Unpack[RequestArguments]
    ) -> Request[Any]: ...
    def request(
        self,
        channel: str,
        content: Any = b"",
        model: Any = None,
        *,
        timeout: float | None = None,
        **context: Unpack[RequestKeywords],
    ) -> Request[Any]:
        """Send ``content`` to ``channel``, and promise the reply.

        Args:
            channel: where to.
            content: as for :meth:`publish`.
            model: what the reply is to become: the promise is then that of the value, such as a pydantic model, and
                otherwise that of the reply message.
            timeout: seconds for all of it; the instance's setting ``timeout`` if not given.
            **context: as for :meth:`publish`.

        Returns:
            The promise of :meth:`ReplyToPublisher.publish_with_reply
            <messaging.replyto.publisher.ReplyToPublisher.publish_with_reply>`, which also lists
            the errors; besides,
            ``CodecError`` if ``content`` does not become bytes, or ``DecodeError`` if the reply does not fit ``model``.

        Example:
            ``total = m.request("sums", [1, 2, 3], int, timeout=2).result()``
        """
        options: Any = context
        if timeout is not None:
            options["timeout"] = timeout
        message = self._contexts.message(channel, content, options, call="request")
        return self.reply_to.publish_with_reply(message, model=model)

    @overload
    def request_many(
        self, channel: str, content: Any = b"", model: type[V] = ..., **arguments: Unpack[RequestManyArguments]
    ) -> MessageStream[V]: ...
    @overload
    def request_many(
        self, channel: str, content: Any = b"", model: Any = None, **arguments: Unpack[RequestManyArguments]
    ) -> MessageStream[Any]: ...
    def request_many(
        self,
        channel: str,
        content: Any = b"",
        model: Any = None,
        *,
        timeout: float | None = None,
        **context: Unpack[RequestManyKeywords],
    ) -> MessageStream[Any]:
        """Send ``content`` to ``channel``, and stream the replies.

        Arguments as for :meth:`request`, but that ``timeout`` is for each reply; the rest as
        :meth:`ReplyToManyPublisher.publish_with_reply_many
        <messaging.replyto.publisher.ReplyToManyPublisher.publish_with_reply_many>`.
        """
        options: Any = context
        if timeout is not None:
            options["timeout"] = timeout
        return self.reply_to_many.publish_with_reply_many(
            self._contexts.message(channel, content, options, _OF_STREAMS, "request_many"), model=model
        )

    @overload
    def reply(
        self, channel: str | Sequence[str], handler: None = None, **arguments: Unpack[ReplyArguments]
    ) -> Callable[[F], F]: ...
    @overload
    def reply(
        self, channel: str | Sequence[str], handler: Callable[..., Any], **arguments: Unpack[ReplyArguments]
    ) -> ReplyRegistration: ...
    def reply(
        self,
        channel: str | Sequence[str],
        handler: Callable[..., Any] | None = None,
        *,
        content_type: str | None = None,
        many: bool | None = None,
        reply_channel: str | None = None,
        concurrency: int | None = None,
        expected: type[Exception] | tuple[type[Exception], ...] = (),
        ranking: int = 0,
        **extensions: Unpack[ReplyKeywords],
    ) -> Any:
        """Answer requests to ``channel`` with a function, or have the function below do it.

        On a plain thread it returns when the broker has confirmed the subscription. On a thread that runs an event loop
        it returns at once: ``async with m.reply(channel, function)`` waits, and so does ``await m.whiteboard.ready()``
        after all decorated functions. A request that is sent before may find no subscription.

        Args:
            channel: of the requests; one or several, but at least one; patterns too.
            handler: a function, coroutine function or generator function of one parameter, the request: see
                :class:`~messaging.replyto.serving.TypedHandler` for what it gets and may return. What it raises, the
                requester gets as ``ReplyError``.
            content_type: of the replies; chosen by their type if not given.
            many: whether what it returns is many replies, to be iterated; found out if not given.
            reply_channel: only requests that name it.
            concurrency: how many requests it works on at a time: 8 in threads, 64 as a coroutine function.
            expected: exceptions that are answers rather than failures, such as ``KeyError`` or
                ``(KeyError, ValueError)``: the requester gets them as any other, and the log has a line at level INFO
                without a traceback.
            ranking: of several handlers of a channel, the highest has the requests.
            **extensions: of the subscription, in snake case, such as ``queue="workers"``: responders that share the
                requests between them.

        Returns:
            The registration in ``services``, a :class:`~messaging.replyto.whiteboard.ReplyRegistration`, which ends
            it; or without ``handler`` a decorator.

        Raises:
            ArgumentError: the function is no such handler, or one of the others is not as described.
            UnsupportedFeatureError: the instance does not announce ``replyTo``.
            SubscriptionRefusedError: the broker refused the subscription.

        Example::

            @m.reply("orders/price", queue="pricing")
            def price(order: Order) -> Price: ...
        """
        if handler is None:

            def decorate(function: F) -> F:
                self.reply(
                    channel, function, content_type=content_type, many=many, reply_channel=reply_channel,
                    concurrency=concurrency, expected=expected, ranking=ranking, **extensions,
                )  # fmt: skip
                return function

            return decorate
        self._registered.refuse_closed()
        self._contexts.check("reply", extensions)
        if Features.REPLY_TO not in announced(self._adapter):
            raise self._adapter.capabilities.lacks(Features.REPLY_TO, "it needs messageProperties and headers")
        typed = TypedHandler(handler, content_type, many=many)
        several = [*channel_list(channel, "the channel of a request handler")]
        keys = {extension_key(name): value for name, value in extensions.items() if value is not None}
        for each in several:
            self.subscription.check(each, keys)
        properties: dict[str, Any] = {
            TARGET: f"({NAME_PROPERTY}={escaped(self.name)})",
            CHANNEL: several,
            EXTENSIONS: keys,
            SERVICE_RANKING: ranking,
            EXPECTED: expected_errors(expected, "expected"),
        }
        if reply_channel is not None:
            properties[REPLY_CHANNEL] = check_name(reply_channel)
        if concurrency is not None:
            properties[CONCURRENCY] = checked("concurrency", integer(1, None), concurrency)
        interface = ReplyToManySubscriptionHandler if typed.is_many else ReplyToSingleSubscriptionHandler
        registration = self._registered.add(interface, typed, properties)
        try:
            ready = self.whiteboard.ready(registration.reference)
            self._wait_until(ready)
            return ReplyRegistration(registration, ready)
        except BaseException:  # an interrupt, too: no registration is returned
            registration.unregister()
            raise

    @overload
    def subscribe(self, channel: str, model: type[V], **arguments: Unpack[SubscribeArguments]) -> MessageStream[V]: ...
    @overload
    def subscribe(
        self, channel: str, model: Any = None, **arguments: Unpack[SubscribeArguments]
    ) -> MessageStream[Any]: ...
    def subscribe(
        self,
        channel: str,
        model: Any = None,
        *,
        on_invalid: OnInvalid | None = None,
        keep_subscription: bool = False,
        acknowledge: Acknowledge = "automatic",
        **context: Unpack[SubscribeKeywords],
    ) -> MessageStream[Any]:
        """Subscribe to ``channel``; ``context`` as in :meth:`publish`, the rest as ``MessageSubscription.subscribe``.

        Entering the stream's ``with`` block, or ``async with``, waits for the broker's confirmation: messages published
        after that is received.

        Example:
            ``for message in m.subscribe("sensors/+", Reading, qos=1): print(message.value().celsius)``
        """
        return self.subscription.subscribe(
            self._contexts.subscribing(channel, context),
            model=model,
            on_invalid=on_invalid,
            keep_subscription=keep_subscription,
            acknowledge=acknowledge,
        )

    @overload
    def on(self, channel: str, handler: None = None, **arguments: Unpack[HandlerArguments]) -> Callable[[F], F]: ...
    @overload
    def on(
        self, channel: str, handler: Callable[..., Any], **arguments: Unpack[HandlerArguments]
    ) -> HandlerRegistration: ...
    def on(
        self,
        channel: str,
        handler: Callable[..., Any] | None = None,
        *,
        model: Any = None,
        concurrency: int = 1,
        on_invalid: HandlerOnInvalid | None = None,
        keep_subscription: bool = False,
        **context: Unpack[SubscribeKeywords],
    ) -> Any:
        """Call a function with each message of ``channel``, or have the function below called.

        A message is acknowledged when the function returns, or when the coroutine it made has finished. When it raises,
        that is logged and the message is rejected: it is redelivered, up to ``max_deliveries`` times, or sent to the
        ``dead_letter_channel``, as configured. The next message is handled all the same.

        On a plain thread this returns when the broker has confirmed the subscription. On a thread that runs an event
        loop it returns at once: ``async with m.on(channel, handler):`` waits.

        Args:
            channel: a channel or pattern.
            handler: a function or coroutine function of one parameter. It gets the
                :class:`~messaging.Message`, or its value if ``model`` is given or the parameter is annotated
                with another type than ``Message``. Functions run on worker threads; coroutines on the event loop that
                runs where this is called, or else on one that such handlers share.
            model: what the value is validated against; wins over the annotation. A parameter annotated with ``Message``
                gets the message, once it is valid.
            concurrency: messages handled at a time, at least 1. With more than 1 they may be finished out of order.
            on_invalid: what becomes of a message that does not fit: ``dead_letter`` sends it to the dead-letter
                channel; ``skip`` acknowledges and counts it. By default the former if there is such a channel.
                Either is logged, and the function is not called.
            keep_subscription: as for :meth:`subscribe`.
            **context: as for :meth:`subscribe`.

        Returns:
            The registration, whose ``close()`` ends it; without ``handler`` a decorator, which returns the function.
            :attr:`handlers` has the registrations of decorated functions.

        Raises:
            ArgumentError: ``handler`` is not callable with one argument, or another argument is not as described.
            SubscriptionRefusedError: the broker refused the subscription.
            MessagingError: as :meth:`subscribe`.

        Example::

            @m.on("sensors/+", qos=1)
            def store(reading: Reading) -> None: ...
        """
        if handler is None:

            def decorate(function: F) -> F:
                self.on(
                    channel, function, model=model, concurrency=concurrency, on_invalid=on_invalid,
                    keep_subscription=keep_subscription, **context,
                )  # fmt: skip
                return function

            return decorate
        options = self._checked_concurrency(concurrency, context)
        registration = self.subscription.open_handler(
            self._contexts.subscribing(channel, options, "on"),
            MessageHandler(handler, model),
            model,
            concurrency,
            on_invalid,
            keep_subscription,
        )
        try:
            self._wait_until(registration.ready)
            return registration
        except BaseException:  # an interrupt, too: no registration is returned
            registration.close()
            raise

    def _checked_concurrency(self, concurrency: int, context: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check ``concurrency`` against ``context``; return ``context`` with at least as large a prefetch."""
        if checked("concurrency", integer(1, MAX_PREFETCH), concurrency) == 1:
            return context
        if context.get("guaranteed_ordering"):
            raise ArgumentError("guaranteed_ordering handles one message at a time: it excludes concurrency > 1")
        prefetch = context.get("prefetch")
        if isinstance(prefetch, int) and prefetch < concurrency:
            raise ArgumentError(f"prefetch={prefetch} is less than concurrency={concurrency}")
        if prefetch is None and (self._settings.prefetch or concurrency) < concurrency:
            return {**context, "prefetch": concurrency}
        return context

    def _wait_until(self, ready: Promise[None]) -> None:
        """Wait for the broker's confirmation, on a plain thread and for as long as the instance's timeout."""
        if may_block():
            try:
                ready.result(self._settings.timeout)
            except DeadlineError:
                if ready.done():  # meanwhile
                    ready.result(0)

    @property
    def handlers(self) -> tuple[HandlerRegistration, ...]:
        """The registrations of :meth:`on` that have not ended; their order is that of their subscriptions."""
        return self.subscription.handlers
