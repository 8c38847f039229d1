"""What a program adds to the request of a WebSocket: headers and a query, which may hold secrets."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, Final
from urllib.parse import urlencode

from pydantic import SecretStr

from messaging.errors import ConnectFailedError
from messaging.execution import workers
from messaging.functions import is_coroutine

_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
#: printable ASCII without space; "#" would begin a fragment
_QUERY: Final = re.compile(r"[!\"$-~]*\Z")
#: the handshake's own
_RESERVED: Final = re.compile(
    r"(connection|upgrade|content-length|transfer-encoding|sec-websocket-.*)\Z", re.IGNORECASE
)

#: share of the time to connect that the program's callable may take
_SHARE: Final = 0.8


class WebHeaders:
    """The setting ``ws_headers``. Its repr shows no value."""

    __slots__ = ("_calling", "_lock", "_source")

    def __init__(self, source: Mapping[str, str] | Callable[[], Mapping[str, str]]) -> None:
        self._source = source
        self._lock = threading.Lock()  # guards _calling
        #: the call of the program's callable that has not returned
        self._calling: Future[Mapping[str, str]] | None = None

    def __repr__(self) -> str:
        return "<WebHeaders>"

    def now(self, timeout: float | None) -> Mapping[str, str]:
        """Return the headers of the next request. On the dialing thread.

        The program's callable runs on a worker thread, once at a time. While it hangs, the next attempt waits for the
        same result, so that one thread at most hangs with it.

        Args:
            timeout: of the attempt to connect, seconds. The callable gets most of it, so that the error names it.

        Raises:
            ConnectFailedError: the callable failed, returned something else, or did not return in time.
        """
        source = self._source
        if isinstance(source, Mapping):
            return source
        with self._lock:
            calling, is_running = self._calling, self._calling is not None
            if calling is None:
                calling = self._calling = Future()
        if not is_running:
            self._start(source, calling)
        limit = None if timeout is None else timeout * _SHARE
        wait([calling], limit)
        if not calling.done():
            why = f"it did not return within {limit:g} s"
        elif (error := calling.exception()) is None:
            return calling.result()
        else:  # its text may hold a secret
            why = str(error) if isinstance(error, _InvalidHeaderError) else f"it raised {type(error).__name__}"
        raise ConnectFailedError(f"option 'ws_headers': the callable returned no headers: {why}")

    def _start(self, source: Callable[[], Mapping[str, str]], calling: Future[Mapping[str, str]]) -> None:
        def call() -> None:
            try:
                headers = _checked(source())
            except BaseException as error:  # noqa: BLE001  # the one who waits is told
                self._calling = None
                calling.set_exception(error)
            else:
                self._calling = None
                calling.set_result(headers)

        try:
            workers().submit(call)
        except RuntimeError as error:  # no thread can be started
            self._calling = None
            calling.set_exception(error)


class _InvalidHeaderError(ValueError):
    """Headers that HTTP does not carry. Its text shows no value."""


def _checked(headers: object) -> Mapping[str, str]:
    if not isinstance(headers, Mapping):
        raise _InvalidHeaderError(f"must be a mapping of str to str, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _NAME.match(name) or _RESERVED.match(name):
            raise _InvalidHeaderError(f"{name!r:.80} is no name of a header, or one that the handshake sets")
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise _InvalidHeaderError(f"the value of {name!r:.80} must be a str of printable ASCII")
    return dict(headers)


def as_headers(value: Any) -> WebHeaders | None:
    """Return the setting ``ws_headers``: a mapping, its JSON, or a callable without parameters that returns one.

    Raises:
        ValueError: it is neither.
    """
    if value is None or isinstance(value, WebHeaders):
        return value
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("must be a JSON object of names and values") from None
    if callable(value) and not isinstance(value, type):
        if is_coroutine(value):
            raise ValueError("must be a plain function: it runs on a worker thread")
        return WebHeaders(value)
    return WebHeaders(_checked(value))


def as_query(value: Any) -> Any:
    """Return the setting ``ws_query``: text that is percent-encoded already, or a mapping that is encoded here.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, Mapping):
        return SecretStr(urlencode(value))
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    if isinstance(text, str):
        text = text.removeprefix("?")
        if not _QUERY.match(text):
            raise ValueError("holds characters that a query does not: percent-encode them, or give a mapping")
        return SecretStr(text)
    return value
