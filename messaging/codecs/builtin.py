"""The codecs that come with the project."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set, ValuesView
from enum import Enum
from io import BytesIO
from itertools import chain
from typing import Any, ClassVar, Final

from pydantic_core import from_json, to_json, to_jsonable_python

from messaging.codecs.encodings import charset_name
from messaging.codecs.models import is_any, serializer_of, shorten, validate_json, validate_python
from messaging.codecs.overflow import BEYOND_FLOAT, has_vast_numbers, holds_infinity, may_overflow
from messaging.codecs.tags import WITH_REFERENCES, WITHOUT_REFERENCES, StringReferenceFoundError, check_references
from messaging.errors import DecodeError, EncodeError, MissingExtraError, UnknownContentTypeError

#: nesting of arrays and maps
MAX_DEPTH: Final = 200
#: Keys that are neither text nor bytes can be chosen to collide, which makes building a map take quadratic time:
#: they are accepted in payloads up to this size only, in bytes.
MAX_FREE_KEYS: Final = 64 * 2**10

_UTF8_BOM: Final = b"\xef\xbb\xbf"
_SCALARS: Final = frozenset({str, bytes, int, float, bool, type(None)})


class OctetStreamCodec:
    """``application/octet-stream``: the bytes as they are."""

    content_types: ClassVar[Sequence[str]] = ("application/octet-stream",)

    def encode(self, obj: Any, parameters: Mapping[str, str]) -> bytes:  # noqa: ARG002
        """Refuse: bytes never get here."""
        raise EncodeError(
            f"application/octet-stream: content must be bytes, not {type(obj).__name__}; "
            f"give a content type such as application/json"
        )

    def decode(self, data: bytes, model: Any, parameters: Mapping[str, str]) -> Any:  # noqa: ARG002
        """The bytes, as ``model``."""
        if model in (bytearray, memoryview):
            return model(data)
        return data if model is bytes else validate_python(model, data, len(data), "application/octet-stream")


class TextCodec:
    """``text/*``: a str, in the charset of the parameter or else UTF-8."""

    content_types: ClassVar[Sequence[str]] = ("text/plain", "text/*")

    def encode(self, obj: Any, parameters: Mapping[str, str]) -> bytes:
        """The str in its charset."""
        if not isinstance(obj, str):
            raise EncodeError(f"text: content must be a str, not {type(obj).__name__}")
        charset = _charset(parameters)
        try:
            return obj.encode(charset)
        except UnicodeError as error:
            problem = _unicode_problem(error)
        raise EncodeError(f"text: no {charset} for the character {problem}")

    def decode(self, data: bytes, model: Any, parameters: Mapping[str, str]) -> Any:
        """The str, or what ``model`` makes of it: an int of ``"5"``."""
        charset = _charset(parameters)
        try:
            text = data.decode(charset)
        except UnicodeError as error:
            problem = _unicode_problem(error)
        else:
            return text if model is str else validate_python(model, text, len(data), "text")
        raise DecodeError(f"text: not {charset} {problem}")


def _charset(parameters: Mapping[str, str]) -> str:
    given = parameters.get("charset")
    if given is None:
        return "utf-8"
    charset = charset_name(given)
    if charset is None:
        raise UnknownContentTypeError(f"unknown charset {given!r:.80} of a text content type")
    return charset


def _unicode_problem(error: UnicodeError) -> str:
    return f"at index {error.start}" if isinstance(error, (UnicodeEncodeError, UnicodeDecodeError)) else "throughout"


class JsonCodec:
    """``application/json`` and ``+json``: RFC 8259, always UTF-8, by pydantic.

    Encoding takes whatever pydantic can serialize: models, dataclasses, typed dicts, named tuples, dates, enums,
    sets, … Fields go by their alias, without their types being checked. Bytes become text if they are UTF-8 and are
    an :class:`~messaging.errors.EncodeError` if not; a model may set ``ser_json_bytes="base64"``.

    NaN and infinity are not JSON: refused both ways, and so are numbers that would become infinite, being beyond the
    range of a float. Beware that a model or dataclass writes them as ``null``, unless its ``ser_json_inf_nan`` says
    otherwise; of its ``"strings"`` nothing is lost.
    """

    content_types: ClassVar[Sequence[str]] = ("application/json",)

    def encode(self, obj: Any, parameters: Mapping[str, str]) -> bytes:  # noqa: ARG002
        """The JSON text."""
        serializer = serializer_of(obj)
        try:
            if serializer is None:
                data = to_json(obj, by_alias=True, inf_nan_mode="constants", fallback=_simplified)
            else:
                # its warnings would show values, and are about values that do not fit their field's type
                data = serializer.to_json(obj, by_alias=True, warnings=False, fallback=_simplified)
            _refuse_constants(data)
        except Exception as error:  # noqa: BLE001 - serializers of a model may raise anything
            problem = shorten(str(error))
        else:
            return data
        raise EncodeError(f"application/json: {problem}")

    def decode(self, data: bytes, model: Any, parameters: Mapping[str, str]) -> Any:  # noqa: ARG002
        """What the JSON text stands for, validated by ``model``."""
        data = data.removeprefix(_UTF8_BOM)
        try:
            has_large_numbers = may_overflow(data)
            if is_any(model):
                value = from_json(data, allow_inf_nan=False)
                if has_large_numbers:
                    has_vast_numbers(value)
                return value
            _refuse_constants(data)
            has_large_numbers = has_large_numbers and has_vast_numbers(from_json(data))
        except Exception as error:  # noqa: BLE001 - the parser tells by ValueError, but must not be trusted to
            problem = shorten(str(error))
        else:
            value = validate_json(model, data, "application/json")
            if not (has_large_numbers and holds_infinity(value)):
                return value
            problem = BEYOND_FLOAT
        raise DecodeError(f"application/json: {problem}")


def _refuse_constants(data: bytes) -> None:
    """Pydantic writes and reads NaN and Infinity; a text that holds neither word is spared the second look."""
    # looking for a single byte first is many times faster
    if (78 in data and b"NaN" in data) or (73 in data and b"Infinity" in data):  # N and I
        try:
            from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"NaN and infinity are not JSON ({error})") from None


class CborCodec:
    """``application/cbor`` and ``+cbor``: RFC 8949. Needs the extra ``cbor``.

    Dates with a time zone, decimals, UUIDs, sets and big integers are written as such, what CBOR has no tag for as
    in JSON. Refused are shared values (a few bytes could stand for more than memory holds), regular expressions, MIME
    messages, and numbers beyond the bounds of :mod:`~messaging.codecs.bounds`. String references may stand for 64 MiB.
    With a model the result is validated by it.
    """

    content_types: ClassVar[Sequence[str]] = ("application/cbor",)

    def __init__(self) -> None:
        try:
            import cbor2
        except ImportError as error:
            raise MissingExtraError("cbor", "content type application/cbor") from error
        self._dumps = cbor2.dumps
        self._decoder = cbor2.CBORDecoder

    def encode(self, obj: Any, parameters: Mapping[str, str]) -> bytes:  # noqa: ARG002
        """The CBOR item."""
        try:
            return self._dumps(
                _shallow(obj), default=lambda encoder, value: encoder.encode(_shallow(_simplified(value)))
            )
        except Exception as error:  # noqa: BLE001 - it is no tree of CBORErrors
            problem = shorten(str(error))
        raise EncodeError(f"application/cbor: {problem}")

    def decode(self, data: bytes, model: Any, parameters: Mapping[str, str]) -> Any:  # noqa: ARG002
        """What the CBOR item stands for, validated by ``model``."""
        try:
            try:
                value, rest = self._read(data, WITHOUT_REFERENCES)
            except Exception as error:
                if not _is_caused_by(error, StringReferenceFoundError):
                    raise
                value, rest = self._read(data, WITH_REFERENCES)
                check_references(value)
        except Exception as error:  # noqa: BLE001
            problem = _cbor_problem(error)
        else:
            if not rest:
                return validate_python(model, value, len(data), "application/cbor")
            problem = f"{rest} bytes follow the item"
        raise DecodeError(f"application/cbor: {problem}")

    def _read(self, data: bytes, tags: Mapping[int, Any]) -> tuple[Any, int]:
        """The first item, and how many bytes follow it."""
        source = BytesIO(data)
        value = self._decoder(
            source,
            semantic_decoders=tags,
            max_depth=MAX_DEPTH,
            strict_hashable_types=len(data) > MAX_FREE_KEYS,
        ).decode()
        return value, len(data) - source.tell()


def _is_caused_by(error: BaseException | None, kind: type[Exception]) -> bool:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__
    return error is not None


def _cbor_problem(error: Exception) -> str:
    """Return the text of an error of cbor2, with the reason of one of our decoders."""
    cause = error.__cause__
    return shorten(f"{error}: {cause}" if isinstance(cause, ValueError) else str(error))


class MsgpackCodec:
    """``application/msgpack``, ``application/vnd.msgpack``, ``+msgpack``. Needs the extra ``msgpack``.

    Dates with a time zone are written as timestamps and read as UTC; what msgpack has no type for is written as in
    JSON. Other extension types are refused. With a model the result is validated by it.
    """

    content_types: ClassVar[Sequence[str]] = ("application/msgpack", "application/vnd.msgpack", "application/x-msgpack")

    def __init__(self) -> None:
        try:
            import msgpack  # type: ignore[import-untyped]
        except ImportError as error:
            raise MissingExtraError("msgpack", "content type application/msgpack") from error
        self._pack = msgpack.packb
        self._unpack = msgpack.unpackb

    def encode(self, obj: Any, parameters: Mapping[str, str]) -> bytes:  # noqa: ARG002
        """The msgpack object."""
        try:
            data: bytes = self._pack(obj, default=_simplified, datetime=True)
        except Exception as error:  # noqa: BLE001 - OverflowError, TypeError, ...
            problem = shorten(str(error))
        else:
            return data
        raise EncodeError(f"application/msgpack: {problem}")

    def decode(self, data: bytes, model: Any, parameters: Mapping[str, str]) -> Any:  # noqa: ARG002
        """What the msgpack object stands for, validated by ``model``."""
        try:
            # every length is checked against that of the data by the library
            value = self._unpack(
                data, timestamp=3, ext_hook=_refuse_extension, strict_map_key=len(data) > MAX_FREE_KEYS
            )
        except Exception as error:  # noqa: BLE001
            problem = shorten(str(error)) or type(error).__name__
        else:
            return validate_python(model, value, len(data), "application/msgpack")
        raise DecodeError(f"application/msgpack: {problem}")


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not accepted")


def _simplified(obj: Any) -> Any:
    """What a format has no type for, as something simpler: one level, or all of it."""
    serializer = serializer_of(obj)
    if serializer is not None:
        plain = serializer.to_python(obj, by_alias=True, warnings=False)
        if plain is not obj:  # as a secret is
            return plain
    if isinstance(obj, Enum):
        return obj.value
    if isinstance(obj, memoryview):
        return bytes(obj)
    if isinstance(obj, Mapping):
        return dict(obj)
    if isinstance(obj, (Set, Sequence, ValuesView, Iterator, deque)):
        return list(obj)
    if isinstance(obj, int):
        raise EncodeError("integer of more than 64 bits")
    return to_jsonable_python(obj, by_alias=True)


def _shallow(value: Any) -> Any:
    """Return ``value`` if it can be read again: where others fail, cbor2 overruns the C stack (seen with 6.2)."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        below: dict[int, Any] = {}  # by identity: what is shared is looked at once, so that cycles stay small
        for item in level:
            if isinstance(item, Mapping):
                children: Any = chain(item, item.values())
            elif isinstance(item, (Sequence, Set, deque)) and not isinstance(item, (str, bytes, bytearray, memoryview)):
                children = item
            else:
                continue
            for child in children:
                if type(child) not in _SCALARS:
                    below[id(child)] = child
        if not below:
            return value
        level = list(below.values())
    raise EncodeError(f"nested deeper than {MAX_DEPTH} levels")
