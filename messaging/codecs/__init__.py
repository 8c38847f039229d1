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

May import: ``errors``, ``environment``. Exports the functions below, the protocol :class:`Codec`,
and limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.codecs.encodings import MAX_DECODED_SIZE, NONE, compress, decompress, parse_encodings
from messaging.codecs.models import check_model
from messaging.codecs.registry import ENTRY_POINT_GROUP, Codec, Codecs
from messaging.errors import ArgumentError, DecodeError, EncodeError, MessagingError

if TYPE_CHECKING:
    from collections.abc import Mapping

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

OCTET_STREAM: Final = "application/octet-stream"
JSON: Final = "application/json"
TEXT: Final = "text/plain"

_BYTES: Final = (bytes, bytearray, memoryview)

_codecs: Final = Codecs()


class ContentDescription(Protocol):
    """The properties of a message context that :func:`decode` reads."""

    @property
    def content_type(self) -> str | None:
        """Return the content type; ``None`` or empty if unknown."""

    @property
    def content_encoding(self) -> str | None:
        """Return the content encoding; ``None`` or empty without one."""


def encode(obj: Any, content_type: str | None = None, content_encoding: str | None = None) -> tuple[bytes, str]:
    """Encode an object to the payload of a message.

    Args:
        obj: bytes-like content, or an object that the content type's codec accepts.
        content_type: ``None`` or empty: chosen by the type of ``obj``.
        content_encoding: compressions to apply, and the charset of text if the content type names none.

    Returns:
        The payload, and the content type to send with it.

    Raises:
        UnknownContentTypeError, UnknownContentEncodingError: no codec or encoding of that name is known.
        EncodeError: the object cannot be encoded.
        MissingExtraError: the content type or encoding needs a package that is not installed.
    """
    encodings = parse_encodings(content_encoding) if content_encoding else NONE
    if isinstance(obj, _BYTES):
        return compress(bytes(obj), encodings), content_type or OCTET_STREAM
    if not content_type:
        content_type = f"{TEXT}; charset={encodings.charset or 'utf-8'}" if isinstance(obj, str) else JSON
    codec, parameters = _codecs.resolve(content_type)
    if encodings.charset is not None:
        parameters = _with_charset(parameters, encodings.charset)
    try:
        data = codec.encode(obj, parameters)
    except MessagingError:
        raise
    except Exception as error:
        raise EncodeError(f"{content_type}: the codec failed with {type(error).__name__}") from error
    if not isinstance(data, bytes):
        raise EncodeError(f"{content_type}: the codec returned {type(data).__name__}, not bytes")
    return compress(data, encodings), content_type


def decode(
    payload: bytes,
    context: ContentDescription,
    model: Any = None,
    *,
    max_decoded_size: int = MAX_DECODED_SIZE,
    default_content_type: str | None = None,
) -> Any:
    """Decode the payload of a message to an object.

    Args:
        payload: the bytes in their content encoding.
        context: names content type and encoding.
        model: a pydantic model, dataclass, typed dict or any other type pydantic can validate; ``None``: the result of
            the codec. Compiled types are cached by identity: pass the same object rather than an equal one.
        max_decoded_size: maximum size of a decompressed payload, bytes.
        default_content_type: used if the context has none, unless ``model`` is bytes; ``None``: ``model`` decides.

    Raises:
        UnknownContentTypeError, UnknownContentEncodingError: no codec or encoding of that name is known.
        DecodeError: the payload cannot be decoded to ``model``.
        MissingExtraError: the content type or encoding needs a package that is not installed.
        ArgumentError: ``context`` is no message context.
    """
    try:
        content_type = context.content_type
        content_encoding = context.content_encoding
    except AttributeError:
        raise ArgumentError(f"context must be a message context, not {type(context).__name__}") from None
    if not content_type:
        if default_content_type is not None and not _is_bytes(model):
            content_type = default_content_type
        else:
            content_type = OCTET_STREAM if model is None or _is_bytes(model) else TEXT if model is str else JSON
    codec, parameters = _codecs.resolve(content_type)
    if content_encoding:
        encodings = parse_encodings(content_encoding)
        payload = decompress(payload, encodings, max_decoded_size)
        if encodings.charset is not None:
            parameters = _with_charset(parameters, encodings.charset)
    try:
        return codec.decode(payload, model, parameters)
    except MessagingError:
        raise
    except Exception as error:
        raise DecodeError(f"{content_type}: the codec failed with {type(error).__name__}") from error


def _is_bytes(model: Any) -> bool:
    return any(model is each for each in _BYTES)


def codec_for(content_type: str) -> Codec:
    """Return the codec of ``content_type``.

    Raises:
        UnknownContentTypeError: the content type is malformed or has no codec, or its codec cannot be loaded.
        MissingExtraError: the built-in codec needs a package that is not installed.
    """
    return _codecs.resolve(content_type)[0]


def content_types() -> list[str]:
    """Return the content types with a built-in, registered or announced codec, loadable or not; sorted."""
    return _codecs.content_types()


def register_codec(codec: Codec) -> None:
    """Register ``codec`` for its ``content_types`` in this process. Idempotent.

    Raises:
        ArgumentError: ``codec`` is no codec, or one of its content types is malformed, built in or registered already.
    """
    _codecs.register(codec)


def _with_charset(parameters: Mapping[str, str], charset: str) -> Mapping[str, str]:
    return parameters if "charset" in parameters else {**parameters, "charset": charset}
