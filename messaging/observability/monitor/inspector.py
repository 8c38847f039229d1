"""The message inspector: shows the newest messages of a channel pattern, for as long as a viewer asks for them.

An inspection has a subscription of its own and copies the beginning of each payload into a bounded ring. Messages are
decoded when they are shown, not when they arrive.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from messaging.connection.properties import FEATURE_PROPERTY, NAME_PROPERTY
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, BoundReachedError
from messaging.errors.text import visible
from messaging.execution import clock
from messaging.model import Message, MessageContext, MessageContextBuilder, check_pattern
from messaging.observability.monitor.plain import Bounds, Masking, Plain, clean
from messaging.observability.monitor.publisher import observing
from messaging.receiving import MessageSubscription
from messaging.services import LdapFilter, ServiceRegistry, escaped

#: bounds of one inspection: messages in the ring, seconds, bytes of all messages that are shown
MAX_COUNT: Final = 200
MAX_SECONDS: Final = 600.0
MAX_BYTES: Final = 16 * 1024 * 1024
#: inspections at a time
MAX_INSPECTIONS: Final = 4
#: bytes of a payload that are kept, and characters of it that are shown
_KEPT: Final = 16 * 1024
_SHOWN: Final = 4096
_NAME: Final = 300
_HEX_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class InspectionRequest:
    """What a viewer asks for."""

    instance: str
    channel: str
    #: newest messages to keep
    count: int
    seconds: float

    @classmethod
    def of(cls, fields: Any) -> InspectionRequest:
        """Read the request of a viewer.

        Raises:
            ArgumentError: a field is missing or out of range.
            InvalidChannelError: the channel is no channel pattern.
        """
        if not isinstance(fields, Mapping):
            raise ArgumentError("a request must be a JSON object")
        instance, channel = fields.get("instance"), fields.get("channel")
        count, seconds = fields.get("count", 50), fields.get("seconds", 60)
        if not isinstance(instance, str) or not isinstance(channel, str):
            raise ArgumentError("instance and channel must be texts")
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_COUNT:
            raise ArgumentError(f"count must be a number of messages from 1 to {MAX_COUNT}")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 1 <= seconds <= MAX_SECONDS:
            raise ArgumentError(f"seconds must be a number from 1 to {MAX_SECONDS:g}")
        return cls(instance, check_pattern(channel), count, float(seconds))


class _KeptMessage(NamedTuple):
    number: int
    at: float
    size: int
    beginning: bytes
    context: MessageContext


class Inspection:
    """One subscription, and the newest messages that arrived. Thread safe. Get it from :meth:`Inspector.open`.

    Attributes:
        failure: why the subscription ended; ``None``: it has not.
        total: number of messages that arrived.
    """

    def __init__(
        self, inspector: Inspector, service: MessageSubscription, context: MessageContext, count: int, masking: Masking
    ) -> None:
        self._inspector = inspector
        self._masking = masking
        self._lock = threading.Lock()  # guards the following
        self._ring: deque[_KeptMessage] = deque(maxlen=count)
        self.total = 0
        self._left = MAX_BYTES
        self.failure: Exception | None = None
        self._stream = service.subscribe(context)
        with on_failure(self._stream.close):
            self._stream.subscribe(self._receive, self._fail)

    def _receive(self, message: Message) -> None:
        payload = message.payload
        with self._lock:
            self.total += 1
            self._ring.append(_KeptMessage(self.total, clock.wall(), len(payload), payload[:_KEPT], message.context))

    def _fail(self, error: Exception) -> None:
        self.failure = error

    @property
    def is_exhausted(self) -> bool:
        """Whether as many bytes were shown as one inspection may show."""
        return self._left <= 0

    def take(self) -> list[dict[str, Any]]:
        """Return the newest messages that have arrived since the last call, the oldest first."""
        with self._lock:
            kept = [*self._ring]
            self._ring.clear()
        found = [shown(each, self._masking) for each in kept]
        self._left -= sum(len(each["payload"]) + 200 for each in found)
        return found

    def close(self) -> None:
        """Unsubscribe, and make room for another inspection. Idempotent."""
        self._inspector.ended(self)
        self._stream.close()


class Inspector:
    """Opens inspections through the instances of a registry. Thread safe.

    Args:
        services: where the subscription services of the instances are.
        masking: masks secrets.
    """

    def __init__(self, services: ServiceRegistry, masking: Masking) -> None:
        self._services = services
        self._masking = masking
        self._lock = threading.Lock()  # guards the following
        self._open: set[Inspection] = set()
        self._opening = 0

    def instances(self) -> list[str]:
        """Return the names of the instances that can be used."""
        return sorted({str(each.properties.get(NAME_PROPERTY)) for each in self._services.find(MessageSubscription)})

    def open(self, request: InspectionRequest) -> Inspection:
        """Subscribe.

        Raises:
            ArgumentError: no instance has that name.
            BoundReachedError: too many inspections are open.
            MessagingError: the subscription is impossible.
        """
        names = self.instances()
        if request.instance not in names:
            raise ArgumentError(f"no instance {request.instance!r:.80}; there are {', '.join(names[:20]) or 'none'}")
        with self._lock:
            if len(self._open) + self._opening >= MAX_INSPECTIONS:
                raise BoundReachedError(f"{MAX_INSPECTIONS} inspections are open; stop one of them first")
            self._opening += 1
        try:
            wanted = LdapFilter.parse(f"({NAME_PROPERTY}={escaped(request.instance)})")
            reference = self._services.find(MessageSubscription, wanted)[0]
            service = self._services.get(reference)
            if service is None:
                raise ArgumentError(f"the instance {request.instance!r:.80} is closed")
            features = reference.properties.get(FEATURE_PROPERTY, ())
            context = (
                MessageContextBuilder()
                .channel(request.channel)
                .extensions(observing(features, request.count, qos="1"))
                .build_context()
            )
            inspection = Inspection(self, service, context, request.count, self._masking)
            with self._lock:
                self._open.add(inspection)
            return inspection
        except IndexError:
            raise ArgumentError(f"the instance {request.instance!r:.80} is closed") from None
        finally:
            with self._lock:
                self._opening -= 1

    def ended(self, inspection: Inspection) -> None:
        """Note that an inspection is closed."""
        with self._lock:
            self._open.discard(inspection)

    def close(self) -> None:
        """Close all inspections."""
        with self._lock:
            pending = [*self._open]
        for each in pending:
            each.close()


# --- how a message is shown


def shown(kept: Any, masking: Masking) -> dict[str, Any]:
    """Return a message as an object of JSON for the page."""
    context: MessageContext = kept.context
    form, payload, is_cut = payload_text(kept.beginning, masking, is_cut=kept.size > len(kept.beginning))
    plain = Plain(masking, Bounds(depth=4, items=50, values=200))
    headers: dict[str, Any] = {
        "content_type": context.content_type,
        "content_encoding": context.content_encoding,
        "correlation_id": context.correlation_id,
        "reply_to": context.reply_to_channel,
        "routing_key": context.channel_extension,
    }
    found = {name: plain.convert(value) for name, value in headers.items() if value is not None}
    found |= plain.convert(dict(context.extensions))
    return {
        "number": kept.number,
        "time": round(kept.at, 3),
        "channel": clean(context.channel or "", _NAME, masking),
        "size": kept.size,
        "form": form,
        "payload": payload,
        "cut": is_cut,
        "headers": found,
    }


def payload_text(payload: bytes, masking: Masking, *, is_cut: bool = False) -> tuple[str, str, bool]:
    """Return the form of a payload (``empty``, ``json``, ``text`` or ``hex``), its text, and whether it is cut.

    Args:
        payload: its first bytes.
        masking: masks secrets in text and JSON. Hex is not masked.
        is_cut: whether these are not all bytes.
    """
    if not payload:
        return "empty", "", is_cut
    text: str | None = None
    try:
        text = payload.decode()
    except UnicodeDecodeError as error:
        if is_cut and error.start >= len(payload) - 3:  # cut within a character
            text = payload[: error.start].decode()
    if text is None or "\x00" in text:
        return "hex", payload[:_HEX_BYTES].hex(" "), is_cut or len(payload) > _HEX_BYTES
    form = "text"
    if not is_cut and text.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            text = json.dumps(masking.value(json.loads(text)), indent=2, ensure_ascii=False)
            form = "json"
    if form == "text":
        text = masking.text(text, is_cut=is_cut)
    text = visible(text, keep="\n\t")
    return form, text[:_SHOWN], is_cut or len(text) > _SHOWN
