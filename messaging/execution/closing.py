"""Objects that a ``with`` statement starts and closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closeable(ABC):
    """An object with a ``close``, which the end of a ``with`` statement calls, after an exception too."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Close the object; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncCloseable(Closeable):
    """An object with an ``aclose`` as well, which the end of an ``async with`` statement awaits."""

    __slots__ = ()

    @abstractmethod
    async def aclose(self) -> None:
        """Close the object; idempotent."""

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Startable(Closeable):
    """An object with a ``start`` as well, which the beginning of a ``with`` statement calls."""

    __slots__ = ()

    @abstractmethod
    def start(self) -> Self:
        """Start the object, and return it."""

    def __enter__(self) -> Self:
        return self.start()
