"""Markers: user headers that travel beside a request or reply, and are hidden from users.

=====================  =============================================================================================
header                 value
=====================  =============================================================================================
``rx-reply``           in a request: ``many`` if more than one reply is wanted. In a reply: ``item`` for one of many,
                       ``end`` behind the last of them, ``error`` if the handler failed. ``start`` comes before the
                       first of many: its reply channel takes ``cancel``, with the same correlation id, from a
                       requester that wants no more
``rx-number``          in an ``item``: its number, from 0; in an ``end`` or ``error``: the number of items
``rx-error``           in an ``error``: the name of the exception; the payload is its text (``text/plain``)
=====================  =============================================================================================

A single reply without an error has no marker, and a requester takes replies without any. So handlers and requesters of
other programs need not know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from messaging.errors import ReplyError
from messaging.model import Features, Incoming, as_text

REPLY: Final = "rx-reply"
NUMBER: Final = "rx-number"
ERROR: Final = "rx-error"

MANY: Final = "many"
START: Final = "start"
ITEM: Final = "item"
END: Final = "end"
CANCEL: Final = "cancel"
FAULT: Final = "error"

_OWN: Final = frozenset({REPLY, NUMBER, ERROR})
#: looked up once: a constant of a class costs more than one of a module
_HEADERS: Final = Features.EXTENSION_HEADERS


class Marker(NamedTuple):
    """The markers of one message.

    Attributes:
        kind: ``many``, ``start``, ``item``, ``end``, ``cancel`` or ``error``.
        number: see the module; ``None`` if it is missing or malformed.
        error: name of the exception.
    """

    kind: str
    number: int | None = None
    error: str = ""

    def headers(self) -> dict[str, str]:
        """Return the marker as user headers."""
        found = {REPLY: self.kind}
        if self.number is not None:
            found[NUMBER] = str(self.number)
        if self.error:
            found[ERROR] = self.error
        return found

    def fault(self, payload: bytes) -> ReplyError:
        """Return the failure of the handler that a message with this marker and ``payload`` reports."""
        return ReplyError(self.error or "Error", payload.decode(errors="replace"))


def read(incoming: Incoming) -> Marker | None:
    """Remove the marker from a received message and return it; ``None`` if it has none.

    Call it before any other code has seen the message: its extensions are replaced.
    """
    headers: Mapping[str, Any] | None = incoming.extensions.get(_HEADERS)
    if headers is None or (kind := headers.get(REPLY)) is None:
        return None
    extensions: dict[str, Any] = dict(incoming.extensions)
    others = {name: value for name, value in headers.items() if name not in _OWN}
    if others:
        extensions[Features.EXTENSION_HEADERS] = MappingProxyType(others)
    else:
        del extensions[Features.EXTENSION_HEADERS]
    incoming.keep(MappingProxyType(extensions))
    number = as_text(headers.get(NUMBER, ""))
    return Marker(
        as_text(kind),
        int(number) if number.isascii() and number.isdigit() and len(number) < 19 else None,
        as_text(headers.get(ERROR, "")),
    )
