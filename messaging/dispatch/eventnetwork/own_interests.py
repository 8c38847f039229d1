"""What one member wants: the broker's subscriptions for it, and then its announcement, in this order.

Another member that reads an announcement sends events at once, so the subscription must exist before. The reverse order
holds for interests that end. An interest that ends while one of overlapping topics begins stays until the broker has
confirmed that: a consumer whose topics change misses no event that it wants before and after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from messaging.environment.signals import on_failure
from messaging.errors import ClosedError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Promise, engine
from messaging.model import overlap

if TYPE_CHECKING:
    from messaging.dispatch.eventnetwork.announcements import TopicInterest
    from messaging.dispatch.eventnetwork.own_member import Control
    from messaging.receiving import JointSubscription

logger = SafeLog(__name__)

#: pairs of patterns that are compared; of more, all that end stay until none is being added
_COMPARED: Final = 5_000


class OwnInterests:
    """Keeps subscriptions and announcements in step with what an event service wants.

    Args:
        title: of the member, for the log.
        control: runs everything but :meth:`request`.
        joint: the subscription of the member.
        wanted: returns what the service wants and offers.
        pattern_of: returns the channel pattern of a topic filter.
        announce: announces interests and offers.
    """

    def __init__(
        self,
        title: str,
        control: Control,
        joint: JointSubscription,
        wanted: Callable[[], tuple[Iterable[TopicInterest], Iterable[str]]],
        pattern_of: Callable[[str], str],
        announce: Callable[[Iterable[TopicInterest], Iterable[str]], object],
    ) -> None:
        self._title = title
        self._control = control
        self._joint = joint
        self._wanted = wanted
        self._pattern_of = pattern_of
        self._announce = announce
        self._lock = threading.Lock()  # guards the following two
        self._requests: list[Promise[None]] = []
        self._is_posted = False
        # --- used by the control thread
        #: the interests with the patterns of their channels
        self._interests: dict[TopicInterest, str] = {}
        #: interests that stay until others take their place
        self._ending: dict[TopicInterest, str] = {}
        self._offers: Iterable[str] = ()
        #: patterns of both
        self._patterns: frozenset[str] = frozenset()
        #: patterns that the broker has confirmed, that it refused, and that it was asked for, with the last promise
        self._confirmed: set[str] = set()
        self._refused: dict[str, None] = {}
        self._adding: dict[str, Promise[None]] = {}
        #: requests with the patterns that they wait for
        self._waiting: list[tuple[set[str], Promise[None]]] = []
        self._is_publishing = False
        self._error: MessagingError | None = None

    def request(self) -> Promise[None]:
        """Announce what the service wants now; many calls become one announcement. From any thread.

        Returns:
            A promise that resolves when the broker has confirmed the subscriptions, and the announcement is on its way.
        """
        promise: Promise[None] = Promise(f"announcing the interests of {self._title}")
        promise.was_retrieved = True
        with self._lock:
            error = self._error
            if error is None:
                self._requests.append(promise)
                is_posted, self._is_posted = self._is_posted, True
        if error is not None:
            promise.reject(error)  # on this thread: it is not known elsewhere yet
        elif not is_posted:
            self._control.post(self.sync)
        return promise

    def sync(self) -> None:
        """Subscribe to the interests of now, and announce the subscribed ones."""
        with self._lock:
            requests, self._requests = self._requests, []
            self._is_posted = False
        with on_failure(self._refuse_unknown, requests):
            wanted, self._offers = self._wanted()
            interests = {each: self._pattern_of(each.topics) for each in wanted}
        patterns = frozenset(interests.values())
        ending = {**self._interests, **self._ending}
        self._ending = {each: pattern for each, pattern in ending.items() if pattern not in patterns}
        self._interests = interests
        new = [each for each in dict.fromkeys(interests.values()) if each not in self._patterns]
        self._patterns |= patterns
        # a pattern that was refused before is no reason for later requests to wait
        self._waiting += [(set(patterns - self._confirmed - self._refused.keys()), each) for each in requests]
        for pattern in new:
            self._add(pattern)
        self._publish()

    def _refuse_unknown(self, requests: list[Promise[None]]) -> None:
        failure = MessagingError(f"{self._title}: its interests are unknown; the log has the error")
        for each in requests:
            engine().call(each.reject, failure)

    def _replaced(self) -> frozenset[str]:
        """Return the patterns that end, are still confirmed, and have one that takes their place and is not yet."""
        ending = self._confirmed.intersection(self._ending.values())
        if len(ending) * len(self._adding) > _COMPARED:
            return frozenset(ending)
        return frozenset(each for each in ending if any(overlap(each, new) for new in self._adding))

    def _remove(self, patterns: frozenset[str]) -> None:
        """End subscriptions."""
        self._patterns -= patterns
        self._confirmed -= patterns
        for waiting, _ in self._waiting:
            waiting -= patterns
        for each in sorted(patterns):
            self._refused.pop(each, None)
            self._adding.pop(each, None)
            self._joint.remove(each)

    @property
    def are_refused(self) -> bool:
        """Return whether the broker refused or ended a subscription, which was not asked for again."""
        return bool(self._refused)

    def retry(self) -> None:
        """Subscribe to the refused patterns again: after a reconnect, and from time to time."""
        refused, self._refused = self._refused, {}
        for each in refused:
            self._add(each)

    def failed(self, pattern: str, error: MessagingError) -> None:
        """Note that the broker ended a subscription: its interests are announced no more."""
        if pattern in self._patterns:
            self._confirmed.discard(pattern)
            self._adding.pop(pattern, None)
            self._refuse(pattern, error)
            self._publish_soon()

    def _add(self, pattern: str) -> None:
        try:
            added = self._joint.add(pattern)
        except MessagingError as error:  # one that the transport cannot carry must not keep the others from it
            self._refuse(pattern, error)
        else:
            self._adding[pattern] = added
            added.listen(partial(self._control.post, self._added, pattern, added))

    def _added(self, pattern: str, added: Promise[None]) -> None:
        if self._adding.get(pattern) is not added:
            return  # removed meanwhile, and maybe added again: the later promise counts
        del self._adding[pattern]
        error = added.exception()
        if error is not None:
            self._refuse(pattern, error)
        else:
            self._confirmed.add(pattern)
            for waiting, _ in self._waiting:
                waiting.discard(pattern)
        self._publish_soon()

    def _refuse(self, pattern: str, error: MessagingError) -> None:
        if not isinstance(error, ClosedError):
            logger.error("%s: the events of %.200r do not arrive: %s; tried again later", self._title, pattern, error)
        self._refused[pattern] = None
        for waiting, promise in self._waiting:
            if pattern in waiting:
                waiting.discard(pattern)
                engine().call(promise.reject, error)

    def _publish_soon(self) -> None:
        """Publish after the calls that are posted already: the broker confirms many patterns at once."""
        if not self._is_publishing:
            self._is_publishing = True
            self._control.post(self._publish)

    def _publish(self) -> None:
        self._is_publishing = False
        confirmed = self._confirmed
        wanted = frozenset(self._interests.values())
        unwanted = self._patterns - wanted
        for pattern in unwanted:  # of interests that end: nothing waits for them
            self._adding.pop(pattern, None)
        staying = self._replaced()
        self._ending = {each: pattern for each, pattern in self._ending.items() if pattern in staying}
        self._announce(
            [*(each for each, pattern in self._interests.items() if pattern in confirmed), *self._ending],
            self._offers,
        )
        self._remove(unwanted - staying)
        for waiting, promise in self._waiting:
            if not waiting:
                engine().call(promise.resolve, None)
        self._waiting = [each for each in self._waiting if each[0]]

    def close(self, error: MessagingError) -> None:
        """Fail all requests."""
        with self._lock:
            self._error = error
            requests, self._requests = self._requests, []
        for each in (*requests, *(promise for _, promise in self._waiting)):
            engine().call(each.reject, error)
        self._waiting = []

    def abandon(self, error: MessagingError) -> None:
        """Refuse all requests in a forked child, where the holder of the lock may not exist."""
        self._lock = threading.Lock()
        self._error = error
        self._requests = []
        self._waiting = []
