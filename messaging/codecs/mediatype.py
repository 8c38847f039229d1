"""Media types (RFC 9110, 8.3.1): ``application/json; charset=utf-8``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from messaging.errors import UnknownContentTypeError

MAX_LENGTH: Final = 1024

_WORD: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_TYPE: Final = re.compile(rf"[ \t]*({_WORD}/{_WORD})[ \t]*")
_PARAMETER: Final = re.compile(rf';[ \t]*(?:({_WORD})=(?:({_WORD})|"((?:[^"\\]|\\.)*)"))?[ \t]*')
_ESCAPED: Final = re.compile(r"\\(.)")


class MediaType(NamedTuple):
    """A parsed media type.

    Attributes:
        essence: ``type/subtype`` in lower case.
        parameters: read-only; names in lower case, values unquoted.
    """

    essence: str
    parameters: Mapping[str, str]


def parse_media_type(text: str) -> MediaType:
    """Parse a content type.

    Raises:
        UnknownContentTypeError: it is malformed; the text names the place and the expected syntax.
    """
    if not isinstance(text, str):
        raise UnknownContentTypeError(f"a content type must be a str, not {type(text).__name__}")
    if len(text) > MAX_LENGTH:
        raise UnknownContentTypeError(f"content type of {len(text)} characters; at most {MAX_LENGTH} are allowed")
    match = _TYPE.match(text)
    if match is None:
        raise UnknownContentTypeError(f"malformed content type {text!r:.80}: it looks like 'type/subtype; name=value'")
    parameters: dict[str, str] = {}
    essence, at = match[1].lower(), match.end()
    while at < len(text):
        match = _PARAMETER.match(text, at)
        if match is None:
            raise UnknownContentTypeError(
                f"malformed content type {text!r:.80}: expected '; name=value' or '; name=\"value\"' at index {at}"
            )
        at = match.end()
        if match[1] is not None:
            name = match[1].lower()
            if name in parameters:
                raise UnknownContentTypeError(f"malformed content type {text!r:.80}: {name!r:.80} is given twice")
            parameters[name] = match[2] if match[2] is not None else _ESCAPED.sub(r"\1", match[3])
    return MediaType(essence, MappingProxyType(parameters))
