"""Conventions of kombu, and so of Celery, that differ from MIME.

=============================  ====================================================================================
here                           on the wire
=============================  ====================================================================================
content encoding ``zlib``      header ``compression: application/x-gzip``, which is zlib's format in kombu, and no
                               content encoding of that name
content type                   ``text/plain``: UTF-8 is the default of text, and kombu compares content types with
``text/plain; charset=utf-8``  their parameters
=============================  ====================================================================================

A received message whose header ``compression`` is one of kombu's has the matching content encoding, after its own, and
not the header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from messaging.codecs.encodings import parse_encodings
from messaging.errors import UnknownContentEncodingError

#: kombu's header
HEADER: Final = "compression"

_ZLIB_FORMAT: Final = "zlib"
_ZLIB: Final = "application/x-gzip"
#: content encodings by kombu's names, including encodings without a codec here: the error names them
_ENCODINGS: Final[Mapping[Any, str]] = {
    _ZLIB: _ZLIB_FORMAT,
    "application/zstd": "zstd",
    "application/x-bz2": "bzip2",
    "application/x-lzma": "lzma",
    "application/x-brotli": "br",
}
_TEXT: Final = "text/plain"
_TEXT_UTF8: Final = f"{_TEXT}; charset=utf-8"


def content_type(text: str, encoding: str | None) -> str:
    """Return the content type ``text`` as it is on the wire: the charset of the encoding counts if it has none."""
    if text != _TEXT_UTF8:
        return text
    try:
        charset = parse_encodings(encoding).charset if encoding else None
    except UnknownContentEncodingError:
        return text
    return _TEXT if charset in (None, "utf-8", "utf8") else text


def written(encoding: str | None, headers: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Return content encoding and headers as they are on the wire."""
    if encoding is None or not encoding.lower().endswith(_ZLIB_FORMAT):
        return encoding, headers
    before, _, last = encoding.rpartition(",")
    if last.strip().lower() != _ZLIB_FORMAT:
        return encoding, headers
    return before.strip() or None, {**headers, HEADER: _ZLIB}


def read(encoding: str | None, fields: dict[str, Any]) -> str | None:
    """Return the content encoding of a message with the header, and remove the header if it is kombu's."""
    value = fields[HEADER]
    compressed = _ENCODINGS.get(value) if isinstance(value, str) else None
    if compressed is None:
        return encoding
    del fields[HEADER]
    return compressed if encoding is None else f"{encoding}, {compressed}"
