"""Frames: what a segment of the journal is made of. A frame is there as a whole or it is not there.

A segment is a file of frames. Each is a header of 32 bytes and a body, an encapsulated Arrow IPC message: that of the
first frame is the schema, every other one a record batch. A header is, in little-endian::

    magic "RXJ1"  rows u32  first offset u64  length of the body u64  crc32 of the body u32  crc32 of all this u32

Bodies are multiples of eight bytes long, so that a mapped file is read without copying.

The check of a header begins with a seed, a number that is another for each log. So a frame of another log is none
here, and neither is one that somebody sends as a payload.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC: Final = b"RXJ1"
_FIELDS: Final = struct.Struct("<4sIQQI")
_CHECK: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CHECK.size
#: a body that claims to be longer is no body: a record batch holds a few MiB, or one message
MAX_BODY: Final = 2**32
#: how much is looked through at a time, bytes
_CHUNK: Final = 2**20


class Header(NamedTuple):
    """What stands before a body."""

    rows: int
    #: offset of the first row
    first: int
    #: bytes of the body
    length: int
    check: int


def encode(first: int, rows: int, body: pa.Buffer, seed: int = 0) -> list[Any]:
    """A frame, in parts that are written one after the other."""
    fields = _FIELDS.pack(MAGIC, rows, first, body.size, zlib.crc32(body))
    return [fields + _CHECK.pack(zlib.crc32(fields, seed)), body]


def header(data: Any, seed: int = 0) -> Header | None:
    """The header that ``data`` begins with; ``None`` if it does not."""
    if len(data) < HEADER_BYTES:
        return None
    magic, rows, first, length, check = _FIELDS.unpack_from(data)
    if magic != MAGIC or _CHECK.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(data[: _FIELDS.size], seed):
        return None
    return Header(rows, first, length, check) if length <= MAX_BODY else None


class Frame(NamedTuple):
    """A whole frame in a buffer."""

    header: Header
    #: where it begins, and where the next one does
    position: int
    end: int
    body: pa.Buffer

    def is_intact(self) -> bool:
        """Whether the body is as it was written."""
        return zlib.crc32(self.body) == self.header.check


def scan(data: pa.Buffer, seed: int = 0, position: int = 0) -> Iterator[Frame]:
    """The frames of ``data`` from ``position`` on, up to the first one that is not whole. Bodies are not checked."""
    view = memoryview(data)
    while True:
        found = header(view[position : position + HEADER_BYTES], seed)
        if found is None:
            return
        body = position + HEADER_BYTES
        end = body + found.length
        if end > data.size:
            return
        yield Frame(found, position, end, data.slice(body, found.length))
        position = end


def any_after(data: pa.Buffer, position: int, seed: int = 0) -> bool:
    """Whether an intact frame follows somewhere behind ``position``: then what is broken there is not a torn tail."""
    view = memoryview(data)
    for begin in range(position + 1, data.size, _CHUNK):
        chunk = bytes(view[begin : begin + _CHUNK + len(MAGIC) - 1])
        at = chunk.find(MAGIC)
        while at >= 0:
            frame = next(scan(data, seed, begin + at), None)
            if frame is not None and frame.is_intact():
                return True
            at = chunk.find(MAGIC, at + 1)
    return False
