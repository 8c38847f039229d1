"""Monitor: the live page of a process, or of the processes that publish their snapshots at a broker.

A viewer that is slower than the events gets the newest state of each process, not every one.

**Threads.** ``messaging-monitor`` takes a snapshot once in an interval, and puts the events for all viewers. Requests
are answered, events taken, and subscriptions of the inspector made, on the threads of the HTTP server: see
:mod:`messaging.observability.web`. Nothing of it runs on the engine's loop.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from importlib import resources
from typing import Any, Final, Self

from messaging.environment.signals import on_failure
from messaging.errors import BoundReachedError, ClosedError, MessagingError
from messaging.errors.checks import check_instance, check_optional
from messaging.errors.text import SafeLog
from messaging.execution import Flag, Startable, clock, start_thread
from messaging.instance import Messaging
from messaging.observability.monitor.access import HEADERS, Access, find_token
from messaging.observability.monitor.board import Board, BoardChange
from messaging.observability.monitor.inspector import Inspection, InspectionRequest, Inspector
from messaging.observability.monitor.plain import Masking
from messaging.observability.monitor.publisher import CHANNEL, PublishedSnapshots, checked_interval, process_name
from messaging.observability.monitor.snapshot import SnapshotSampler
from messaging.observability.web import HttpAnswer, HttpRequest, WebServer, check_port, text_answer
from messaging.services import ServiceRegistry, default_registry

logger = SafeLog(__name__)

#: files of the page -> their content types
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/monitor.js": ("monitor.js", "text/javascript; charset=utf-8"),
    "/monitor.css": ("monitor.css", "text/css; charset=utf-8"),
    "/monitor.svg": ("monitor.svg", "image/svg+xml"),
}
#: viewers at a time
MAX_VIEWERS: Final = 16
#: bytes of the body of a request
_MAX_BODY: Final = 4096
#: connections at a time
_MAX_CONNECTIONS: Final = 64
#: how often messages are sent to an inspector, and connections without an event are checked, seconds
_PAUSE: Final = 0.25
#: how long stopping may take, seconds
_PATIENCE: Final = 10.0
#: a comment is sent to a viewer after so many seconds without an event, to find those that are gone
_HEARTBEAT: Final = 15.0
_EVENTS: Final = {"Content-Type": "text/event-stream; charset=utf-8"}


class Viewer:
    """What one viewer has not been sent yet: the newest event of each topic. Thread safe; one thread takes."""

    __slots__ = ("_lock", "_pending", "_wake", "is_ended")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        self._pending: dict[str, bytes] = {}
        self._wake = Flag()
        self.is_ended = False

    def put(self, topic: str, data: bytes) -> None:
        """Replace the pending event of a topic."""
        with self._lock:
            self._pending[topic] = data
            self._wake.set()

    def end(self) -> None:
        """End the stream: the server stops."""
        self.is_ended = True
        self._wake.set()

    def take(self, timeout: float) -> list[bytes]:
        """Wait for events for at most ``timeout`` seconds, and return the pending ones."""
        self._wake.wait(timeout)
        with self._lock:
            if not self.is_ended:
                self._wake.clear()
            pending, self._pending = self._pending, {}
        return [*pending.values()]


class Viewers:
    """All viewers, and the newest event of each topic, which a new viewer gets first. Thread safe.

    Attributes:
        dropped: number of viewers that were too slow.
        refused: number of viewers for whom there was no room.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        self._viewers: set[Viewer] = set()
        self._newest: dict[str, bytes] = {}
        self._is_closed = False
        self.dropped = 0
        self.refused = 0

    def put(self, topic: str, data: bytes) -> None:
        """Send an event to all viewers, and to new ones."""
        with self._lock:
            self._newest[topic] = data
            for each in self._viewers:
                each.put(topic, data)

    def remove(self, topic: str, data: bytes) -> None:
        """Send the last event of a topic: new viewers do not get it."""
        with self._lock:
            self._newest.pop(topic, None)
            for each in self._viewers:
                each.put(topic, data)

    def join(self) -> Viewer | None:
        """Return a new viewer; ``None``: there is no room for it."""
        with self._lock:
            if len(self._viewers) >= MAX_VIEWERS or self._is_closed:
                self.refused += 1
                return None
            viewer = Viewer()
            for topic, data in self._newest.items():
                viewer.put(topic, data)
            self._viewers.add(viewer)
            return viewer

    def leave(self, viewer: Viewer, *, is_dropped: bool = False) -> None:
        """Forget a viewer; count it as dropped if it was too slow."""
        with self._lock:
            self._viewers.discard(viewer)
            self.dropped += is_dropped

    def close(self) -> None:
        """End the streams of all viewers."""
        with self._lock:
            self._is_closed = True
            for each in self._viewers:
                each.end()

    def counts(self) -> Mapping[str, int]:
        """Return the number of viewers, of dropped and of refused ones."""
        with self._lock:
            return {"viewers": len(self._viewers), "dropped": self.dropped, "refused": self.refused}


class Monitor(Startable):
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
        token: that viewers need, 16 characters or more; without one it listens on loopback only. ``None``: see
            ``token_file``.
        token_file: file with the token; ``None``: the variables MESSAGING_MONITOR_TOKEN and
            MESSAGING_MONITOR_TOKEN_FILE.
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
        check_optional("m", m, Messaging)
        check_optional("services", services, ServiceRegistry)
        check_instance("channel", channel, str)
        check_port(port)
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
        self._sampler = (
            SnapshotSampler(self._services, process_name(), self._interval, self._masking) if m is None else None
        )
        self._lock = threading.Lock()  # guards ``_denied``
        self._denied = 0
        self._routes: dict[str, tuple[str, Callable[[HttpRequest], HttpAnswer]]] = {
            **dict.fromkeys(_FILES, ("GET", self._file)),
            "/api/events": ("GET", self._events),
            "/api/snapshot": ("GET", self._snapshot),
            "/api/inspect": ("POST", self._inspect),
        }
        self._stopping = Flag()
        self._ended = Flag()
        self._server: WebServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The address of the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"

    def start(self) -> Self:
        """Listen, and subscribe to snapshots.

        Raises:
            ConfigurationError: the address cannot be used.
            MessagingError: the subscription is impossible.
            ClosedError: it was started before.
        """
        if self._server is not None or self._stopping.is_set():
            raise ClosedError("a monitor is started once; make another one")
        server = self._server = WebServer("monitor", self.host, self.port, self._answer, HEADERS, _MAX_CONNECTIONS)
        self.port = server.port
        server.start()
        with on_failure(self.close):
            if self._m is not None:
                self._published = PublishedSnapshots(self._m, self._channel, self._masking)
            self._thread = start_thread(self._watch, "messaging-monitor")
        logger.info("monitor: %s", self.url)
        return self

    def close(self) -> None:
        """Stop, and end the streams of all viewers; waits for at most 10 seconds. Idempotent."""
        is_first = not self._stopping.is_set()
        self._stopping.set()
        self._viewers.close()
        if self._server is not None and is_first:
            self._server.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._ended.wait(_PATIENCE)
        self._inspector.close()
        if self._published is not None:
            self._published.stream.close()

    # --- on the thread of the monitor

    def _watch(self) -> None:
        """Take snapshots, and tell the viewers what has changed, until the monitor stops."""
        try:
            while not self._stopping.is_set():
                try:
                    for change in self._changes():
                        self._tell(change)
                    self._viewers.put("counts", _event("counts", self._counts()))
                except Exception:
                    logger.exception("monitor: a snapshot failed; trying again in %g s", self._interval)
                self._stopping.wait(self._interval)
        finally:
            self._ended.set()

    def _changes(self) -> list[BoardChange]:
        """Return what has changed since the last call."""
        changes: list[BoardChange] = []
        if self._sampler is not None:
            changes += self._board.add("", self._sampler.take())
        if self._published is not None:
            for key, snapshot, age in self._published.take():
                changes += self._board.remove(key) if snapshot is None else self._board.add(key, snapshot, age)
        return changes + self._board.tick()

    def _tell(self, change: BoardChange) -> None:
        topic = f"process/{change.key}"
        if change.view is None:
            self._viewers.remove(topic, _event("gone", {"key": change.key}))
        else:
            self._viewers.put(topic, _event("process", change.view))

    def _counts(self) -> dict[str, Any]:
        published = self._published
        return {
            **self._viewers.counts(),
            "crowded_out": self._board.refused,
            "invalid": 0 if published is None else published.invalid,
            "failure": None if published is None or published.failure is None else str(published.failure),
            "denied": self._denied,
            "instances": self._inspector.instances(),
        }

    # --- requests

    def _answer(self, request: HttpRequest) -> HttpAnswer:
        problem = self._access.problem(request)
        if problem is not None:
            with self._lock:
                self._denied += 1
            return text_answer(*problem, {"WWW-Authenticate": "Bearer"} if problem[0] == 401 else {})
        method, answer = self._routes.get(request.path, ("", None))
        if answer is None:
            return text_answer(404, "not found")
        if request.method.replace("HEAD", "GET") != method:
            return text_answer(405, "method not allowed")
        return answer(request)

    def _file(self, request: HttpRequest) -> HttpAnswer:
        name, content_type = _FILES[request.path]
        content = resources.files(__package__).joinpath("static", name).read_bytes()
        return HttpAnswer(200, content, {"Content-Type": content_type})

    def _snapshot(self, _: HttpRequest) -> HttpAnswer:
        processes = {key: snapshot.fields() for key, snapshot in self._board.snapshots().items()}
        return _json(200, {"instances": self._inspector.instances(), "processes": processes})

    def _events(self, _: HttpRequest) -> HttpAnswer:
        viewer = self._viewers.join()
        if viewer is None:
            return _problem(503, "too many viewers, or the monitor is stopping")
        return HttpAnswer(200, self._changes_for(viewer), _EVENTS)

    def _changes_for(self, viewer: Viewer) -> Generator[bytes, None, None]:
        """Yield what a viewer is sent, until the server stops."""
        is_dropped = False
        try:
            yield _event("histories", self._board.histories())
            last = clock.monotonic()
            while not viewer.is_ended:
                data = b"".join(viewer.take(_PAUSE))
                if not data and clock.monotonic() - last > _HEARTBEAT:
                    data = b": still here\n\n"
                if data:
                    last = clock.monotonic()
                yield data
        except TimeoutError:
            is_dropped = True
        finally:
            self._viewers.leave(viewer, is_dropped=is_dropped)

    def _inspect(self, request: HttpRequest) -> HttpAnswer:
        body = request.read(_MAX_BODY)
        if len(body) > _MAX_BODY:
            return _problem(413, f"a request has at most {_MAX_BODY} bytes")
        try:
            wanted = InspectionRequest.of(json.loads(body))
            inspection = self._inspector.open(wanted)
        except (ValueError, RecursionError) as error:
            return _problem(400, str(error) if isinstance(error, MessagingError) else "the request is no JSON")
        except BoundReachedError as error:
            return _problem(503, str(error))
        except MessagingError as error:
            return _problem(502, str(error))
        return HttpAnswer(200, self._messages(inspection, wanted.seconds), _EVENTS)

    def _messages(self, inspection: Inspection, seconds: float) -> Generator[bytes, None, None]:
        """Yield the messages of an inspection as events, until its time is over or the server stops."""
        end = clock.monotonic() + seconds
        try:
            while clock.monotonic() < end and not self._stopping.is_set():
                if inspection.failure is not None:
                    yield _event("failure", {"text": str(inspection.failure)})
                    return
                messages = inspection.take()
                yield _event("messages", {"total": inspection.total, "messages": messages}) if messages else b""
                if inspection.is_exhausted:
                    yield _event("end", {"text": "as many bytes were shown as one inspection may show"})
                    return
                self._stopping.wait(_PAUSE)
            yield _event("end", {"text": "the time of the inspection is over"})
        finally:
            inspection.close()


def _json(status: int, value: Any) -> HttpAnswer:
    return HttpAnswer(status, json.dumps(value, separators=(",", ":")).encode(), {"Content-Type": "application/json"})


def _problem(status: int, text: str) -> HttpAnswer:
    return _json(status, {"problem": text})


def _event(name: str, value: Any) -> bytes:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
