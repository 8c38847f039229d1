"""Frames: the binary format of the segments of a journal. A frame is valid as a whole, or not at all.

A segment is a file of frames. Each has a header of 32 bytes and a body. The body of the first frame, which has no rows,
names the format of the other bodies: it is an Arrow schema where they are Arrow record batches, or a text, see
:mod:`messaging.journal.records`. A header is, in little-endian::

    magic "RXJ1"  rows u32  first offset u64  length of the body u64  crc32 of the body u32  crc32 of all this u32

The check of a header begins with a seed, a number that differs from log to log. So a frame of another log is invalid,
and so is a frame that a sender puts into a payload.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

MAGIC: Final = b"RXJ1"
_MAGIC: Final = re.compile(MAGIC)
_FIELDS: Final = struct.Struct("<4sIQQI")
_CHECK: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CHECK.size
#: a header with a longer body is invalid: a body holds a few MiB, or one message
MAX_BODY: Final = 2**32


class Header(NamedTuple):
    """The header of a frame."""

    rows: int
    #: offset of the first row
    first: int
    #: number of bytes of the body
    length: int
    check: int


def encode(first: int, rows: int, body: Sequence[Any], seed: int = 0) -> list[Any]:
    """Return a frame in parts that are written one after the other.

    Args:
        first: offset of the first row.
        rows: number of rows.
        body: bytes-like parts of the body.
        seed: of the log.
    """
    length = check = 0
    for part in body:
        length += memoryview(part).nbytes
        check = zlib.crc32(part, check)
    fields = _FIELDS.pack(MAGIC, rows, first, length, check)
    return [fields + _CHECK.pack(zlib.crc32(fields, seed)), *body]


def header(data: Any, seed: int = 0) -> Header | None:
    """Return the header at the beginning of ``data``, or ``None``."""
    if len(data) < HEADER_BYTES:
        return None
    magic, rows, first, length, check = _FIELDS.unpack_from(data)
    if magic != MAGIC or _CHECK.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(data[: _FIELDS.size], seed):
        return None
    return Header(rows, first, length, check) if length <= MAX_BODY else None


def rewound(data: bytes, checksum: int) -> int:
    """Return the seed with which the CRC-32 of ``data`` is ``checksum``."""
    value = checksum ^ 0xFFFFFFFF
    for byte in reversed(data):
        index = _BY_HIGH_BYTE[value >> 24]
        value = ((value ^ _TABLE[index]) << 8) | (index ^ byte)
    return value ^ 0xFFFFFFFF


#: the table of CRC-32, and the index of each of its entries by the high byte, which no two have in common
_TABLE: Final = [zlib.crc32(bytes([byte]), 0xFFFFFFFF) ^ 0xFFFFFFFF for byte in range(256)]
_BY_HIGH_BYTE: Final = {entry >> 24: index for index, entry in enumerate(_TABLE)}


def seed_in(data: memoryview) -> int | None:
    """Return the seed that the first two frames of a segment were written with; ``None`` if they do not tell one.

    The checksums of their bodies show that they are intact, whatever the seed.
    """
    position = 0
    seeds = set()
    for _ in range(2):
        head = bytes(data[position : position + HEADER_BYTES])
        if len(head) < HEADER_BYTES:
            return None
        magic, _, _, length, check = _FIELDS.unpack_from(head)
        end = position + HEADER_BYTES + length
        if magic != MAGIC or end > len(data) or zlib.crc32(data[position + HEADER_BYTES : end]) != check:
            return None
        seeds.add(rewound(head[: _FIELDS.size], *_CHECK.unpack_from(head, _FIELDS.size)))
        position = end
    return seeds.pop() if len(seeds) == 1 else None


class Frame(NamedTuple):
    """A whole frame in a buffer."""

    header: Header
    #: where it begins, and where the next frame begins
    position: int
    end: int
    body: memoryview

    def is_intact(self) -> bool:
        """Return whether the body is as it was written."""
        return zlib.crc32(self.body) == self.header.check


def scan(data: memoryview, seed: int = 0, position: int = 0) -> Iterator[Frame]:
    """Yield the frames of ``data`` from ``position`` on, up to the first incomplete one. Bodies are not checked."""
    size = len(data)
    while True:
        found = header(data[position : position + HEADER_BYTES], seed)
        if found is None:
            return
        body = position + HEADER_BYTES
        end = body + found.length
        if end > size:
            return
        yield Frame(found, position, end, data[body:end])
        position = end


def headers(data: memoryview, position: int, seed: int = 0) -> Iterator[tuple[int, Header]]:
    """Yield the place of each header of ``data`` from ``position`` on, and the header. Bodies may be damaged."""
    for match in _MAGIC.finditer(data, position):
        found = header(data[match.start() : match.start() + HEADER_BYTES], seed)
        if found is not None:
            yield match.start(), found


def next_intact(data: memoryview, position: int, seed: int = 0) -> Frame | None:
    """Return the first intact frame behind ``position``; with one, the damage there is no unfinished write."""
    frames = (next(scan(data, seed, place), None) for place, _ in headers(data, position + 1, seed))
    return next((each for each in frames if each is not None and each.is_intact()), None)


class Damage(NamedTuple):
    """A place in a segment that is not as it was written."""

    #: the bytes that cannot be used
    position: int
    end: int
    #: the rows that were in them: offset of the first one, and the offset after the last one
    first: int
    until: int
    reason: str


def walk(data: memoryview, first: int, *, until: int | None = None, seed: int = 0) -> Iterator[Frame | Damage]:
    """Yield the frames of a segment in order, and before a frame the damaged place that it follows, if any.

    Ends at an unfinished write, or at the end of ``data``. The bodies of a closed segment are not checked.

    Args:
        data: the segment.
        first: the offset of its first row, from its name.
        until: the offset of the first row of the next segment; ``None`` for the last segment. Frames from there on are
            left over of a write that failed.
        seed: of the log.
    """
    position, offset = 0, first
    while position < len(data):
        frame: Frame | None = next(scan(data, seed, position), None)
        damage = None
        if frame is None or (until is None and not frame.is_intact()):
            frame = next_intact(data, position, seed)
            if frame is not None:
                damage = f"the frame at byte {position} is damaged, and whole ones follow"
        elif frame.header.first != offset and (not position or until is None or frame.header.first < until):
            found = frame.header.first
            damage = f"row {found} follows row {offset - 1}" if position else f"its first row is {found}"
        while frame is not None and frame.header.first < offset:
            frame = next_intact(data, frame.position, seed)
        if frame is not None and until is not None and frame.header.first >= until:
            frame = None
        if damage is not None:
            end, lost_until = (len(data), offset) if frame is None else (frame.position, frame.header.first)
            yield Damage(position, end, offset, lost_until, damage)
        if frame is None:
            return
        yield frame
        position, offset = frame.end, frame.header.first + frame.header.rows
