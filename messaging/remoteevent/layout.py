"""One remote event as one line of JSON: in notifications, and in journals.

=============  =====================================================================================================
``source``     text
``id``         integer or text
``sequence``   integer
``handback``   a portable value, see :mod:`messaging.dispatch.eventdata`; missing for ``None``
``type``       name of the subclass of ``RemoteEvent``; missing for ``RemoteEvent`` itself
``data``       the fields of the subclass, portable; missing with ``type``
``suppressed`` number of older events that a mailbox dropped in favour of this one; missing for 0
=============  =====================================================================================================

A line is encoded once: an event that was read from a line is written as the same line again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.eventdata import convert, from_portable, read_json, to_portable, write_json
from messaging.errors import ConversionError, DecodeError, InvalidEventError
from messaging.errors.text import SafeLog
from messaging.remoteevent.event import ForeignEvent, RemoteEvent, check_sequence_number

if TYPE_CHECKING:
    from messaging.remoteevent.event import EventId

logger = SafeLog(__name__)

#: kinds of events whose common part of the line is remembered
_HEADS: Final = 4096


def encode_event(event: RemoteEvent) -> bytes:
    """Return an event as one line, without the end of the line.

    Raises:
        InvalidEventError: a value in it has no portable form.
    """
    line = event.line
    if line is None:
        line = _encode(event)
        event.keep_line(line)
    return line


def _encode(event: RemoteEvent) -> bytes:
    return b"%b%d%b" % (_head(event.source, event.id), event.sequence_number, _tail(event))


@lru_cache(maxsize=_HEADS)
def _head(source: str, event_id: EventId) -> bytes:
    """Return the line of an event up to its number. Events of a kind have it in common."""
    return b'{"source":%b,"id":%b,"sequence":' % (write_json(source), write_json(event_id))


def _tail(event: RemoteEvent) -> bytes:
    """Return the line of an event behind its number."""
    value: dict[str, Any] = {}
    if event.handback is not None:
        value["handback"] = to_portable(event.handback)
    if event.suppressed:
        value["suppressed"] = event.suppressed
    name = event.type_name
    if name is not None:
        value["type"] = name
        value["data"] = event.foreign_data if isinstance(event, ForeignEvent) else to_portable(event.data)
    return b"," + write_json(value)[1:] if value else b"}"


class NumberedLine:
    """The line of an event whose sequence number is not known yet: encoded once, numbered later.

    Args:
        event: its sequence number does not count.

    Raises:
        InvalidEventError: a value in it has no portable form.
    """

    __slots__ = ("_head", "_tail")

    def __init__(self, event: RemoteEvent) -> None:
        self._head = _head(event.source, event.id)
        self._tail = _tail(event)

    def numbered(self, number: int) -> bytes:
        """Return the line with a sequence number."""
        return b"%b%d%b" % (self._head, number, self._tail)


def decode_event(line: bytes) -> RemoteEvent:
    """Return the event of a line: of its subclass if that is known here, and the event fits it.

    Otherwise it has its ``type_name`` and ``data``, and travels on unchanged.

    Raises:
        DecodeError: the line holds no event.
    """
    value = read_json(line)
    try:
        handback = value.get("handback")
        if handback is not None:
            handback = from_portable(handback)
        name = value.get("type")
        if name is None:
            event = RemoteEvent(value["source"], value["id"], value["sequence"], handback)
        else:
            event = _typed(value, str(name), handback)
        suppressed = value.get("suppressed", 0)
        if suppressed:
            event = event.suppressing(check_sequence_number(suppressed))
    except (AttributeError, KeyError, TypeError) as error:
        raise DecodeError(f"not a remote event: {type(error).__name__}: {error}") from None
    except InvalidEventError as error:
        raise DecodeError(f"not a remote event: {error}") from None
    event.keep_line(line)
    return event


def _typed(value: dict[str, Any], name: str, handback: Any) -> RemoteEvent:
    kind = RemoteEvent.class_named(name)
    data = value.get("data")
    if kind is not None and isinstance(data, dict):
        fields = from_portable(data)
        base = {
            "source": value["source"],
            "id": value["id"],
            "sequence_number": value["sequence"],
            "handback": handback,
        }
        try:
            return convert({**fields, **base}, kind)  # type: ignore[no-any-return]
        except ConversionError as error:
            # of another version of the class: it must not be lost on the way
            logger.warning("event %r of %r is not a %s: %s", value["id"], value["source"], name, error)
    return ForeignEvent(value["source"], value["id"], value["sequence"], handback, foreign_type=name, foreign_data=data)
