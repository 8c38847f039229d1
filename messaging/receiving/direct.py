"""Direct acknowledgement: filter, handler and post callbacks (RFC 5.8.1, 5.8.6, 5.8.7).

Filter and handler run in the consumer of the subscription, before a message enters the stream. Post runs after them
there, or on the thread that settles the message later.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from messaging.functions import check_result
from messaging.model import AcknowledgeConsumer, AcknowledgeFilter, AcknowledgeHandler, AcknowledgeType
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.model import DirectAcknowledgement, Incoming, Message
    from messaging.services import ServiceRegistry

logger = SafeLog(__name__)


class DirectAcknowledger:
    """Runs the callbacks of one subscription; callbacks given by target are looked up for each message.

    Args:
        callbacks: filter, handler and post.
        services: the registry for their targets.
        channel: of the subscription, for the log.
        make: makes the message for post, of payload, context and ``model``.
    """

    def __init__(
        self,
        callbacks: DirectAcknowledgement,
        services: ServiceRegistry,
        channel: str,
        make: Callable[[bytes, Incoming, Any], Message],
        model: Any,
    ) -> None:
        self._callbacks = callbacks
        self._make = make
        self._model = model
        self._services = services
        self._channel = channel
        self._lock = threading.Lock()  # guards the two below: a verdict may come from any thread
        #: the message that the filter or the handler has now
        self._running: Incoming | None = None
        #: that message was settled meanwhile: post is called after the handler
        self._is_post_due = False

    def run(self, message: Message, incoming: Incoming) -> bool:
        """Call filter, handler and post, in this order (RFC 5.8.4). A callback that raises rejects the message.

        Returns:
            Whether the message enters the stream.
        """
        with self._lock:
            self._running, self._is_post_due = incoming, False
        try:
            enters = self._decide(message, incoming)
        finally:
            with self._lock:
                self._running, is_post_due = None, self._is_post_due
            if is_post_due:
                self._call_post(message)
        return enters and incoming.state is not AcknowledgeType.REJECTED

    def _decide(self, message: Message, incoming: Incoming) -> bool:
        """Call filter and handler; return whether the filter lets the message enter the stream."""
        callbacks = self._callbacks
        enters = True
        has_filter = callbacks.filter is not None
        if callbacks.filter is not None:
            try:
                accept = self._found(callbacks.filter, AcknowledgeFilter, "filter")
                has_filter = accept is not None
                if accept is not None:
                    enters = bool(check_result(accept(message), "an acknowledge filter"))
                    incoming.settle(enters)
            except Exception:
                logger.exception("acknowledge filter of %r raised; the message is rejected", incoming.channel)
                enters = False
                incoming.settle(False)
        # a callable handler yields to a filter, one given by target does not: RFC 5.8.4 says both
        if callbacks.handle is not None and (not has_filter or isinstance(callbacks.handle, str)):
            try:
                handle = self._found(callbacks.handle, AcknowledgeConsumer, "handler")
                if handle is not None:
                    arguments = (message, AcknowledgeHandler(incoming)) if _takes_two(handle) else (message,)
                    check_result(handle(*arguments), "an acknowledge handler")
            except Exception:
                logger.exception("acknowledge handler of %r raised; the message is rejected", incoming.channel)
                incoming.settle(False)
        return enters

    def settled(self, incoming: Incoming) -> None:
        """Call post for a message that was acknowledged or rejected; after its handler, if that is running."""
        if self._callbacks.post is None:
            return
        with self._lock:
            if incoming is self._running:
                self._is_post_due = True
                return
        self._call_post(self._make(incoming.payload, incoming, self._model))

    def _call_post(self, message: Message) -> None:
        """Call post, and log its exception."""
        post: Any = self._callbacks.post
        try:
            post = self._found(post, AcknowledgeConsumer, "post")
            if post is not None:
                check_result(post(message), "a post-acknowledge callback")
        except Exception:
            logger.exception("post-acknowledge callback of %r raised", self._channel)

    def _found(self, callback: str | Callable[..., Any], interface: type, what: str) -> Any:
        if not isinstance(callback, str):
            return callback
        service = self._services.service(interface, callback)
        if service is None:
            logger.warning("acknowledge %s %s of %r matches no service and is ignored", what, callback, self._channel)
        return service


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a handler takes the acknowledge handler beside the message (both forms: RFC 5.8.4 and 5.8.8)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len([p for p in positional if p.default is p.empty]) >= 2
