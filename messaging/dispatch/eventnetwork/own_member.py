"""This member of a network: its settings, its event service, and what its parts share.

**Control.** The state of the membership is used by the calls of :class:`Control` only, one after the other on a worker
thread, and so needs no lock. Handlers of events run elsewhere: a slow one delays no heartbeat.
"""

from __future__ import annotations

import abc
import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from messaging.dispatch import DISTRIBUTED_EVENTS, TYPED_EVENTS, TopicGrammar
from messaging.dispatch.eventnetwork.announcements import (
    MAX_SECONDS,
    MAX_TEXT,
    MIN_HEARTBEAT,
    TYPED,
    Announcement,
    TopicInterest,
)
from messaging.dispatch.eventnetwork.channels import PREFIX, ChannelNames, EventContexts
from messaging.dispatch.eventnetwork.hops import ArrivedEvent
from messaging.dispatch.eventnetwork.seals import Seals
from messaging.dispatch.eventnetwork.signing import EventSigning
from messaging.errors import ArgumentError
from messaging.errors.checks import check_optional
from messaging.errors.text import SafeLog
from messaging.execution import Serial, clock, engine
from messaging.instance import Messaging

logger = SafeLog(__name__)

#: bytes of the payload of an event that is read
MAX_EVENT_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EventNetwork:
    """How a distributed event admin, or a typed event bus, takes part in an event network. Immutable.

    Attributes:
        prefix: the first levels of the channels, equal for all members of the network.
        name: name of the member for people; by default that of its event service.
        heartbeat: seconds; after twice this time without a sign of life a member counts as lost.
        linger: seconds that the interests of a lost member remain in force. Longer than the time for which brokers keep
            the events of a member whose connection is lost.
        send_always: topic filters whose events are sent even if no member announced an interest: for plain programs
            that announce nothing.
        as_cbor: whether events are sent in CBOR instead of JSON (extra ``cbor``). Both are read.
        last_will: whether the broker announces the loss of the connection, where the instance has feature ``lastWill``:
            an instance has one last will. Setting it ends the connection once, to make another one.
        queue: name of a queue that keeps the events of this member while it is away, where the instance has feature
            ``queueRetention``. By default the queue ends with the connection.
        max_event_bytes: larger events of other members are refused; with ``signing``, larger signed messages.
        signing: the keys that sign what this member sends, and verify what arrives; see
            :mod:`messaging.dispatch.eventnetwork.signing`. All members sign, or none. By default none does: then the
            access control of the broker alone decides which program may speak for which member and principal.

    Raises:
        ArgumentError: a value is out of its range.
    """

    prefix: str = PREFIX
    name: str | None = None
    heartbeat: float = 5.0
    linger: float = 30.0
    send_always: Iterable[str] = ()
    as_cbor: bool = False
    last_will: bool = True
    queue: str | None = None
    max_event_bytes: int = MAX_EVENT_BYTES
    signing: EventSigning | None = None

    def __post_init__(self) -> None:
        _check_seconds("heartbeat", self.heartbeat, MIN_HEARTBEAT)
        _check_seconds("linger", self.linger, 0.0)
        if self.name is not None and (not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_TEXT):
            raise ArgumentError(f"name must be a str of 1 to {MAX_TEXT} characters, not {self.name!r:.80}")
        if isinstance(self.send_always, str):
            object.__setattr__(self, "send_always", (self.send_always,))
        elif isinstance(self.send_always, Iterable):
            object.__setattr__(self, "send_always", tuple(self.send_always))
        else:
            raise ArgumentError(f"send_always must be topic filters, not {type(self.send_always).__name__}")
        for name in ("as_cbor", "last_will"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} must be True or False, not {getattr(self, name)!r:.80}")
        if type(self.max_event_bytes) is not int or self.max_event_bytes < 1:
            raise ArgumentError(f"max_event_bytes must be an int of at least 1, not {self.max_event_bytes!r:.80}")
        check_optional("signing", self.signing, EventSigning)


def _check_seconds(name: str, value: Any, least: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= MAX_SECONDS:
        raise ArgumentError(f"{name} must be seconds, from {least:g} to {MAX_SECONDS:g}, not {value!r:.80}")


class Control:
    """Runs calls in their order, on one worker thread at a time. Thread safe.

    Args:
        title: of the member, for the log.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._calls: deque[Callable[[], object]] = deque()
        self._serial = Serial(self._drain, lambda: self._calls)
        self._is_closed = False
        #: identifier of the thread that runs the calls
        self._thread: int | None = None
        #: on the loop
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Have ``call(*arguments)`` run after the earlier calls; its exceptions are logged. From any thread."""
        if not self._is_closed:
            self._calls.append(partial(call, *arguments) if arguments else call)
            self._serial.wake()

    def post_later(self, delay: float, call: Callable[[], object]) -> None:
        """Post ``call`` after ``delay`` seconds; it replaces the call that was to be posted later. From any thread."""
        engine().call(self._schedule, delay, call)

    def _schedule(self, delay: float, call: Callable[[], object]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if self._is_closed else clock.call_later(engine().loop, delay, self.post, call)

    def close(self) -> None:
        """Run no more calls but the posted ones."""
        self._is_closed = True
        engine().call(self._cancel)

    def abandon(self) -> None:
        """Run no more calls in a forked child: the threads and the timer are the parent's."""
        self._is_closed = True
        self._calls.clear()
        self._timer = None

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def is_current_thread(self) -> bool:
        """Return whether the calling thread runs the calls."""
        return self._thread == threading.get_ident()

    def _drain(self) -> None:
        self._thread = threading.get_ident()
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception:
                logger.exception("%s: cannot process an announcement or a change of interests", self._title)
        self._thread = None


#: the interest in every event, by the grammar of the topics
EVERYTHING: Final[dict[TopicGrammar[Any], TopicInterest]] = {
    DISTRIBUTED_EVENTS: TopicInterest("**"),
    TYPED_EVENTS: TopicInterest("*", grammar=TYPED),
}


class NodeService(abc.ABC):
    """The event service of a node.

    Attributes:
        on_interest: called when other members want other events than before. On a worker thread.
    """

    on_interest: Callable[[], object]

    @abc.abstractmethod
    def wanted(self) -> tuple[Iterable[TopicInterest], Iterable[str]]:
        """Return the events that are wanted, each once, and the topics that are offered. On a worker thread."""

    @abc.abstractmethod
    def receive(self, arrival: ArrivedEvent) -> None:
        """Take an event of another member, and see to ``ArrivedEvent.notified``.

        On a worker thread, one at a time; may wait for room. A ``MessagingError`` refuses the event; then its sender is
        answered by the caller.
        """

    def batch_received(self) -> None:  # noqa: B027  # a service may deliver each event at once
        """Note that no more events follow at once. On the thread of :meth:`receive`."""

    @abc.abstractmethod
    def member_lost(self, member: str) -> None:
        """Note that a member is lost, after its last event was received. On the thread of :meth:`receive`.

        It is called again if events of a lost member arrive that its broker kept, see :meth:`EventNode.heard_of`.
        """

    def replay_asked(self, request: Announcement) -> None:  # noqa: B027  # a service need not share its history
        """Answer the ``replay`` of another member, on another thread. On a worker thread; does not wait."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnMember:
    """This member, as its parts use it. Immutable.

    Attributes:
        title: of the event service, for the log.
        id: of the member, new for each run.
        node: stands for the member in the way of an event.
        service: the event service.
        instance: the messaging instance of the broker.
        settings: of the network.
        names, contexts: the channels of the network, and the contexts of the messages to them.
        control: the thread of announcements and timers.
        seals: signs messages and opens signed ones; ``None``: messages are not signed.
    """

    title: str
    id: str
    node: object
    service: NodeService
    instance: Messaging
    settings: EventNetwork
    names: ChannelNames
    contexts: EventContexts
    control: Control
    seals: Seals | None = None
