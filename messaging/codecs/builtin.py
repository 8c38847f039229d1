"""The built-in codecs.

Errors are raised outside of ``except`` blocks: their context would hold the content.
"""

from __future__ import annotations

import abc
import cmath
import importlib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set, ValuesView
from enum import Enum
from io import BytesIO
from itertools import chain
from typing import Any, ClassVar, Final

from pydantic import BaseModel
from pydantic_core import from_json, to_json, to_jsonable_python

from messaging.codecs.bounds import leaves
from messaging.codecs.encodings import charset_name
from messaging.codecs.models import is_any, serializer_of, shorten, validate_json, validate_python
from messaging.codecs.tags import WITH_REFERENCES, WITHOUT_REFERENCES, StringReferenceFoundError, check_references
from messaging.errors import DecodeError, EncodeError, MissingExtraError, UnknownContentTypeError

#: maximum nesting of arrays and maps
MAX_DEPTH: Final = 200
#: A sender can choose keys that are neither text nor bytes to collide, which makes building a map take quadratic time.
#: Such keys are accepted in payloads of at most this size, bytes.
MAX_FREE_KEYS: Final = 64 * 2**10

_UTF8_BOM: Final = b"\xef\xbb\xbf"
_SCALARS: Final = frozenset({str, bytes, int, float, bool, type(None)})


class _ParameterlessCodec(abc.ABC):
    """A codec of a content type without parameters. Subclasses read and write, and may raise any exception."""

    content_types: ClassVar[Sequence[str]]

    def encode(self, obj: Any, parameters: Mapping[str, str]) -> bytes:  # noqa: ARG002  # the signature of Codec
        """Return ``obj`` as bytes."""
        try:
            return self._write(obj)
        except Exception as error:  # noqa: BLE001  # libraries and serializers of models may raise anything
            problem = self._problem(error)
        raise EncodeError(f"{self.content_types[0]}: {problem}")

    def decode(self, data: bytes, model: Any, parameters: Mapping[str, str]) -> Any:  # noqa: ARG002
        """Return the object that ``data`` represents, validated by ``model``."""
        try:
            value = self._read(data)
        except Exception as error:  # noqa: BLE001
            problem = self._problem(error)
        else:
            return validate_python(model, value, len(data), self.content_types[0])
        raise DecodeError(f"{self.content_types[0]}: {problem}")

    @abc.abstractmethod
    def _write(self, obj: Any) -> bytes: ...

    @abc.abstractmethod
    def _read(self, data: bytes) -> Any: ...

    def _problem(self, error: Exception) -> str:
        return shorten(str(error)) or type(error).__name__


class OctetStreamCodec(_ParameterlessCodec):
    """``application/octet-stream``: the bytes unchanged."""

    content_types: ClassVar[Sequence[str]] = ("application/octet-stream",)

    def decode(self, data: bytes, model: Any, parameters: Mapping[str, str]) -> Any:
        """Return the bytes, as ``model``."""
        if model in (bytearray, memoryview):
            return model(data)
        return data if model is bytes else super().decode(data, model, parameters)

    def _write(self, obj: Any) -> bytes:  # bytes-like objects never reach a codec
        raise ValueError(
            f"content must be bytes, not {type(obj).__name__}; give a content type such as application/json"
        )

    def _read(self, data: bytes) -> Any:
        return data


class TextCodec:
    """``text/*``: a str in the charset of the parameter, by default UTF-8."""

    content_types: ClassVar[Sequence[str]] = ("text/plain", "text/*")

    def encode(self, obj: Any, parameters: Mapping[str, str]) -> bytes:
        """Return the str in its charset."""
        if not isinstance(obj, str):
            raise EncodeError(f"text: content must be a str, not {type(obj).__name__}")
        charset = _charset(parameters)
        try:
            return obj.encode(charset)
        except UnicodeError as error:
            problem = _unicode_problem(error)
        raise EncodeError(f"text: no {charset} for the character {problem}")

    def decode(self, data: bytes, model: Any, parameters: Mapping[str, str]) -> Any:
        """Return the str, validated by ``model``: for an int, ``"5"`` is 5."""
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


class JsonCodec(_ParameterlessCodec):
    """``application/json`` and ``+json``: RFC 8259, always UTF-8, by pydantic.

    Encoding accepts every object that pydantic can serialize: models, dataclasses, typed dicts, named tuples, dates,
    enums, sets, … Fields are written under their alias, without a check of their types. Bytes become text if they are
    UTF-8 and are an :class:`~messaging.errors.EncodeError` if not; a model may set ``ser_json_bytes="base64"``.

    NaN and infinity are not JSON: they are refused when encoding and decoding, and so are numbers beyond the range of a
    float, which would become infinite. A model or dataclass writes them as ``null``, unless its ``ser_json_inf_nan`` is
    set; with ``"strings"`` nothing is lost.
    """

    content_types: ClassVar[Sequence[str]] = ("application/json",)

    def decode(self, data: bytes, model: Any, parameters: Mapping[str, str]) -> Any:
        """Return the object that the JSON text represents, validated by ``model``."""
        data = data.removeprefix(_UTF8_BOM)
        if is_any(model):
            return super().decode(data, model, parameters)
        try:
            _refuse_constants(data)
            has_large_numbers = _may_overflow(data) and _has_vast_numbers(from_json(data))
        except ValueError as error:
            problem = shorten(str(error))
        else:
            value = validate_json(model, data, "application/json")
            if not (has_large_numbers and _holds_infinity(value)):
                return value
            problem = _BEYOND_FLOAT
        raise DecodeError(f"application/json: {problem}")

    def _write(self, obj: Any) -> bytes:
        serializer = serializer_of(obj)
        if serializer is None:
            data = to_json(obj, by_alias=True, inf_nan_mode="constants", fallback=_simplified)
        else:
            # without its warnings, which show the values that do not fit the type of their field
            data = serializer.to_json(obj, by_alias=True, warnings=False, fallback=_simplified)
        _refuse_constants(data)
        return data

    def _read(self, data: bytes) -> Any:
        has_large_numbers = _may_overflow(data)
        value = from_json(data, allow_inf_nan=False)
        if has_large_numbers:
            _has_vast_numbers(value)
        return value


def _refuse_constants(data: bytes) -> None:
    """Raise ``ValueError`` if the JSON text has NaN or Infinity, which pydantic writes and reads."""
    # the search for a single byte is many times faster than that for a word, and mostly enough
    if (78 in data and b"NaN" in data) or (73 in data and b"Infinity" in data):  # N and I
        try:
            from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"NaN and infinity are not JSON ({error})") from None


# --- JSON numbers beyond the range of a float

_BEYOND_FLOAT: Final = "a number is beyond the range of a float"

#: A float has at most 309 digits before the point. A larger number has an exponent of three digits or, with a shorter
#: exponent, at least this many digits.
_MANY_DIGITS: Final = b"0" * 200
#: a plus sign becomes a digit as well: removing characters takes many times longer
_DIGITS: Final = bytes.maketrans(b"123456789E+", b"000000000e0")
#: bits of the largest integer that a float can hold
_FLOAT_BITS: Final = 1023
#: characters of the shortest text of a number beyond the range of a float: 1e309
_SHORTEST: Final = 5


def _may_overflow(data: bytes) -> bool:
    """Return whether a JSON text may have a number beyond the range of a float; ``False`` is certain."""
    digits = data.translate(_DIGITS)
    # not `in`, which raises and catches an exception internally, because the text is no integer
    return digits.find(b"0e000") >= 0 or (len(digits) >= len(_MANY_DIGITS) and _MANY_DIGITS in digits)


def _has_vast_numbers(value: Any) -> bool:
    """Return whether a model may make an integer or text in ``value`` infinite. ``value`` comes from the parser.

    Raises:
        ValueError: ``value`` has an infinite float, although the JSON text had no constants.
    """
    found = False
    for each in leaves(value):
        if type(each) is float:
            if math.isinf(each):
                raise ValueError(_BEYOND_FLOAT)
        elif not found:
            found = each.bit_length() > _FLOAT_BITS if isinstance(each, int) else _is_infinite_text(each)
    return found


def _is_infinite_text(text: Any) -> bool:
    # a number begins with a digit, a sign, a point, a parenthesis or a space, which all sort before the colon
    if not isinstance(text, str) or len(text) < _SHORTEST or text[0] > ":":
        return False
    try:
        number = complex(text)
    except ValueError:
        return False
    return cmath.isinf(number) and any(map(str.isdigit, text))


def _holds_infinity(value: Any) -> bool:
    """Return whether an object that a model made of a JSON text has an infinite float.

    The float may also be a default value of the model: call it only if :func:`_has_vast_numbers` is true.
    """
    todo = [value]
    seen: set[int] = set()
    while todo:
        for each in leaves(todo.pop()):
            if isinstance(each, float):
                if math.isinf(each):
                    return True
            elif isinstance(each, complex):
                todo += [each.real, each.imag]
            elif (isinstance(each, BaseModel) or hasattr(each, "__dataclass_fields__")) and id(each) not in seen:
                seen.add(id(each))
                todo.append([getattr(each, name, None) for name in _fields(each)])
    return False


def _fields(instance: Any) -> list[str]:
    if isinstance(instance, BaseModel):
        return [*type(instance).model_fields, *(instance.model_extra or ())]
    return [*type(instance).__dataclass_fields__]


class CborCodec(_ParameterlessCodec):
    """``application/cbor`` and ``+cbor``: RFC 8949. Needs the extra ``cbor``.

    Dates with a time zone, decimals, UUIDs, sets and big integers are written with their CBOR tags, other types as in
    JSON. Shared values (a few bytes could represent more than memory holds), regular expressions, MIME messages, and
    numbers beyond the bounds of :mod:`~messaging.codecs.bounds` are refused. String references may represent at most
    64 MiB.
    """

    content_types: ClassVar[Sequence[str]] = ("application/cbor",)

    def __init__(self) -> None:
        try:
            import cbor2
        except ImportError as error:
            raise MissingExtraError("cbor", "content type application/cbor") from error
        self._dumps = cbor2.dumps
        self._decoder = cbor2.CBORDecoder

    def _write(self, obj: Any) -> bytes:
        return self._dumps(_shallow(obj), default=lambda encoder, value: encoder.encode(_shallow(_simplified(value))))

    def _read(self, data: bytes) -> Any:
        try:
            value, rest = self._first_item(data, WITHOUT_REFERENCES)
        except Exception as error:
            if not _is_caused_by(error, StringReferenceFoundError):
                raise
            value, rest = self._first_item(data, WITH_REFERENCES)
            check_references(value)
        if rest:
            raise ValueError(f"{rest} bytes follow the item")
        return value

    def _problem(self, error: Exception) -> str:
        cause = error.__cause__  # of the decoder of a tag
        return shorten(f"{error}: {cause}" if isinstance(cause, ValueError) else str(error))

    def _first_item(self, data: bytes, tags: Mapping[int, Any]) -> tuple[Any, int]:
        """Return the first item, and the number of bytes after it."""
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


class MsgpackCodec(_ParameterlessCodec):
    """``application/msgpack``, ``application/vnd.msgpack``, ``+msgpack``. Needs the extra ``msgpack``.

    Dates with a time zone are written as timestamps and read as UTC; types that msgpack lacks are written as in JSON.
    Other extension types are refused.
    """

    content_types: ClassVar[Sequence[str]] = ("application/msgpack", "application/vnd.msgpack", "application/x-msgpack")

    def __init__(self) -> None:
        try:
            msgpack: Any = importlib.import_module("msgpack")  # it has no types
        except ImportError as error:
            raise MissingExtraError("msgpack", "content type application/msgpack") from error
        self._pack = msgpack.packb
        self._unpack = msgpack.unpackb

    def _write(self, obj: Any) -> bytes:
        data: bytes = self._pack(obj, default=_simplified, datetime=True)
        return data

    def _read(self, data: bytes) -> Any:
        # the library checks every length against that of the data
        return self._unpack(data, timestamp=3, ext_hook=_refuse_extension, strict_map_key=len(data) > MAX_FREE_KEYS)


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not accepted")


def _simplified(obj: Any) -> Any:
    """Return an object that a format has no type for as a simpler one: one level of it, or all."""
    serializer = serializer_of(obj)
    if serializer is not None:
        plain = serializer.to_python(obj, by_alias=True, warnings=False)
        if plain is not obj:  # a secret serializes to itself
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
    """Return ``value`` if it is nested less than the limit; else cbor2 overruns the C stack (seen with 6.2)."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        below: dict[int, Any] = {}  # by identity: each object is visited once per level, so that cycles stay small
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
