"""Observers and iterators of streams inside interceptors. Streams without interceptors use their base classes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from messaging.errors import MessagingError
from messaging.execution import workers
from messaging.interception import PulledScope
from messaging.model import Message
from messaging.receiving.consumers import Pull, Push

if TYPE_CHECKING:
    from messaging.interception import InboundMessage, ProcessChain
    from messaging.model import ReceivedMessage
    from messaging.receiving.subscription import Subscription


class InterceptedPush(Push):
    """Drives one observer inside interceptors. See :class:`Push`."""

    def __init__(
        self,
        chain: ProcessChain,
        subscription: Subscription,
        on_next: Callable[[Message], object],
        on_error: Callable[[Exception], object] | None,
        on_completed: Callable[[], object] | None,
    ) -> None:
        self._chain = chain
        self._observer = on_next
        #: what an operator reports from its ``except`` block
        self._reported: BaseException | None = None
        super().__init__(subscription, self._observe, on_error, on_completed)

    def _observe(self, message: Message) -> None:
        chain = self._chain
        scope = chain.open(_inbound(chain, self.subscription, message, is_pulled=False))
        try:
            scope.run(self._observer, message)
        except BaseException as error:
            scope.leave(error)
            raise
        scope.leave(self._reported)

    def dispose(self) -> None:
        """See ``Push``."""
        if self._thread == threading.get_ident():
            self._reported = sys.exception()
        super().dispose()


class InterceptedPull(Pull):
    """Returns messages to one thread or event loop at a time, inside interceptors. See :class:`Pull`."""

    def __init__(self, chain: ProcessChain, subscription: Subscription) -> None:
        self._chain = chain
        #: of the message in hand
        self._scope: PulledScope | None = None
        super().__init__(subscription)

    def take(self) -> ReceivedMessage | Exception | None:
        """Return the next message, with its scope entered. See ``Pull``."""
        found = super().take()
        if isinstance(found, Message):
            if self._scope is not None:  # an interrupt came before it was handed out
                self._scope.leave(None)
            chain = self._chain
            self._scope = PulledScope(chain, _inbound(chain, self.subscription, found, is_pulled=True))
        return found

    def settle(self, *, failed: bool = False) -> None:
        """Leave the scope of the message that was handed out last, and settle the message. See ``Pull``."""
        scope = self._scope
        if scope is not None and self._in_hand is not None and self._in_hand is not self._hand_out.fetched:
            self._scope = None
            error: BaseException | None = None
            if failed:
                channel = self.subscription.spec.channel
                error = sys.exception() or MessagingError(f"the message of {channel!r} was rejected")
            scope.leave(error)
        super().settle(failed=failed)

    def forget(self) -> None:
        """Leave the scope of a message whose stream is garbage-collected, on any thread and maybe under its locks."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.restore()
            workers().submit(partial(scope.leave, None))


def _inbound(chain: ProcessChain, subscription: Subscription, message: Message, *, is_pulled: bool) -> InboundMessage:
    spec = subscription.spec
    return chain.inbound(message, spec.channel, spec.options.queue, is_pulled=is_pulled, is_manual=subscription.manual)
