"""TypedEventPublisher: publish to one topic whose name and permission are checked once (157.3.4, 157.9.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from messaging.errors import ClosedError
from messaging.text import tolerant

if TYPE_CHECKING:
    from messaging.dispatch import Principal

T = TypeVar("T")


class Outlet(Protocol):
    """The method of a bus that its publishers use."""

    def publish(self, topic: str, event: Any, principal: Principal, is_untyped: bool, is_checked: bool, /) -> None:
        """Publish an event; ``is_checked`` says that the topic is valid and permitted."""


class TypedEventPublisher(Generic[T]):
    """Publishes events to one topic. A context manager that closes it. Thread safe.

    ``TypedEventBus.create_publisher`` makes it, and checks topic and permission. They are not checked again (157.3.4):
    do not pass it to code without that permission.
    """

    __slots__ = ("_is_open", "_outlet", "_topic")

    def __init__(self, outlet: Outlet, topic: str) -> None:
        self._outlet = outlet
        self._topic = topic
        self._is_open = True

    @property
    def topic(self) -> str:
        """The topic of all its events; also after closing (157.9.6.4)."""
        return self._topic

    @property
    def is_open(self) -> bool:
        """Whether the publisher was not closed (157.9.6.5)."""
        return self._is_open

    def deliver(self, event: T) -> None:
        """Publish a typed event; see ``TypedEventBus.deliver`` (157.9.6.2).

        Raises:
            NullEventError, InvalidEventError: see there.
            ClosedError: the publisher or the bus is closed.
        """
        self._refuse_closed()
        self._outlet.publish(self._topic, event, None, False, True)

    def deliver_untyped(self, event: Mapping[str, Any]) -> None:
        """Publish an untyped event; see ``TypedEventBus.deliver_untyped`` (157.9.6.3).

        Raises:
            NullEventError, InvalidEventError: see there.
            ClosedError: the publisher or the bus is closed.
        """
        self._refuse_closed()
        self._outlet.publish(self._topic, event, None, True, True)

    def _refuse_closed(self) -> None:
        if not self._is_open:
            raise ClosedError(f"the publisher for {self._topic!r} is closed")

    def close(self) -> None:
        """Stop publishing; idempotent (157.9.6.1). Events that were published are delivered."""
        self._is_open = False

    def __enter__(self) -> Self:
        self._refuse_closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @tolerant
    def __repr__(self) -> str:
        return f"<TypedEventPublisher for {self._topic!r}, {'open' if self._is_open else 'closed'}>"
