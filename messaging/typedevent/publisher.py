"""TypedEventPublisher: publishes to one topic, checked once (157.3.4, 157.9.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from messaging.errors import ClosedError
from messaging.reprs import tolerant

if TYPE_CHECKING:
    from messaging.dispatch.permission import Principal
    from messaging.typedevent.bus import TypedEventBus

T = TypeVar("T")


class TypedEventPublisher(Generic[T]):
    """Publishes events to one topic; get it from ``TypedEventBus.create_publisher``. A context manager that closes it.

    Topic and permission were checked when it was made, and are not checked again (157.3.4): do not hand it to others.
    Thread safe.
    """

    __slots__ = ("_bus", "_is_open", "_principal", "_topic")

    def __init__(self, bus: TypedEventBus, topic: str, principal: Principal) -> None:
        self._bus = bus
        self._topic = topic
        self._principal = principal
        self._is_open = True

    @property
    def topic(self) -> str:
        """The topic of all its events; also after closing (157.9.6.4)."""
        return self._topic

    @property
    def is_open(self) -> bool:
        """Whether it was not closed (157.9.6.5)."""
        return self._is_open

    def deliver(self, event: T) -> None:
        """As ``TypedEventBus.deliver`` with this topic (157.9.6.2).

        Raises:
            NullEventError, InvalidEventError: as there.
            ClosedError: the publisher or the bus is closed.
        """
        self._refuse_closed()
        self._bus.publish(self._topic, event, None, False, True)

    def deliver_untyped(self, event: Mapping[str, Any]) -> None:
        """As ``TypedEventBus.deliver_untyped`` with this topic (157.9.6.3).

        Raises:
            NullEventError, InvalidEventError: as there.
            ClosedError: the publisher or the bus is closed.
        """
        self._refuse_closed()
        self._bus.publish(self._topic, event, None, True, True)

    def _refuse_closed(self) -> None:
        if not self._is_open:
            raise ClosedError(f"the publisher for {self._topic!r} is closed")

    def close(self) -> None:
        """Publish no more; idempotent (157.9.6.1). What was published is delivered."""
        self._is_open = False

    def __enter__(self) -> Self:
        self._refuse_closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @tolerant
    def __repr__(self) -> str:
        return f"<TypedEventPublisher for {self._topic!r}, {'open' if self._is_open else 'closed'}>"
