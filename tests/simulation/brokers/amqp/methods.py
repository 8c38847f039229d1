"""Methods that pass rarely: decoded and encoded by the fields that pamqp lists.

Publishes, deliveries and acknowledgements are not among them: :mod:`.frames` has those. Tables are decoded by
:mod:`.tables`, since pamqp forgets the types of their values, and names are not checked: brokers take more of them than
pamqp does.
"""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any, Final, cast

from pamqp import commands
from pamqp.base import Frame

from tests.simulation.brokers.amqp import tables
from tests.simulation.brokers.amqp.frames import END, METHOD, PREFIX

_NUMBERS: Final = {name: struct.Struct(">" + code) for name, code in {"octet": "B", "short": "H", "long": "I",
                                                                      "longlong": "Q"}.items()}  # fmt: skip
_U32: Final = struct.Struct(">I")

_KINDS: Final = cast("dict[int, type[Frame]]", commands.INDEX_MAPPING)
#: the fields of each method, name and type, by the number that the method has on the wire
_FIELDS: Final[dict[int, tuple[tuple[str, str], ...]]] = {
    index: tuple((name, kind.amqp_type(name)) for name in kind.__slots__) for index, kind in _KINDS.items()
}
#: name of each method, "Queue.Declare", by its number
NAMES: Final[dict[int, str]] = {index: kind.name for index, kind in _KINDS.items()}


def decode(index: int, data: bytes, at: int) -> Any:
    """Return the arguments of the method ``index``, which start at ``at``, as attributes named as in pamqp.

    Raises:
        ValueError, IndexError, struct.error: they are malformed.
    """
    found: dict[str, Any] = {}
    bit = 0
    for name, kind in _FIELDS[index]:
        if kind == "bit":
            found[name] = bool(data[at] >> bit & 1)
            bit += 1
            continue
        if bit:
            at, bit = at + 1, 0
        if kind == "shortstr":
            end = at + 1 + data[at]
            found[name] = data[at + 1 : end].decode("utf-8", "surrogateescape")
            at = end
        elif kind == "longstr":
            end = at + 4 + _U32.unpack_from(data, at)[0]
            found[name] = data[at + 4 : end]
            at = end
        elif kind == "table":
            found[name], at = tables.read_table(data, at)
        else:
            (found[name],) = _NUMBERS[kind].unpack_from(data, at)
            at += _NUMBERS[kind].size
    return SimpleNamespace(**found)


def encode(kind: type[Frame], channel: int, **values: Any) -> bytes:
    """Return the frame of the method ``kind``. Fields that are not given are zero or empty."""
    parts = [_U32.pack(kind.index)]
    bits, count = 0, 0
    for name, field in _FIELDS[kind.index]:
        value = values.get(name)
        if field == "bit":
            bits |= bool(value) << count
            count += 1
            continue
        if count:
            parts.append(bytes([bits]))
            bits = count = 0
        if field == "shortstr":
            data = value if isinstance(value, bytes) else (value or "").encode("utf-8", "surrogateescape")
            parts.append(bytes([len(data)]) + data)
        elif field == "longstr":
            data = value or b""
            parts.append(_U32.pack(len(data)) + data)
        elif field == "table":
            parts.append(tables.write_table(value or {}))
        else:
            parts.append(_NUMBERS[field].pack(value or 0))
    if count:
        parts.append(bytes([bits]))
    payload = b"".join(parts)
    return PREFIX.pack(METHOD, channel, len(payload)) + payload + END
