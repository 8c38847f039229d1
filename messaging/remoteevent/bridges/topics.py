"""Source and id of an event as a topic, and back: the mapping is injective.

``remoteevent/SOURCE/tID`` for an id that is a text, ``remoteevent/SOURCE/iID`` for a number. Letters and digits of
ASCII and ``-`` stand for themselves; each byte of any other character in UTF-8 is ``_`` and two hexadecimal digits::

    ("boiler 7", "overheated")   remoteevent/boiler_207/toverheated
    ("boiler", -3)               remoteevent/boiler/i-3

A subscription to ``remoteevent/boiler/*`` gets the events of one source.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from messaging.errors import InvalidTopicError
from messaging.remoteevent.event import check_event_id

if TYPE_CHECKING:
    from messaging.remoteevent.event import EventId, EventKind

#: first level of the topics of remote events
PREFIX: Final = "remoteevent"
_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-")
_TOPIC: Final = re.compile(rf"{PREFIX}/((?:[A-Za-z0-9-]|_[0-9a-f]{{2}})+)/([it])((?:[A-Za-z0-9-]|_[0-9a-f]{{2}})+)")
_ESCAPED: Final = re.compile(rb"_([0-9a-f]{2})")


def topic_of(source: str, event_id: EventId) -> str:
    """Return the topic of a kind of event.

    Raises:
        InvalidTopicError: the source or the id has no form in UTF-8.
    """
    if isinstance(event_id, int):
        return f"{PREFIX}/{_escaped(source)}/i{event_id}"
    return f"{PREFIX}/{_escaped(source)}/t{_escaped(event_id)}"


def kind_of(topic: str) -> EventKind:
    """Return source and id of a topic that :func:`topic_of` returned.

    Raises:
        InvalidTopicError: it is no such topic.
    """
    found = _TOPIC.fullmatch(topic)
    try:
        if found is not None:
            source, form, text = found.groups()
            event_id = int(text) if form == "i" else _plain(text)
            if topic_of(_plain(source), check_event_id(event_id)) == topic:
                return _plain(source), event_id
    except ValueError:
        pass
    raise InvalidTopicError(topic, f"not the topic of a kind of remote event: {topic!r:.80}")


def _escaped(text: str) -> str:
    try:
        return "".join(chr(each) if each in _PLAIN else f"_{each:02x}" for each in text.encode())
    except UnicodeEncodeError:
        raise InvalidTopicError(text, f"no topic can be made of {text!r:.80}: it has no form in UTF-8") from None


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), text.encode()).decode()
