"""Monitor: the live page of a process, or of the processes that publish their snapshots at a broker.

**Threads.** ``messaging-monitor`` runs an event loop of its own with the HTTP server and the viewers. Snapshots are
taken on a worker of that loop, once in an interval, and subscriptions of the inspector are made there. Nothing of it
runs on the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, Self

from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    ClosedError,
    ConfigurationError,
    MessagingError,
    check_instance,
)
from messaging.errors import MissingExtraError as _MissingExtraError
from messaging.execution import Flag, clock, start_thread
from messaging.instance import Messaging
from messaging.observability.monitor.access import Access, Guard, find_token
from messaging.observability.monitor.board import Board, Change
from messaging.observability.monitor.inspector import Inspection, InspectionRequest, Inspector
from messaging.observability.monitor.masking import Masking
from messaging.observability.monitor.published import PublishedSnapshots
from messaging.observability.monitor.publisher import CHANNEL, checked_interval, process_name
from messaging.observability.monitor.snapshot import Sampler
from messaging.observability.monitor.viewers import Viewers, event
from messaging.services import ServiceRegistry, default_registry
from messaging.text import SafeLog

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from messaging.observability.monitor.connections import PATIENCE, EventStream, TimedProtocol
except ImportError as error:
    raise _MissingExtraError("monitor", "messaging.observability.monitor") from error

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Iterable
    from types import TracebackType

    from starlette.requests import Request

logger = SafeLog(__name__)

#: files of the page -> their content types
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/monitor.js": ("monitor.js", "text/javascript; charset=utf-8"),
    "/monitor.css": ("monitor.css", "text/css; charset=utf-8"),
    "/monitor.svg": ("monitor.svg", "image/svg+xml"),
}
#: bytes of the body of a request
_MAX_BODY: Final = 4096
#: connections at a time
_MAX_CONNECTIONS: Final = 64
#: how often messages are sent to an inspector, and how long starting and stopping may take, seconds
_INSPECT_PAUSE: Final = 0.25
_PATIENCE: Final = 10.0
#: a comment is sent to a viewer after so many seconds without an event, to find those that are gone
_HEARTBEAT: Final = 15.0


class Monitor:
    """Serves the live page. A context manager, which starts and ends it. Thread safe.

    ::

        with Monitor(port=8787):                       # this process
            ...

        with messaging.connect(url) as m, Monitor(m=m):  # the processes that publish at a broker
            ...

    Args:
        m: shows the processes whose ``SnapshotPublisher`` publishes through this broker; ``None``: this process.
        services: the registry of the parts that are shown; ``None``: that of ``m``, or of the process.
        host, port: to listen at; port 0: a free one.
        token: that viewers need, 16 characters or more; ``None``: see ``token_file``.
        token_file: file with the token; ``None``: the variables MESSAGING_MONITOR_TOKEN and
            MESSAGING_MONITOR_TOKEN_FILE. Without a token it listens on loopback only.
        allowed_hosts: further names that the page may be opened by.
        interval: seconds between two snapshots, 0.1 to 3600.
        channel: first levels of the channels of published snapshots.
        mask: further names of fields whose values are masked.

    Raises:
        ArgumentError: an argument is not as described.
        ConfigurationError: another address than loopback needs a token.

    Attributes:
        host, port: where it listens, once it is started.
    """

    def __init__(
        self,
        m: Messaging | None = None,
        *,
        services: ServiceRegistry | None = None,
        host: str = "127.0.0.1",
        port: int = 8787,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        allowed_hosts: Iterable[str] = (),
        interval: float = 1.0,
        channel: str = CHANNEL,
        mask: Iterable[str] = (),
    ) -> None:
        if m is not None:
            check_instance("m", m, Messaging)
        if services is not None:
            check_instance("services", services, ServiceRegistry)
        check_instance("channel", channel, str)
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65_535:
            raise ArgumentError(f"port must be a whole number from 0 to 65535, not {port!r:.40}")
        self._interval = checked_interval(interval)
        self._masking = Masking(mask)
        self._access = Access(host, find_token(token, token_file), allowed_hosts)
        self.host = host
        self.port = port
        self._m = m
        self._channel = channel
        own = default_registry() if m is None else m.services
        self._services = own if services is None else services
        self._board = Board()
        self._viewers = Viewers()
        self._inspector = Inspector(self._services, self._masking)
        self._published: PublishedSnapshots | None = None
        self._sampler = Sampler(self._services, process_name(), self._interval, self._masking) if m is None else None
        self._refused: dict[str, int] = {}
        self._started = Flag()
        self._ended = Flag()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._is_closed = False

    @property
    def url(self) -> str:
        """The address of the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"

    def start(self) -> Self:
        """Listen, and subscribe to snapshots.

        Raises:
            ConfigurationError: the address cannot be used, or the server does not start.
            MessagingError: the subscription is impossible.
            ClosedError: it was started before.
        """
        if self._thread is not None or self._is_closed:
            raise ClosedError("a monitor is started once; make another one")
        listening = self._listen()
        try:
            if self._m is not None:
                self._published = PublishedSnapshots(self._m, self._channel, self._masking)
            self._thread = start_thread(lambda: self._run(listening), "messaging-monitor")
        except BaseException:
            listening.close()
            raise
        if not self._started.wait(_PATIENCE) or self._ended.is_set():
            self.close()
            raise ConfigurationError(f"monitor at {self.host}:{self.port}: the server did not start; the log says why")
        logger.info("monitor: %s", self.url)
        return self

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self.host, self.port))
            listening.listen(32)
        except (OSError, UnicodeError) as error:
            listening.close()
            raise ConfigurationError(f"monitor at {self.host}:{self.port}: cannot listen: {error}") from None
        self.port = int(listening.getsockname()[1])
        return listening

    def close(self) -> None:
        """Stop, and end the streams of all viewers; waits for at most 10 seconds. Idempotent."""
        self._is_closed = True
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(stopping.set)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._ended.wait(_PATIENCE)
        self._inspector.close()
        if self._published is not None:
            self._published.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- on the thread of the monitor

    def _run(self, listening: socket.socket) -> None:
        try:
            asyncio.run(self._serve(listening))
        except Exception:
            logger.exception("monitor: the server failed; the page is gone")
        finally:
            listening.close()
            self._ended.set()
            self._started.set()

    async def _serve(self, listening: socket.socket) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        app = Starlette(
            routes=[
                *(Route(path, self._file, methods=["GET"]) for path in _FILES),
                Route("/api/events", self._events, methods=["GET"]),
                Route("/api/snapshot", self._snapshot, methods=["GET"]),
                Route("/api/inspect", self._inspect, methods=["POST"]),
            ]
        )
        config = uvicorn.Config(
            Guard(app, self._access, self._note_refused), log_config=None, access_log=False, lifespan="off",
            server_header=False, limit_concurrency=_MAX_CONNECTIONS, timeout_keep_alive=5, ws="none", loop="asyncio",
            h11_max_incomplete_event_size=32_768, timeout_graceful_shutdown=2, http=TimedProtocol,
        )  # fmt: skip
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        watching = asyncio.create_task(self._watch())
        self._started.set()
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._viewers.close()
            watching.cancel()
            stopping.cancel()
            server.should_exit = True
            await clock.wait_for(serving, _PATIENCE / 2)

    async def _watch(self) -> None:
        """Take snapshots, and tell the viewers what has changed, until the monitor stops."""
        while True:
            try:
                for change in await run_in_threadpool(self._changes):
                    self._tell(change)
                self._viewers.put("counts", event("counts", self._counts()))
            except Exception:
                logger.exception("monitor: a snapshot failed; trying again in %g s", self._interval)
            await clock.sleep(self._interval)

    def _changes(self) -> list[Change]:
        """Return what has changed since the last call. On a worker of the loop."""
        changes: list[Change] = []
        if self._sampler is not None:
            changes += self._board.add("", self._sampler.take())
        if self._published is not None:
            for key, snapshot, age in self._published.take():
                changes += self._board.remove(key) if snapshot is None else self._board.add(key, snapshot, age)
        return changes + self._board.tick()

    def _tell(self, change: Change) -> None:
        topic = f"process/{change.key}"
        if change.view is None:
            self._viewers.remove(topic, event("gone", {"key": change.key}))
        else:
            self._viewers.put(topic, event("process", change.view))

    def _counts(self) -> dict[str, Any]:
        published = self._published
        return {
            **self._viewers.counts(),
            "crowded_out": self._board.refused,
            "invalid": 0 if published is None else published.invalid,
            "failure": None if published is None or published.failure is None else str(published.failure),
            "denied": sum(self._refused.values()),
            "instances": self._inspector.instances(),
        }

    def _note_refused(self, reason: str) -> None:
        self._refused[reason] = self._refused.get(reason, 0) + 1  # the reasons are constants

    # --- requests

    async def _file(self, request: Request) -> Response:
        name, content_type = _FILES[request.url.path]
        content = resources.files(__package__).joinpath("static", name).read_bytes()
        return Response(content, headers={"content-type": content_type})

    async def _snapshot(self, _: Request) -> Response:
        processes = {key: snapshot.fields() for key, snapshot in self._board.snapshots().items()}
        return JSONResponse({"instances": self._inspector.instances(), "processes": processes})

    async def _events(self, _: Request) -> Response:
        viewer = self._viewers.join()
        if viewer is None:
            return _problem(503, "too many viewers, or the monitor is stopping")

        async def stream() -> AsyncGenerator[bytes, None]:
            yield event("histories", self._board.histories())
            while not viewer.is_ended:
                try:
                    pending = await clock.wait_for(viewer.take(), _HEARTBEAT)
                except TimeoutError:
                    pending = [b": still here\n\n"]
                for data in pending:
                    yield data

        async def leave() -> None:
            self._viewers.leave(viewer)

        return EventStream(stream(), self._viewers, leave)

    async def _inspect(self, request: Request) -> Response:
        body = b""
        try:
            async with clock.timeout(PATIENCE):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > _MAX_BODY:
                        return _problem(413, f"a request has at most {_MAX_BODY} bytes")
        except TimeoutError:
            return _problem(408, f"a request must arrive within {PATIENCE:g} s")
        except ClientDisconnect:
            return Response()
        try:
            wanted = InspectionRequest.of(json.loads(body))
            inspection = await run_in_threadpool(self._inspector.open, wanted)
        except (ValueError, RecursionError) as error:
            text = str(error) if isinstance(error, MessagingError) else "the request is no JSON"
            return _problem(400, text)
        except BoundReachedError as error:
            return _problem(503, str(error))
        except MessagingError as error:
            return _problem(502, str(error))
        return EventStream(
            self._messages(inspection, wanted.seconds), self._viewers, lambda: run_in_threadpool(inspection.close)
        )

    async def _messages(self, inspection: Inspection, seconds: float) -> AsyncGenerator[bytes, None]:
        """Yield the messages of an inspection as events, until its time is over or the server stops."""
        loop = asyncio.get_running_loop()
        end = clock.time_of(loop) + seconds
        assert self._stopping is not None  # noqa: S101  # set before requests are served
        while clock.time_of(loop) < end and not self._stopping.is_set():
            if inspection.failure is not None:
                yield event("failure", {"text": str(inspection.failure)})
                return
            messages = inspection.take()
            if messages:
                yield event("messages", {"total": inspection.total, "messages": messages})
            if inspection.is_exhausted:
                yield event("end", {"text": "as many bytes were shown as one inspection may show"})
                return
            await clock.sleep(_INSPECT_PAUSE)
        yield event("end", {"text": "the time of the inspection is over"})


def _problem(status: int, text: str) -> Response:
    return JSONResponse({"problem": text}, status_code=status)
