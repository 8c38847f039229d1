"""Recorded events: events on the wire that have a recorder, a sequence number, a time and a map as their data.

:mod:`messaging.dispatch.eventdata.layout` describes the payload, :mod:`messaging.dispatch.eventdata.values` the form of
the data. The bounds of depth and numbers do not apply to them: an archive may have events that were recorded before
these bounds.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from messaging.dispatch import is_topic
from messaging.dispatch.eventdata import (
    WireEvent,
    decode,
    encode,
    from_portable,
    microseconds,
    read_json,
    time_of,
    to_portable,
    write_json,
)
from messaging.errors import DecodeError, InvalidEventError


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event of an archive.

    Attributes:
        topic: the topic of the event.
        time: the publication time, in UTC.
        recorder, sequence: identify the event: a recorder has a unique name for each run, and numbers the events of its
            topics from 0, so that a missing number is a lost event. A recorder that resumes has the name and the
            numbers of the durable history, which also count the events of other topics.
        data: the event in map form.
    """

    topic: str
    time: datetime.datetime
    recorder: str
    sequence: int
    data: dict[str, Any]


def dump_event(event: RecordedEvent) -> bytes:
    """Return a recorded event as a payload; ``InvalidEventError`` tells the type of a value that has no form."""
    try:
        time = microseconds(event.time)
    except TypeError:
        raise InvalidEventError("the time of a recorded event has no time zone") from None
    data = to_portable(event.data, is_bounded=False)
    return encode(WireEvent(event.topic, data, time=time, recorder=event.recorder, sequence=event.sequence))


def load_event(payload: bytes) -> RecordedEvent:
    """Return the recorded event in a payload; ``DecodeError`` tells why it has none."""
    try:
        found = decode(payload)
    except DecodeError as error:
        raise DecodeError(f"not a recorded event: {error}") from None
    if not is_topic(found.topic):
        raise DecodeError("a recorded event without a valid topic")
    if found.recorder is None:
        raise DecodeError("a recorded event without the name of its recorder")
    if found.sequence is None:
        raise DecodeError("a recorded event without a sequence number")
    if found.time is None:
        raise DecodeError("a recorded event without a time")
    return RecordedEvent(found.topic, time_of(found.time), found.recorder, found.sequence, _loaded_map(found.data))


def dump_data(data: Mapping[str, Any]) -> str:
    """Return the data of an event as JSON. Raises ``InvalidEventError`` as :func:`dump_event`."""
    return write_json(to_portable(data, is_bounded=False)).decode()


def load_data(text: str) -> dict[str, Any]:
    """Return the data from the JSON of :func:`dump_data`. Raises ``DecodeError`` as :func:`load_event`."""
    return _loaded_map(read_json(text))


def _loaded_map(data: Any) -> dict[str, Any]:
    found = from_portable(data, is_bounded=False)
    if type(found) is not dict:
        raise DecodeError("a recorded event whose data is no map")
    return found
