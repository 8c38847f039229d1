"""Notification filters: third parties between a sender and a listener (EV.3.2).

**Threads.** The predicate runs on a worker thread, for one batch of a sender at a time. A filter stores nothing: it
acknowledges an event when the next party has acknowledged it, or when the predicate has consumed it. So it loses
nothing when its process is killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from messaging.errors import DeadlineError
from messaging.errors.checks import plain_function
from messaging.errors.text import SafeLog
from messaging.execution import Promise, workers
from messaging.remoteevent.event import RemoteEvent
from messaging.remoteevent.failures import as_failure
from messaging.remoteevent.listener import BatchListener, WantedEvents, WithdrawnError, outcomes_of, wanted_test
from messaging.remoteevent.targets import Batch, as_target, settled
from messaging.remoteevent.time_limits import TIME_LIMIT, LimitedCall, TimeLimits

if TYPE_CHECKING:
    from messaging.remoteevent.listener import Outcome

logger = SafeLog(__name__)


class NotificationFilter(BatchListener):
    """Passes the events on that a predicate wants (EV.3.2). A listener; thread safe.

    An event that the predicate does not want is consumed: the sender is not told, and the next party misses its number,
    which is legal.

    Args:
        predicate: called with each event; also a function that returns another event of the same kind and number, or
            ``None``, to change what is passed on. If it raises, the sender is told, as of any listener that raises.
        target: the next party: a listener, a third party, or a stub of a listener in another process.
        time_limit: seconds that one call of the predicate may take.

    Attributes:
        passed, consumed: numbers of events.

    Raises:
        ArgumentError: an argument is not as described.
    """

    def __init__(self, predicate: Callable[[RemoteEvent], Any], target: Any, *, time_limit: float = TIME_LIMIT) -> None:
        self._predicate = plain_function(predicate, "a predicate")
        self._target = as_target(target)
        self._limits = TimeLimits(time_limit)
        self._lock = threading.Lock()  # guards the following two
        self.passed = self.consumed = 0

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """See :class:`~messaging.remoteevent.listener.EventTarget`."""
        if self._limits.is_stuck:
            return settled([DeadlineError("the predicate of a filter has not returned from an earlier event")])
        batch = Batch(events)
        call = LimitedCall(lambda: batch.fail(DeadlineError("the predicate of a filter took too long")))
        self._limits.begin(call)
        workers().submit(lambda: self._filter(batch, call))
        return batch.promise

    def _filter(self, batch: Batch, call: LimitedCall) -> None:
        wanted: list[RemoteEvent] = []
        #: for each event that was decided on, whether it is passed on
        is_wanted: list[bool] = []
        failure: Outcome = None
        is_still_wanted = wanted_test(batch.events)
        try:
            for event in batch.events:
                if not is_still_wanted():
                    break
                found = self._predicate(event)
                is_wanted.append(bool(found))
                if found:
                    wanted.append(found if isinstance(found, RemoteEvent) else event)
                self._limits.go_on(call)
        except BaseException as error:  # noqa: BLE001  # of the application
            failure = as_failure(error)
        finally:
            self._limits.end(call)
        if batch.is_settled:
            return
        if not is_wanted and failure is None:
            batch.fail(WithdrawnError("the events are no longer wanted"))
            return
        if not wanted:
            self._settle(batch, is_wanted, [], failure)
            return
        try:
            answer = self._target.deliver(WantedEvents(wanted, is_still_wanted))
            answer.listen(lambda: self._settle(batch, is_wanted, outcomes_of(answer), failure))
        except Exception as error:  # noqa: BLE001  # a target of the application
            self._settle(batch, is_wanted, [as_failure(error)], None)

    def _settle(self, batch: Batch, is_wanted: list[bool], passed: list[Outcome], failure: Outcome) -> None:
        outcomes = self._merged(is_wanted, passed, failure)
        delivered = min(len(passed), sum(is_wanted))
        with self._lock:
            self.passed += delivered
            self.consumed += max(0, min(len(outcomes), len(is_wanted)) - delivered)
        batch.settle_with(outcomes)

    @staticmethod
    def _merged(is_wanted: list[bool], passed: list[Outcome], failure: Outcome) -> list[Outcome]:
        """Return the outcomes of the batch: of consumed events ``None``, of others those of the next party."""
        outcomes: list[Outcome] = []
        following = iter(passed)
        for each in is_wanted:
            try:
                outcomes.append(next(following) if each else None)
            except StopIteration:
                return outcomes
        return outcomes if failure is None else [*outcomes, failure]
