"""Announcements: how members of an event network tell each other of themselves and of the events they want.

A *member* is one participant of an event network: a distributed event admin, or a connected typed event bus. Each
publishes announcements, and reads those of the others. An announcement is a JSON object in UTF-8, version 1::

    {"announcement": 1, "kind": "update", "member": "1c0e…", "framework": "77ab…", "name": "billing", "version": 4,
     "heartbeat": 5.0, "linger": 30.0, "qos": ["AT_LEAST_ONCE"],
     "interests": [{"topics": "orders/**"}, {"topics": "audit/login", "filter": "(failed=true)", "hidden": true}],
     "offers": ["invoices/sent"]}

==============  ======================================================================================================
field           meaning
==============  ======================================================================================================
``kind``        see below
``member``      UUID of the member, new for each run
``version``     number of changes of its interests and offers so far; ``add`` and ``remove`` make it one more
``heartbeat``   seconds: a member that is silent for twice this time counts as lost
``linger``      seconds that its interests remain in force after it was lost, since its broker may keep its events
``interests``   ``topics``: a topic filter of RFC 214, or with ``"grammar": "typed"`` one of Typed Event; ``filter``: an
                LDAP filter over the top level of the data, optional; ``hidden``: not to be listed to people, optional
``offers``      topics that it publishes and lists
``framework``   UUID of its framework; ``name``: its name for people; ``qos``: what it keeps. All optional
``to``          UUID of the member that this is for; without it, for all
``answers``     true if the member answers each ``ping`` with a ``pong``: ``announced()`` of others waits for it
``inbox``       UUID in the name of the channel for announcements to the sender; its ``member`` by default. With a queue
                of its own a member keeps it from run to run, so that the queue has no bindings of earlier runs
``token``       of a ``ping``, and of the ``pong`` that answers it; of a ``replay``, and of the events that answer it;
                of a ``query`` for all and a ``heartbeat``, which the sender recognizes when they come back
``replays``     true if the member shares its history: it answers a ``replay``
``since``       of a ``replay``: time of the first event, microseconds since 1970, inclusive. By default any
``limit``       of a ``replay``: number of events, the newest ones
``event``       id of the event that was ``notified``
``is_lost``     of ``leave``: true if the broker says so for a member that is gone (last will)
==============  ======================================================================================================

==============  ======================================================================================================
kind            meaning
==============  ======================================================================================================
``query``       asks for an ``update`` of the member in ``to``, or of all
``update``      all interests and offers of the sender
``add``         further interests and offers
``remove``      interests and offers that no longer hold
``heartbeat``   the sender lives; its ``version`` shows whether an announcement was missed, which is queried then
``leave``       the sender ends
``ping``        asks for a ``pong``: the other member has read all earlier announcements of the sender
``notified``    every consumer of the sender was notified of an event
``replay``      asks for the past events of the topics in ``interests``; see
                :mod:`messaging.dispatch.eventnetwork.asking`
==============  ======================================================================================================

A program without this library takes part with an ``update`` on the channel of all members, sent again within twice its
own ``heartbeat``. If it wants ``announced()`` of the others to wait for it, it has ``answers`` in the ``update``, and
answers each ``ping`` with a ``pong`` that has the same ``token``, on the channel of the member that sent it.

Unknown fields are ignored. So are entries of ``interests``, ``offers`` and ``qos`` that are wrong or unknown, such as a
grammar of a later version, and a wrong ``framework``, ``name``, ``heartbeat`` or ``linger``: the rest is taken. Each
problem is logged once for each member.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, TypeGuard, TypeVar, get_args
from uuid import UUID

from messaging.errors import DecodeError
from messaging.errors.text import did_you_mean, printable

T = TypeVar("T")

VERSION: Final = 1

Kind: TypeAlias = Literal[
    "query", "update", "add", "remove", "heartbeat", "leave", "ping", "pong", "notified", "replay"
]
KINDS: Final[tuple[str, ...]] = get_args(Kind)

#: grammars of topic filters
DISTRIBUTED: Final = "distributed"
TYPED: Final = "typed"
#: bytes of one announcement
MAX_BYTES: Final = 1 << 20
#: interests, and offers, of one member
MAX_ENTRIES: Final = 10_000
#: characters of a topic filter, an LDAP filter, a name, an id
MAX_TEXT: Final = 1_000
#: bounds of heartbeat and linger, seconds
MIN_HEARTBEAT: Final = 0.05
MAX_SECONDS: Final = 86_400.0
_MAX_VERSION: Final = 2**53
_MAX_QOS: Final = 32
_MAX_PROBLEMS: Final = 8
#: characters of a kind for which a similar one is searched
_MAX_HINTED: Final = 40
#: microseconds since 1970, beyond the year 9999
_MAX_TIME: Final = 2**58

_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class TopicInterest:
    """Events that a member wants: a topic filter, and an LDAP filter over their data. Immutable."""

    topics: str
    filter: str | None = None
    #: whether it is left out of lists for people (DE087)
    is_hidden: bool = False
    #: grammar of the topic filter: ``distributed`` (RFC 214) or ``typed`` (Typed Event)
    grammar: str = DISTRIBUTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """One announcement; see the module for its fields."""

    kind: str
    member: str
    version: int = 0
    heartbeat: float = 0.0
    linger: float = 0.0
    interests: tuple[TopicInterest, ...] = ()
    offers: tuple[str, ...] = ()
    framework: str | None = None
    name: str | None = None
    qos: tuple[str, ...] = ()
    to: str | None = None
    token: str | None = None
    event: str | None = None
    is_lost: bool = False
    replays: bool = False
    answers: bool = False
    since: int | None = None
    limit: int = 0
    inbox: str | None = None
    #: what was wrong in it and left out, as texts; at most ``_MAX_PROBLEMS``
    problems: tuple[str, ...] = ()


#: fields that are written unless they have no value, and those values
_WRITTEN: Final = (
    *("framework", "name", "inbox", "to", "token", "event"),
    *("heartbeat", "qos", "is_lost", "replays", "answers"),
)
_LEFT_OUT: Final = (None, 0.0, (), False)


def dump_announcement(announcement: Announcement) -> bytes:
    """Return an announcement as a payload."""
    found: dict[str, Any] = {
        "announcement": VERSION,
        "kind": announcement.kind,
        "member": announcement.member,
        "version": announcement.version,
    }
    for name in _WRITTEN:
        value = getattr(announcement, name)
        if value not in _LEFT_OUT:
            found[name] = value
            if name == "heartbeat":
                found["linger"] = announcement.linger
    if announcement.kind == "replay":
        found["interests"] = [_dumped(each) for each in announcement.interests]
        found["limit"] = announcement.limit
        if announcement.since is not None:
            found["since"] = announcement.since
    if announcement.kind in ("update", "add", "remove"):
        found["interests"] = [_dumped(each) for each in announcement.interests]
        found["offers"] = list(announcement.offers)
    return _encode(found).encode()


def _dumped(interest: TopicInterest) -> dict[str, Any]:
    found: dict[str, Any] = {"topics": interest.topics}
    if interest.filter is not None:
        found["filter"] = interest.filter
    if interest.is_hidden:
        found["hidden"] = True
    if interest.grammar != DISTRIBUTED:
        found["grammar"] = interest.grammar
    return found


def load_announcement(payload: bytes) -> Announcement:
    """Return the announcement in a payload. Topic filters and LDAP filters are text here, and not parsed.

    Fields and entries that it can do without are left out if they are wrong, see the module and ``problems``.

    Raises:
        DecodeError: it is no announcement; the text says which field is wrong, and what would be right.
    """
    if len(payload) > MAX_BYTES:
        raise DecodeError(f"an announcement of {len(payload)} bytes: at most {MAX_BYTES} are read")
    try:
        found = json.loads(payload.decode())
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not an announcement: no JSON in UTF-8 ({type(error).__name__})") from None
    if not isinstance(found, dict) or "announcement" not in found:
        raise DecodeError("not an announcement: no object with a version in 'announcement'")
    version = found["announcement"]
    if type(version) is not int or version != VERSION:
        shown = version if type(version) is int and 0 <= version <= _MAX_VERSION else type(version).__name__
        raise DecodeError(f"an announcement of version {shown}: this library reads version {VERSION}")
    kind = found.get("kind")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS) if isinstance(kind, str) and len(kind) <= _MAX_HINTED else ""
        raise _wrong("kind", f"must be one of {', '.join(KINDS)}{hint and f'; {hint}'}")
    problems: dict[str, None] = {}
    return Announcement(
        kind=kind,
        member=_uuid(found, "member") or _missing("member"),
        version=_count(found, "version"),
        heartbeat=_optional(problems, _heartbeat, found) or 0.0,
        linger=_optional(problems, _seconds, found, "linger") or 0.0,
        interests=tuple(dict.fromkeys(_entries(problems, found, "interests", _interest))),
        offers=tuple(dict.fromkeys(_entries(problems, found, "offers", partial(_text, field="offers")))),
        framework=_optional(problems, _uuid, found, "framework"),
        name=_optional(problems, _optional_text, found, "name"),
        qos=_entries(problems, found, "qos", partial(_text, field="qos"), _MAX_QOS),
        to=_uuid(found, "to"),
        token=_optional_text(found, "token"),
        event=_optional_text(found, "event"),
        is_lost=found.get("is_lost") is True,
        replays=found.get("replays") is True,
        answers=found.get("answers") is True,
        since=_time(found, "since"),
        limit=_count(found, "limit"),
        inbox=_uuid(found, "inbox"),
        problems=tuple(problems),
    )


def _optional(problems: dict[str, None], read: Callable[..., T], *arguments: Any) -> T | None:
    """Return ``read(*arguments)``; note why it is ``None`` if it is refused."""
    try:
        return read(*arguments)
    except DecodeError as error:
        _note(problems, error)
        return None


def _note(problems: dict[str, None], error: DecodeError) -> None:
    if len(problems) < _MAX_PROBLEMS:
        problems[str(error)] = None


def _entries(
    problems: dict[str, None],
    found: dict[str, Any],
    field: str,
    read: Callable[[Any], T],
    limit: int = MAX_ENTRIES,
) -> tuple[T, ...]:
    """Return the entries of a list that are right. Raises ``DecodeError`` if it is no list."""
    several = found.get(field, [])
    if not isinstance(several, list):
        raise _wrong(field, "must be a list")
    if len(several) > limit:
        _note(problems, _wrong(field, f"has {len(several)} entries: at most {limit} are read; announce wider filters"))
    read_all = (_optional(problems, read, each) for each in several[:limit])
    return tuple(each for each in read_all if each is not None)


def _wrong(field: str, why: str) -> DecodeError:
    return DecodeError(f"an announcement whose {field!r} {why}")


def _missing(field: str) -> Any:
    raise DecodeError(f"an announcement without {field!r}")


def _uuid(found: dict[str, Any], field: str) -> str | None:
    value = found.get(field)
    if value is None:
        return None
    if not isinstance(value, str) or not _UUID.fullmatch(value):
        raise _wrong(field, "must be a UUID in lower case, such as 1b4e28ba-2fa1-41d2-883f-0016d3cca427")
    return str(UUID(value))


def _count(found: dict[str, Any], field: str) -> int:
    value = found.get(field, 0)
    if type(value) is not int or not 0 <= value <= _MAX_VERSION:
        raise _wrong(field, f"must be an integer from 0 to {_MAX_VERSION}")
    return value


def _time(found: dict[str, Any], field: str) -> int | None:
    value = found.get(field)
    if value is not None and (type(value) is not int or not -_MAX_TIME <= value <= _MAX_TIME):
        raise _wrong(field, "must be an integer, microseconds since 1970")
    return value


def _seconds(found: dict[str, Any], field: str) -> float:
    value = found.get(field, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SECONDS:
        raise _wrong(field, f"must be seconds, from 0 to {MAX_SECONDS:g}")
    return float(value)


def _heartbeat(found: dict[str, Any]) -> float:
    value = _seconds(found, "heartbeat")
    if value and (value < MIN_HEARTBEAT or not math.isfinite(value)):
        raise _wrong("heartbeat", f"must be seconds, at least {MIN_HEARTBEAT:g}")
    return value


def is_announceable(value: Any) -> TypeGuard[str]:
    """Return whether a value is text that an announcement can have: not empty, not too long, and of Unicode."""
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and not _SURROGATE.search(value)


def _text(value: Any, field: str) -> str:
    if not is_announceable(value):
        raise _wrong(field, f"must have text of 1 to {MAX_TEXT} characters, without lone surrogates")
    return value


def _optional_text(found: dict[str, Any], field: str) -> str | None:
    value = found.get(field)
    return None if value is None else _text(value, field)


def _interest(value: Any) -> TopicInterest:
    if not isinstance(value, dict):
        raise _wrong("interests", "must have objects with a topic filter in 'topics'")
    ldap = value.get("filter")
    grammar = value.get("grammar", DISTRIBUTED)
    if grammar not in (DISTRIBUTED, TYPED):
        raise _wrong(
            "interests",
            f"must have {DISTRIBUTED!r} or {TYPED!r} as their grammar, not {printable(str(grammar))[:80]!r}",
        )
    return TopicInterest(
        _text(value.get("topics"), "interests"),
        None if ldap is None else _text(ldap, "interests"),
        value.get("hidden") is True,
        grammar,
    )
