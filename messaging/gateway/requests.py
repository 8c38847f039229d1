"""Routes of requests: a request at the source is sent to the target, and its reply travels back.

Requests are not stored: a requester waits for its reply, and asks again if there is none. A request is acknowledged at
the source when its reply is sent. Correlation ids and reply channels of the two sides are independent of each other.
Where the target knows expiry, a request expires when its requester has given up.

A failure reaches the requester as ``ReplyError``: that of the responder with its kind and reason, and one on the way
with the kind of the error, such as ``DeadlineError`` or ``UnroutableError``.

**Threads.** Requests are taken on worker threads; replies are passed on by the engine's loop, and many replies on
worker threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from reactivex import Observable, operators

from messaging import Messaging
from messaging.errors import MessagingError, ReplyError
from messaging.errors.text import SafeLog
from messaging.execution import Promise
from messaging.gateway.destinations import Destinations, MessageTraits
from messaging.gateway.extensions import of_source, with_prefetch
from messaging.gateway.patterns import ChannelPattern
from messaging.gateway.reports import RequestRouteDTO
from messaging.gateway.settings import RequestSettings
from messaging.gateway.subscriptions import Subscribing
from messaging.model import Features, Message
from messaging.replyto import ReplyRegistration

logger = SafeLog(__name__)


class RequestForwarder:
    """One route of requests. Thread safe.

    Args:
        name: of the route.
        settings: of the route.
        gateway: name of the gateway.
        max_hops: gateways that a request may pass.
        instances: by name.

    Attributes:
        name, settings, max_hops: see the arguments.
        subscribing: registers the handler at the source.
    """

    def __init__(
        self, name: str, settings: RequestSettings, gateway: str, max_hops: int, instances: Mapping[str, Messaging]
    ) -> None:
        self.name = name
        self.settings = settings
        self.max_hops = max_hops
        self.subscribing = Subscribing(f"requests '{name}'", self._register)
        self._source = instances[settings.source.instance]
        self._target = target = instances[settings.target.instance]
        self._lock = threading.Lock()  # guards the following four
        self._pending = self._answered = self._failed = 0
        self._destinations = Destinations(settings.source, settings.target, gateway, max_hops, target)
        self._expires = Features.EXTENSION_TIME_TO_LIVE in target.features and settings.target.time_to_live is None
        self._registration: ReplyRegistration | None = None

    def _register(self) -> None:
        source, features = self.settings.source, self._source.features
        options = of_source(source, features)
        if "prefetch" in source.model_fields_set:  # by default as many requests as are handled at a time
            options = with_prefetch(options, source.prefetch)
        many = self.settings.many
        handler = self._answer_many if many else self._answer
        self._registration = self._source.reply(
            ChannelPattern(source.channel).pattern, handler, concurrency=self.settings.concurrency, many=many, **options
        )
        self.subscribing.note_success()
        if self.subscribing.is_stopped:
            self._registration.unregister()

    def close(self) -> None:
        """Take no more requests. Those that were taken are answered as their replies come. Idempotent."""
        self.subscribing.is_stopped = True
        if self._registration is not None:
            self._registration.unregister()

    # --- one request, on a worker thread

    def _forwarded(self, request: Message) -> Message:
        """Return a request for the target.

        Raises:
            MessagingError: the request has passed this gateway before, or the target cannot carry it.
        """
        context = request.context
        traits = MessageTraits.of(context)._replace(correlation_id=None, retain=False)
        if self._destinations.is_loop(traits.passed):
            passed = ", ".join(traits.passed)
            raise MessagingError(f"the request has passed the gateways {passed}: there is a loop of routes")
        with self._lock:
            values = self._destinations.values(context.channel or "")
            publishing = self._destinations.find(self._destinations.template.render(values), traits, values).publishing
        timeout = self.settings.timeout
        found: dict[str, Any] = {**publishing.extensions, Features.EXTENSION_TIMEOUT: timeout}
        if self._expires:
            found[Features.EXTENSION_TIME_TO_LIVE] = timeout
        return Message(request.payload, publishing.replace(extensions=MappingProxyType(found)))

    def _answer(self, request: Message) -> Promise[Message]:
        answer: Promise[Message] = Promise(f"the reply to a request on {request.context.channel!r}")
        self._begin()
        try:
            reply = self._target.reply_to.publish_with_reply(self._forwarded(request))
        except Exception as error:  # noqa: BLE001  # the requester is told
            answer.reject(self._failure(error))
            return answer
        reply.listen(lambda: self._pass_on(reply, answer))
        return answer

    def _pass_on(self, reply: Promise[Any], answer: Promise[Message]) -> None:
        """Settle the answer with a reply. On the engine's loop."""
        error = reply.exception(0)
        if error is not None:
            answer.reject(self._failure(error))
            return
        self._end(failed=False)
        # a received message: its channel and correlation id are those of the other side, and are not passed on
        answer.resolve(reply.result(0))

    def _answer_many(self, request: Message) -> Observable[Any]:
        self._begin()
        try:
            replies: Observable[Any] = self._target.reply_to_many.publish_with_reply_many(self._forwarded(request))
        except Exception as error:
            raise self._failure(error) from error
        is_open = [True]

        def complete() -> None:
            is_open.clear()
            self._end(failed=False)

        def fail(error: Exception) -> Observable[Any]:
            is_open.clear()
            raise self._failure(error)

        def end() -> None:
            if is_open:  # the requester wants no more
                self._end(failed=False)

        return replies.pipe(
            operators.do_action(on_completed=complete),
            operators.catch(lambda error, _: fail(error)),
            operators.finally_action(end),
        )

    # --- counters

    def _begin(self) -> None:
        with self._lock:
            self._pending += 1

    def _end(self, *, failed: bool) -> None:
        with self._lock:
            self._pending -= 1
            if failed:
                self._failed += 1
            else:
                self._answered += 1

    def _failure(self, error: BaseException) -> ReplyError:
        """Count a request that failed, and return the error for its requester."""
        self._end(failed=True)
        found = error if isinstance(error, ReplyError) else ReplyError(type(error).__name__, str(error))
        logger.warning("requests '%s': a request failed: %s", self.name, found)
        return found

    # --- state

    def report(self) -> RequestRouteDTO:
        """Return the state of the route."""
        settings = self.settings
        return RequestRouteDTO(
            name=self.name,
            source=f"{settings.source.instance}:{settings.source.channel}",
            target=f"{settings.target.instance}:{settings.target.channel}",
            pending=self._pending,
            answered=self._answered,
            failed=self._failed,
        )
