"""Publication: a message on its way to the adapter, and the promise of its outcome."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol

from messaging.environment import forks
from messaging.errors import (
    ClosedError,
    ConnectionLostError,
    DeadlineError,
    MessagingError,
    OutcomeUnknownError,
)
from messaging.execution import PENDING, Promise, clock
from messaging.model import PublishPlan

#: the first time, a time to live of which less than this is over is sent as it was given: part of it, at most seconds
_PART: Final = 0.01
_INSTANT: Final = 0.25


class Publications(Protocol):
    """The interface of the outbox that a publication uses. On the loop."""

    #: distinguishes the outboxes of all processes
    id: str
    #: see :mod:`messaging.environment.forks`
    generation: int

    def count_settled(self, entry: Publication) -> None:
        """Count a publication as settled; called by it, once."""

    def count_late(self, entry: Publication) -> None:
        """Count a publication that was settled before it was accepted, unless it is counted already."""

    def fail(self, entry: Publication, error: MessagingError) -> None:
        """Fail a publication, unless it is settled."""

    def fail_expired(self, entry: Publication, error: MessagingError) -> None:
        """Fail a publication whose time to live is over, unless it is settled; it is not sent any more."""

    def retry(self, entry: Publication) -> bool:
        """Send a publication again after reconnecting; return ``False`` if the outbox is closed."""


class Publication(Promise[None]):
    """An outgoing message: the core's ``Outgoing``, and the promise of its own outcome.

    One object serves both purposes, because one is made for every published message. It is settled on the engine's
    loop only, and then releases its payload, because the application may keep the promise for long.
    """

    #: whether :meth:`prepare` is called before the message is sent
    may_expire = False
    #: whether the message is on disk, so that its deadline ends its promise and not its sending
    is_stored = False
    #: its place in the journal, if it is stored
    offset = -1

    __slots__ = (
        "correlation_id",
        "deadline",
        "is_waiting",
        "outbox",
        "payload",
        "plan",
        "sequence",
        "settled",
        "was_sent",
    )

    def __init__(self, outbox: Publications, payload: bytes, plan: PublishPlan, deadline: float) -> None:
        # the state of the promise: spelled out, because a call of its __init__ would cost as much as all of this
        self._value = PENDING
        self._error = None
        self._listeners = None
        self.was_retrieved = False
        self.outbox = outbox
        self.payload = payload
        self.plan = plan
        self.correlation_id = plan.correlation_id
        #: monotonic seconds
        self.deadline = deadline
        #: position in the outbox, which sets it when it accepts the message; the order of sending, also again
        self.sequence = 0
        #: whether the message is confirmed or failed; read by the adapter
        self.settled = False
        #: whether a confirm is awaited, so that a connection loss leaves the outcome unknown
        self.was_sent = False
        #: whether the message is in the outbox, rather than with the adapter
        self.is_waiting = True

    @property
    def what(self) -> str:
        """See ``Promise``."""
        return f"publish to {self.plan.channel!r}"

    @property
    def message_id(self) -> str:
        """Return the message id: the application's own, or one that is unique across instances and processes."""
        return self.plan.options.message_id or f"{self.outbox.id}-{self.sequence:x}"

    def prepare(self) -> bool:
        """Set the time to live that is left; if it is over, fail the message and return ``False``. On the loop."""
        return True

    def pass_deadline(self) -> None:
        """Fail the promise of a stored message, which is still sent. On the loop; other messages fail instead."""

    @property
    def is_inherited(self) -> bool:
        """See ``Promise``."""
        return self.outbox.generation != forks.generation

    @property
    def may_have_arrived(self) -> bool:
        """Return whether the message left for the broker: its confirm is awaited, or has come."""
        return self.was_sent or (self.done() and self._error is None)

    def unfinished(self, why: str) -> MessagingError:
        """Return the error of an unsettled message: whether it may still arrive depends on its state."""
        if self.was_sent:
            return OutcomeUnknownError(f"{self.what}: {why} before the broker confirmed; it may arrive")
        return ClosedError(f"{self.what}: {why} before it was sent")

    def sent(self) -> None:
        """See ``Outgoing``."""
        self.was_sent = True

    def confirm(self) -> None:
        """See ``Outgoing``."""
        if not self.settled:
            self.settled = True
            self.outbox.count_settled(self)
            self._value = None
            if self._listeners is not None:
                self.call_listeners()

    def fail(self, error: MessagingError) -> None:
        """See ``Outgoing``."""
        if self.settled:
            return
        if isinstance(error, ConnectionLostError):
            if self.outbox.retry(self):
                return
            error = self.unfinished("the instance was closed")
        self.outbox.fail(self, error)


class SpecialPublication(Publication):
    """A message with a time to live, which counts from the call of ``publish``, or with an id of its own.

    The id is apart from the options, so that many messages can share the same ones. It travels where the id of every
    confirmed message does; ``plan.options.message_id`` travels everywhere.
    """

    __slots__ = ("expires", "may_expire", "own_id")

    def __init__(self, outbox: Publications, payload: bytes, plan: PublishPlan, deadline: float) -> None:
        super().__init__(outbox, payload, plan, deadline)
        options = plan.options
        self.own_id: str | None = options.message_id
        self.may_expire = options.time_to_live is not None
        if options.time_to_live is not None:
            #: when its time to live is over, monotonic seconds
            self.expires = clock.monotonic() + options.time_to_live

    @property
    def message_id(self) -> str:
        """Return the id that the application gave the message, or else the generated one."""
        own = self.own_id
        return own if own is not None else f"{self.outbox.id}-{self.sequence:x}"

    def prepare(self) -> bool:
        """See ``Publication``."""
        if not self.may_expire:
            return True
        plan, left = self.plan, self.expires - clock.monotonic()
        told = plan.options.time_to_live or 0.0
        if self.was_sent or told - left >= min(told * _PART, _INSTANT):
            self.plan = plan.replace(options=replace(plan.options, time_to_live=max(left, 0.0)))
            self.plan.record = plan.record
        if left <= 0:
            why = f"{self.what}: its time to live ended in the outbox"
            error = OutcomeUnknownError(f"{why}; it was sent before") if self.was_sent else DeadlineError(why)
            self.outbox.fail_expired(self, error)
        return left > 0
