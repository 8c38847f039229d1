"""Seals: signs what one member sends, and opens what arrives: once each, and for each member with one key only.

**Replays.** A message is known by its key and nonce as long as it is valid: then its time refuses it. The messages of
each key are remembered up to ``EventSigning.max_nonces``; further ones are refused until older ones have expired. A
clock that is set back does not make the member forget: messages signed before the forgotten ones are refused.

**Members.** The id of a member belongs to the key of its first message. The ids of each key are bounded by number:
further ids push out the oldest ones of the same key, never those of another key.

**Threads.** Announcements and events are opened on different threads. A lock guards the nonces and the members;
signatures are checked without it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from messaging.dispatch.eventdata import WireEvent, decode
from messaging.dispatch.eventnetwork.announcements import MAX_BYTES, Announcement, load_announcement
from messaging.dispatch.eventnetwork.signing import EventSigning, Opened
from messaging.errors import DecodeError, PermissionDeniedError, SignatureError
from messaging.execution import clock

#: ids of members that are remembered for each key
MAX_MEMBERS: Final = 10_000
#: bytes of the envelope of the largest announcement: every character of it may be escaped
_MAX_ENVELOPE: Final = 2 * MAX_BYTES + 4_096
#: parts of the time for which messages are remembered; a part is forgotten as a whole
_PARTS: Final = 16
_MICROSECONDS: Final = 1_000_000


class SeenNonces:
    """The nonces of one key that arrived. Not thread safe.

    Args:
        lifetime: for how long a message is valid after it was signed, microseconds.
        limit: number of nonces that are remembered.
    """

    __slots__ = ("_count", "_forgotten", "_lifetime", "_limit", "_parts", "_width")

    def __init__(self, lifetime: int, limit: int) -> None:
        self._lifetime = lifetime
        self._limit = limit
        self._width = max(1, lifetime // _PARTS)
        #: the hashes of the nonces, by time: 64 bits with a key of this process, and half as large as the texts. Two
        #: equal hashes of different nonces refuse a message, and never accept a replay
        self._parts: dict[int, set[int]] = {}
        self._count = 0
        #: messages signed before this time may have been forgotten
        self._forgotten = 0

    def __len__(self) -> int:
        return self._count

    def add(self, nonce: str, at: int, now: int) -> str | None:
        """Note a nonce of a message that was signed ``at``; return the problem if it must be refused.

        Args:
            nonce: of the message.
            at: when it was signed, microseconds since 1970.
            now: microseconds since 1970.

        Returns:
            ``"replayed"``, ``"expired"``, ``"full"``, or ``None`` if it is new.
        """
        number, known = at // self._width, hash(nonce)
        part = self._parts.get(number)
        if part is not None and known in part:
            return "replayed"
        if at < self._forgotten:
            return "expired"
        if part is None or self._count >= self._limit:
            self._forget(now - self._lifetime)
            if at < self._forgotten:
                return "expired"
            if self._count >= self._limit:
                return "full"
            part = self._parts.setdefault(number, set())
        part.add(known)
        self._count += 1
        return None

    def _forget(self, before: int) -> None:
        """Forget the parts whose messages were all signed before this time."""
        width = self._width
        for number in [each for each in self._parts if (each + 1) * width <= before]:
            self._count -= len(self._parts.pop(number))
            self._forgotten = max(self._forgotten, (number + 1) * width)


@dataclass(slots=True, eq=False)
class _Binding:
    """The key of a member, and whether its last will was taken."""

    key_id: str
    will_taken: bool = False


class Seals:
    """Signs and opens the messages of one member. Thread safe.

    Args:
        signing: the keys.
        member: id of this member; it belongs to the own key.
    """

    def __init__(self, signing: EventSigning, member: str) -> None:
        self._signing = signing
        #: returns a payload in a signed envelope
        self.seal = signing.seal
        self._lifetime = int((signing.window + signing.clock_skew) * _MICROSECONDS)
        self._lock = threading.Lock()  # guards the following
        self._nonces: dict[str, SeenNonces] = {}
        self._bindings: dict[str, _Binding] = {}
        #: the ids of the members of each key, the one that was heard last at the end
        self._members: dict[str, OrderedDict[str, None]] = {}
        self._own = member
        self._bindings[member] = _Binding(signing.own.id)

    # --- sending

    def check_own(self, principal: str | None, topic: str) -> None:
        """Refuse an event whose principal the own key may not speak for: every receiver would refuse it.

        Raises:
            PermissionDeniedError: the key may not speak for ``principal``.
        """
        own = self._signing.own
        if principal is not None and own.principals is not None and principal not in own.principals:
            raise PermissionDeniedError(
                f"an event on {topic!r:.200} is not sent: key {own.id!r} may not speak for the principal "
                f"{principal!r:.200}"
            )

    # --- receiving

    def announcement(self, payload: bytes, channel: str) -> Announcement:
        """Return the announcement of a signed message.

        Raises:
            SignatureError: its signature is missing or invalid, it was seen before, or it is for a member of another
                key.
            DecodeError: it is no announcement.
        """
        if len(payload) > _MAX_ENVELOPE:
            raise DecodeError(f"a signed announcement of {len(payload)} bytes: at most {_MAX_ENVELOPE} are read")
        opened = self.open(payload, channel)
        announcement = load_announcement(opened.payload)
        if opened.is_will and not (announcement.kind == "leave" and announcement.is_lost):
            raise _no_will(opened, channel)
        self.bind(opened, announcement.member, channel)
        return announcement

    def event(self, payload: bytes, channel: str, topic: str | None) -> WireEvent:
        """Return the event of a signed message, with a principal that its key may speak for.

        Raises:
            SignatureError: its signature is missing or invalid, it was seen before, or it is for a member or a
                principal that its key may not speak for.
            DecodeError: it is no event.
        """
        return self.opened_event(self.open_event(payload, channel), channel, topic)

    def opened_event(self, opened: Opened, channel: str, topic: str | None) -> WireEvent:
        """Return the event of a result of :meth:`open_event`; raise as :meth:`event`."""
        event = decode(opened.payload, topic)
        if event.sender is not None:
            self.bind(opened, event.sender, channel)
        event.principal = _principal(opened, event.principal, channel)
        return event

    def open_event(self, payload: bytes, channel: str) -> Opened:
        """Return what is signed in the message of an event, as :meth:`open` does; refuse a last will."""
        opened = self.open(payload, channel)
        if opened.is_will:
            raise _no_will(opened, channel)
        return opened

    def open(self, payload: bytes, channel: str) -> Opened:
        """Return the payload of a message that arrives for the first time.

        A last will may arrive several times: :meth:`bind` refuses the second one of a member.

        Raises:
            SignatureError: its signature is missing or invalid, or it was seen before.
        """
        now = clock.wall()
        opened = self._signing.open(payload, channel, now)
        if opened.is_will:
            return opened
        key_id = opened.key.id
        with self._lock:
            nonces = self._nonces.get(key_id)
            if nonces is None:
                nonces = self._nonces[key_id] = SeenNonces(self._lifetime, self._signing.max_nonces)
            problem = nonces.add(opened.nonce, opened.time, int(now * _MICROSECONDS))
        if problem is not None:
            raise SignatureError(problem, self._text(problem), channel, key_id)
        return opened

    def _text(self, problem: str) -> str:
        if problem == "replayed":
            return "it arrived before: a copy, or a replay"
        if problem == "expired":
            return "it was signed before messages that are forgotten: it may be a replay"
        return (
            f"{self._signing.max_nonces} messages of its key arrived within {self._signing.window:g} s, which is the "
            "maximum that is remembered: it may be a replay; raise max_nonces, or shorten the window"
        )

    def bind(self, opened: Opened, member: str, channel: str) -> None:
        """Note that a member sent a message; the first one binds its id to the key.

        Raises:
            SignatureError: the id belongs to another key, or the message is the second last will of the member.
        """
        key_id = opened.key.id
        with self._lock:
            binding = self._bindings.get(member)
            if binding is None:
                binding = self._bindings[member] = _Binding(key_id)
            is_forged = binding.key_id != key_id
            is_copy = opened.is_will and binding.will_taken and not is_forged
            if not is_forged:
                binding.will_taken |= opened.is_will
                self._heard(key_id, member)
        if is_forged:
            raise SignatureError(
                "forged_member", f"it is for member {member}, which uses another key than {key_id!r}", channel, key_id
            )
        if is_copy:
            raise SignatureError("replayed", f"the last will of member {member} arrived before", channel, key_id)

    def _heard(self, key_id: str, member: str) -> None:
        """Keep the members of a key within their bound. With the lock."""
        if member == self._own:
            return
        members = self._members.get(key_id)
        if members is None:
            members = self._members[key_id] = OrderedDict()
        members[member] = None
        members.move_to_end(member)
        if len(members) > MAX_MEMBERS:
            gone, _ = members.popitem(last=False)
            del self._bindings[gone]


def _no_will(opened: Opened, channel: str) -> SignatureError:
    return SignatureError(
        "malformed", "it is signed as a last will, and does not tell the loss of a member", channel, opened.key.id
    )


def _principal(opened: Opened, claimed: str | None, channel: str) -> str | None:
    """Return the principal of an event."""
    allowed = opened.key.principals
    if allowed is None:
        return claimed
    if claimed is None:
        return next(iter(allowed)) if len(allowed) == 1 else None
    if claimed in allowed:
        return claimed
    raise SignatureError(
        "wrong_principal",
        f"key {opened.key.id!r} may not speak for the principal {claimed!r:.200}",
        channel,
        opened.key.id,
    )
