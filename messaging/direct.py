"""Direct acknowledgement: filter, handler and post callbacks (RFC 5.8.1, 5.8.6, 5.8.7).

They run in the consumer of the subscription, before a message enters the stream; post on whichever thread settled it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from messaging.acknowledge import (
    AcknowledgeConsumer,
    AcknowledgeFilter,
    AcknowledgeHandler,
    AcknowledgeType,
    DirectAcknowledgement,
)

if TYPE_CHECKING:
    from messaging.adapter import Incoming
    from messaging.message import Message
    from messaging.services import ServiceRegistry

logger = logging.getLogger(__name__)


class DirectAcknowledger:
    """Runs the callbacks of one subscription; those given by target are looked up for each message."""

    def __init__(self, callbacks: DirectAcknowledgement, services: ServiceRegistry, channel: str) -> None:
        self._callbacks = callbacks
        self._services = services
        self._channel = channel

    def run(self, message: Message, incoming: Incoming) -> bool:
        """Filter, then handler; whether the message enters the stream. A callback that raises rejects it."""
        callbacks = self._callbacks
        enters = True
        has_filter = callbacks.filter is not None
        if callbacks.filter is not None:
            try:
                accept = self._found(callbacks.filter, AcknowledgeFilter, "filter")
                has_filter = accept is not None
                if accept is not None:
                    enters = bool(accept(message))
                    incoming._settle(enters)
            except Exception:
                logger.exception("acknowledge filter of %r raised; the message is rejected", incoming._channel)
                enters = False
                incoming._settle(False)
        # a callable handler yields to a filter, one given by target does not: RFC 5.8.4 says both
        if callbacks.handle is not None and (not has_filter or isinstance(callbacks.handle, str)):
            try:
                handle = self._found(callbacks.handle, AcknowledgeConsumer, "handler")
                if handle is not None:
                    arguments = (message, AcknowledgeHandler(incoming)) if _takes_two(handle) else (message,)
                    handle(*arguments)
            except Exception:
                logger.exception("acknowledge handler of %r raised; the message is rejected", incoming._channel)
                incoming._settle(False)
        return enters and incoming._state is not AcknowledgeType.REJECTED

    def settled(self, message: Message) -> None:
        """Post: the message was acknowledged or rejected. What the callback raises is logged."""
        if self._callbacks.post is None:
            return
        try:
            post = self._found(self._callbacks.post, AcknowledgeConsumer, "post")
            if post is not None:
                post(message)
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
    """Whether a handler wants the acknowledge handler beside the message (both forms are in RFC 5.8.4 and 5.8.8)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len([p for p in positional if p.default is p.empty]) >= 2
