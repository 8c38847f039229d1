"""The last will of an instance (RFC 6.3), and the will and the birth that it was connected with. On the engine loop."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

from messaging.adapter import Adapter, TakesLastWill
from messaging.connection.state import Epoch
from messaging.connection.subscribed import PublishQueue
from messaging.environment.signals import on_failure
from messaging.errors import ConnectionLostError, DeadlineError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Engine, clock, of_library
from messaging.model import Features, Outgoing, PublishPlan

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

    def prepare(self) -> bool:
        """See ``Outgoing``."""
        return True

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


class PendingWill:
    """Hands a last will to the adapter, now or with the next connection, and keeps it until then.

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
        with on_failure(self._engine.call, self._outbox.withdraw, will):  # the caller gets no promise
            self._engine.call(self._register, will)

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
