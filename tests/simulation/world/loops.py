"""The event loops of a world: asyncio's own, over a selector that waits for the world's sockets."""

from __future__ import annotations

import asyncio
import selectors
import sys
from math import inf
from typing import TYPE_CHECKING, Any

from tests.simulation.world import current
from tests.simulation.world.network import FIRST_DESCRIPTOR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.simulation.world.network import Socket
    from tests.simulation.world.scheduler import Fiber


class Selector(selectors.BaseSelector):
    """Waits for sockets of the world, for calls of other threads, and for virtual time."""

    def __init__(self) -> None:
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._fiber: Fiber | None = None
        self._is_notified = False

    def _socket(self, key: selectors.SelectorKey) -> Socket:
        found: Socket = current.world.network.sockets[key.fd]
        return found

    def notify(self) -> None:
        """End the wait of the loop, or its next one. Thread safe."""
        self._is_notified = True
        if self._fiber is not None:
            current.scheduler.wake(self._fiber)

    def _changed(self) -> None:
        if self._fiber is not None:
            current.scheduler.wake(self._fiber)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See ``selectors.BaseSelector``."""
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if fd < FIRST_DESCRIPTOR or fd in self._keys:
            raise ValueError(f"invalid file descriptor {fd}")
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        self._socket(key).watch(self._changed)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """See ``selectors.BaseSelector``."""
        key = self.get_key(fileobj)
        del self._keys[key.fd]
        sock = current.world.network.sockets.get(key.fd)
        if sock is not None:
            sock.unwatch(self._changed)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See ``selectors.BaseSelector``."""
        found = self.get_key(fileobj)
        key = self._keys[found.fd] = selectors.SelectorKey(found.fileobj, found.fd, events, data)
        return key

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        """See ``selectors.BaseSelector``."""
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if fd < 0:  # closed meanwhile
            for each in self._keys.values():
                if each.fileobj is fileobj:
                    return each
        return self._keys[fd]

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """See ``selectors.BaseSelector``."""
        return self._keys

    def close(self) -> None:
        """See ``selectors.BaseSelector``."""
        for key in [*self._keys.values()]:
            self.unregister(key.fd)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See ``selectors.BaseSelector``."""
        world = current.scheduler
        if timeout is not None and timeout <= 0:
            world.point()
            return self._ready()
        found = self._ready()
        if not found and not self._is_notified:
            self._fiber = world.current
            world.block(inf if timeout is None else world.now + timeout, "events")
            self._fiber = None
            found = self._ready()
        self._is_notified = False
        return found

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        found = []
        sockets = current.world.network.sockets if self._keys else {}
        for key in self._keys.values():
            sock = sockets.get(key.fd)
            if sock is None:
                continue
            events = key.events & selectors.EVENT_READ if sock.is_readable else 0
            if key.events & selectors.EVENT_WRITE and sock.is_writable:
                events |= selectors.EVENT_WRITE
            if events:
                found.append((key, events))
        return found


class _Hashed:
    """Gives an object a hash that does not depend on its address: sets of it have the same order in each run."""

    _made = 0

    def __hash__(self) -> int:
        try:
            return self._hash  # type: ignore[has-type]
        except AttributeError:
            current.objects_made += 1
            self._hash: int = current.objects_made
            return self._hash


class Future(_Hashed, asyncio.Future):  # type: ignore[type-arg]
    """A future with such a hash."""


class Task(_Hashed, asyncio.Task):  # type: ignore[type-arg]
    """A task with such a hash."""


class Loop(asyncio.SelectorEventLoop):
    """An event loop of a world."""

    _selector: Selector

    def __init__(self) -> None:
        super().__init__(Selector())
        self.set_task_factory(lambda loop, coroutine, **keywords: Task(coroutine, loop=loop, **keywords))

    def create_future(self) -> asyncio.Future[Any]:
        """See ``asyncio.AbstractEventLoop``."""
        return Future(loop=self)

    def _make_self_pipe(self) -> None:
        """Do nothing: the selector is notified without a pipe."""

    def _close_self_pipe(self) -> None:
        """Do nothing, likewise."""

    def _write_to_self(self) -> None:
        current.scheduler.point()
        selector: Selector | None = self._selector
        if selector is not None:  # otherwise the loop was closed here, as it may be in reality
            selector.notify()


class _Policy(asyncio.DefaultEventLoopPolicy):
    """Makes loops of the world."""

    def new_event_loop(self) -> Loop:
        """Return one."""
        return Loop()


def install() -> None:
    """Have asyncio make loops of the world. Once, and for ever."""
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # it would wait for real sockets
    asyncio.set_event_loop_policy(_Policy())
