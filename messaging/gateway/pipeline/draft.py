"""Drafts: messages on their way through the pipeline of a route.

**Parts.** Several drafts may be made of one message of the source. They may leave the pipeline at different times: held
for sampling, or in batches of several targets. The message is settled with the last one: an earlier acknowledgement
would lose the parts that are not stored yet. So each of these drafts has a :class:`Part` as its token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from messaging.codecs.encodings import MAX_DECODED_SIZE, Encodings, decompress, parse_encodings
from messaging.errors import CodecError, DecodeError, EncodeError

#: the value of a draft that was not decoded
_UNREAD: Final = object()
_JSON: Final = "application/json"
#: extension of messages that the broker has sent before
_REDELIVERED: Final = "redelivered"


def read_json(payload: bytes, content_encoding: str | None, *, limit: int = MAX_DECODED_SIZE) -> Any:
    """Return the value of a JSON payload.

    Raises:
        DecodeError: the payload is not JSON in UTF-8, or is too large when it is decompressed.
        UnknownContentEncodingError, MissingExtraError: the content encoding cannot be undone.
    """
    if content_encoding is not None:
        encodings = parse_encodings(content_encoding)
        payload = decompress(payload, Encodings(None, encodings.compressions), limit)
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"the payload is not JSON: {type(error).__name__}") from None


def write_json(value: Any) -> bytes:
    """Return a value as JSON in UTF-8, in the shortest form.

    Raises:
        EncodeError: JSON cannot express it.
    """
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EncodeError(f"the value cannot be written as JSON: {error}") from None


def is_redelivered(message: Any) -> bool:
    """Return whether the broker has sent a message of the source before."""
    return _REDELIVERED in message.context.extensions


class Draft:
    """A message on its way through a route. For one thread at a time.

    Attributes:
        channel: where it arrived.
        captures: values for templates by name.
        payload: the bytes, in their content encoding; encoded anew after :meth:`set_value`.
        content_type, content_encoding: of the payload.
        headers: user headers, which steps may change.
        timestamp: when the gateway received it, seconds since the epoch.
        message_id: travels with the message; ``None``: the gateway makes one.
        retain: whether the source has retained it.
        target: channel to publish to, given by a step; ``None``: that of the route.
        sources: tokens of the messages of the source that it stands for.
        members: of a batch, what recognises its messages if they are delivered again.
    """

    __slots__ = (
        "_payload", "_value", "captures", "channel", "content_encoding", "content_type", "headers", "members",
        "message_id", "retain", "sources", "target", "timestamp",
    )  # fmt: skip

    def __init__(
        self,
        channel: str,
        payload: bytes,
        *,
        captures: Mapping[str, str] | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: dict[str, Any] | None = None,
        message_id: str | None = None,
        target: str | None = None,
    ) -> None:
        self.channel = channel
        self.captures: Mapping[str, str] = captures if captures is not None else {}
        self._payload: bytes | None = payload
        self._value: Any = _UNREAD
        self.content_type = content_type
        self.content_encoding = content_encoding
        self.headers: dict[str, Any] = headers if headers is not None else {}
        self.timestamp = 0.0
        self.message_id = message_id
        self.retain = False
        self.target = target
        self.sources: tuple[Any, ...] = ()
        self.members: Sequence[str] = ()

    @property
    def contexts(self) -> list[Any]:
        """Return the tokens that settle the messages of the source."""
        return [each.context for each in self.sources]

    @property
    def is_redelivered(self) -> bool:
        """Return whether the source has delivered it, or a part of it, before."""
        return any(map(is_redelivered, self.sources))

    @property
    def payload(self) -> bytes:
        """Return the payload. Raises ``EncodeError``: the value that was set is not JSON."""
        if self._payload is None:
            self._payload = write_json(self._value)
        return self._payload

    def set_payload(self, payload: bytes, content_type: str | None, content_encoding: str | None = None) -> None:
        """Replace the payload."""
        self._payload, self._value = payload, _UNREAD
        self.content_type, self.content_encoding = content_type, content_encoding

    @property
    def value(self) -> Any:
        """Return the decoded JSON payload; it must be changed with :meth:`set_value` only.

        Raises:
            CodecError: the payload is not JSON, or cannot be decompressed.
        """
        if self._value is _UNREAD:
            assert self._payload is not None  # noqa: S101  # one of both is there
            self._value = read_json(self._payload, self.content_encoding)
        return self._value

    @property
    def fields(self) -> Mapping[str, Any]:
        """Return the decoded payload if it is a JSON object, otherwise no fields."""
        try:
            found = self.value
        except CodecError:
            return {}
        return found if isinstance(found, dict) else {}

    def set_value(self, value: Any) -> None:
        """Replace the payload by a value that JSON can express; it is encoded when the payload is read."""
        self._value, self._payload = value, None
        self.content_type, self.content_encoding = _JSON, None

    def copy(self, **changes: Any) -> Draft:
        """Return a copy with some attributes changed; the value is shared."""
        made = Draft.__new__(Draft)
        made._payload, made._value = self._payload, self._value
        made.headers = dict(self.headers)
        for name in (
            "captures", "channel", "content_encoding", "content_type", "members", "message_id", "retain", "sources",
            "target", "timestamp",
        ):  # fmt: skip
            setattr(made, name, getattr(self, name))
        for name, value in changes.items():
            setattr(made, name, value)
        return made


class _Divided:
    """A message of the source, and how many of its parts are not settled. Thread safe."""

    __slots__ = ("_is_acknowledged", "_left", "_lock", "source")

    def __init__(self, source: Any, count: int) -> None:
        self.source = source
        self._lock = threading.Lock()  # guards what follows
        self._left = count
        self._is_acknowledged = True

    def settle(self, acknowledged: bool) -> None:
        with self._lock:
            self._left -= 1
            self._is_acknowledged = self._is_acknowledged and acknowledged
            is_last, is_acknowledged = not self._left, self._is_acknowledged
        if is_last:
            self.source.context.settle(is_acknowledged)


class Part:
    """A part of a message of the source: used like the message, and like its context. Thread safe."""

    __slots__ = ("_is_settled", "_whole", "context")

    def __init__(self, whole: _Divided) -> None:
        self._whole = whole
        self._is_settled = False
        self.context = self

    @property
    def payload(self) -> Any:
        """Return the payload of the message."""
        return self._whole.source.payload

    def settle(self, acknowledged: bool) -> None:
        """Settle the part, and with the last one the message. Settling again has no effect."""
        if not self._is_settled:
            self._is_settled = True
            self._whole.settle(acknowledged)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._whole.source.context, name)


def divide(drafts: Sequence[Draft]) -> None:
    """Give each draft parts in place of the messages of the source that it shares with others."""
    counts: dict[int, int] = {}
    for draft in drafts:
        for source in draft.sources:
            counts[id(source)] = counts.get(id(source), 0) + 1
    shared: dict[int, _Divided] = {}
    for draft in drafts:
        if any(counts[id(source)] > 1 for source in draft.sources):
            draft.sources = tuple(
                source
                if counts[id(source)] == 1
                else Part(shared.setdefault(id(source), _Divided(source, counts[id(source)])))
                for source in draft.sources
            )
