"""Content types and content encodings: objects <-> bytes (MSG200, MSG220).

========================================  ==================================================  =======
content type                              object                                              extra
========================================  ==================================================  =======
``application/octet-stream``              bytes, as they are
``text/*``                                str; ``charset`` parameter, UTF-8 by default
``application/json``, ``*/*+json``        whatever pydantic serializes and validates
``application/cbor``, ``*/*+cbor``        the same, and bytes                                 cbor
``application/msgpack``, ``+msgpack``     the same, and bytes; also ``vnd.`` and ``x-``       msgpack
========================================  ==================================================  =======

Without a content type, both ways: bytes are bytes, str is ``text/plain; charset=utf-8``, anything else is JSON; when
decoding, the wanted type decides, and without one the bytes are returned as they are. The setting
``default_content_type`` of an instance replaces this for messages that it receives.

**Bytes are content, not an object**: ``bytes``, ``bytearray`` and ``memoryview`` are taken as encoded already,
whatever the content type; so somebody who has JSON text in hand can publish it as ``application/json``. Content
encodings (:mod:`messaging.codecs.encodings`) apply to them all the same.

Other codecs are added with :func:`register_codec`, or by an installed distribution with an entry point in the group
``messaging.codecs``: name = content type, value = a codec or a class of codecs. What is built in cannot be replaced.

Everything here may be called from any thread. What arrived from outside is bounded in nesting and in the size it
decompresses to, and whatever is wrong with it is a :class:`~messaging.errors.CodecError` that does not quote it.
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
    """What :func:`decode` needs of a message context."""

    @property
    def content_type(self) -> str | None:
        """Content type; ``None`` or empty if unknown."""
        ...

    @property
    def content_encoding(self) -> str | None:
        """Content encoding; ``None`` or empty if there is none."""
        ...


def encode(obj: Any, content_type: str | None = None, content_encoding: str | None = None) -> tuple[bytes, str]:
    """Turn an object into the payload of a message.

    Args:
        obj: bytes-like content, or an object the content type's codec takes.
        content_type: ``None`` or empty to have it chosen by the type of ``obj``.
        content_encoding: compressions to apply, and the charset of text if the content type names none.

    Returns:
        The payload, and the content type to send with it: the given or the chosen one.

    Raises:
        UnknownContentTypeError, UnknownContentEncodingError: nothing here writes it.
        EncodeError: the object does not become bytes.
        MissingExtraError: that content type or encoding needs a package that is not installed.
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
    """Turn the payload of a message into an object.

    Args:
        payload: as it was sent.
        context: tells content type and encoding.
        model: a pydantic model, dataclass, typed dict or any other type pydantic can validate; ``None`` for whatever
            the content type yields. Types are kept compiled: rather pass the same object than an equal one.
        max_decoded_size: bytes that a compressed payload may grow to.
        default_content_type: taken if the context has none, unless bytes are wanted; ``None``: ``model`` decides.

    Raises:
        UnknownContentTypeError, UnknownContentEncodingError: nothing here reads it.
        DecodeError: the bytes do not fit.
        MissingExtraError: that content type or encoding needs a package that is not installed.
        ArgumentError: ``context`` is no context.
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
    """The codec that serves ``content_type``.

    Raises:
        UnknownContentTypeError: malformed, nobody serves it, or who would cannot be loaded.
        MissingExtraError: it is built in, but needs a package that is not installed.
    """
    return _codecs.resolve(content_type)[0]


def content_types() -> list[str]:
    """The content types that have a codec here, installed or not: built in, registered, announced; sorted."""
    return _codecs.content_types()


def register_codec(codec: Codec) -> None:
    """Have ``codec`` serve its ``content_types`` in this process; again is no error.

    Raises:
        ArgumentError: no codec, or one of its content types is malformed, built in or registered already.
    """
    _codecs.register(codec)


def _with_charset(parameters: Mapping[str, str], charset: str) -> Mapping[str, str]:
    return parameters if "charset" in parameters else {**parameters, "charset": charset}
