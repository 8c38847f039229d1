"""Events of a mailbox itself: they tell its owners which leases it does not renew any more (EV.3.3).

A notice is an event in the box of the owner, so it reaches the owner in each mode, also after a restart. Each lease is
a source of its own: a box that keeps the latest events keeps the notices of all leases.

**Room.** A notice waits until the box has room, so it is not dropped in place of another event. Beside those that are
being stored, one waits for each lease.

**Threads.** Any thread may use the objects. Notices are stored on worker threads.
"""

from __future__ import annotations

import threading
from itertools import islice
from typing import Final, TypeAlias

from messaging.execution import Promise, clock
from messaging.remoteevent.delivery import EventDelivery, RetryPolicy
from messaging.remoteevent.event import RemoteEvent
from messaging.remoteevent.mailbox.box import notices_of
from messaging.remoteevent.mailbox.registration import MailboxRegistration
from messaging.remoteevent.renewal_set import RENEWAL_FAILURE, RenewalFailureEvent
from messaging.remoteevent.renewals import RenewalFailure

#: a box that is full may have room as soon as its owner takes events
_RETRY: Final = RetryPolicy(max_delay=2.0)


_Notice: TypeAlias = "tuple[RemoteEvent, RenewalFailure]"
#: channel and id
_Lease: TypeAlias = tuple[str, str]


class FailureNotices:
    """The notices of one mailbox. Thread safe.

    Args:
        name: of the mailbox, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # guards the following
        self._waiting: dict[str, WaitingNotices] = {}
        self._is_started = False
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of registrations that were told of a failure."""
        return len(self._waiting)

    def add(self, registration: MailboxRegistration, failure: RenewalFailure) -> None:
        """Store a notice as soon as the mailbox is open and the box has room; nothing if the mailbox is closed."""
        event = RenewalFailureEvent(
            f"{notices_of(registration.id)}{failure.lease_id:.400}",
            RENEWAL_FAILURE,
            clock.wall_ns() // 1000,  # above that of an earlier failure of the same lease
            None,
            lease_id=failure.lease_id,
            error=type(failure.error).__name__,
            reason=str(failure.error)[:500],
        )
        with self._lock:
            if self._is_closed:
                return  # the next run tells
            waiting = self._waiting.get(registration.id)
            if waiting is None:
                waiting = self._waiting[registration.id] = WaitingNotices(registration, self._name, self._is_started)
        waiting.add(event, failure)

    def start(self) -> None:
        """Store the notices from now on: the mailbox is open."""
        with self._lock:
            self._is_started = True
            waiting = [*self._waiting.values()]
        for each in waiting:
            each.delivery.enable()

    def forget(self, registration: MailboxRegistration) -> None:
        """Store no notice for a registration that has ended."""
        with self._lock:
            waiting = self._waiting.pop(registration.id, None)
        if waiting is not None:
            waiting.abandon()

    def close(self) -> list[Promise[None]]:
        """Store nothing further; return the promises that nothing is being stored."""
        with self._lock:
            self._is_closed = True
            return [each.delivery.close() for each in self._waiting.values()]


class WaitingNotices:
    """The notices that wait for the box of one registration: an ``EventQueue``. Thread safe."""

    def __init__(self, registration: MailboxRegistration, name: str, is_enabled: bool) -> None:
        self._lock = threading.Lock()  # guards the following two
        #: of each lease the newest one
        self._waiting: dict[_Lease, _Notice] = {}
        #: those of the last `peek`, which may be stored already
        self._passed: list[_Notice] = []
        self.delivery = EventDelivery(
            f"{name}: notices of registration {registration.id}",
            registration.listener,
            self,
            policy=_RETRY,
            lease=registration.lease,
            is_enabled=is_enabled,
        )

    def add(self, event: RemoteEvent, failure: RenewalFailure) -> None:
        """Store a notice of a failure, in place of an earlier one of the same lease."""
        with self._lock:
            self._waiting[failure.channel, failure.lease_id] = event, failure
        self.delivery.wake()

    def peek(self, most: int) -> list[RemoteEvent]:
        """See ``EventQueue``."""
        with self._lock:
            passed = {(each[1].channel, each[1].lease_id): each for each in self._passed}
            waiting = passed | self._waiting
            self._passed = [waiting.pop(lease) for lease in [*islice(waiting, most)]]
            self._waiting = waiting
            return [event for event, _ in self._passed]

    def settle(self, count: int) -> None:
        """See ``EventQueue``."""
        with self._lock:  # none are left if the registration has ended meanwhile
            told, self._passed = self._passed[:count], self._passed[count:]
        for _, failure in told:
            failure.told()

    def abandon(self) -> None:
        """Store nothing further: the owner is gone."""
        self.delivery.close()
        with self._lock:
            waiting = [*self._passed, *self._waiting.values()]
            self._passed, self._waiting = [], {}
        for _, failure in waiting:
            failure.told()
