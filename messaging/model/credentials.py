"""Credentials that change: the value that a provider returns, and the provider as the settings hold it.

A provider is a callable or a coroutine function of the application, a command, or a file.
:mod:`messaging.connection.credentials` asks it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import shlex
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

from pydantic import SecretStr

from messaging.errors import ArgumentError
from messaging.errors.checks import is_coroutine
from messaging.errors.text import tolerant
from messaging.execution import clock, running_loop
from messaging.model.channels import MAX_BYTES, forbidden_character

#: characters of the longest password that is looked at for a lifetime
_LONGEST_TOKEN: Final = 65_536


class Credentials:
    """User name and password of a client, and how long they are valid. Immutable; its repr shows no password.

    A callable that ``connect(credentials=...)`` was given returns it::

        def token() -> messaging.Credentials:
            answer = issue_token()
            return messaging.Credentials("plant", answer.token, valid_for=answer.lifetime)

    Args:
        username: the user name; without it, the one of the URL or of the setting ``username``.
        password: the password or token.
        valid_for: seconds from now until the credentials expire.
        expires_at: the time at which they expire instead: seconds since the epoch, or a ``datetime`` with a time zone.
            Without either, they expire at the ``exp`` of a password that is a JSON Web Token, and otherwise never.

    Attributes:
        username: ``None`` for that of the URL or of the settings.
        password: a ``SecretStr``.
        expires_at: seconds since the epoch; ``None`` for never.

    Raises:
        ArgumentError: an argument is malformed. The text never repeats a value.
    """

    __slots__ = ("_deadline", "expires_at", "password", "username")

    username: str | None
    password: SecretStr
    expires_at: float | None
    _deadline: float

    def __init__(
        self,
        username: str | None = None,
        password: str | SecretStr | None = None,
        *,
        valid_for: float | None = None,
        expires_at: float | datetime | None = None,
    ) -> None:
        if isinstance(password, str):
            password = SecretStr(password)  # from here on no variable of this frame shows it
        if username is not None:
            _check_text("username", username)
        if not isinstance(password, SecretStr):
            raise ArgumentError(f"password must be a str, not {type(password).__name__}")
        _check_text("password", password.get_secret_value())
        if valid_for is not None and expires_at is not None:
            raise ArgumentError("give valid_for or expires_at, not both")
        left = _seconds_left(password, valid_for, expires_at)
        put = object.__setattr__
        put(self, "username", username)
        put(self, "password", password)
        put(self, "expires_at", None if left is None else clock.wall() + left)
        # monotonic: a clock that is set meanwhile changes nothing
        put(self, "_deadline", math.inf if left is None else clock.monotonic() + left)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Credentials cannot be changed: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Credentials cannot be changed: {name}")

    @property
    def remaining(self) -> float:
        """Seconds until the credentials expire: infinite if they never do, negative once they have."""
        return self._deadline - clock.monotonic()

    def is_same_secret(self, other: Credentials) -> bool:
        """Return whether user name and password are those of ``other``."""
        return isinstance(other, Credentials) and self.username == other.username and self.password == other.password

    @tolerant
    def __repr__(self) -> str:
        expiry = "" if self.expires_at is None else f", expires_at={self.expires_at:.3f}"
        return f"Credentials({self.username!r}, '***'{expiry})"

    def __reduce__(self) -> Any:
        raise TypeError("Credentials cannot be pickled: they hold a secret")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a str, not {type(value).__name__}")
    if not value:
        raise ArgumentError(f"{name} is empty")
    bad = forbidden_character(value)
    if bad is not None:
        raise ArgumentError(f"{name} holds {bad}")
    if len(value.encode()) > MAX_BYTES:
        raise ArgumentError(f"{name} is longer than {MAX_BYTES} bytes in UTF-8")


def _seconds_left(password: SecretStr, valid_for: float | None, expires_at: float | datetime | None) -> float | None:
    if valid_for is not None:
        seconds = _number("valid_for", valid_for)
        if seconds <= 0:
            raise ArgumentError("valid_for must be more than 0 seconds")
        return seconds
    if isinstance(expires_at, datetime):
        if expires_at.tzinfo is None:
            raise ArgumentError("expires_at must be a datetime with a time zone, such as datetime.now(UTC)")
        return expires_at.timestamp() - clock.wall()
    if expires_at is not None:
        return _number("expires_at", expires_at) - clock.wall()
    expiry = token_expiry(password)
    return None if expiry is None else expiry - clock.wall()


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ArgumentError(f"{name} must be a finite number of seconds")
    return float(value)


def token_expiry(password: SecretStr) -> float | None:
    """Return the time at which a JSON Web Token expires, seconds since the epoch (RFC 7519, 4.1.4).

    The signature is not verified: the time only says when to ask for the next token. ``None`` for any other password.
    """
    parts = password.get_secret_value().split(".") if len(password) <= _LONGEST_TOKEN else []
    if len(parts) != 3 or not parts[0].startswith("eyJ"):  # an object of JSON in base64
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return None
    expiry = claims.get("exp") if isinstance(claims, dict) else None
    if isinstance(expiry, bool) or not isinstance(expiry, int | float) or not 0 < expiry < 1e12:
        return None
    return float(expiry)


class Provider:
    """A callable that returns credentials, and the event loop of its coroutines. Its repr shows no argument.

    Attributes:
        function: the callable.
        loop: the loop that was running when it was given; ``None`` if there was none.
        is_coroutine: whether it is a coroutine function.
    """

    __slots__ = ("function", "is_coroutine", "loop")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.loop: asyncio.AbstractEventLoop | None = running_loop()
        self.is_coroutine = is_coroutine(function)

    def __repr__(self) -> str:
        return "<Provider of credentials>"


def as_provider(value: object) -> Provider | None:
    """Return the setting ``credentials`` as a provider.

    Raises:
        ValueError: it is not callable.
    """
    if value is None or isinstance(value, Provider):
        return value
    if not callable(value) or isinstance(value, type):
        raise ValueError(
            f"must be a callable or coroutine function without parameters, not {type(value).__name__}; "
            "credentials that do not change are username and password"
        )
    return Provider(value)


def as_command(value: object) -> tuple[str, ...] | None:
    """Return the setting ``password_command`` as program and arguments.

    Raises:
        ValueError: it is not a command.
    """
    if value is None:
        return None
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("has a quotation mark without its other half") from None
    if not isinstance(words, Sequence) or not words or not all(isinstance(each, str) for each in words):
        raise ValueError("must be a command line, or a list of a program and its arguments")
    if not words[0] or any("\0" in each for each in words):
        raise ValueError("must begin with the name of a program, and hold no NUL")
    return tuple(words)
