"""An event on its way to the consumers of this process."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from messaging.dispatch.eventdata import as_data
from messaging.distributedeventing.events import DistributableEvent, PushEvent
from messaging.errors import InvalidEventError

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from messaging.dispatch.eventdata import Converter
    from messaging.distributedeventing.events import EventKind

#: identifies a session: the member and the session there; ``None`` is the default session of all senders (5.2.3)
SessionKey = tuple[str, str] | None

_MISSING: Any = object()


@dataclass(slots=True, eq=False, repr=False)
class DispatchedEvent:
    """One event, shared by its consumers. Thread safe: conversions are computed at most once for each consumer thread.

    Attributes:
        topic, kind, data, failure: see ``PushEvent``.
        session: the session that it belongs to.
        is_late: whether its session has ended before: consumers that are aware of sessions do not receive it.
        bundle, framework, reply_to, correlation_id: see ``DistributableEvent``.
    """

    topic: str
    kind: EventKind
    data: Any
    _: KW_ONLY
    session: SessionKey = None
    bundle: int | None = None
    framework: UUID | None = None
    reply_to: str | None = None
    correlation_id: str | None = None
    failure: Exception | None = None
    is_late: bool = field(default=False, init=False)
    _map: Any = field(default=_MISSING, init=False)
    _converted: dict[Converter, Any] = field(default_factory=dict, init=False)

    def as_map(self) -> Any:
        """Return the payload with maps in place of objects; see ``as_data`` for errors."""
        if self._map is _MISSING:
            self._map = as_data(self.data)
        return self._map

    def converted(self, convert: Converter | None) -> Any:
        """Return the payload as a consumer wants it: ``convert(data)``, or as it is without ``convert``.

        Raises:
            ConversionError, InvalidEventError: the payload cannot be converted.
        """
        if convert is None:
            return self.data
        known = self._converted.get(convert, _MISSING)
        if known is _MISSING:
            known = self._converted[convert] = convert(self.data)
        return known

    def push_event(self, convert: Converter | None, is_whole: bool) -> PushEvent[Any]:
        """Return what a consumer is called with; raise as :meth:`converted`."""
        if self.kind != "data":
            return PushEvent(self.kind, None, self.failure)
        data = self.converted(convert)
        return PushEvent("data", self.whole(data) if is_whole else data)

    def whole(self, data: Any) -> DistributableEvent[Any]:
        """Return the event with its sender."""
        return DistributableEvent(self.topic, self.bundle, self.framework, self.reply_to, self.correlation_id, data)

    def matches(self, accepts: Callable[[dict[str, Any]], bool]) -> bool:
        """Return whether the payload has named fields, and these pass a filter."""
        try:
            found = self.as_map()
        except InvalidEventError:
            return False
        return isinstance(found, dict) and accepts(found)
