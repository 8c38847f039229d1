"""The control socket of a running gateway: how the command line asks it for its state, or to replay dead letters.

A Unix socket ``control`` in the data folder, for the user of the gateway only. A request is one line of JSON, such as
``{"call":"status"}``; the answer is one line, ``{"result": …}`` or ``{"error": [class, text]}``. One request for each
connection, one connection at a time.

**Threads.** The thread ``messaging-gateway-control`` accepts connections and executes requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from messaging import errors
from messaging.errors import ArgumentError, ConnectFailedError, MessagingError
from messaging.execution import start_thread
from messaging.text import SafeLog

if TYPE_CHECKING:
    from pathlib import Path

logger = SafeLog(__name__)

FILE: Final = "control"
_THREAD_NAME: Final = "messaging-gateway-control"
#: longest request and answer, bytes
_MAX_LINE: Final = 2**20
#: how long a client may take to send its request, seconds
_READ_TIMEOUT: Final = 5.0
#: how often the thread looks whether it is closed, seconds
_LOOK: Final = 0.5

Calls = Mapping[str, Callable[[Mapping[str, Any]], Any]]


class ControlServer:
    """Executes the requests of the command line.

    Args:
        folder: the data folder.
        calls: name -> function of the arguments, which returns what JSON can express and raises ``MessagingError``.

    Raises:
        ConfigurationError: the socket cannot be made.
    """

    def __init__(self, folder: Path, calls: Calls) -> None:
        self._path = folder / FILE
        self._calls = calls
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bind()
        except OSError as error:
            self._socket.close()
            raise errors.ConfigurationError(f"control socket {self._path}: {error}") from error
        self._socket.settimeout(_LOOK)
        self._thread = start_thread(self._serve, _THREAD_NAME)

    def _bind(self) -> None:
        # of a gateway that was killed: the buffers are locked by now, so no other gateway uses the folder
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(self._path.lstat().st_mode):
                self._path.unlink()
        with _short(self._path) as name:
            before = os.umask(0o177)
            try:
                self._socket.bind(name)
            finally:
                os.umask(before)
        self._socket.listen(8)

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            with connection:
                try:
                    connection.settimeout(_READ_TIMEOUT)
                    answer = self._answer(_line(connection))
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                except OSError as error:
                    logger.debug("control socket: a client is gone: %s", error)
                except Exception:
                    logger.exception("control socket: a request failed")

    def _answer(self, line: bytes) -> Mapping[str, Any]:
        try:
            request = json.loads(line)
            call = self._calls[request["call"]]
            arguments = request.get("arguments", {})
            if not isinstance(arguments, dict):
                raise TypeError("the arguments are no object")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return {"error": ["ArgumentError", f"the request is not understood: {type(error).__name__}"]}
        try:
            return {"result": call(arguments)}
        except MessagingError as error:
            return {"error": [type(error).__name__, str(error)]}
        except Exception as error:
            logger.exception("control socket: %r failed", request["call"])
            return {"error": ["MessagingError", f"{type(error).__name__}: {error}"]}

    def close(self) -> None:
        """Execute no more requests, and remove the socket. Idempotent."""
        self._is_closed = True
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def call(folder: Path, name: str, arguments: Mapping[str, Any] | None = None, *, timeout: float = 600.0) -> Any:
    """Have a running gateway execute a request, and return the result.

    Args:
        folder: the data folder of the gateway.
        name: of the request.
        arguments: what JSON can express.
        timeout: how long to wait for the result, seconds.

    Raises:
        ConnectFailedError: no gateway runs with this folder.
        MessagingError: the request failed: an error of the class that the gateway raised, where it is one of
            ``messaging.errors``.
    """
    request = json.dumps({"call": name, "arguments": dict(arguments or {})}).encode() + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            with _short(folder / FILE) as path:
                client.settimeout(_READ_TIMEOUT)
                client.connect(path)
        except OSError as error:
            raise ConnectFailedError(f"no gateway runs with the data folder {folder}: {error.strerror}") from error
        try:
            client.sendall(request)
            client.settimeout(timeout)
            answer = json.loads(_line(client))
        except (OSError, ValueError) as error:
            raise MessagingError(f"the gateway did not answer: {type(error).__name__}: {error}") from error
    if "error" in answer:
        kind, text = answer["error"]
        found = getattr(errors, kind, None)
        is_plain = isinstance(found, type) and issubclass(found, ArgumentError | errors.ConfigurationError)
        raise (found if is_plain and found is not None else MessagingError)(text)
    return answer["result"]


def _line(connection: socket.socket) -> bytes:
    """Return the bytes up to a line feed. Raises ``OSError``: the other side is gone, or sends too much."""
    found = b""
    while not found.endswith(b"\n"):
        data = connection.recv(65_536)
        if not data:
            raise ConnectionResetError("the connection ended within a line")
        found += data
        if len(found) > _MAX_LINE:
            raise OSError("a line is too long")
    return found


@contextlib.contextmanager
def _short(path: Path) -> Any:
    """Give a name of a socket that fits: its folder as a file descriptor, where the path is too long for the system."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
