"""Routes of requests: a request at the source is sent to the target, and its reply travels back.

Requests are not stored: a requester waits for its reply, and asks again if there is none. A request is acknowledged at
the source when its reply is sent. Correlation ids and reply channels of the two sides are independent of each other.

**Threads.** Requests are taken on worker threads; replies are passed on by the engine's loop.
"""

from __future__ import annotations

import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from reactivex import operators

from messaging.errors import MessagingError
from messaging.execution import Promise, workers
from messaging.gateway.destinations import PASSED_HEADER, passed_gateways
from messaging.gateway.pipeline import ChannelPattern, ChannelTemplate
from messaging.gateway.reports import RequestRouteDTO
from messaging.model import Features, Message, MessageContext
from messaging.text import SafeLog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from messaging import Messaging
    from messaging.gateway.settings import RequestSettings
    from messaging.replyto import ReplyRegistration

logger = SafeLog(__name__)

#: headers of one side that mean nothing at the other
_OWN_HEADERS: Final = frozenset({PASSED_HEADER})


class RequestRoute:
    """One route of requests. Thread safe.

    Args:
        name: of the route.
        settings: of the route.
        gateway: name of the gateway.
        max_hops: gateways that a request may pass.
        instances: by name.
    """

    def __init__(
        self, name: str, settings: RequestSettings, gateway: str, max_hops: int, instances: Mapping[str, Messaging]
    ) -> None:
        self.name = name
        self._settings = settings
        self._gateway = gateway
        self._max_hops = max_hops
        self._source = instances[settings.source.instance]
        self._target = instances[settings.target.instance]
        self._pattern = ChannelPattern(settings.source.channel)
        self._template = ChannelTemplate(settings.target.channel)
        self._lock = threading.Lock()  # guards the following three
        self._pending = self._answered = self._failed = 0
        self._registration: ReplyRegistration | None = None
        self._is_closed = False

    def start(self) -> None:
        """Take requests, from when the source is connected on."""
        workers().submit(self._register)

    def _register(self) -> None:
        settings = self._settings
        options: dict[str, Any] = {"concurrency": settings.concurrency, "many": settings.many}
        if settings.source.queue is not None:
            options["queue"] = settings.source.queue
        if settings.source.qos is not None:
            options["qos"] = settings.source.qos
        try:
            handler = self._answer_many if settings.many else self._answer
            self._registration = self._source.reply(self._pattern.pattern, handler, **options)
            if self._is_closed:
                self._registration.unregister()
        except MessagingError as error:
            if not self._is_closed:
                logger.error("requests '%s': not subscribed: %s", self.name, error)

    def close(self) -> None:
        """Take no more requests. Those that were taken are answered as their replies come."""
        self._is_closed = True
        if self._registration is not None:
            self._registration.unregister()

    # --- one request, on a worker thread

    def _forwarded(self, request: Message) -> tuple[str, dict[str, Any]]:
        """Return the channel and the options of a request at the target.

        Raises:
            MessagingError: the request has passed this gateway before.
        """
        context = request.context
        extensions = context.extensions
        passed = passed_gateways(extensions)
        if self._gateway in passed or len(passed) >= self._max_hops:
            raise MessagingError(f"the request has passed the gateways {', '.join(passed)}: there is a loop of routes")
        values = {"gateway": self._gateway, "channel": context.channel or ""}
        values |= self._pattern.match(context.channel or "") or {}
        options: dict[str, Any] = {"timeout": self._settings.timeout}
        target = self._settings.target
        content_type = target.content_type or context.content_type
        if content_type is not None:
            options["content_type"] = content_type
        if context.content_encoding is not None:
            options["content_encoding"] = context.content_encoding
        if target.qos is not None:
            options["qos"] = target.qos
        found = dict(extensions.get(Features.EXTENSION_HEADERS) or {}) | target.headers
        found[PASSED_HEADER] = ",".join((*passed, self._gateway))
        options["headers"] = found
        return self._template.render(values), options

    def _answer(self, request: Message) -> Promise[Message]:
        channel, options = self._forwarded(request)
        answer: Promise[Message] = Promise(f"the reply of {channel!r}")
        with self._lock:
            self._pending += 1
        try:
            reply = self._target.request(channel, request.payload, **options)
        except BaseException:
            self._count(failed=True)
            raise
        reply.listen(lambda: self._pass_on(reply, answer))
        return answer

    def _pass_on(self, reply: Promise[Any], answer: Promise[Message]) -> None:
        """Settle the answer with a reply. On the engine's loop."""
        error = reply.exception(0)
        self._count(failed=error is not None)
        if error is not None:
            answer.reject(error)
        else:
            answer.resolve(_copied(reply.result(0)))

    def _answer_many(self, request: Message) -> Any:
        channel, options = self._forwarded(request)
        replies = self._target.request_many(channel, request.payload, **options)
        with self._lock:
            self._answered += 1
        return replies.pipe(operators.map(_copied))

    def _count(self, *, failed: bool) -> None:
        with self._lock:
            self._pending -= 1
            if failed:
                self._failed += 1
            else:
                self._answered += 1

    # --- state

    def report(self) -> RequestRouteDTO:
        """Return the state of the route."""
        settings = self._settings
        return RequestRouteDTO(
            name=self.name,
            source=f"{settings.source.instance}:{settings.source.channel}",
            target=f"{settings.target.instance}:{settings.target.channel}",
            pending=self._pending,
            answered=self._answered,
            failed=self._failed,
        )


def _copied(reply: Message) -> Message:
    """Return a reply as a message of its own: correlation and reply channel are those of the other side."""
    context = reply.context
    found = context.extensions.get(Features.EXTENSION_HEADERS) or {}
    kept = {name: value for name, value in found.items() if name not in _OWN_HEADERS}
    extensions = {Features.EXTENSION_HEADERS: MappingProxyType(kept)} if kept else {}
    return Message(
        reply.payload,
        MessageContext(
            content_type=context.content_type,
            content_encoding=context.content_encoding,
            extensions=MappingProxyType(extensions),
        ),
    )
