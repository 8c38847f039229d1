"""Encoding and decoding by content type: the registry of codecs, and the functions that apply them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from threading import Lock
from typing import Any, Final, Protocol

from messaging.codecs.builtin import CborCodec, JsonCodec, MsgpackCodec, OctetStreamCodec, TextCodec
from messaging.codecs.cache import BoundedCache
from messaging.codecs.encodings import MAX_DECODED_SIZE, NONE, compress, decompress, parse_encodings
from messaging.codecs.mediatype import parse_media_type
from messaging.errors import ArgumentError, DecodeError, EncodeError, MessagingError, UnknownContentTypeError

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP: Final = "messaging.codecs"

OCTET_STREAM: Final = "application/octet-stream"
JSON: Final = "application/json"
TEXT: Final = "text/plain"

_BYTES: Final = (bytes, bytearray, memoryview)


class Codec(Protocol):
    """Encodes objects to bytes and decodes them. Must be thread safe: several threads call it at once."""

    @property
    def content_types(self) -> Sequence[str]:
        """Return the content types: ``type/subtype``, or ``type/*`` for subtypes without a codec of their own."""

    def encode(self, obj: Any, parameters: Mapping[str, str]) -> bytes:
        """Return ``obj`` as bytes.

        Args:
            obj: any object but bytes, bytearray and memoryview, which are encoded already.
            parameters: of the content type, names in lower case.

        Raises:
            EncodeError: ``obj`` cannot be encoded. Any other exception becomes an ``EncodeError``.
        """

    def decode(self, data: bytes, model: Any, parameters: Mapping[str, str]) -> Any:
        """Return the object that ``data`` represents.

        Args:
            data: the decompressed payload.
            model: the requested type, or ``None``.
            parameters: of the content type, names in lower case.

        Raises:
            DecodeError: ``data`` cannot be decoded. Any other exception becomes a ``DecodeError``.
        """


_BUILT_IN: Final[Mapping[str, type[Codec]]] = {
    name: kind
    for kind in (OctetStreamCodec, TextCodec, JsonCodec, CborCodec, MsgpackCodec)
    for name in kind.content_types
}


class Codecs:
    """Codecs by content type; thread safe.

    The look-up tries the content type itself, then ``application/suffix`` for a ``+suffix``, then ``type/*``. Each of
    these may be built in (and cannot be replaced then), registered, or announced by an entry point, whose codec is
    loaded on first use.

    No lock is held while a codec is loaded, because its import may wait for a thread that waits for the lock. Two
    threads may load a codec at the same time; the first loaded one is kept.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._registered: dict[str, Codec] = {}
        self._loaded: dict[str, Codec] = {}
        self._announced: dict[str, list[metadata.EntryPoint]] | None = None
        # replaced rather than cleared, so that a look-up begun before a registration cannot add its outdated result
        self._resolved: BoundedCache[str, tuple[Codec, Mapping[str, str]]] = BoundedCache()

    def register(self, codec: Codec) -> None:
        """Register ``codec`` for its ``content_types`` in this process. Idempotent.

        Raises:
            ArgumentError: ``codec`` is no codec, or one of its content types is malformed, built in or registered
                already.
        """
        names = [_checked_name(name) for name in _checked(codec).content_types]
        if not names:
            raise ArgumentError(f"codec {type(codec).__name__} names no content type")
        with self._lock:
            for name in names:
                if name in _BUILT_IN:
                    raise ArgumentError(f"the codec of content type {name!r} is built in and cannot be replaced")
                if self._registered.get(name, codec) is not codec:
                    raise ArgumentError(f"content type {name!r} has a codec already")
            self._registered.update(dict.fromkeys(names, codec))
            self._resolved = BoundedCache()

    def resolve(self, content_type: str) -> tuple[Codec, Mapping[str, str]]:
        """Return the codec and the parameters of a content type. See ``codec_for`` for errors."""
        resolved = self._resolved
        known = resolved.get(content_type)
        if known is not None:
            return known
        essence, parameters = parse_media_type(content_type)
        for name in _names(essence):
            codec = self._find(name)
            if codec is not None:
                resolved[content_type] = codec, parameters
                return codec, parameters
        raise UnknownContentTypeError(
            f"no codec for content type {essence!r:.80}; there are {', '.join(self.content_types())}, and others can "
            f"be added with register_codec() or an entry point in the group {ENTRY_POINT_GROUP!r}"
        )

    def _find(self, name: str) -> Codec | None:
        codec = self._registered.get(name) or self._loaded.get(name)
        if codec is not None:
            return codec
        kind = _BUILT_IN.get(name)
        if kind is not None:
            codec = kind()
            for served in codec.content_types:
                codec = self._loaded.setdefault(served, codec)
            return codec
        points = self._points().get(name)
        return self._loaded.setdefault(name, _load(name, points)) if points else None

    def _points(self) -> dict[str, list[metadata.EntryPoint]]:
        if self._announced is None:
            announced: dict[str, list[metadata.EntryPoint]] = {}
            for point in _entry_points():
                try:
                    name = _checked_name(point.name)
                except ArgumentError as error:
                    logger.warning("codec %s of %s ignored: %s", point.value, _distribution(point), error)
                    continue
                if name in _BUILT_IN:
                    logger.warning("codec %s of %s ignored: %s is built in", point.value, _distribution(point), name)
                    continue
                announced.setdefault(name, []).append(point)
            self._announced = announced
        return self._announced

    def content_types(self) -> list[str]:
        """Return the content types with a built-in, registered or announced codec, loadable or not; sorted."""
        return sorted({*_BUILT_IN, *self._registered, *self._points()})


def _names(essence: str) -> Iterator[str]:
    yield essence
    kind, _, subtype = essence.partition("/")
    _, plus, suffix = subtype.rpartition("+")
    if plus and suffix:
        yield f"application/{suffix}"
    yield f"{kind}/*"


def _checked_name(name: str) -> str:
    try:
        essence, parameters = parse_media_type(name)
    except UnknownContentTypeError as error:
        raise ArgumentError(str(error)) from None
    if parameters:
        raise ArgumentError(f"content type {name!r:.80}: a codec serves all parameters; leave them out")
    return essence


def _checked(loaded: Any) -> Codec:
    for attribute in ("encode", "decode"):
        if not callable(getattr(loaded, attribute, None)):
            raise ArgumentError(f"{type(loaded).__name__} is no codec: it has no method {attribute}")
    if not isinstance(getattr(loaded, "content_types", None), (tuple, list, set, frozenset)):
        raise ArgumentError(f"{type(loaded).__name__} is no codec: content_types must be a tuple of str")
    codec: Codec = loaded
    return codec


def _entry_points() -> Sequence[metadata.EntryPoint]:
    try:
        return tuple(metadata.entry_points(group=ENTRY_POINT_GROUP))
    except Exception:
        # one malformed entry_points.txt of any distribution makes the standard library fail for all of them
        logger.exception("the entry points of installed distributions cannot be read: no codecs from there")
        return ()


def _load(name: str, points: Sequence[metadata.EntryPoint]) -> Codec:
    if len({point.value for point in points}) > 1:
        claims = " and ".join(sorted(f"{point.value} of {_distribution(point)}" for point in points))
        raise UnknownContentTypeError(f"content type {name!r} is claimed by {claims}; uninstall all but one")
    point = points[0]
    try:
        loaded = point.load()
        return _checked(loaded() if isinstance(loaded, type) else loaded)
    except Exception as error:
        raise UnknownContentTypeError(
            f"codec {point.value} of {_distribution(point)} for content type {name!r} cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def _distribution(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"


_codecs: Final = Codecs()
content_types: Final = _codecs.content_types
register_codec: Final = _codecs.register


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
    return (compress(data, encodings) if content_encoding else data), content_type


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


def _with_charset(parameters: Mapping[str, str], charset: str) -> Mapping[str, str]:
    return parameters if "charset" in parameters else {**parameters, "charset": charset}
