"""Running something on other threads, with their errors raised in the test; an event loop and a port there."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from messaging.testing.waiting import PATIENCE

T = TypeVar("T")


def in_background(call: Callable[[], object], patience: float = PATIENCE) -> Callable[[], None]:
    """Call it on another thread; return a function that waits for its end and raises its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # raised by join
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> None:
        thread.join(patience)
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    return join


def in_threads(count: int, run: Callable[[int], object]) -> None:
    """Call ``run`` with 0, 1, ... on as many threads at the same moment, and raise what it raises."""
    barrier = threading.Barrier(count)

    def start(number: int) -> Callable[[], None]:
        def work() -> None:
            barrier.wait(PATIENCE)
            run(number)

        return in_background(work, 6 * PATIENCE)

    for join in [start(number) for number in range(count)]:
        join()


def together(*jobs: Callable[[], object]) -> None:
    """Run jobs at the same time, each on a thread of its own, until all are done."""
    in_threads(len(jobs), lambda number: jobs[number]())


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    """Let no thread be started within the block, as at a limit of the system."""

    def start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        patched.setattr(_thread, "start_new_thread", start)
        yield


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port whose connections are handed to ``serve``, one after the other, and closed when it returns."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            while True:
                try:
                    peer = listening.accept()[0]
                except OSError:  # the test is over
                    return
                with peer, contextlib.suppress(OSError):  # the client may leave
                    peer.settimeout(PATIENCE)
                    serve(peer)

        join = in_background(accept)
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            join()


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="test-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(2 * PATIENCE)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        async def call() -> T:
            return function(*args)

        return self.run(call())

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """In it, the loop does nothing."""
        stands, over = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            over.wait(PATIENCE)

        self.loop.call_soon_threadsafe(stand)
        assert stands.wait(PATIENCE)
        try:
            yield
        finally:
            over.set()

    def close(self) -> None:
        """As ``asyncio.run`` does: all tasks are cancelled."""
        if self.loop.is_closed():
            return

        async def cancel() -> None:
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            self.loop.stop()

        asyncio.run_coroutine_threadsafe(cancel(), self.loop)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.loop.close()
