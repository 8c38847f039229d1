"""What a program adds to the request of a WebSocket: headers and a query, which may hold secrets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlencode

from pydantic import SecretStr

from messaging.errors import ConnectFailedError
from messaging.errors.checks import is_coroutine
from messaging.execution import clock, on_worker, shielded

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

    __slots__ = ("_calling", "_source")

    def __init__(self, source: Mapping[str, str] | Callable[[], Mapping[str, str]]) -> None:
        self._source = source
        #: the call of the program's callable that has not returned
        self._calling: asyncio.Future[Mapping[str, str]] | None = None

    def __repr__(self) -> str:
        return "<WebHeaders>"

    async def now(self, timeout: float) -> Mapping[str, str]:
        """Return the headers of the next request. On the engine loop.

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
        limit = timeout * _SHARE
        try:
            if self._calling is None:
                self._calling = on_worker(lambda: _called(source))
                self._calling.add_done_callback(self._returned)
            async with clock.timeout(limit):
                return await shielded(self._calling)
        except TimeoutError:
            why = f"it did not return within {limit:g} s"
        except (_InvalidHeaderError, RuntimeError) as error:  # or no thread can be started
            why = str(error)
        raise ConnectFailedError(f"option 'ws_headers': the callable returned no headers: {why}")

    def _returned(self, _: object) -> None:
        self._calling = None


def _called(source: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
    try:
        headers = source()
    except BaseException as error:  # noqa: BLE001  # the caller of ``now`` is told
        # its text may hold a secret
        raise _InvalidHeaderError(f"it raised {type(error).__name__}") from None
    return _checked(headers)


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
