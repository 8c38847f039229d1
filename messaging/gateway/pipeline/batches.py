"""Batches: several messages combined to one, and the compression of payloads."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any, Final

from messaging.codecs.encodings import compress, parse_encodings
from messaging.errors import CodecError
from messaging.gateway.pipeline.draft import Draft, write_json
from messaging.gateway.settings import BatchSettings

#: batches that are open at a time: one for each target channel; then the oldest is closed early
OPEN_BATCHES: Final = 1000
_TYPES: Final = {"json_lines": "application/x-ndjson", "json_array": "application/json"}


def compressed(draft: Draft, encoding: str) -> Draft:
    """Compress the payload of a draft, unless it has a content encoding already."""
    if draft.content_encoding is None:
        payload, content_type = draft.payload, draft.content_type
        draft.set_payload(compress(payload, parse_encodings(encoding)), content_type, encoding)
    return draft


class _OpenBatch:
    __slots__ = ("bytes", "drafts", "due", "items")

    def __init__(self, due: float, is_array: bool) -> None:
        self.due = due
        #: of the payload: each item has a byte that ends or separates it, and an array has one more
        self.bytes = int(is_array)
        self.drafts: list[Draft] = []
        self.items: list[bytes] = []


class Batcher:
    """Combines the messages of each target channel.

    Args:
        settings: of the batches.
        compression: content encoding of the batches; ``None``: none.
    """

    def __init__(self, settings: BatchSettings, compression: str | None) -> None:
        self._settings = settings
        self._compression = compression
        #: by target channel, in the order in which they were begun
        self._open: OrderedDict[str, _OpenBatch] = OrderedDict()
        #: the messages of open batches by what recognises them
        self._known: dict[str, Draft] = {}

    def put(self, draft: Draft, item: bytes, target: str, now: float) -> list[Draft]:
        """Add a message, and its :meth:`item`; return the batches that are complete."""
        complete: list[Draft] = []
        batch = self._open.get(target)
        if batch is not None and batch.bytes + len(item) + 1 > self._settings.max_bytes:
            complete.append(self._close(target))
            batch = None
        if batch is None:
            if len(self._open) >= OPEN_BATCHES:
                complete.append(self._close(next(iter(self._open))))
            batch = self._open[target] = _OpenBatch(now + self._settings.delay, self._settings.format == "json_array")
        batch.drafts.append(draft)
        self._known.update(dict.fromkeys(draft.members, draft))
        batch.items.append(item)
        batch.bytes += len(item) + 1
        if len(batch.items) >= self._settings.count or batch.bytes >= self._settings.max_bytes:
            complete.append(self._close(target))
        return complete

    def joins(self, key: str, draft: Draft) -> bool:
        """Return whether a message is in an open batch; then the sources of ``draft`` are acknowledged with it."""
        known = self._known.get(key)
        if known is None:
            return False
        known.sources = (*known.sources, *draft.sources)
        return True

    def item(self, draft: Draft) -> bytes:
        """Return what a batch holds of a message.

        Raises:
            CodecError: the payload is not JSON, and the batch needs it.
        """
        if not self._settings.envelope:
            return write_json(draft.value)
        found: dict[str, Any] = {
            "channel": draft.channel,
            "time": datetime.fromtimestamp(draft.timestamp, UTC).isoformat(timespec="milliseconds"),
        }
        if draft.headers:
            found["headers"] = {
                name: value if _is_plain(value) else str(value) for name, value in draft.headers.items()
            }
        found |= _payload(draft)
        return write_json(found)

    def _close(self, target: str) -> Draft:
        batch = self._open.pop(target)
        first = batch.drafts[0]
        if self._settings.format == "json_lines":
            payload = b"\n".join(batch.items) + b"\n"
        else:
            payload = b"[" + b",".join(batch.items) + b"]"
        made = Draft(
            first.channel,
            payload,
            captures=first.captures,
            content_type=_TYPES[self._settings.format],
            message_id=_identity(batch.drafts),
            target=target,
        )
        made.timestamp = first.timestamp
        made.sources = tuple(source for draft in batch.drafts for source in draft.sources)
        made.members = [member for draft in batch.drafts for member in draft.members]
        for member in made.members:
            self._known.pop(member, None)
        return made if self._compression is None else compressed(made, self._compression)

    @property
    def next_due(self) -> float | None:
        """Return when the first batch has waited long enough, in monotonic seconds."""
        return next(iter(self._open.values())).due if self._open else None

    def due(self, now: float = math.inf) -> list[Draft]:
        """Return the batches that have waited long enough; all of them by default."""
        found: list[Draft] = []
        while self._open and next(iter(self._open.values())).due <= now:
            found.append(self._close(next(iter(self._open))))
        return found


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, bool)) or (isinstance(value, float) and math.isfinite(value))


def _payload(draft: Draft) -> dict[str, Any]:
    """Return the payload of a draft as JSON, text, or base64 with a marker, as key and value."""
    if draft.content_encoding is None:
        if draft.content_type is None or "json" in draft.content_type:
            try:
                value = draft.value
                write_json(value)  # Python reads NaN, which is no JSON
            except CodecError:
                pass
            else:
                return {"payload": value}
        try:
            return {"payload": draft.payload.decode()}
        except UnicodeDecodeError:
            pass
    found = {"payload_base64": base64.b64encode(draft.payload).decode()}
    return found if draft.content_encoding is None else {**found, "content_encoding": draft.content_encoding}


def _identity(drafts: list[Draft]) -> str | None:
    """Return a message id made of those of the members: a batch that is made again of them has the same one."""
    ids = [draft.message_id for draft in drafts]
    if None in ids:
        return None
    return hashlib.sha256("\0".join(map(str, ids)).encode()).hexdigest()[:32]
