"""The will and the birth that an instance was connected with. On the engine loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import uuid4

from messaging.adapter import TakesLastWill
from messaging.errors import ConnectionLostError, DeadlineError, MessagingError
from messaging.execution import clock, of_library
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.model import PublishPlan

logger = SafeLog(__name__)

#: returns payload and plan for the features of the broker that is connected; raises MessagingError
Made = Callable[[], tuple[bytes, "PublishPlan"]]


class PresenceMessage:
    """A will or a birth: an ``Outgoing`` that is in no outbox and has no deadline. A failure is logged.

    Attributes:
        error: why it failed.
    """

    __slots__ = ("_what", "correlation_id", "error", "message_id", "payload", "plan", "settled")

    def __init__(self, what: str, payload: bytes, plan: PublishPlan) -> None:
        self._what = what
        self.payload = payload
        self.plan = plan
        self.correlation_id = plan.correlation_id
        self.message_id: str = plan.options.message_id or uuid4().hex
        self.settled = False
        self.error: MessagingError | None = None

    def sent(self) -> None:
        """See ``Outgoing``."""

    def confirm(self) -> None:
        """See ``Outgoing``."""
        self.settled = True

    def fail(self, error: MessagingError) -> None:
        """See ``Outgoing``. After a loss the next connection has a birth of its own."""
        if not self.settled:
            self.settled, self.error = True, error
            if not isinstance(error, ConnectionLostError):
                logger.warning("%s on %r failed: %s", self._what, self.plan.channel, error)


class Presence:
    """Hands the will to the adapter before the first connection, and publishes the birth after each.

    Attributes:
        will, birth: the messages; ``None`` for none.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.will: Made | None = None
        self.birth: Made | None = None

    async def connecting(self) -> None:
        """Hand over the will, for the first connection and each further one.

        Raises:
            MessagingError: the protocol does not carry it.
        """
        if self.will is None or not isinstance(self._adapter, TakesLastWill):
            return
        message = PresenceMessage(self._title("the last will"), *self.will())
        await of_library(self._adapter.set_will(message))
        if message.error is not None:
            raise message.error

    async def connected(self) -> None:
        """Publish the birth, before anything that waits in the outbox."""
        if self.birth is None:
            return
        title = self._title("the birth")
        try:
            message = PresenceMessage(title, *self.birth())
        except MessagingError as error:  # the broker lacks a feature that its protocol has
            logger.warning("%s is not published: %s", title, error)
        else:
            seconds = self._adapter.settings.connect_timeout
            try:
                async with clock.timeout(seconds):
                    await of_library(self._adapter.publish([message]))
            except TimeoutError:
                message.fail(DeadlineError(f"{title} was not taken within {seconds:g} s"))
            except MessagingError as error:
                message.fail(error)

    def _title(self, what: str) -> str:
        return f"{self._adapter.url.scheme} '{self._adapter.name}': {what}"
