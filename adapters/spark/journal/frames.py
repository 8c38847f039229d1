"""Frames: the binary format of the segments of a journal. A frame is valid as a whole, or not at all.

A segment is a file of frames. Each has a header of 32 bytes and a body, an encapsulated Arrow IPC message: the body of
the first frame is the schema, every other body a record batch. A header is, in little-endian::

    magic "RXJ1"  rows u32  first offset u64  length of the body u64  crc32 of the body u32  crc32 of all this u32

Bodies are multiples of eight bytes long, so that a mapped file is read without copying.

The check of a header begins with a seed, a number that differs from log to log. So a frame of another log is invalid,
and so is a frame that a sender puts into a payload.
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
#: a header with a longer body is invalid: a record batch holds a few MiB, or one message
MAX_BODY: Final = 2**32
#: bytes that are searched at a time
_CHUNK: Final = 2**20


class Header(NamedTuple):
    """The header of a frame."""

    rows: int
    #: offset of the first row
    first: int
    #: number of bytes of the body
    length: int
    check: int


def encode(first: int, rows: int, body: pa.Buffer, seed: int = 0) -> list[Any]:
    """Return a frame, in parts that are written one after the other."""
    fields = _FIELDS.pack(MAGIC, rows, first, body.size, zlib.crc32(body))
    return [fields + _CHECK.pack(zlib.crc32(fields, seed)), body]


def header(data: Any, seed: int = 0) -> Header | None:
    """Return the header at the beginning of ``data``, or ``None``."""
    if len(data) < HEADER_BYTES:
        return None
    magic, rows, first, length, check = _FIELDS.unpack_from(data)
    if magic != MAGIC or _CHECK.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(data[: _FIELDS.size], seed):
        return None
    return Header(rows, first, length, check) if length <= MAX_BODY else None


class Frame(NamedTuple):
    """A whole frame in a buffer."""

    header: Header
    #: where it begins, and where the next frame begins
    position: int
    end: int
    body: pa.Buffer

    def is_intact(self) -> bool:
        """Return whether the body is as it was written."""
        return zlib.crc32(self.body) == self.header.check


def scan(data: pa.Buffer, seed: int = 0, position: int = 0) -> Iterator[Frame]:
    """Yield the frames of ``data`` from ``position`` on, up to the first incomplete one. Bodies are not checked."""
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
    """Return whether an intact frame follows behind ``position``: then the damage there is no unfinished write."""
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
