"""TypedEventPublisher: publish events to one topic (157.3.4, 157.9.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Self, TypeVar

from messaging.errors import ClosedError
from messaging.errors.text import tolerant
from messaging.execution import Closeable

T = TypeVar("T")


class TypedEventPublisher(Closeable, Generic[T]):
    """Publishes events to one topic. A context manager that closes it. Thread safe.

    ``TypedEventBus.create_publisher`` makes it, and checks topic and permission. They are not checked again (157.3.4):
    do not pass it to code without that permission.
    """

    __slots__ = ("_is_open", "_publish", "_topic")

    def __init__(self, publish: Callable[..., None], topic: str) -> None:
        self._publish = publish
        self._topic = topic
        self._is_open = True

    @property
    def topic(self) -> str:
        """The topic of all its events; also after closing (157.9.6.4)."""
        return self._topic

    @property
    def is_open(self) -> bool:
        """Return whether the publisher was not closed (157.9.6.5)."""
        return self._is_open

    def deliver(self, event: T) -> None:
        """Publish a typed event; see ``TypedEventBus.deliver`` (157.9.6.2).

        Raises:
            NullEventError, InvalidEventError: see there.
            ClosedError: the publisher or the bus is closed.
        """
        self._refuse_closed()
        self._publish(self._topic, event, None, False, True)

    def deliver_untyped(self, event: Mapping[str, Any]) -> None:
        """Publish an untyped event; see ``TypedEventBus.deliver_untyped`` (157.9.6.3).

        Raises:
            NullEventError, InvalidEventError: see there.
            ClosedError: the publisher or the bus is closed.
        """
        self._refuse_closed()
        self._publish(self._topic, event, None, True, True)

    def _refuse_closed(self) -> None:
        if not self._is_open:
            raise ClosedError(f"the publisher for {self._topic!r} is closed")

    def close(self) -> None:
        """Stop publishing; idempotent (157.9.6.1). Events that were published are delivered."""
        self._is_open = False

    def __enter__(self) -> Self:
        self._refuse_closed()
        return self

    @tolerant
    def __repr__(self) -> str:
        return f"<TypedEventPublisher for {self._topic!r}, {'open' if self._is_open else 'closed'}>"
