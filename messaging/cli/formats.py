"""How messages are written: ``--format``, the output formats of ``mosquitto_sub -F``, for messages of any protocol.

A format is text with sequences: ``%`` and a letter for a part of the message (between them a flag ``0`` or ``-``, a
width and, after a dot, a maximum, both in bytes), ``@`` and a letter for a part of the local time as in ``strftime``,
and ``\\`` and a letter for a character.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import messaging
from messaging.cli.output import dump, payload_fields, payload_line, record_line, write
from messaging.errors import ArgumentError, MessagingError

if TYPE_CHECKING:
    from messaging.model import Message

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SEQUENCE: Final = re.compile(
    rb"%(?P<flag>[0-]?)(?P<width>\d{0,4})(?:\.(?P<most>\d{1,4}))?(?P<letter>[^\d.-])|@(?P<time>.)|\\(?P<escape>.)"
    rb"|(?P<text>[^%@\\]+)|(?P<incomplete>.)",
    re.DOTALL,
)
_ESCAPES: Final[Mapping[bytes, bytes]] = {
    b"\\": b"\\",
    b"0": b"\0",
    b"a": b"\a",
    b"e": b"\x1b",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"v": b"\v",
}
#: letters of strftime that every system supports
_TIMES: Final = frozenset("aAbBcCdDeFgGhHIjklmMnprRsStTuUVwWxXyYzZ")

#: extension that a subscription needs for a format with packet ids
PACKET_ID: Final = "packetId"

_Part = Callable[["Message", int], bytes]


class UnformattableError(MessagingError):
    """A message cannot be written in the format, such as a payload for ``%J`` that is not JSON."""


def write_formatted(items: Iterable[T], form: Callable[[T], bytes]) -> None:
    """Write each of ``items`` to stdout in a form; log those that cannot be written so."""
    for each in items:
        try:
            write(form(each))
        except UnformattableError as error:
            logger.warning("%s", error)


def _text(value: object) -> bytes:
    return b"" if value is None else str(value).encode()


def is_retained(message: Message) -> bool:
    """Return whether the broker had retained ``message``."""
    return bool(message.context.extensions.get(messaging.Features.EXTENSION_RETAIN))


def _time_to_live(message: Message) -> int | None:
    left = message.context.extensions.get(messaging.Features.EXTENSION_TIME_TO_LIVE)
    return None if left is None else round(left)


def _user_properties(message: Message) -> bytes:
    headers = message.context.extensions.get(messaging.Features.EXTENSION_HEADERS) or {}
    return " ".join(
        f"{name}:{each}"
        for name, value in headers.items()
        for each in (value if isinstance(value, (list, tuple)) else (value,))
    ).encode()


def _qos(message: Message) -> int:
    qos = message.context.extensions.get(messaging.Features.EXTENSION_QOS)
    return int(qos) if qos is not None else 0


def _local(form: str, now: int) -> str:
    return time.strftime(form, time.localtime(now // 10**9))


def _parameters(message: Message, now: int) -> dict[str, Any]:
    """Return the object of ``%j`` and ``%J``, without the payload."""
    context = message.context
    found: dict[str, Any] = {
        "tst": _local(f"%Y-%m-%dT%H:%M:%S.{now // 1000 % 10**6:06}%z", now),
        "topic": context.channel,
        "qos": _qos(message),
        "retain": int(is_retained(message)),
        "payloadlen": len(message.payload),
    }
    if message.context.extensions.get(PACKET_ID) is not None:
        found["mid"] = message.context.extensions.get(PACKET_ID)
    properties = {
        "content-type": context.content_type,
        "correlation-data": context.correlation_id,
        "message-expiry-interval": _time_to_live(message),
        "response-topic": context.reply_to_channel,
        "user-properties": message.context.extensions.get(messaging.Features.EXTENSION_HEADERS) or None,
    }
    properties = {key: value for key, value in properties.items() if value is not None}
    if properties:
        found["properties"] = properties
    return found


def _json_value(message: Message, now: int) -> bytes:
    try:
        json.loads(message.payload)
    except (ValueError, RecursionError):
        raise UnformattableError(f"message on {message.context.channel!r}: %J: its payload is not JSON") from None
    # the payload unchanged: numbers keep their digits
    return dump(_parameters(message, now))[:-2] + b',"payload":' + message.payload.strip() + b"}"


_PARTS: Final[Mapping[str, _Part]] = {
    "C": lambda message, _: _text(message.context.content_type),
    "D": lambda message, _: _text(message.context.correlation_id),
    "E": lambda message, _: _text(_time_to_live(message)),
    "I": lambda _, now: _local("%Y-%m-%dT%H:%M:%S%z", now).encode(),
    "j": lambda message, now: dump(_parameters(message, now) | payload_fields(message.payload))[:-1],
    "J": _json_value,
    "l": lambda message, _: b"%d" % len(message.payload),
    "m": lambda message, _: _text(message.context.extensions.get(PACKET_ID) or 0),
    "P": lambda message, _: _user_properties(message),
    "p": lambda message, _: message.payload,
    "q": lambda message, _: b"%d" % _qos(message),
    "R": lambda message, _: _text(message.context.reply_to_channel),
    "r": lambda message, _: b"%d" % is_retained(message),
    "t": lambda message, _: _text(message.context.channel),
    "U": lambda _, now: b"%d.%09d" % divmod(now, 10**9),
    "x": lambda message, _: message.payload.hex().encode(),
    "X": lambda message, _: message.payload.hex().upper().encode(),
}


def message_form(
    format_: str | None, *, json: bool, verbose: bool, no_newline: bool
) -> tuple[Callable[[Message], bytes], dict[str, Any]]:
    """Return the form of messages that the options of the same names ask for.

    Returns:
        A function that formats a message, see :func:`compiled`, and the extensions that it needs of a subscription.

    Raises:
        ArgumentError: options contradict each other, or the format is malformed.
    """
    if json and (format_ is not None or verbose):
        raise ArgumentError(f"--json and {'--verbose' if format_ is None else '--format'}: give one of them")
    if json:
        return record_line, {}
    end = b"" if no_newline else b"\n"
    if format_ is None:
        return payload_line(end, channel=verbose), {}
    form, letters = compiled(format_)
    return lambda message: form(message) + end, {PACKET_ID: True} if "m" in letters else {}


def compiled(text: str) -> tuple[Callable[[Message], bytes], frozenset[str]]:
    """Compile a format.

    Returns:
        A function that formats a message, and the letters of the format. The function raises
        :class:`UnformattableError` for a message that cannot be formatted.

    Raises:
        ArgumentError: a sequence is unknown or incomplete.
    """
    try:
        source = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise ArgumentError("--format is not UTF-8") from None
    parts: list[_Part] = []
    letters: set[str] = set()
    for found in _SEQUENCE.finditer(source):
        if found["incomplete"]:
            rest = source[found.start() : found.start() + 12].decode(errors="replace")
            raise ArgumentError(f"--format: incomplete sequence {rest!r}")
        parts.append(_literal(found["text"]) if found["text"] else _part(found))
        if found["letter"]:
            letters.add(found["letter"].decode(errors="replace"))

    def form(message: Message) -> bytes:
        now = time.time_ns()
        return b"".join([part(message, now) for part in parts])

    return form, frozenset(letters)


def _literal(value: bytes) -> _Part:
    return lambda _message, _now: value


def _part(found: re.Match[bytes]) -> _Part:
    if found["escape"]:
        if found["escape"] not in _ESCAPES:
            raise ArgumentError(f"--format: unknown escape {_shown(found)}; there are \\\\ \\0 \\a \\e \\n \\r \\t \\v")
        return _literal(_ESCAPES[found["escape"]])
    if found["time"]:
        return _time(found)
    letter = found["letter"].decode(errors="replace")
    if letter == "%":
        return _literal(b"%")
    if letter not in _PARTS:
        raise ArgumentError(f"--format: unknown sequence {_shown(found)}; there are %% %{' %'.join(_PARTS)}")
    part, width, most = _PARTS[letter], int(found["width"] or 0), found["most"]
    limit = None if most is None or letter not in "CIRt" else int(most)
    if not width and limit is None:
        return part
    fill = b"0" if found["flag"] == b"0" and letter in "ElmxX" else b" "
    adjust = bytes.ljust if found["flag"] == b"-" else bytes.rjust
    return lambda message, now: adjust(part(message, now)[:limit], width, fill)


def _time(found: re.Match[bytes]) -> _Part:
    letter = found["time"].decode(errors="replace")
    if letter == "@":
        return _literal(b"@")
    if letter == "N":
        return lambda _, now: b"%09d" % (now % 10**9)
    if letter not in _TIMES:
        raise ArgumentError(f"--format: unknown sequence {_shown(found)}; a letter of strftime, @N or @@ follows '@'")
    return lambda _, now: _local(f"%{letter}", now).encode()


def _shown(found: re.Match[bytes]) -> str:
    return repr(found.group().decode(errors="replace"))
