"""The content of payloads by their content type and encoding, and how it is read: as JSON, or by a codec.

The JSON parser is fast, accepts more than JSON, and turns every number with a point into a double. A search of the
bytes finds payloads that this could change; they are read with care."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json

from messaging.codecs import decode
from messaging.codecs.encodings import charset_name
from messaging.codecs.mediatype import parse_media_type
from messaging.errors import MissingExtraError, UnknownContentTypeError
from pyspark_messaging.columns import CONTENT_ENCODING
from pyspark_messaging.read.typed.plan import POSITION, Row, RowPlan

logger = logging.getLogger(__name__)

_JSON: Final = "application/json"
_OCTET_STREAM: Final = "application/octet-stream"


class Content(NamedTuple):
    """The content of a payload, for the codecs."""

    content_type: str | None
    content_encoding: str | None


def contents_of(batch: pa.RecordBatch) -> list[Content] | None:
    """Return the content of each payload; ``None`` if all of them are plain JSON."""
    kinds = batch.column(POSITION["_content_type"])
    headers = batch.column(POSITION["_headers"])
    encoded = pc.any(pc.equal(headers.keys, CONTENT_ENCODING)).as_py()
    if not encoded and all(_is_json(kind) for kind in kinds.unique().to_pylist()):
        return None
    encodings: Iterable[str | None] = [None] * len(kinds)
    if encoded:
        encodings = [dict(row or ()).get(CONTENT_ENCODING) for row in headers.to_pylist()]
    return [Content(kind, encoding) for kind, encoding in zip(kinds.to_pylist(), encodings, strict=True)]


@lru_cache(maxsize=256)
def _is_json(content_type: str | None) -> bool:
    if not content_type:
        return True
    try:
        essence, parameters = parse_media_type(content_type)
    except UnknownContentTypeError:
        return False
    if essence == "text/plain":
        return charset_name(parameters.get("charset", "utf-8")) in ("utf-8", "utf8", "us-ascii", "ascii")
    return essence in (_JSON, _OCTET_STREAM) or essence.endswith("+json")


def read_content(plan: RowPlan, payload_and_content: tuple[bytes, Content]) -> Row:
    """Return the row of a payload of any content type; raise if it does not fit."""
    payload, (content_type, content_encoding) = payload_and_content
    try:
        if _is_json(content_type):
            if content_encoding:
                kind = content_type if content_type and content_type.lstrip().startswith("text/") else _OCTET_STREAM
                payload = _bytes(decode(payload, Content(kind, content_encoding)))
            return read_carefully(plan, payload)
        if content_type and content_type.lstrip().lower().startswith("text/plain"):
            return read_carefully(plan, _bytes(decode(payload, Content(content_type, content_encoding))))
        return plan.validate(decode(payload, Content(content_type, content_encoding), plan.model))
    except MissingExtraError as error:
        _warn_once(str(error))
        raise


def _bytes(content: Any) -> bytes:
    return content.encode() if isinstance(content, str) else bytes(content)


@lru_cache(maxsize=16)
def _warn_once(problem: str) -> None:
    logger.warning("payloads of a content type are corrupt on this executor: %s", problem)


_BOM: Final = b"\xef\xbb\xbf"
_DIGITS: Final = bytes.maketrans(b"123456789.E+", b"0000000000e-")
#: after that translation: more digits than a double has, or a longer exponent
_LONG_NUMBERS: Final = (b"0" * 17, b"0e000", b"0e-000")


def needs_care(data: bytes, *, numbers: bool) -> bool:
    """Return whether the parser might read ``data`` wrongly."""
    return b"NaN" in data or b"Infinity" in data or _BOM in data or (numbers and _has_long_numbers(data))


def _has_long_numbers(data: bytes) -> bool:
    data = data.translate(_DIGITS)
    return any(number in data for number in _LONG_NUMBERS)


def read_carefully(plan: RowPlan, payload: bytes) -> Row:
    """Return the row of JSON that :func:`needs_care`; raise if it does not fit."""
    payload = payload.removeprefix(_BOM)
    if b"NaN" in payload or b"Infinity" in payload:
        from_json(payload, allow_inf_nan=False)
    row = plan.read(payload)
    if plan.read_exactly is not None and _has_long_numbers(payload):
        return plan.read_exactly(payload)
    return row
