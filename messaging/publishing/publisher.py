"""MessagePublisher (RFC 5.5): checks a message, puts it into the outbox, and promises its outcome.

**Threads.** ``publish`` may be called from any thread and any event loop. It runs on the caller: everything that can
be refused is refused there, before anything is sent. The engine's loop takes it from there, see
:mod:`messaging.publishing.outbox`.
"""

from __future__ import annotations

import threading
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import (
    InvalidChannelError,
    InvalidContentError,
    PayloadTooLargeError,
    UnsupportedFeatureError,
)
from messaging.model import (
    NO_EXTENSIONS,
    Features,
    MessageContext,
    PublishOptions,
    as_context,
    as_message,
    channels,
    check_printable,
    check_text,
    identified,
    kind_like,
    publish_options,
    requested,
)
from messaging.publishing.outbox import IdentifiedPublication, Outbox, Publication
from messaging.text import exact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from messaging.connection import Connection
    from messaging.execution import Promise
    from messaging.model import Message, MessageContextProvider

_UNSET: Final = (None, None, None, None)
_MAPPINGS: Final = (MappingProxyType, dict)
#: checked contexts kept by channel; more distinct channels than this are checked again
_PLAN_CACHE: Final = 4096


class MessagePublisher:
    """Publishes messages of one instance (RFC 5.5). Thread safe; get it as ``Messaging.publisher``."""

    def __init__(self, connection: Connection, outbox: Outbox) -> None:
        self._connection = connection
        self._adapter = adapter = connection.adapter
        #: the messages that wait to be published
        self.outbox = outbox
        self._timeout = adapter.settings.timeout
        self._plans: dict[tuple[Any, ...], PublishOptions] = {}
        #: what marks a context as checked by this publisher, for what the adapter announces now
        self._stamp = object()
        self._size_limit = adapter.max_message_size
        self._will_lock = threading.Lock()  # guards _will_taken
        self._will_taken = False

    def publish(
        self,
        message: Message | MessageContextProvider,
        channel_or_context: str | MessageContext | MessageContextProvider | None = None,
    ) -> Promise[None]:
        """Publish ``message``.

        Args:
            message: its own context decides channel and options, unless the second argument says otherwise. A provider
                (a builder, RFC 5.6.3) builds it.
            channel_or_context: a channel replaces the message's channel; the rest of its context stays. A context
                *replaces* the message's context altogether (RFC 5.5): what it leaves unset is unset, with one
                exception: without a channel, the message's is used.

        Returns:
            A promise. Without confirmation (QoS 0) it resolves when the bytes were handed to the socket; otherwise,
            or with ``guaranteedDelivery``, when the broker has taken responsibility. While there is no connection
            the message waits in the outbox. It fails with ``DeadlineError`` if it was not sent in time,
            ``OutcomeUnknownError`` if it was sent and the confirm did not come in time, ``PublishRefusedError`` if
            the broker refused it, ``ClosedError`` if the instance was closed before. The deadline is the extension
            ``timeout`` or else the instance's setting ``timeout``, and covers everything, waiting included.

        Raises:
            ArgumentError: no channel anywhere, a malformed one, an extension of the wrong type, too large a
                payload. Nothing is sent.
            UnsupportedFeatureError: the context asks for something the instance does not announce.
            OutboxFullError: ``outbox_size`` or ``outbox_bytes`` is reached. A plain thread waits for room first,
                until the deadline; a thread that runs an event loop does not.
            ClosedError: the instance is closed.
        """
        try:
            context = message._context  # type: ignore[union-attr]  # of a provider it is built below
            payload = message._payload  # type: ignore[union-attr]
        except AttributeError:
            message = as_message(message, "publish")
            context, payload = message._context, message._payload
        if channel_or_context is not None:
            context = self.override(context, channel_or_context)
        try:
            plan = context._plan
        except AttributeError:  # another implementation of the interface, to be read through its getters
            context = as_context(context)
            plan = None
        options: PublishOptions = plan[1] if plan is not None and plan[0] is self._stamp else self._compile(context)
        payload = self.check_payload(payload)
        timeout = options.timeout
        if timeout is None:
            timeout = self._timeout
        else:
            self.outbox.deadlines.watch(timeout)
        publication = Publication(self.outbox, payload, context, options, time.monotonic() + timeout)
        if options.last_will:
            self._set_will(publication)
        else:
            self.outbox.put(publication)
        return publication

    def check(self, context: MessageContext) -> PublishOptions:
        """What a context asks for, checked. From any thread; raises as :meth:`publish`."""
        plan = context._plan
        options: PublishOptions = plan[1] if plan is not None and plan[0] is self._stamp else self._compile(context)
        return options

    def check_like(self, context: MessageContext, options: PublishOptions) -> None:
        """:meth:`check` a context that differs from one that came to ``options`` in nothing but the channel."""
        context._channel = channels.check_name(context._channel or "")
        self._adapter.check_publish(context, options)
        context._plan = (self._stamp, options)

    def publish_checked(
        self,
        payload: bytes,
        context: MessageContext,
        options: PublishOptions,
        correlation_id: str | None,
        *,
        message_id: str | None = None,
        on_loop: bool = False,
    ) -> Publication:
        """Publish with a context that :meth:`check` has seen, and beside it a correlation id and a message id.

        ``message_id`` is for the instance with feature ``messageId`` and a confirmed message that needs no envelope,
        and takes the place of the id that it would have anyway; any other needs the extension.

        Raises ``PayloadTooLargeError``, ``OutboxFullError``, ``ClosedError`` as :meth:`publish`. ``on_loop`` is for the
        engine's loop, which must not wait: the promise fails with the latter two.
        """
        payload = self.check_payload(payload)
        timeout = self._timeout if options.timeout is None else options.timeout
        deadline = time.monotonic() + timeout
        if message_id is None:
            publication = Publication(self.outbox, payload, context, options, deadline)
        else:
            publication = own = IdentifiedPublication(self.outbox, payload, context, options, deadline)
            own.own_id = message_id
        publication.correlation_id = correlation_id
        if on_loop:
            self.outbox.post(publication)
        else:
            self.outbox.put(publication)
        return publication

    def check_payload(self, payload: Any) -> bytes:
        """A payload as bytes; raises ``InvalidContentError`` and ``PayloadTooLargeError``. From any thread."""
        if type(payload) is not bytes:
            payload = _as_bytes(payload)
        limit = self._size_limit
        if limit is not None and len(payload) > limit:
            raise PayloadTooLargeError(len(payload), limit, f"{self._adapter.name!r}")
        checked: bytes = payload
        return checked

    def refresh(self) -> None:
        """Forget checked contexts: the adapter announces other features than before. On the loop."""
        self._plans.clear()
        self._size_limit = self._adapter.max_message_size
        self._stamp = object()

    @staticmethod
    def override(context: MessageContext, override: str | MessageContext | MessageContextProvider) -> MessageContext:
        """Return the context of a message that is published with a second argument; see :meth:`publish`."""
        channel: str | None
        extension: str | None
        if isinstance(override, str):
            channel, extension = override, None
            values = context
        else:
            values = as_context(override)
            if values._channel is not None:
                return values
            channel, extension = context._channel, context._channel_extension
        return kind_like(values)(
            channel,
            extension,
            values._content_type,
            values._content_encoding,
            values._correlation_id,
            values._reply_to_channel,
            values._extensions,
        )

    def _compile(self, context: MessageContext) -> PublishOptions:
        """Check ``context`` and remember the result in it. Thread safe: at worst it is done twice."""
        channel = context._channel
        if channel is None:
            raise InvalidChannelError(
                "no channel: neither the message's context nor the call names one; "
                "use builder.channel(...) or publish(message, 'a/b')"
            )
        if channel.__class__ is not str:
            if not isinstance(channel, str):
                raise InvalidChannelError(f"channel must be a str, not {type(channel).__name__}")
            channel = context._channel = exact(channel)
        stamp = self._stamp
        extensions = requested(context, self._adapter) if context._is_received else context._extensions
        key = _alike(context, extensions)
        try:
            options = self._plans.get(key) if key is not None else None
        except TypeError:  # a value is of the wrong type
            key = options = None
        if options is not None:
            if options.message_id is not None:
                options = identified(options, extensions[Features.EXTENSION_MESSAGE_ID])
        else:
            channels.check_name(channel)
            options = publish_options(extensions, self._adapter)
            self._check_values(context)
            self._adapter.check_publish(context, options)
            if key is not None and stamp is self._stamp:
                if len(self._plans) >= _PLAN_CACHE:
                    self._plans.clear()
                self._plans[key] = options
        context._plan = (stamp, options)
        return options

    def _check_values(self, context: MessageContext) -> None:
        features = self._adapter.features
        if context._channel_extension is not None and Features.ROUTING_KEY not in features:
            raise self._adapter.lacks(
                Features.ROUTING_KEY, "channel(name, extension) needs a protocol with routing keys"
            )
        for name in ("channel_extension", "content_type", "content_encoding", "correlation_id", "reply_to_channel"):
            value = getattr(context, name)
            if value is None:
                continue
            (check_printable if name in _PRINTABLE else check_text)(name, value)
            if name != "channel_extension" and Features.MESSAGE_PROPERTIES not in features:
                raise self._adapter.lacks(Features.MESSAGE_PROPERTIES, f"{name} would not reach the subscriber")
        if context._reply_to_channel is not None:
            context._reply_to_channel = channels.check_name(context._reply_to_channel)

    def _set_will(self, will: Publication) -> None:
        with self._will_lock:
            if self._will_taken:
                raise UnsupportedFeatureError(
                    Features.EXTENSION_LAST_WILL, self._adapter.name, "this instance has a last will already"
                )
            self._will_taken = True
        try:
            self._connection.last_will.set(will)
        except BaseException:  # an interrupt, too
            self._will_taken = False
            raise


def _alike(context: MessageContext, extensions: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What contexts have in common that one check serves, or ``None`` if there are not many like this one.

    Contexts with nothing but a channel are alike, and so are contexts that differ in nothing but their message id.
    """
    if extensions is NO_EXTENSIONS:
        plain = context._values_beside_channel() == _UNSET
        return (context._channel, context._channel_extension) if plain else None
    if context._correlation_id is not None or extensions.__class__ not in _MAPPINGS:
        return None
    if extensions.get(Features.EXTENSION_MESSAGE_ID) is None:
        return None
    others = [(name, value) for name, value in extensions.items() if name != Features.EXTENSION_MESSAGE_ID]
    if not all(isinstance(value, (str, int, float)) for _, value in others):
        return None  # such as headers
    return (
        context._channel, context._channel_extension, context._content_type, context._content_encoding,
        context._reply_to_channel, *others, *[type(value) for _, value in others],
    )  # fmt: skip


def _as_bytes(payload: object) -> bytes:
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise InvalidContentError(
            f"a payload must be bytes, not {type(payload).__name__}; a builder's content(...) encodes objects"
        )
    return bytes(payload)


#: values of a context that are printable text on every protocol; the others are any text, and checked by themselves
_PRINTABLE: Final = ("content_type", "content_encoding")
