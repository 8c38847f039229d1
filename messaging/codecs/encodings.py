"""Content encodings: compression of payloads (RFC 9110, 8.4).

``gzip`` (RFC 1952), ``zlib`` (RFC 1950), ``zstd`` (RFC 8878, needs the extra) and ``identity``, which kombu and Celery
call ``binary``. Several are separated by commas, in the order of their application. The samples of the Messaging RFC
use the content encoding for a charset (``UTF-8``): a charset name is therefore accepted as the charset of text.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

from messaging.errors import DecodeError, MissingExtraError, UnknownContentEncodingError

#: default of the maximum size of a decompressed payload, bytes
MAX_DECODED_SIZE: Final = 64 * 2**20

_MAX_ENCODINGS: Final = 8
_MAX_LENGTH: Final = 200
#: gzip members or zstd frames in one payload
_MAX_MEMBERS: Final = 1000
#: Decompressors get slices so small that one slice expands to at most 8 MiB. Deflate grows at most 1032-fold; a zstd
#: block of four bytes can stand for 128 KiB.
_GZIP_SLICE: Final = 8 * 2**10
_ZSTD_SLICE: Final = 256
#: window that frames of a stream may request (RFC 9659), even if the size limit is lower
_ZSTD_WINDOW: Final = 8 * 2**20

#: Charsets of text. A closed list, because Python keeps every unknown name in memory that it was asked for, and some of
#: its codecs are no charsets, or slow for malicious input.
CHARSETS: Final = frozenset(
    ("utf-8", "utf8", "utf-16", "utf-16le", "utf-16be", "utf-32", "utf-32le", "utf-32be")
    + ("us-ascii", "ascii", "latin-1", "latin1", "koi8-r", "koi8-u")
    + ("shift_jis", "euc-jp", "iso-2022-jp", "gb2312", "gbk", "gb18030", "big5", "euc-kr")
    + tuple(f"iso-8859-{part}" for part in range(1, 17) if part != 12)
    + tuple(f"windows-{page}" for page in range(1250, 1259))
)


class Encodings(NamedTuple):
    """A parsed content encoding.

    Attributes:
        charset: in lower case; ``None`` without one.
        compressions: in the order of their application.
    """

    charset: str | None
    compressions: tuple[str, ...]


NONE: Final = Encodings(None, ())


@lru_cache(maxsize=256)
def parse_encodings(text: str) -> Encodings:
    """Parse a content encoding; raise ``UnknownContentEncodingError`` for an unknown name."""
    if not isinstance(text, str):
        raise UnknownContentEncodingError(f"a content encoding must be a str, not {type(text).__name__}")
    names = [name.strip().lower() for name in text.split(",")]
    if len(text) > _MAX_LENGTH or len(names) > _MAX_ENCODINGS:
        raise UnknownContentEncodingError(f"content encoding {text!r:.80} is too long")
    charset: str | None = None
    compressions = []
    for name in names:
        if name in _CODINGS:
            compressions.append(name)
        elif name not in ("", "identity", "binary"):
            found = charset_name(name)
            if found is None:
                raise UnknownContentEncodingError(
                    f"unknown content encoding {name!r:.80}; known are gzip, zlib, zstd, identity, binary "
                    f"and charset names"
                )
            charset = charset or found
    return Encodings(charset, tuple(compressions))


def charset_name(name: str) -> str | None:
    """Return the name of a known charset in lower case, as Python accepts it; ``None`` for an unknown one."""
    name = name.lower()
    return name if name in CHARSETS else None


def compress(data: bytes, encodings: Encodings) -> bytes:
    """Apply the compressions, in order; raise ``MissingExtraError`` if the package of one is not installed."""
    for name in encodings.compressions:
        data = _CODINGS[name][0](data)
    return data


def decompress(data: bytes, encodings: Encodings, limit: int) -> bytes:
    """Undo the compressions, last first. Stops within 8 MiB of ``limit``.

    Raises:
        DecodeError: the data is corrupt or incomplete, has trailing bytes, or expands to more than ``limit`` bytes.
        MissingExtraError: the package of a compression is not installed.
    """
    for name in reversed(encodings.compressions):
        data = _CODINGS[name][1](data, limit)
    return data


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 6, mtime=0)  # the same bytes for the same content


def _gunzip(data: bytes, limit: int) -> bytes:
    return _expand(data, "gzip", lambda: zlib.decompressobj(zlib.MAX_WBITS | 16), zlib.error, _GZIP_SLICE, limit)


def _zlib(data: bytes) -> bytes:
    return zlib.compress(data, 6)


def _inflate(data: bytes, limit: int) -> bytes:
    return _expand(data, "zlib", zlib.decompressobj, zlib.error, _GZIP_SLICE, limit)


def _zstd(data: bytes) -> bytes:
    compressed: bytes = _zstandard().ZstdCompressor().compress(data)  # not shareable between threads, cheap to make
    return compressed


def _unzstd(data: bytes, limit: int) -> bytes:
    zstandard = _zstandard()
    decompressor = zstandard.ZstdDecompressor(max_window_size=max(limit, _ZSTD_WINDOW))
    # not its one-shot function, which trusts the size that a frame claims, and ignores trailing bytes
    return _expand(data, "zstd", decompressor.decompressobj, zstandard.ZstdError, _ZSTD_SLICE, limit)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError("zstd", "content encoding 'zstd'") from error
    return zstandard


def _expand(data: bytes, name: str, start: Callable[[], Any], failure: type[Exception], size: int, limit: int) -> bytes:
    """Decompress ``data``, in slices of ``size`` bytes, member by member."""
    view = memoryview(data)
    at = 0
    expanded = bytearray()
    for _ in range(_MAX_MEMBERS):
        member = start()
        while not member.eof:
            if at == len(view):
                raise DecodeError(f"content encoding {name}: the data ends too soon, after {at} bytes")
            piece = view[at : at + size]
            try:
                expanded += member.decompress(piece)
            except failure as error:
                raise DecodeError(f"content encoding {name}: corrupt at or after byte {at}: {error}") from None
            if len(expanded) > limit:
                raise DecodeError(f"content encoding {name}: the content is larger than the limit of {limit} bytes")
            at += len(piece)
        at -= len(member.unused_data)
        if at == len(view):
            return bytes(expanded)
    raise DecodeError(f"content encoding {name}: more than {_MAX_MEMBERS} members")


#: name -> compress, decompress
_CODINGS: Final[dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes, int], bytes]]]] = {
    "gzip": (_gzip, _gunzip),
    "x-gzip": (_gzip, _gunzip),
    "zlib": (_zlib, _inflate),
    "zstd": (_zstd, _unzstd),
}
