"""The control socket of a running gateway: how the command line asks it for its state, or to replay dead letters.

A Unix socket ``control`` in the data folder, for the user of the gateway and root only. A request is one line of JSON,
such as ``{"call":"status"}``. The answer is one line, ``{"result": …}`` or ``{"error": [class, text]}``. A connection
is for one request.

**Threads.** The thread ``messaging-gateway-control`` accepts connections. Each request is read and executed on a thread
of its own, at most ``MAX_CONNECTIONS`` at a time: a replay that lasts does not hold up a look at the state.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from messaging import errors
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, ConfigurationError, ConnectFailedError, MessagingError
from messaging.errors.text import SafeLog, did_you_mean
from messaging.execution import clock, start_thread

logger = SafeLog(__name__)

FILE: Final = "control"
#: connections that are served at a time; further ones are told that the gateway is busy
MAX_CONNECTIONS: Final = 8
_THREAD_NAME: Final = "messaging-gateway-control"
#: longest request, bytes
_MAX_REQUEST: Final = 2**20
#: longest answer, bytes
_MAX_ANSWER: Final = 2**26
#: how long a client may take to send its request, and to take the answer, seconds
_CLIENT_TIMEOUT: Final = 5.0
#: how often the thread looks whether it is closed, and the pause after a failure to accept, seconds
_LOOK: Final = 0.5
#: pid, user and group of a client
_CREDENTIALS: Final = struct.Struct("3i")

Calls = Mapping[str, Callable[[Mapping[str, Any]], Any]]


class ControlServer:
    """Executes the requests of the command line.

    Args:
        folder: the data folder.
        calls: name -> function of the arguments, which returns what JSON can express and raises ``MessagingError``. It
            is called on any of several threads.

    Raises:
        ConfigurationError: the socket cannot be made, or another gateway uses the folder.
    """

    def __init__(self, folder: Path, calls: Calls) -> None:
        self._path = folder / FILE
        self._calls = calls
        self._is_closed = False
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with on_failure(self._socket.close):
            try:
                self._bind()
            except OSError as error:
                raise ConfigurationError(f"control socket {self._path}: {error}") from error
        self._socket.settimeout(_LOOK)
        self._thread = start_thread(self._serve, _THREAD_NAME)

    def _bind(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(self._path.lstat().st_mode):
                if _is_served(self._path):
                    raise ConfigurationError(
                        f"control socket {self._path}: another gateway runs with this data folder; give each its own"
                    )
                self._path.unlink()  # of a gateway that was killed
        with _short(self._path) as name:
            # before it has a name: afterwards others could connect in between. A umask would concern all threads
            with contextlib.suppress(OSError):  # Linux only
                os.fchmod(self._socket.fileno(), 0o600)
            self._socket.bind(name)
        self._path.chmod(0o600)
        self._inode = self._path.lstat().st_ino
        self._socket.listen(MAX_CONNECTIONS)

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._socket.fileno() < 0:
                    return  # closed
                logger.warning("control socket: cannot accept a client: %s; trying again", error)
                clock.pause(_LOOK)  # too many open files, say
                continue
            if not self._places.acquire(blocking=False):
                self._refuse(connection)
                continue
            try:
                start_thread(lambda taken=connection: self._serve_client(taken), _THREAD_NAME)  # type: ignore[misc]
            except RuntimeError as error:  # no thread can be started
                self._places.release()
                connection.close()
                logger.warning("control socket: a client is not served: %s", error)

    @staticmethod
    def _refuse(connection: socket.socket) -> None:
        text = f"the gateway is busy with {MAX_CONNECTIONS} requests; try again later"
        with connection, contextlib.suppress(OSError):
            connection.settimeout(0.0)
            connection.sendall(json.dumps({"error": ["MessagingError", text]}).encode() + b"\n")

    def _serve_client(self, connection: socket.socket) -> None:
        try:
            with connection:
                if not _is_permitted(connection):
                    logger.warning("control socket: refused a client of another user")
                    return
                line = _line(connection, _MAX_REQUEST, _CLIENT_TIMEOUT)
                connection.settimeout(None)
                answer = _encoded(self._answer(line))
                connection.settimeout(_CLIENT_TIMEOUT)
                connection.sendall(answer)
        except OSError as error:
            logger.debug("control socket: a client is gone: %s", error)
        except Exception:
            logger.exception("control socket: a request failed")
        finally:
            self._places.release()

    def _answer(self, line: bytes) -> Mapping[str, Any]:
        try:
            name, call, arguments = self._understood(line)
        except ArgumentError as error:
            return {"error": ["ArgumentError", str(error)]}
        try:
            return {"result": call(arguments)}
        except MessagingError as error:
            return {"error": [type(error).__name__, str(error)]}
        except Exception as error:
            logger.exception("control socket: %r failed", name)
            return {"error": ["MessagingError", f"{type(error).__name__}: {error}"]}

    def _understood(self, line: bytes) -> tuple[str, Callable[[Mapping[str, Any]], Any], Mapping[str, Any]]:
        """Return name, function and arguments of a request. Raises ``ArgumentError``."""
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"the request is no JSON: {type(error).__name__}") from None
        name = request.get("call") if isinstance(request, dict) else None
        if not isinstance(name, str):
            raise ArgumentError("""the request must be an object such as {"call": "status"}""")
        call = self._calls.get(name)
        if call is None:
            hint = did_you_mean(name, self._calls) or f"there are {', '.join(self._calls)}"
            raise ArgumentError(f"there is no request {name!a:.60}; {hint}")
        arguments = request.get("arguments", {})
        if not isinstance(arguments, dict):
            raise ArgumentError(f"the arguments of {name!r} must be an object, not {type(arguments).__name__}")
        return name, call, arguments

    def close(self) -> None:
        """Take no more requests, and remove the socket. Idempotent. Does not wait for requests that are executed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._socket.close()
        with contextlib.suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()


def call(folder: Path, name: str, arguments: Mapping[str, Any] | None = None, *, timeout: float = 600.0) -> Any:
    """Have a running gateway execute a request, and return the result.

    Args:
        folder: the data folder of the gateway.
        name: of the request.
        arguments: what JSON can express.
        timeout: how long to wait for the result, seconds.

    Raises:
        ConnectFailedError: no gateway runs with this folder, or it is that of another user.
        MessagingError: the request failed: an error of the class that the gateway raised, where it is one of
            ``messaging.errors``.
    """
    request = json.dumps({"call": name, "arguments": dict(arguments or {})}).encode() + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            with _short(folder / FILE) as path:
                client.settimeout(_CLIENT_TIMEOUT)
                client.connect(path)
        except PermissionError as error:
            raise ConnectFailedError(
                f"the gateway with the data folder {folder} belongs to another user; run the command as that user"
            ) from error
        except OSError as error:
            raise ConnectFailedError(f"no gateway runs with the data folder {folder}: {error.strerror}") from error
        try:
            # a gateway that is busy answers before it has read the request
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(request)
            answer = json.loads(_line(client, _MAX_ANSWER, timeout))
            if "error" in answer:
                kind, text = answer["error"]
            else:
                return answer["result"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MessagingError(f"the gateway did not answer: {type(error).__name__}: {error}") from error
    found = getattr(errors, str(kind), None)
    is_plain = isinstance(found, type) and issubclass(found, ArgumentError | ConfigurationError)
    raise (found if is_plain and found is not None else MessagingError)(str(text))


def _encoded(answer: Mapping[str, Any]) -> bytes:
    """Return the line of an answer; of one that is too long, an error."""
    line = json.dumps(answer).encode() + b"\n"
    if len(line) <= _MAX_ANSWER:
        return line
    return json.dumps({"error": ["MessagingError", f"the answer is too long: {len(line)} bytes"]}).encode() + b"\n"


def _line(connection: socket.socket, most: int, timeout: float) -> bytes:
    """Return the bytes before the first line feed.

    Raises:
        OSError: the other side is gone, sends more than ``most`` bytes, or takes longer than ``timeout`` seconds.
    """
    found = bytearray()
    deadline = clock.monotonic() + timeout
    while True:
        left = deadline - clock.monotonic()
        if left <= 0:
            raise TimeoutError(f"no line within {timeout:g} s")
        connection.settimeout(left)
        data = connection.recv(65_536)
        if not data:
            raise ConnectionResetError("the connection ended within a line")
        head, feed, _ = data.partition(b"\n")
        found += head
        if len(found) > most:
            raise OSError(f"a line is longer than {most} bytes")
        if feed:
            return bytes(found)


def _is_served(path: Path) -> bool:
    """Return whether a process listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, _short(path) as name:
        probe.settimeout(_CLIENT_TIMEOUT)
        try:
            probe.connect(name)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


def _is_permitted(connection: socket.socket) -> bool:
    """Return whether a client runs as the user of the gateway, or as root, where the system tells that."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True  # the mode of the socket decides
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
    return user in (0, os.geteuid())


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Give a name of a socket that fits: its folder as a file descriptor, where the path is too long for the system."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
