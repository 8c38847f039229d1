"""The last will of an instance (RFC 6.3): kept until the adapter has handed it to the broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from messaging.adapter import TakesLastWill
from messaging.errors import ConnectionLostError, MessagingError
from messaging.execution import clock, of_library
from messaging.model import Features
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.connection.state import Epoch
    from messaging.connection.subscribed import PublishQueue
    from messaging.execution import Engine
    from messaging.model import Outgoing

logger = SafeLog(__name__)


class PendingWill:
    """Hands a last will to the adapter, now or with the next connection. On the engine loop.

    Args:
        engine: runs the hand-over.
        adapter: takes the will.
        outbox: counts the will as pending, and fails it at its deadline.
        epoch: of the connection.
    """

    def __init__(self, engine: Engine, adapter: Adapter, outbox: PublishQueue, epoch: Epoch) -> None:
        self._engine = engine
        self._adapter = adapter
        self._outbox = outbox
        self._epoch = epoch
        #: the will that is not handed over yet
        self._pending: Outgoing | None = None

    def set(self, will: Outgoing) -> None:
        """Have the adapter register ``will``, now or once connected. From any thread."""
        self._outbox.put(will, queue=False)
        try:
            self._engine.call(self._register, will)
        except BaseException:  # an interrupt: the caller gets no promise
            self._engine.call(self._outbox.withdraw, will)
            raise

    def _register(self, will: Outgoing) -> None:
        self._outbox.adopt(will)
        self._pending = will
        if self._epoch.is_usable:
            self._engine.spawn(self.hand_over())

    async def hand_over(self) -> None:
        """Hand the pending will to the adapter, if there is one; after a loss, with the next connection."""
        will, self._pending = self._pending, None
        if will is None or will.settled:
            return
        number = self._epoch.number
        adapter = self._adapter
        try:
            if not isinstance(adapter, TakesLastWill):
                raise adapter.capabilities.lacks(Features.EXTENSION_LAST_WILL)
            async with clock.timeout(self._adapter.settings.connect_timeout):
                await of_library(adapter.set_will(will))
        except (ConnectionLostError, TimeoutError):
            self._pending = will  # until its deadline
            if number != self._epoch.number and self._epoch.is_usable:
                self._engine.spawn(self.hand_over())  # the next connection is there already
        except MessagingError as error:
            will.fail(error)
        except Exception as error:
            logger.exception("%s: the adapter failed to set a last will", self._adapter.url.label(self._adapter.name))
            will.fail(MessagingError(f"the adapter failed to set the last will: {type(error).__name__}"))
