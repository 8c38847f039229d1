"""A remote event as a map, and back, without loss of information (EV.4.2).

============  =======================================================================================================
``source``    text
``id``        int or text
``sequence``  int
``handback``  the value; missing for ``None``
``type``      name of the subclass of ``RemoteEvent``; missing for ``RemoteEvent`` itself
``data``      the fields of the subclass, as nested maps; missing with ``type``
============  =======================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from messaging.dispatch.eventdata import from_portable, read_json, to_portable, write_json
from messaging.errors import DecodeError
from messaging.remoteevent.layout import decode_event, encode_event

if TYPE_CHECKING:
    from messaging.remoteevent.event import RemoteEvent


def as_map(event: RemoteEvent) -> dict[str, Any]:
    """Return an event as nested maps, which share no mutable value with it.

    Raises:
        InvalidEventError: a value in it has no portable form.
    """
    found: dict[str, Any] = read_json(encode_event(event))
    for key in ("handback", "data"):
        if key in found:
            found[key] = from_portable(found[key])
    return found


def from_map(value: Mapping[str, Any]) -> RemoteEvent:
    """Return the event of a map: of its subclass if that is known here.

    Raises:
        DecodeError: it is no such map.
        InvalidEventError: a value in it has no portable form.
    """
    if not isinstance(value, Mapping):
        raise DecodeError(f"a remote event is made of a map, not of a {type(value).__name__}")
    found = dict(value)
    for key in ("handback", "data"):
        if key in found:
            found[key] = to_portable(found[key])
    return decode_event(write_json(found))
