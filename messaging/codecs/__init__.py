"""Codecs of content types and content encodings: objects <-> bytes (MSG200, MSG220).

========================================  ==================================================  =======
content type                              object                                              extra
========================================  ==================================================  =======
``application/octet-stream``              bytes, unchanged
``text/*``                                str; ``charset`` parameter, UTF-8 by default
``application/json``, ``*/*+json``        objects that pydantic serializes and validates
``application/cbor``, ``*/*+cbor``        the same, and bytes                                 cbor
``application/msgpack``, ``+msgpack``     the same, and bytes; also ``vnd.`` and ``x-``       msgpack
========================================  ==================================================  =======

Without a content type, bytes stay bytes, str is ``text/plain; charset=utf-8``, and any other object is JSON. Decoding
decides by the requested type, and returns the bytes without one. The setting ``default_content_type`` of an instance
replaces this rule for messages that it receives.

**Bytes are encoded content**: ``bytes``, ``bytearray`` and ``memoryview`` pass every codec unchanged, so JSON text in
bytes can be published as ``application/json``. Content encodings (:mod:`messaging.codecs.encodings`) apply to them too.

Further codecs are added with :func:`register_codec`, or by an installed distribution with an entry point in the group
``messaging.codecs``: name = content type, value = a codec or a class of codecs. Built-in codecs cannot be replaced.

Every function of this package is thread safe. Payloads are bounded in nesting and in decompressed size. The error for
an invalid payload is a :class:`~messaging.errors.CodecError` that does not quote the payload.

Exports the functions below, the protocol :class:`Codec`, and limits.
"""

from messaging.codecs.encodings import MAX_DECODED_SIZE
from messaging.codecs.models import check_model
from messaging.codecs.registry import (
    ENTRY_POINT_GROUP,
    Codec,
    codec_for,
    content_types,
    decode,
    encode,
    register_codec,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "MAX_DECODED_SIZE",
    "Codec",
    "check_model",
    "codec_for",
    "content_types",
    "decode",
    "encode",
    "register_codec",
]
