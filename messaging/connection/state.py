"""The state of an instance's connection, its observers (MSG060), and its number.

================  ==================================================================================================
state             meaning
================  ==================================================================================================
``connecting``    no connection has been made yet
``connected``     the connection is up
``degraded``      connected, but the broker accepts no messages for lack of memory, or not all subscriptions are
                  restored; ``cause`` names the reason
``reconnecting``  the connection was lost, or could not be made; retried with growing delays
``refused``       the broker refused the connection: wrong credentials, a client id taken over by another client, ...;
                  retried with long delays, because only a change at the broker helps, or with the usual ones after a
                  log-in with credentials that may change
``closed``        the connection is closed for good
================  ==================================================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from reactivex import Observable
from reactivex import abc as rx

from messaging.environment.signals import attempt
from messaging.errors import MessagingError
from messaging.errors.checks import check_result
from messaging.errors.text import SafeLog
from messaging.execution import Engine, Serial, ValueObserver, callbacks_of, clock

logger = SafeLog(__name__)

StateName = Literal["connecting", "connected", "degraded", "reconnecting", "refused", "closed"]

#: maximum number of states that wait for an observer; the oldest are dropped first
_BACKLOG: Final = 64


class Epoch:
    """Identifies the current connection of an instance: replies and verdicts of an earlier one are void.

    Written on the engine loop.

    Attributes:
        number: of the current connection, or of the last one; 0 before the first.
        is_usable: whether the connection is up.
    """

    __slots__ = ("is_usable", "number")

    def __init__(self) -> None:
        self.number = 0
        self.is_usable = False


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """One state of a connection."""

    name: StateName
    #: the problem; ``None`` if the connection is up, or if no problem has occurred yet
    cause: MessagingError | None = None
    #: begin of the state, seconds since the epoch
    since: float = 0.0
    #: the host that the instance is connected to, or tried last, as ``broker:1883``, and with its address if the name
    #: has several; ``None`` before the first attempt
    host: str | None = None

    @property
    def is_up(self) -> bool:
        """Return whether the connection is up."""
        return self.name in ("connected", "degraded")

    def __str__(self) -> str:
        return self.name if self.cause is None else f"{self.name}: {self.cause}"


class ConnectionStates(Observable[ConnectionState]):
    """The states of one connection, as an Observable. Thread safe; get it as ``Messaging.connection_state``.

    Each observer receives the current state first, then every change in order, and completion after ``closed``. It is
    called on a worker thread, one call at a time, shortly after the change; :attr:`value` is the current state. An
    observer more than 64 states behind misses the oldest of them. An observer that raises is not called again.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._value = ConnectionState("connecting", None, clock.wall())
        #: whether the state is ``closed``: for hot paths, because :attr:`value` costs more
        self.is_closed = False
        #: used on the loop only
        self._watchers: dict[_StateWatcher, None] = {}  # in the order of their beginning

    @property
    def value(self) -> ConnectionState:
        """Return the current state."""
        return self._value

    def subscribe(
        self,
        on_next: ValueObserver[ConnectionState] | Callable[[ConnectionState], object] | None = None,
        on_error: Callable[[Exception], object] | None = None,
        on_completed: Callable[[], object] | None = None,
        *,
        scheduler: rx.SchedulerBase | None = None,  # noqa: ARG002  # observers run on workers; see the class
    ) -> rx.DisposableBase:
        """Subscribe an observer, or callbacks. ``on_error`` is never called: a problem is a state.

        Returns:
            A disposable. After its disposal no call begins; one may be in progress.

        Raises:
            ArgumentError: an argument is neither an observer nor callable.
        """
        next_, _, on_completed = callbacks_of(on_next, on_error, on_completed)
        watcher = _StateWatcher(next_, on_completed)
        if self._value.name == "closed":  # the engine loop may not run any more
            watcher.tell(self._value)
        else:
            self._engine.call(self._add, watcher)
        return watcher

    def _add(self, watcher: _StateWatcher) -> None:
        if not watcher.is_over and self._value.name != "closed":
            self._watchers[watcher] = None
        watcher.tell(self._value)

    def change(self, name: StateName, cause: MessagingError | None = None, host: str | None = None) -> None:
        """Enter a state. For the connection only, on the loop."""
        old = self._value
        if old.name == "closed" or (old.name == name and str(old.cause) == str(cause) and old.host == host):
            return  # an attempt that fails like the previous one changes nothing
        self._value = value = ConnectionState(name, cause, clock.wall(), host)
        self.is_closed = name == "closed"
        self._watchers = {each: None for each in self._watchers if not each.is_over}
        for watcher in self._watchers:
            watcher.tell(value)
        if name == "closed":
            self._watchers.clear()

    def abandon(self) -> None:
        """Enter ``closed`` in a forked child, without a call of the observers."""
        self._watchers.clear()
        self._value = ConnectionState("closed", None, clock.wall(), self._value.host)
        self.is_closed = True


class _StateWatcher(rx.DisposableBase):
    """One observer of the states."""

    def __init__(
        self, on_next: Callable[[ConnectionState], object] | None, on_completed: Callable[[], object] | None
    ) -> None:
        self._on_next = on_next
        self._on_completed = on_completed
        self._backlog: deque[ConnectionState] = deque(maxlen=_BACKLOG)
        self._serial = Serial(self._drain, self._has_work)
        self.is_over = False

    def tell(self, state: ConnectionState) -> None:
        self._backlog.append(state)
        self._serial.wake()

    def _has_work(self) -> bool:
        return bool(self._backlog) and not self.is_over

    def _drain(self) -> None:
        while self._has_work():
            error = attempt(self._call, self._backlog.popleft())
            if error is not None:
                self.is_over = True
                logger.error("connection states: an observer raised; it is not called again", exc_info=error)

    def _call(self, state: ConnectionState) -> None:
        if self._on_next is not None:
            check_result(self._on_next(state), "an observer")
        if state.name == "closed":
            self.is_over = True
            if self._on_completed is not None:
                self._on_completed()

    def dispose(self) -> None:
        """Begin no further call. Thread safe."""
        self.is_over = True
        self._backlog.clear()
