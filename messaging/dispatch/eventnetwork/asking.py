"""Questions of one member to the others: for past events, and whether they have read its announcements.

A member asks for the events of topics that it missed, and merges the answers of the others:

**The request** is an announcement of kind ``replay`` to all members, with a token. Members that announced ``replays``
are expected to answer.

**An answer** consists of events on the channel ``<prefix>-past/<member>`` of the member that asked, the oldest first.
``correlation`` has the token, and ``sequence`` tells the events of the answer apart. An event of kind ``close`` ends
it; its ``sequence`` is the number of events. An event of kind ``error`` says that there is no answer, or no more of it.

**The result** has each event once, by its id, in the order of the publication times. It is there when every live
member that was expected has answered, or with an error after the deadline.

**Bounds.** An answer has at most the events that were asked for, and :data:`MAX_ANSWER_BYTES` bytes: the newest events
that fit. The answers to one request have at most :data:`MAX_RESULT_BYTES` bytes. The answer of a member that sends more
is refused, and the member counts as missing. Events that no member was asked for are refused and counted.

**Threads.** The engine loop only queues what arrives. A worker thread reads it, on one at a time. Requests are sent by
the control thread. Results are handed over on a worker thread.

**Pings** ask whether a member has read the announcements so far: a promise waits for the answer of every live member.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Final
from uuid import uuid4

from messaging.dispatch.eventdata import WireEvent, decode
from messaging.dispatch.eventnetwork.announcements import Announcement, TopicInterest
from messaging.dispatch.eventnetwork.hops import ArrivedEvent
from messaging.dispatch.eventnetwork.intake import MessageIntake
from messaging.dispatch.eventnetwork.membership import Membership
from messaging.dispatch.eventnetwork.notifications import DISPATCH, MEMBERS, DeliveryNotification
from messaging.dispatch.eventnetwork.other_members import OtherMember
from messaging.dispatch.eventnetwork.own_member import OwnMember
from messaging.environment.signals import on_failure
from messaging.errors import ClosedError, DecodeError, MessagingError, PartialNotificationError, TooManyRequestsError
from messaging.errors.text import SafeLog, printable
from messaging.execution import Promise, workers
from messaging.model import Incoming

logger = SafeLog(__name__)

#: events that may be asked for at a time
MAX_PAST: Final = 100_000
#: bytes of one answer, and of all answers to one request
MAX_ANSWER_BYTES: Final = 16 << 20
MAX_RESULT_BYTES: Final = 128 << 20
#: requests of one member that may be pending at a time
MAX_REQUESTS: Final = 16

Done = Callable[[list[ArrivedEvent], MessagingError | None], object]


@dataclass(slots=True, eq=False, repr=False)
class _PastAnswer:
    """The answer of one member so far."""

    events: list[ArrivedEvent] = field(default_factory=list)
    #: of the events; a message may come twice, and overtake another one
    numbers: set[int] = field(default_factory=set)
    total: int | None = None
    #: it is complete or refused
    is_over: bool = False


@dataclass(slots=True, eq=False, repr=False)
class PastRequest:
    """A request for past events. Made by :meth:`Replays.ask`.

    Args:
        what: the operation, for errors.
        interests: the topics.
        accepts: whether a topic is among them.
        since: time of the first event, microseconds since 1970, inclusive; ``None``: any.
        limit: number of events.
        timeout: deadline, seconds.
        done: called with the events and the error, on a worker thread.
    """

    what: str
    interests: tuple[TopicInterest, ...]
    accepts: Callable[[str], bool]
    since: int | None
    limit: int
    timeout: InitVar[float]
    done: Done
    token: str = field(init=False, default_factory=lambda: str(uuid4()))
    notification: DeliveryNotification = field(init=False)
    # --- guarded by the lock of ``Replays``
    answers: dict[str, _PastAnswer] = field(init=False, default_factory=dict)
    bytes: int = field(init=False, default=0)

    def __post_init__(self, timeout: float) -> None:
        self.notification = DeliveryNotification(self.what, timeout)

    def events(self) -> list[ArrivedEvent]:
        """Return the newest events of all answers, each once, in the order of their publication times."""
        by_id: dict[str | None, ArrivedEvent] = {}
        for answer in self.answers.values():
            for each in answer.events:
                by_id.setdefault(each.hop.key, each)
        found = sorted(by_id.values(), key=lambda each: each.event.time or 0)
        return found[-self.limit :]


class Replays:
    """Asks the other members for past events. Thread safe.

    Args:
        own: the member that asks. Its control thread runs :meth:`ask_all`, and everything that uses the membership.
        membership: the members that answer; their notifications are told when one is lost or leaves.
        listen: subscribes to the channel of past events of this member.
        settle: acknowledges messages; from any thread.
    """

    def __init__(
        self,
        own: OwnMember,
        membership: Membership,
        listen: Callable[[], Promise[None]],
        settle: Callable[[Sequence[Incoming]], object],
    ) -> None:
        self._own = own
        self._membership = membership
        self._listen = listen
        #: takes in the answers
        self.intake = MessageIntake(own.title, "a past event", self._take, settle)
        #: whether past events may arrive
        self.is_listening = False
        #: number of past events that were taken
        self.received = 0
        self._lock = threading.Lock()  # guards the following
        self._requests: dict[str, PastRequest] = {}
        # --- used by the control thread
        self._waiting: list[PastRequest] = []
        self._listening: Promise[None] | None = None

    # --- asking

    def ask(self, request: PastRequest) -> None:
        """Ask the members, once they are settled and this member can receive their answers. From any thread.

        Raises:
            TooManyRequestsError: ``MAX_REQUESTS`` are pending.
        """
        with self._lock:
            if len(self._requests) >= MAX_REQUESTS:
                raise TooManyRequestsError(f"{request.what}: {MAX_REQUESTS} requests are pending: await earlier ones")
            self._requests[request.token] = request
        with on_failure(self._forget, request):
            self._membership.changes.notifications.add(request.token, request.notification)
        request.notification.promise.was_retrieved = True
        request.notification.promise.listen(lambda: workers().submit(partial(self._finish, request)))
        self._own.control.post(self._prepare, request)

    def _prepare(self, request: PastRequest) -> None:
        self._waiting.append(request)
        self._listen_first()

    def _listen_first(self) -> None:
        """Subscribe to the answers, and then send the requests that wait."""
        if self._listening is None:
            self.is_listening = True
            self._listening = self._listen()
        self._listening.listen(partial(self._own.control.post, self.ask_all))

    def deafened(self) -> None:
        """Note that the broker ended the subscription to the answers: the next request subscribes again.

        On the control thread.
        """
        self._listening = None
        if self._waiting:
            self._listen_first()

    def ask_all(self) -> None:
        """Send the requests that wait, if that is possible by now. On the control thread."""
        listening = self._listening
        if listening is None or not listening.done():
            return
        error = listening.exception()
        if error is None and not self._membership.is_settled:
            return
        requests, self._waiting = self._waiting, []
        if error is not None:
            self._listening = None  # the next request tries again
        for each in requests:
            if error is not None:
                each.notification.fail(error)
            elif not each.notification.promise.done():
                self._send(each)

    def _send(self, request: PastRequest) -> None:
        membership = self._membership
        members: list[OtherMember] = [each for each in membership.members.values() if each.replays and not each.is_lost]
        with self._lock:
            request.answers = {each.id: _PastAnswer() for each in members}
        request.notification.expect(members)
        membership.own.send(
            "replay",
            token=request.token,
            interests=request.interests,
            since=request.since,
            limit=request.limit,
        )
        request.notification.release(DISPATCH)

    def _forget(self, request: PastRequest) -> None:
        with self._lock:
            self._requests.pop(request.token, None)

    def _finish(self, request: PastRequest) -> None:
        self._forget(request)  # no more answers are taken: the request is used by this thread alone
        error = request.notification.promise.exception()
        if isinstance(error, PartialNotificationError):
            names = ", ".join(error.missing) or "every member"
            error = PartialNotificationError(
                f"{request.what}: not every member has answered: missing: {names}", error.missing
            )
        try:
            request.done(request.events(), error)
        except Exception:
            logger.exception("%s: the receiver of the past events failed; they are dropped", request.what)

    # --- the answers

    def _take(self, incoming: Incoming) -> None:
        payload = incoming.payload
        max_bytes, seals = self._own.settings.max_event_bytes, self._own.seals
        if len(payload) > max_bytes:
            raise DecodeError(f"{len(payload)} bytes: at most {max_bytes} are read")
        event = decode(payload) if seals is None else seals.event(payload, incoming.channel or "", None)
        sender = event.sender
        if sender is None or event.sequence is None or event.correlation_id is None:
            raise DecodeError("a past event must have 'sender', 'sequence' and 'correlation'")
        with self._lock:
            request = self._requests.get(event.correlation_id)
            answer = None if request is None else request.answers.get(sender)
            if request is None or answer is None or answer.is_over:
                raise DecodeError(f"member {printable(sender)} was not asked for it, or has answered")
            problem = self._add(request, answer, event, sender, len(payload))
            is_complete = answer.total == len(answer.numbers)
            answer.is_over = is_complete or problem is not None
        if problem is not None:
            request.notification.lost(sender)
            raise DecodeError(f"the answer of member {printable(sender)} {problem}; no more of it is read")
        if is_complete:
            request.notification.confirmed(sender)

    def _add(self, request: PastRequest, answer: _PastAnswer, event: WireEvent, sender: str, size: int) -> str | None:
        """Add a message to an answer; return why the answer is refused. Called with the lock."""
        number = event.sequence or 0
        if event.error is not None:
            return f"failed there: {printable(event.error.message)[:200]}"
        if event.kind != "data":
            answer.total = number
        elif number not in answer.numbers:
            if not request.accepts(event.topic):
                return f"has the topic {event.topic!r:.200}, for which it was not asked"
            request.bytes += size
            if len(answer.numbers) >= request.limit:
                return f"has more than {request.limit} events"
            if request.bytes > MAX_RESULT_BYTES:
                return f"exceeds {MAX_RESULT_BYTES} bytes in total"
            answer.numbers.add(number)
            event_id = event.id or f"{sender}-{request.token}-{number}"
            answer.events.append(ArrivedEvent(event, event_id, self._own.node, None))
            self.received += 1
        if answer.total is not None and len(answer.numbers) > answer.total:
            return f"has more events than the {answer.total} of its end"
        return None


class Pings:
    """Asks the other members whether they have read the announcements of this one. Thread safe.

    Args:
        own: the member that asks.
        membership: the members that answer; their notifications are told when one answers, is lost or leaves.
        announce: announces.
        refresh: announces the interests of now.
        is_connected: returns whether pings reach the others, and their answers this member.
    """

    def __init__(
        self,
        own: OwnMember,
        membership: Membership,
        announce: Callable[[Announcement], object],
        refresh: Callable[[], Promise[None]],
        is_connected: Callable[[], bool],
    ) -> None:
        self._own = own
        self._membership = membership
        self._announce = announce
        self._refresh = refresh
        self._is_connected = is_connected
        # --- used by the control thread
        #: pings that wait until this member is connected and hears announcements, by token; and pings that were sent
        self._unasked: dict[str, DeliveryNotification] = {}
        self._asked: dict[str, DeliveryNotification] = {}

    def ask(self, timeout: float) -> Promise[None]:
        """Return a promise that resolves when every live member that answers has read the announcements of this one.

        From any thread. A plain program that does not answer pings is not waited for.
        While the broker has ended the subscription to announcements, it waits until that is made again. It does not
        wait for the subscriptions of interests that the broker refused.
        It fails with ``PartialNotificationError`` after ``timeout`` seconds, or if a member is lost meanwhile.
        """
        token = str(uuid4())
        asking = DeliveryNotification(f"announcing the interests of {self._own.title}", timeout)
        asking.is_for = lambda member: member.answers
        asking.waits_for_connection = True
        self._membership.changes.notifications.add(token, asking)
        self._refresh_first(token, asking)
        return asking.promise

    def _refresh_first(self, token: str, asking: DeliveryNotification) -> None:
        """Announce the interests of now, and then send a ping."""
        announced = self._refresh()

        def go_on() -> None:
            error = announced.exception()
            if isinstance(error, ClosedError):
                asking.fail(error)
            else:
                self._own.control.post(self._ping, token, asking)

        announced.listen(go_on)

    def ask_again(self) -> None:
        """Send the pings that waited. On the control thread."""
        unasked, self._unasked = self._unasked, {}
        for token, asking in unasked.items():
            self._refresh_first(token, asking)

    def deafened(self) -> None:
        """Have all pings sent again by the next :meth:`ask_again`. On the control thread.

        The interests are withdrawn, so members that answered do not know them any more. Answers to the former pings
        that are still on their way do not count.
        """
        asked = [*self._asked.items()]
        self._asked.clear()
        for token, asking in asked:
            renewed = str(uuid4())
            asking.restart()
            self._membership.changes.notifications.renew(token, renewed)
            self._unasked[renewed] = asking

    def _ping(self, token: str, asking: DeliveryNotification) -> None:
        if asking.promise.done():
            return
        membership = self._membership
        if not self._is_connected() or membership.is_deaf:  # no answer would arrive
            self._unasked[token] = asking
            return
        self._asked[token] = asking
        asking.promise.listen(partial(self._own.control.post, self._asked.pop, token, None))
        asking.joined = partial(self._ping_one, token)
        if not membership.is_settled:
            asking.hold(MEMBERS)
        asking.expect(each for each in membership.members.values() if each.answers and not each.is_lost)
        self._announce(Announcement(kind="ping", member=self._own.id, token=token))
        asking.release(DISPATCH)

    def _ping_one(self, token: str, member: OtherMember) -> None:
        """Ping a member that joined after the ping to all."""
        self._announce(Announcement(kind="ping", member=self._own.id, to=member.id, token=token))
