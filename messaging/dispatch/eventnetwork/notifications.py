"""Delivery notifications: a promise that resolves when every consumer, here and in other processes, was notified.

The members that live and want an event when it is published are waited for, and the consumers of this process. A member
that leaves, or withdraws its interest in the event, has no consumers left. A member that is lost fails the promise, as
does the deadline, and the error names it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

from messaging.dispatch.eventnetwork.other_members import OtherMember
from messaging.errors import ConnectionLostError, MessagingError, PartialNotificationError, TooManyRequestsError
from messaging.execution import Promise, clock, engine

#: reasons to wait that are no consumer: the event is being dispatched; members that are not known yet may want it
DISPATCH: Final = "dispatch"
MEMBERS: Final = "members"
#: notifications that may be pending at a time
MAX_PENDING: Final = 10_000


class NotificationPromise(Promise[None]):
    """The promise of a notification. ``message``: the promise of the message of its event, once it is sent."""

    __slots__ = ("message",)

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.message: Promise[None] | None = None

    @property
    def stored(self) -> Promise[None]:
        """See ``Promise``: the event was stored, and will be sent."""
        return super().stored if self.message is None else self.message.stored


class DeliveryNotification:
    """The notification of one event. Thread safe.

    Args:
        what: the operation, for errors.
        timeout: deadline, seconds.
        joined: called with each member that joined while the members are not settled, and that is waited for, too.

    Attributes:
        is_for: returns whether a member wants the event now. Any thread may call it.
    """

    __slots__ = (
        "_confirmed",
        "_deadline",
        "_is_open",
        "_is_watched",
        "_lock",
        "_lost",
        "_members",
        "_parts",
        "is_expired",
        "is_for",
        "joined",
        "promise",
        "timeout",
        "waits_for_connection",
        "what",
    )

    def __init__(self, what: str, timeout: float, joined: Callable[[OtherMember], object] = lambda _: None) -> None:
        self.joined = joined
        self.is_for: Callable[[OtherMember], bool] = lambda _: True
        #: whether its deadline has passed before its promise was settled
        self.is_expired = False
        #: whether the loss of the connection leaves it pending as long as it is held for ``DISPATCH``
        self.waits_for_connection = False
        self.what = what
        self.timeout = timeout
        self.promise = NotificationPromise(what)
        self._deadline = clock.monotonic() + timeout
        self._lock = threading.Lock()  # guards the following
        #: consumers of this process that are waited for, by an object for each delivery
        self._parts: dict[object, str] = {}
        #: members that are waited for, and members that were lost meanwhile
        self._members: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        #: members that confirmed it: they are not waited for again when their interests change
        self._confirmed: set[str] = set()
        self._is_open: set[str] = {DISPATCH}
        self._is_watched = False

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - clock.monotonic()

    def waits_for(self, reason: str) -> bool:
        """Return whether ``reason`` keeps it open."""
        return reason in self._is_open

    def hold(self, reason: str) -> None:
        """Keep it open for ``reason``, until :meth:`release`."""
        with self._lock:
            self._is_open.add(reason)

    def release(self, reason: str) -> None:
        """Undo :meth:`hold`; at first it is held for ``DISPATCH``."""
        with self._lock:
            self._is_open.discard(reason)
        self._settle()

    def lose_connection(self) -> None:
        """Fail: the connection was lost. One that waits for a connection anyway waits for the next one."""
        if not (self.waits_for_connection and self.waits_for(DISPATCH)):
            self.fail(ConnectionLostError(f"{self.what}: the connection was lost before every consumer was notified"))

    def restart(self) -> None:
        """Hold it for ``DISPATCH`` alone, as at first, and have members confirm it again."""
        with self._lock:
            self._is_open = {DISPATCH}
            self._confirmed.clear()

    def expect_part(self, name: str) -> Callable[[], None]:
        """Wait for one delivery to a consumer of this process; return the function to call when it is over."""
        key = object()
        with self._lock:
            self._parts[key] = name

        def over() -> None:
            with self._lock:
                if self._parts.pop(key, None) is None:
                    return
            self._settle()

        return over

    def expect(self, members: Iterable[OtherMember]) -> None:
        """Wait for other members."""
        with self._lock:
            for each in members:
                if each.id in self._confirmed:
                    continue
                self._members[each.id] = str(each)

    def confirmed(self, member: str) -> None:
        """Note that every consumer of a member was notified, or that it has none any more."""
        with self._lock:
            self._confirmed.add(member)
            if self._members.pop(member, None) is None and self._lost.pop(member, None) is None:
                return
        self._settle()

    def is_missing(self, member: OtherMember) -> bool:
        """Return whether a member has not confirmed it yet, which was lost and came back or is waited for."""
        with self._lock:
            return member.id in self._members or (member.id in self._lost and not member.is_lost)

    def ignore(self, member: str) -> None:
        """Wait no more for a member that was lost before the event was published."""
        with self._lock:
            self._members.pop(member, None)
        self._settle()

    def lost(self, member: str) -> None:
        """Note that a member is lost: it is not waited for, and named."""
        with self._lock:
            name = self._members.pop(member, None)
            if name is None:
                return
            self._lost[member] = name
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            if self._is_open or self._parts or self._members:
                return
            lost = tuple(self._lost.values())
        if lost:
            text = f"{self.what}: not every consumer was notified: lost: {', '.join(lost)}"
            self.fail(PartialNotificationError(text, lost))
        else:
            engine().call(self.promise.resolve, None)

    def follow(self, other: DeliveryNotification | None) -> None:
        """Have the outcome of another one, of the same event; at once without one."""
        if other is None:
            self.release(DISPATCH)
            return

        def settled() -> None:
            error = other.promise.exception(0)
            if error is None:
                self.release(DISPATCH)
            else:
                self.fail(error)

        self.watch()
        other.promise.listen(settled)

    def watch(self) -> None:
        """Have it expire at its deadline. From any thread; further calls have no effect."""
        with self._lock:
            was_watched, self._is_watched = self._is_watched, True
        if not was_watched:
            engine().call(self._watch)

    def _watch(self) -> None:
        if self.promise.done():
            return
        timer = clock.call_later(engine().loop, max(0.0, self.left), self.expire)
        self.promise.listen(lambda: engine().call(timer.cancel))

    def expire(self) -> None:
        """Fail it: the deadline has passed."""
        with self._lock:
            missing = (*self._parts.values(), *self._members.values(), *self._lost.values())
        self.is_expired = True
        names = ", ".join(missing) or "the answers of the members"
        text = f"{self.what}: not every consumer was notified within {self.timeout:g} s: missing: {names}"
        self.fail(PartialNotificationError(text, missing))

    def fail(self, error: MessagingError) -> None:
        """Fail it."""
        engine().call(self.promise.reject, error)


class Notifications:
    """The pending notifications of one member, by the id of their event or ping. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        self._pending: dict[str, DeliveryNotification] = {}

    def add(self, key: str, notification: DeliveryNotification) -> None:
        """Watch a notification until its promise is settled.

        Raises:
            TooManyRequestsError: ``MAX_PENDING`` are pending.
        """
        with self._lock:
            if len(self._pending) >= MAX_PENDING:
                raise TooManyRequestsError(
                    f"{notification.what}: {MAX_PENDING} notifications are pending: await earlier ones first"
                )
            self._pending[key] = notification
        notification.promise.listen(lambda: self._remove(key, notification))
        notification.watch()

    def renew(self, key: str, new: str) -> None:
        """Have a pending notification confirmed by ``new``, and no more by ``key``."""
        with self._lock:
            found = self._pending.pop(key, None)
            if found is None:
                return
            self._pending[new] = found
        found.promise.listen(lambda: self._remove(new, found))

    def _remove(self, key: str, notification: DeliveryNotification) -> None:
        with self._lock:
            if self._pending.get(key) is notification:
                del self._pending[key]

    def abandon(self) -> None:
        """Forget all in a forked child, where the holder of the lock may not exist."""
        self._lock = threading.Lock()
        self._pending = {}

    def all(self) -> list[DeliveryNotification]:
        """Return the pending notifications."""
        with self._lock:
            return [*self._pending.values()]

    def confirmed(self, key: str, member: str) -> None:
        """Pass on a confirmation of a member."""
        with self._lock:
            found = self._pending.get(key)
        if found is not None:
            found.confirmed(member)
