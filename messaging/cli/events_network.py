"""This program as a member of an event network: joining it, publishing, watching events and members, and leaving it.

**Threads.** The methods of a ``NodeService`` run on worker threads; a command reads what they note on the main thread.
A :class:`Watcher` gets events on a worker thread, which waits while ``LIMIT`` events are unwritten: then the broker
sends no more. The loss of a member comes on the thread of the announcements, which never waits. The main thread
writes. One lock guards the queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.cli.events_lines import EventLine
from messaging.cli.options import Grammar, NetworkOptions
from messaging.cli.output import LOOK, ExitCode, dump, one_line, report, show_list, wait_while_read, write
from messaging.codecs.cache import BoundedCache
from messaging.dispatch import DISTRIBUTED_EVENTS, TYPED_EVENTS, TopicGrammar
from messaging.dispatch.eventdata import WireError, WireEvent, from_portable, read_json
from messaging.dispatch.eventnetwork import (
    DISPATCH,
    PREFIX,
    ArrivedEvent,
    DeliveryNotification,
    EventNetwork,
    EventNode,
    NodeService,
    SeenEvents,
    TopicInterest,
    framework_uuid,
)
from messaging.dispatch.eventnetwork.other_members import OtherMember
from messaging.distributedeventing.admin_network import RemoteSessions, topics_of
from messaging.distributedeventing.qos import STANDARD, QosReader, supported_by
from messaging.errors import (
    ArgumentError,
    DeadlineError,
    DecodeError,
    MessagingError,
    NullEventError,
    PartialNotificationError,
    PayloadTooLargeError,
)
from messaging.errors.text import did_you_mean
from messaging.instance import Messaging

if TYPE_CHECKING:
    from messaging.cli.connecting import BrokerOptions
    from messaging.dispatch.eventnetwork import MemberDTO, NodeDTO

logger = logging.getLogger(__name__)

#: default of ``--heartbeat``, seconds
_HEARTBEAT: Final = EventNetwork().heartbeat
#: how long to wait for joining, seconds
_JOINING: Final = 30.0
#: how long to wait until all members know of this one, and until it has left, seconds
_ANNOUNCING: Final = 10.0
_LEAVING: Final = 5.0
#: events that may be unwritten
LIMIT: Final = 1_000
#: how long the first event of a sender waits for its announcement, which comes on another thread, seconds
_NAMING: Final = 1.0
#: names of members that are remembered, also of members that left
_MAX_NAMES: Final = 4_096
#: bytes of a payload that is read: members refuse larger events by default
MAX_BYTES: Final = 16 << 20
#: deadline of a notification, seconds
NOTIFYING: Final = 30.0
#: with these, JSON begins that is no number and no name
_JSON: Final = ("{", "[", '"')


def grammar_of(network: NetworkOptions) -> TopicGrammar[Any]:
    """Return the grammar of the topics of a network."""
    return TYPED_EVENTS if network.grammar == "typed" else DISTRIBUTED_EVENTS


def settings_of(network: NetworkOptions) -> EventNetwork:
    """Return the settings of a network.

    Raises:
        ArgumentError: the heartbeat is out of its range.
    """
    return EventNetwork(
        prefix=PREFIX if network.prefix is None else network.prefix,
        heartbeat=_HEARTBEAT if network.heartbeat is None else network.heartbeat,
        send_always=network.everything,  # also for programs that announce nothing
        last_will=False,  # setting it would interrupt the connection, and most commands end soon
    )


@contextlib.contextmanager
def joined(m: Messaging, network: NetworkOptions, service: NodeService) -> Iterator[EventNode]:
    """Join a network; leave it at the end of the ``with`` block.

    Raises:
        MessagingError: the network cannot be joined: a setting is invalid, or the broker refuses.
    """
    settings = settings_of(network)
    title = f"event network {settings.prefix!r}"
    node = EventNode(service, m, settings, title=title, name=m.name, grammar=grammar_of(network), qos=supported_by(m))
    try:
        node.ready.result(_JOINING)
        yield node
    finally:
        with contextlib.suppress(MessagingError):
            node.close().result(_LEAVING)


def announce(node: EventNode) -> None:
    """Wait until the broker has confirmed the subscriptions of ``node``, and every member knows of them.

    Raises:
        MessagingError: the broker refuses a subscription.
    """
    node.refresh().result(_JOINING)
    try:
        node.announced(_ANNOUNCING).result()
    except PartialNotificationError as error:
        logger.warning("%s: some members may not send their events yet: %s", node.title, ", ".join(error.missing))


class MemberObserver(NodeService):
    """Wants no events, and notes that other members changed."""

    def __init__(self) -> None:
        self._has_news = threading.Event()
        self.on_interest = self._has_news.set

    def wanted(self) -> tuple[frozenset[TopicInterest], frozenset[str]]:
        """See ``NodeService``."""
        return frozenset(), frozenset()

    def receive(self, arrival: ArrivedEvent) -> None:
        """See ``NodeService``: no events are subscribed to."""

    def member_lost(self, member: str) -> None:
        """See ``NodeService``."""

    def settled(self, node: EventNode) -> NodeDTO:
        """Wait until the other members had time to answer; return the members that are known.

        Raises:
            DeadlineError: the connection was lost, and is not back in time.
        """
        deadline = time.monotonic() + _JOINING
        while not (found := node.get_dto()).is_settled:
            if not self._has_news.wait(max(0.0, deadline - time.monotonic())):
                raise DeadlineError(f"{node.title}: its members did not answer within {_JOINING:g} s")
            self._has_news.clear()
        return found


# --- events that arrive


class Watcher(NodeService):
    """Takes the events of some topic filters.

    Args:
        topics: the topic filters.
        network: the options of the network.
        grammar: of the topic filters.
        with_ends: whether the ends of sessions are written, too.

    Raises:
        InvalidTopicError: a topic filter breaks the grammar.
    """

    def __init__(
        self, topics: Iterable[str], network: NetworkOptions, grammar: TopicGrammar[Any], *, with_ends: bool
    ) -> None:
        self._filters = [grammar.parse(each) for each in dict.fromkeys(topics)]
        self._interests = frozenset(TopicInterest(each.text, grammar=network.grammar) for each in self._filters)
        self._with_ends = with_ends
        self._seen = SeenEvents()
        #: ``None`` for a sender that did not announce itself in time
        self._names: BoundedCache[str, str | None] = BoundedCache(_MAX_NAMES)
        #: the member of the network, once it is made
        self.node: EventNode | None = None
        self._sessions = RemoteSessions()
        self._changed = threading.Condition()  # guards the following
        self._lines: deque[EventLine] = deque()
        self._is_closed = False
        self.on_interest = self._learn_names

    # --- on worker threads

    def wanted(self) -> tuple[frozenset[TopicInterest], frozenset[str]]:
        """See ``NodeService``."""
        return self._interests, frozenset()

    def receive(self, arrival: ArrivedEvent) -> None:
        """See ``NodeService``: queue an event."""
        event, hop = arrival.event, arrival.hop
        # the channel pattern of a filter may match more
        is_wanted = any(each.matches(event.topic) for each in self._filters)
        if is_wanted and (key := hop.key) is not None:
            is_wanted = self._seen.is_new(key)
        if not is_wanted or (event.kind != "data" and not self._with_ends):
            if arrival.notified is not None:
                arrival.notified()
            return
        if event.session is not None and self._with_ends:
            is_late = self._sessions.note((event.sender or "", event.session), event.topic, event.kind)
            if event.sender is not None and event.kind == "data" and not is_late:
                hop.node.heard_of(event.sender)  # the session ends when its sender is lost
        sender = hop.path[0] if hop.path else None
        self._put(EventLine(event, time.time(), sender, self._name(sender), arrival=arrival))

    def member_lost(self, member: str) -> None:
        """See ``NodeService``: the open sessions of a member end with it (RFC 214 5.1.2)."""
        name = self._names.get(member)
        with self._changed:
            for key, topic in self._sessions.lose(member).items():
                error = WireError("EventSessionLostError", "the process that sent the session is gone")
                event = WireEvent(topic, kind="error", session=key[1], error=error)
                self._lines.append(EventLine(event, time.time(), member, name))
            self._changed.notify_all()

    def _put(self, line: EventLine) -> None:
        with self._changed:
            while len(self._lines) >= LIMIT and not self._is_closed:
                self._changed.wait(LOOK)
            if not self._is_closed:
                self._lines.append(line)
                self._changed.notify_all()

    def _name(self, member: str | None) -> str | None:
        if member is None:
            return None
        deadline = time.monotonic() + _NAMING
        while member not in self._names:
            self._learn_names()
            with self._changed:
                if member in self._names:
                    break
                if self._is_closed or time.monotonic() > deadline:
                    self._names[member] = None
                else:  # the announcement of a member without interests is told to no service
                    self._changed.wait(_NAMING / 50)
        return self._names.get(member)

    def _learn_names(self) -> None:
        if self.node is not None:
            members = self.node.get_dto().members
            with self._changed:
                for each in members:
                    self._names[each.id] = each.name
                self._changed.notify_all()

    # --- on the main thread

    def take(self, timeout: float) -> EventLine | None:
        """Return the next event, or ``None`` after ``timeout`` seconds without one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._lines, timeout):
                return None
            self._changed.notify_all()
            return self._lines.popleft()

    def close(self) -> None:
        """Take no more events, so that no thread waits for room."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


# --- members


def show_topics(broker: BrokerOptions, network: NetworkOptions, *, json: bool) -> ExitCode:
    """Write the listed topics and topic filters, with their publishers and consumers."""
    found = topics_of((), (), _asked(broker, network))
    columns: dict[str, Callable[[Any], str]] = {
        "topic": lambda each: each.topic,
        "publishers": lambda each: _several(each.publishers),
        "consumers": lambda each: _several(each.consumers),
    }
    return show_list(found, columns, dataclasses.asdict, json=json)


def show_members(broker: BrokerOptions, network: NetworkOptions, *, json: bool) -> ExitCode:
    """Write the other members."""
    members = sorted(_asked(broker, network).members, key=lambda each: (each.name, each.id))
    columns: dict[str, Callable[[MemberDTO], str]] = {
        "name": lambda each: each.name or "-",
        "id": lambda each: each.id,
        "state": _state,
        "silent": lambda each: f"{each.silent:.1f} s",
        "wants": lambda each: _several(each.interests),
        "publishes": lambda each: _several(each.offers),
        "qos": lambda each: _several(each.qos),
    }
    return show_list(members, columns, _fields, json=json)


def watch_members(broker: BrokerOptions, network: NetworkOptions, *, json: bool) -> ExitCode:
    """Write a line for each member that is there, joins, changes, is lost, or leaves; until interrupted."""
    observer, never = MemberObserver(), threading.Event()
    settings_of(network)
    with broker.connect("events-members") as m, joined(m, network, observer) as node:
        observer.settled(node)
        before: dict[str, MemberDTO] = {}
        is_first = True
        while True:
            now = {each.id: each for each in node.get_dto().members}
            for what, member in _changes(before, now, is_first=is_first):
                write(_change_line(what, member, json=json))
            before, is_first = now, False
            wait_while_read(never, _interval(node))


def _interval(node: EventNode) -> float:
    """Return how long to wait until the next look at the members, seconds."""
    shortest = min((each.heartbeat for each in node.get_dto().members if each.heartbeat), default=1.0)
    return min(0.25, shortest / 2)


def _changes(
    before: dict[str, MemberDTO], now: dict[str, MemberDTO], *, is_first: bool
) -> Iterator[tuple[str, MemberDTO]]:
    for member, each in now.items():
        known = before.get(member)
        if known is None:
            yield ("lost" if each.is_lost else "there" if is_first else "joined"), each
        elif each.is_lost != known.is_lost:
            yield ("lost" if each.is_lost else "back"), each
        elif _told(each) != _told(known):
            yield "changed", each
    for member, each in before.items():
        if member not in now:
            yield "left", each


def _told(member: MemberDTO) -> tuple[Any, ...]:
    return member.name, member.interests, member.offers, member.qos


def _change_line(what: str, member: MemberDTO, *, json: bool) -> bytes:
    at = datetime.now(UTC)
    if json:
        return dump({"time": at.isoformat(timespec="microseconds"), "change": what, **_fields(member)})
    text = f"{at.isoformat(timespec='milliseconds')}  {what:7}  {member.name or '-'}  {member.id}"
    if what in ("there", "joined", "changed"):
        text += f"  wants: {_several(member.interests)}; publishes: {_several(member.offers)}"
    return f"{one_line(text)}\n".encode()


def _asked(broker: BrokerOptions, network: NetworkOptions) -> NodeDTO:
    observer = MemberObserver()
    settings_of(network)
    with broker.connect("events") as m, joined(m, network, observer) as node:
        return observer.settled(node)


def _fields(member: MemberDTO) -> dict[str, Any]:
    return {
        "name": member.name or None,
        "id": member.id,
        "state": _state(member),
        "silent": round(member.silent, 3),
        "heartbeat": member.heartbeat,
        "framework": member.framework,
        "interests": list(member.interests),
        "offers": list(member.offers),
        "qos": list(member.qos),
    }


def _state(member: MemberDTO) -> str:
    return "lost" if member.is_lost else "live"


def _several(texts: Any) -> str:
    return ", ".join(map(str, texts)) or "-"


# --- publishing


class _CountedNotification(DeliveryNotification):
    """A notification that knows the members it waited for. Thread safe."""

    __slots__ = ("members",)

    def __init__(self, what: str, timeout: float) -> None:
        super().__init__(what, timeout)
        #: the members that were waited for, by id
        self.members: dict[str, str] = {}

    def expect(self, members: Iterable[OtherMember]) -> None:
        """See ``DeliveryNotification``."""
        found = [*members]
        self.members |= {each.id: str(each) for each in found}
        super().expect(found)


def read_payload(text: str | None, file: Path | None) -> bytes:
    """Return the payload that the command line names: a text, ``-`` for stdin, or a file.

    Raises:
        ArgumentError: none is given, or two; it cannot be read.
        PayloadTooLargeError: it has more than ``MAX_BYTES``.
    """
    if (text is None) == (file is None):
        raise ArgumentError("say what to publish with exactly one of PAYLOAD, - (stdin) and --file")
    if file is not None:
        try:
            with file.open("rb") as source:
                found = source.read(MAX_BYTES + 1)
        except OSError as error:
            raise ArgumentError(f"cannot read {str(file)!r}: {error.strerror}") from error
    elif text == "-":
        if sys.stdin is None:
            raise ArgumentError("stdin is closed")
        found = sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        found = str(text).encode(errors="surrogateescape")
    if len(found) > MAX_BYTES:
        raise PayloadTooLargeError(len(found), MAX_BYTES, "an event; there may be more")
    return found


def data_of(payload: bytes, grammar: Grammar, *, is_text: bool) -> Any:
    """Return the data of an event in portable form.

    Args:
        payload: JSON, or another text.
        grammar: the events of Typed Event are maps.
        is_text: whether it is text even if it is JSON.

    Raises:
        ArgumentError: the payload is not as described.
        NullEventError: it is ``null``.
    """
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        raise ArgumentError('the payload is not UTF-8; events carry bytes as JSON: {"$bytes": "<base64>"}') from None
    data = text if is_text else _parsed(text)
    if data is None:
        raise NullEventError("the payload is null")
    if grammar == "typed" and not isinstance(from_portable(data), dict):
        raise ArgumentError('the events of --grammar typed are JSON objects, such as {"id": 7}')
    return data


def _parsed(text: str) -> Any:
    try:
        found = read_json(text)
    except DecodeError:
        if text.lstrip().startswith(_JSON):
            raise ArgumentError("the payload begins like JSON and is malformed; --text publishes it as text") from None
        return text
    try:
        from_portable(found)
    except DecodeError as error:
        raise ArgumentError(f"the payload: {error}; --text publishes it as text") from None
    return found


def check_qos(names: Iterable[str]) -> list[str]:
    """Return the names of qualities of service as RFC 214 writes them.

    Raises:
        ArgumentError: a name is unknown.
    """
    found = [each.upper() for each in names]
    for each in found:
        if each not in STANDARD:
            hint = did_you_mean(each, STANDARD) or f"there are {', '.join(STANDARD)}"
            raise ArgumentError(f"--qos: unknown quality of service {each!r:.80}; {hint}")
    return found


def publish_event(
    broker: BrokerOptions,
    network: NetworkOptions,
    event: WireEvent,
    qos: Iterable[str],
    notify: float | None,
) -> ExitCode:
    """Publish an event, and wait for the broker's confirmation.

    Args:
        broker: the options of the broker.
        network: the options of the network.
        event: the event, without its time and origin.
        qos: names of qualities of service.
        notify: how long to wait until every consumer is notified, seconds; ``None``: not at all.

    Raises:
        UnsupportedFeatureError: the instance does not keep a quality of service.
        MessagingError: the event cannot be published.
    """
    settings_of(network)  # a wrong one is an error before anything is connected
    with broker.connect("events-publish") as m:
        wanted = QosReader(m.name, supported_by(m)).read(qos)
        with joined(m, network, MemberObserver()) as node:
            event.time = time.time_ns() // 1_000
            event.origin = str(framework_uuid())
            notification = None
            if notify is not None:
                notification = _CountedNotification(f"publishing to {event.topic!r} with notification", notify)
            sent = node.sender.send(
                event,
                lambda: from_portable(event.data),
                qos=wanted.message_qos,
                is_stored=wanted.is_persistent,
                notification=notification,
            )
            if sent is not None:
                sent.result()
            if notification is None:
                return ExitCode.OK
            notification.release(DISPATCH)
            return _notified(event.topic, notification)


def _notified(topic: str, notification: _CountedNotification) -> ExitCode:
    """Wait for a notification; report the members on stderr, and return the exit code."""
    try:
        notification.promise.result()
    except PartialNotificationError as error:
        members = len(notification.members)
        missing = ", ".join(error.missing) or "the answers of the members"
        is_late = notification.is_expired
        why = f"within {notification.timeout:g} s" if is_late else "and a process was lost"
        report(f"notified {members - len(error.missing)} of {members} members {why}; missing: {missing}")
        return ExitCode.TIMED_OUT if is_late else ExitCode.FAILED
    names = sorted(notification.members.values())
    if names:
        logger.info("notified %d member%s: %s", len(names), "s" * (len(names) > 1), ", ".join(names))
    else:
        logger.warning("notified no member: no consumer of %r is known", topic)
    return ExitCode.OK
