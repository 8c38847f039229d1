"""The channel grammar: one for all adapters (MSG170).

A channel name is a non-empty text of levels separated by ``/``. A subscription pattern may hold two wildcards:
``+`` stands for exactly one level, ``#`` (last level only) for any number of levels, none included. Both must
be a whole level. A wildcard in the *first* level does not match names that start with ``$`` (broker-internal
channels, MQTT 4.7.2).

Names are at most 65,535 bytes in UTF-8 and hold no NUL, no control characters, no Unicode noncharacters and no
lone surrogates. Brokers close the connection because of any of them, so they are refused before anything is sent.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from messaging.errors import InvalidChannelError
from messaging.errors.text import exact

SEPARATOR: Final = "/"
ANY_LEVEL: Final = "+"
ANY_LEVELS: Final = "#"
MAX_BYTES: Final = 65_535

#: C0 and C1 controls, surrogates, and the 66 noncharacters (U+FDD0..U+FDEF, U+xxFFFE, U+xxFFFF).
_FORBIDDEN: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(f"{chr((plane << 16) | 0xFFFE)}{chr((plane << 16) | 0xFFFF)}" for plane in range(17))
    + "]"
)


def forbidden_character(text: str) -> str | None:
    """Describe the first character of ``text`` that makes brokers close the connection; ``None`` if there is none."""
    if text.isascii() and text.isprintable():  # the common case, and the fast one
        return None
    bad = _FORBIDDEN.search(text)
    if bad is None:
        return None
    return (
        f"U+{ord(bad.group()):04X} at index {bad.start()}; control characters, surrogates and noncharacters "
        f"are not allowed"
    )


def escape_forbidden(text: str) -> str:
    r"""Return ``text`` with each character that :func:`forbidden_character` finds escaped as in ``\u000a``."""
    return _FORBIDDEN.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidChannelError(f"{what} must be a str, not {type(value).__name__}")
    return exact(value)


def _check_text(text: str, what: str) -> str:
    if not text:
        raise InvalidChannelError(f"{what} is empty; name at least one level, such as 'a/b'")
    bad = forbidden_character(text)
    if bad is not None:
        raise InvalidChannelError(f"{what} {_shown(text)} holds {bad}")
    size = len(text.encode())
    if size > MAX_BYTES:
        raise InvalidChannelError(f"{what} {_shown(text)} is {size} bytes long in UTF-8; at most {MAX_BYTES} fit")
    return text


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def check_name(channel: str) -> str:
    """Return ``channel`` if messages can be published to it.

    Raises:
        InvalidChannelError: not a str, empty, too long, forbidden characters, or a wildcard.
    """
    return _checked_name(_text(channel, "channel"))


@lru_cache(maxsize=4096)
def _checked_name(channel: str) -> str:
    _check_text(channel, "channel")
    for wildcard in (ANY_LEVEL, ANY_LEVELS):
        at = channel.find(wildcard)
        if at >= 0:
            raise InvalidChannelError(
                f"channel {_shown(channel)} holds the wildcard {wildcard!r} at index {at}; "
                "wildcards are for subscriptions only"
            )
    return channel


def check_pattern(pattern: str) -> str:
    """Return ``pattern`` if subscriptions can use it.

    Raises:
        InvalidChannelError: not a str, empty, too long, forbidden characters, or a misplaced wildcard.
    """
    return _checked_pattern(_text(pattern, "channel pattern"))


@lru_cache(maxsize=4096)
def _checked_pattern(pattern: str) -> str:
    _check_text(pattern, "channel pattern")
    if pattern.startswith("$share/"):
        raise InvalidChannelError(
            f"channel pattern {_shown(pattern)}: name a shared queue with the extension queue=..., not with '$share/'"
        )
    levels = pattern.split(SEPARATOR)
    for index, level in enumerate(levels):
        if ANY_LEVELS in level and (level != ANY_LEVELS or index != len(levels) - 1):
            raise InvalidChannelError(
                f"channel pattern {_shown(pattern)}: '#' must be the whole of the last level (level {index + 1})"
            )
        if ANY_LEVEL in level and level != ANY_LEVEL:
            raise InvalidChannelError(
                f"channel pattern {_shown(pattern)}: '+' must be a whole level (level {index + 1})"
            )
    return pattern


def has_wildcard(pattern: str) -> bool:
    """Return whether ``pattern`` has a wildcard."""
    return ANY_LEVEL in pattern or ANY_LEVELS in pattern


@lru_cache(maxsize=4096)
def matcher(pattern: str) -> Callable[[str], bool]:
    """Compile ``pattern``, which must have passed :func:`check_pattern`, to a predicate over channel names.

    The predicate is pure and thread safe.
    """
    if not has_wildcard(pattern):
        return pattern.__eq__
    levels = pattern.split(SEPARATOR)
    if levels == [ANY_LEVELS]:
        return lambda name: not name.startswith("$")
    open_end = levels[-1] == ANY_LEVELS
    if open_end:
        levels.pop()
    body = "/".join("[^/]*" if level == ANY_LEVEL else re.escape(level) for level in levels)
    guard = r"(?!\$)" if levels[0] == ANY_LEVEL else ""
    # '#' also matches the parent level: 'a/#' matches 'a'
    match = re.compile(guard + body + ("(?:/.*)?" if open_end else ""), re.DOTALL).fullmatch
    return lambda name: match(name) is not None


def overlap(first: str, second: str) -> bool:
    """Return whether a channel name can match both patterns, which must be valid."""
    if first.startswith("$") != second.startswith("$"):
        return False  # wildcards do not match a leading '$'
    for one, other in itertools.zip_longest(first.split(SEPARATOR), second.split(SEPARATOR)):
        if ANY_LEVELS in (one, other):
            return True
        if one is None or other is None or (one != other and ANY_LEVEL not in (one, other)):
            return False
    return True


def matches(pattern: str, name: str) -> bool:
    """Return whether the channel ``name`` matches ``pattern``. Both must be valid."""
    return matcher(pattern)(name)
