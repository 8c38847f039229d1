"""MessagePublisher (RFC 5.5): checks a message, puts it into the outbox, and promises its outcome.

**Threads.** ``publish`` may be called from any thread and any event loop. It checks the message on the calling thread
and raises before anything is sent. The engine's loop sends the message, see :mod:`messaging.publishing.sending`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from messaging.codecs.cache import BoundedCache
from messaging.environment.signals import on_failure
from messaging.errors import (
    ArgumentError,
    InvalidChannelError,
    InvalidContentError,
    InvalidExtensionError,
    PayloadTooLargeError,
    UnsupportedFeatureError,
)
from messaging.execution import Promise, clock
from messaging.model import (
    Features,
    Message,
    MessageContext,
    MessageContextBuilder,
    PublishPlan,
    as_context,
    as_message,
    boolean,
    channels,
    check_printable,
    check_text,
    identified,
    parts,
    plan_key,
    publish_options,
    requested,
    with_headers,
)
from messaging.model.context import ForwardedContext
from messaging.publishing.outbox import Outbox
from messaging.publishing.publication import Publication, SpecialPublication

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.interception import OutboundMessage, PublishChain
    from messaging.model import Capabilities, MessageContextProvider

#: values of a context that must be printable text on every protocol; the others may be any text
_PRINTABLE: Final = ("content_type", "content_encoding")
_HEADERS: Final = Features.EXTENSION_HEADERS


class MessagePublisher:
    """Publishes messages of one instance (RFC 5.5). Thread safe; get it as ``Messaging.publisher``.

    Attributes:
        chain: the interceptors of the messages of :meth:`publish`, which wrap it; ``None`` if there are none. They do
            not see the messages of :meth:`publish_internally` and :meth:`publish_checked`.
    """

    def __init__(self, connection: Connection, outbox: Outbox, chain: PublishChain | None = None) -> None:
        self.chain = chain
        if chain is not None:
            self.publish = self._publish_intercepted  # type: ignore[method-assign]  # without, it costs nothing
        self._connection = connection
        self._adapter = adapter = connection.adapter
        #: the messages that are not settled
        self.outbox = outbox
        self._admission = outbox.admission
        #: holds the messages on disk, with the setting ``outbox_path``
        self._intake = outbox.intake
        if self._intake is not None:
            self._intake.restore = self.restore
        self._timeout = adapter.settings.timeout
        self._plans: BoundedCache[tuple[Any, ...], PublishPlan] = BoundedCache(4096)
        #: marks the plans that this publisher compiled for the features that the adapter announces now
        self.stamp = object()
        self._size_limit = adapter.capabilities.max_message_size
        #: acquired once the instance has a last will
        self._will = threading.Lock()

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

            With the setting ``outbox_path`` the message is stored before it is sent, and a deadline or the end of the
            instance ends only its promise, with ``OutcomeUnknownError``: the message is still sent. ``stored`` of the
            promise is the promise that it is on the disk. With the extension ``storeAndForward`` the promise itself
            resolves then. It fails with ``OutboxFullError`` if there is no room.

        Raises:
            ArgumentError: no channel anywhere, a malformed one, an extension of the wrong type, too large a
                payload. Nothing is sent.
            UnsupportedFeatureError: the context asks for something the instance does not announce.
            OutboxFullError: ``outbox_size`` or ``outbox_bytes`` is reached. A plain thread waits for room first,
                until the deadline; a thread that runs an event loop does not.
            ClosedError: the instance is closed.
            InterceptorError, MessagingError: an interceptor failed, or refused the message.
        """
        try:
            payload, context = parts(message)  # type: ignore[arg-type]  # of a provider they are built below
        except AttributeError:
            payload, context = parts(as_message(message, "publish"))
        if channel_or_context is not None:
            context = self.override(context, channel_or_context)
        try:
            plan = context.plan
        except AttributeError:  # another implementation of the interface, to be read through its getters
            context = as_context(context)
            plan = None
        if plan is None or plan.stamp is not self.stamp:
            plan = self._compile(context)
        payload = self.check_payload(payload)
        timeout = plan.options.timeout
        if timeout is None:
            timeout = self._timeout
        else:
            self.outbox.deadlines.watch(timeout)
        deadline = clock.monotonic() + timeout
        if self._intake is not None and not plan.options.last_will:
            if plan.record is None:
                self._plan_record(plan, context)
            return self._intake.accept(payload, plan, deadline)
        if not plan.is_special:
            publication = Publication(self.outbox, payload, plan, deadline)
            self._admission.put(publication)
        elif plan.options.last_will:
            publication = Publication(self.outbox, payload, plan, deadline)
            self._set_will(publication)
        else:
            publication = self._special(payload, plan)
            self._admission.put(publication)
        return publication

    #: publishes messages of the project itself, such as dead letters, without the interceptors
    publish_internally = publish

    # --- interceptors

    def _publish_intercepted(
        self,
        message: Message | MessageContextProvider,
        channel_or_context: str | MessageContext | MessageContextProvider | None = None,
    ) -> Promise[None]:
        """Publish through the interceptors."""
        chain = self.chain
        if chain is None or chain.is_bypassed():
            return self.publish_internally(message, channel_or_context)
        outbound = chain.outbound("publish", Message(*self.open(message, channel_or_context, "publish")))
        return chain.send(outbound, lambda: self.publish_internally(self.intercepted(outbound)), sent_as)

    def open(
        self,
        message: Message | MessageContextProvider,
        override: str | MessageContext | MessageContextProvider | None,
        call: str,
    ) -> tuple[bytes, MessageContext]:
        """Return the payload of a message, checked, and the context that counts.

        Args:
            message, override: the arguments of a call, as of :meth:`publish`.
            call: its name, for errors.
        """
        try:
            payload, context = parts(message)  # type: ignore[arg-type]  # a provider builds its message
        except AttributeError:
            payload, context = parts(as_message(message, call))
        context = as_context(context)
        if override is not None:
            context = self.override(context, override)
        return self.check_payload(payload), context

    def intercepted(self, outbound: OutboundMessage) -> Message:
        """Return the message that interceptors have left, with the headers that they added.

        Raises:
            MessagingError: its context cannot be published.
        """
        if not outbound.added:
            return outbound.message
        payload, context = parts(outbound.message)
        context = as_context(context)
        extended = extend(context, outbound.added)
        extended.plan = self.extended(self.compile(context), outbound.added)
        return Message(payload, extended)

    def extended(self, plan: PublishPlan, headers: Mapping[str, str]) -> PublishPlan:
        """Return a copy of ``plan`` with further headers; only these are checked.

        Raises:
            InvalidHeaderError: a header cannot be sent.
        """
        other = PublishPlan(
            plan.stamp, with_headers(plan.options, headers), plan.channel, plan.channel_extension, plan.content_type,
            plan.content_encoding, plan.correlation_id, plan.reply_to_channel,
        )  # fmt: skip
        self._adapter.check_publish(other)
        return other

    # --- plans

    def compile(self, context: MessageContext) -> PublishPlan:
        """Return the plan of ``context``, compiled on first use. From any thread; raises as :meth:`publish`."""
        plan: PublishPlan | None = context.plan
        return plan if plan is not None and plan.stamp is self.stamp else self._compile(context)

    def restore(self, payload: bytes, context: MessageContext) -> PublishPlan:
        """Return the plan of a stored message. From any thread; raises as :meth:`publish`."""
        if self._size_limit is not None:
            self.check_payload(payload)
        plan = self.compile(context)
        if plan.record is None:
            self._plan_record(plan, context)
        return plan

    def _plan_record(self, plan: PublishPlan, context: MessageContext) -> None:
        from messaging.publishing.stored import RecordPlan  # not at import: few instances have a journal

        plan.record = RecordPlan(plan.channel, context, self._requested(context))

    def readdress(self, plan: PublishPlan, channel: str) -> PublishPlan:
        """Return a copy of ``plan`` for another channel; only the channel is checked. From any thread."""
        other = plan.replace(channel=channels.check_name(channel))
        self._adapter.check_publish(other)
        return other

    def publish_checked(
        self,
        payload: bytes,
        plan: PublishPlan,
        correlation_id: str | None,
        *,
        message_id: str | None = None,
        on_loop: bool = False,
    ) -> Publication:
        """Publish with a plan of :meth:`compile`.

        Args:
            payload: of the message.
            plan: of the message's context.
            correlation_id: of the message; that of the plan is not used.
            message_id: replaces the generated id of a confirmed message. Only for instances with feature ``messageId``,
                and for messages that need no envelope; other messages need the extension.
            on_loop: whether the caller is the engine's loop, which must not wait: the promise then fails with
                ``OutboxFullError`` or ``ClosedError``.

        Raises:
            PayloadTooLargeError, OutboxFullError, ClosedError: as :meth:`publish`.
        """
        payload = self.check_payload(payload)
        if message_id is not None or plan.is_special:
            publication = self._special(payload, plan, message_id)
        else:
            publication = Publication(self.outbox, payload, plan, clock.monotonic() + self._timeout)
        publication.correlation_id = correlation_id
        if on_loop:
            self._admission.post(publication)
        else:
            self._admission.put(publication)
        return publication

    def _special(self, payload: bytes, plan: PublishPlan, message_id: str | None = None) -> Publication:
        """Return a publication with a deadline, a time to live or a message id of its own."""
        options = plan.options
        deadline = clock.monotonic() + (self._timeout if options.timeout is None else options.timeout)
        if options.time_to_live is None and message_id is None:
            return Publication(self.outbox, payload, plan, deadline)
        publication = SpecialPublication(self.outbox, payload, plan, deadline)
        if message_id is not None:
            publication.own_id = message_id
        return publication

    def check_payload(self, payload: Any) -> bytes:
        """Check a payload and return it as bytes. From any thread.

        Raises:
            InvalidContentError, PayloadTooLargeError: the payload is not bytes, or too large for the instance.
        """
        if type(payload) is not bytes:
            payload = as_bytes(payload)
        limit = self._size_limit
        if limit is not None and len(payload) > limit:
            raise PayloadTooLargeError(len(payload), limit, f"{self._adapter.name!r}")
        checked: bytes = payload
        return checked

    def refresh(self) -> None:
        """Discard all plans, because the adapter announces other features than before. On the loop."""
        self._plans.clear()
        self._size_limit = self._adapter.capabilities.max_message_size
        self.stamp = object()

    @staticmethod
    def override(context: MessageContext, override: str | MessageContext | MessageContextProvider) -> MessageContext:
        """Return ``context`` as the second argument of :meth:`publish` changes it."""
        if isinstance(override, str):
            return context.at(override)
        values = as_context(override)
        return values if values.channel is not None else values.at(context.channel, context.channel_extension)

    def _compile(self, context: MessageContext) -> PublishPlan:
        """Check ``context`` and store its plan in it. Thread safe: concurrent calls may compile it twice."""
        stamp = self.stamp
        extensions = self._requested(context)
        key = plan_key(context, extensions)
        try:
            plan = self._plans.get(key) if key is not None else None
        except TypeError:  # a value is of the wrong type
            key = plan = None
        if plan is None:
            plan = self._checked(context, extensions, stamp)
            if key is not None and stamp is self.stamp:
                self._plans[key] = plan
        elif plan.options.message_id is not None:
            plan = plan.replace(options=identified(plan.options, extensions[Features.EXTENSION_MESSAGE_ID]))
        context.plan = plan
        return plan

    def _requested(self, context: MessageContext) -> Mapping[str, Any]:
        """Return the extensions to publish with: ``storeAndForward`` includes ``guaranteedDelivery``."""
        extensions = requested(context, self._adapter.capabilities) if context.is_received else context.extensions
        if isinstance(extensions, Mapping) and extensions.get(Features.EXTENSION_STORE_AND_FORWARD):
            return {**extensions, Features.EXTENSION_GUARANTEED_DELIVERY: True}
        return extensions

    def _checked(self, context: MessageContext, extensions: Mapping[str, Any], stamp: object) -> PublishPlan:
        channel = context.channel
        if channel is None:
            raise InvalidChannelError(
                "no channel: neither the message's context nor the call names one; "
                "use builder.channel(...) or publish(message, 'a/b')"
            )
        channel = channels.check_name(channel)
        options = publish_options(self._without_store(extensions), self._adapter.capabilities)
        _check_values(context, self._adapter.capabilities)
        reply_to = context.reply_to_channel
        plan = PublishPlan(
            stamp,
            options,
            channel,
            context.channel_extension,
            context.content_type,
            context.content_encoding,
            context.correlation_id,
            None if reply_to is None else channels.check_name(reply_to),
        )
        self._adapter.check_publish(plan)
        return plan

    def _without_store(self, extensions: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the extensions without ``storeAndForward``, which is the core's, and not of the adapter."""
        key = Features.EXTENSION_STORE_AND_FORWARD
        if not isinstance(extensions, Mapping) or key not in extensions:
            return extensions  # the rest is checked with the others
        try:
            is_wanted = boolean(extensions[key])
        except ValueError as error:
            raise InvalidExtensionError(key, str(error)) from None
        if is_wanted and self._intake is None:
            raise self._adapter.capabilities.lacks(key, "set outbox_path, the folder of a durable outbox")
        return {name: value for name, value in extensions.items() if name != key}

    def announce(self, will: Message | None, birth: Message | None) -> None:
        """Have the first connection register ``will``, and each connection publish ``birth`` before anything else.

        To be called before the connection is started. Interceptors do not see these messages.

        Raises:
            ArgumentError, UnsupportedFeatureError: as :meth:`publish`.
        """
        presence = self._connection.presence
        if will is not None:
            presence.will = self._made(will, {Features.EXTENSION_LAST_WILL: True})
            self._will.acquire(blocking=False)
        if birth is not None:
            presence.birth = self._made(birth, {})

    def _made(self, message: Message, added: Mapping[str, Any]) -> Callable[[], tuple[bytes, PublishPlan]]:
        payload, context = parts(message)
        payload = self.check_payload(payload)
        if added:
            context = MessageContextBuilder().with_context(context).extensions(added).build_context()

        def make() -> tuple[bytes, PublishPlan]:
            return payload, self.compile(context)

        plan = make()[1]
        if plan.options.last_will is not bool(added):
            raise ArgumentError("a birth is no last will: leave the extension 'lastWill' out")
        return make

    def _set_will(self, will: Publication) -> None:
        if not self._will.acquire(blocking=False):
            raise UnsupportedFeatureError(
                Features.EXTENSION_LAST_WILL, self._adapter.name, "this instance has a last will already"
            )
        with on_failure(self._will.release):
            self._connection.last_will.set(will)


def as_bytes(payload: Any) -> bytes:
    """Return a payload as bytes; raise ``InvalidContentError`` if it is something else."""
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise InvalidContentError(
            f"a payload must be bytes, not {type(payload).__name__}; a builder's content(...) encodes objects"
        )
    return bytes(payload)


def _check_values(context: MessageContext, capabilities: Capabilities) -> None:
    """Check that the values of a context can be sent; raises as ``MessagePublisher.publish``."""
    features = capabilities.features
    if context.channel_extension is not None and Features.ROUTING_KEY not in features:
        raise capabilities.lacks(Features.ROUTING_KEY, "channel(name, extension) needs a protocol with routing keys")
    for name in ("channel_extension", "content_type", "content_encoding", "correlation_id", "reply_to_channel"):
        value = getattr(context, name)
        if value is None:
            continue
        (check_printable if name in _PRINTABLE else check_text)(name, value)
        if name != "channel_extension" and Features.MESSAGE_PROPERTIES not in features:
            raise capabilities.lacks(Features.MESSAGE_PROPERTIES, f"{name} would not reach the subscriber")


def extend(context: MessageContext, headers: Mapping[str, str]) -> MessageContext:
    """Return a copy of ``context`` with further headers."""
    extensions = context.extensions
    own = extensions.get(_HEADERS)
    if not isinstance(own, Mapping):
        own = {}
    return (ForwardedContext if context.is_received else MessageContext)(
        context.channel,
        context.channel_extension,
        context.content_type,
        context.content_encoding,
        context.correlation_id,
        context.reply_to_channel,
        MappingProxyType({**extensions, _HEADERS: MappingProxyType({**own, **headers})}),
    )


def sent_as(promise: Promise[Any]) -> dict[str, Any]:
    """Return the ids of a published message, for its ``Outcome``."""
    if not isinstance(promise, Publication):
        return {}
    options = promise.plan.options
    has_id = options.message_id is not None or options.qos != "0"  # otherwise it is not sent
    return {"message_id": promise.message_id if has_id else None, "correlation_id": promise.correlation_id}
