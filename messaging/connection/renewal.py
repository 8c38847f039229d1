"""Renewal of credentials: asked for before each connection, and again before they expire.

**When.** Credentials that expire are asked for again after 60 to 75 % of their lifetime, at random, so that many
clients do not ask at the same time. A password file is looked at every second, and read when it has changed.

**How.** The adapter logs in anew on the connection that it has, or ends it as planned and makes another one; see
``TakesCredentials``.

**Failures.** A provider that fails is asked again, with growing delays, as long as the connection lasts: the broker
decides what it does with a client whose credentials have expired.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any, Final

from messaging.adapter import Adapter, TakesCredentials
from messaging.connection.credentials import source_of
from messaging.errors import ConnectionLostError, CredentialsError, InvalidOptionError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Backoff, Engine, clock, jitter, of_library, on_worker
from messaging.model.credentials import Credentials
from messaging.model.settings import PASSWORD_SOURCES

logger = SafeLog(__name__)

#: part of their lifetime after which credentials are renewed: bounds of a random number
_FRACTION: Final = (0.6, 0.75)
#: shortest and longest time between two renewals, seconds
_SHORTEST: Final = 0.2
_LONGEST: Final = 86_400.0
#: interval between two looks at a password file, seconds
LOOK: Final = 1.0
#: how long expired credentials are used before a provider that returns them is asked again, seconds
_EXPIRED: Final = 10.0
#: how long credentials that were asked for in advance serve the next connection, seconds
_HANDED: Final = 5.0


class CredentialRenewal:
    """The credentials of one connection. On the engine loop.

    Args:
        engine: runs the task that renews them.
        adapter: takes them.
        label: returns the name of the connection for the log.

    Raises:
        InvalidOptionError: the adapter takes no credentials that change.
    """

    def __init__(self, engine: Engine, adapter: Adapter, label: Callable[[], str]) -> None:
        self._engine = engine
        self._settings = adapter.settings
        self._label = label
        self._source = source_of(engine, adapter.settings)
        self._adapter: TakesCredentials | None = None
        #: credentials that connections use which are up or being made
        self._used: list[Credentials] = []
        #: when to ask again, in the loop's time
        self._due = math.inf
        #: credentials for the next connection, and until when they serve, in the loop's time
        self._handed: tuple[Credentials, float] | None = None
        self._is_expiry_told = False
        self._is_up = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        if self._source is None:
            return
        if isinstance(adapter, TakesCredentials):
            self._adapter = adapter
            adapter.credentials = self.ask
        elif adapter.settings.password is None:
            option = next(each for each in PASSWORD_SOURCES if getattr(adapter.settings, each) is not None)
            raise InvalidOptionError(option, f"option {option!r}: {adapter.url.scheme}:// takes no such credentials")
        else:  # MESSAGING_PASSWORD_FILE, which was read once
            self._source = None

    @property
    def can_change(self) -> bool:
        """Return whether the next attempt to connect may have other credentials."""
        return self._source is not None

    async def prepare(self) -> None:
        """Ask for the credentials of the next attempt to connect, before its deadline begins.

        Raises:
            CredentialsError: there are none.
        """
        if self._source is not None and (self._handed is None or self._now() >= self._handed[1]):
            self._handed = await self._source.ask(), self._now() + _HANDED

    async def ask(self) -> Credentials:
        """Return the credentials of a connection that is about to be made; see ``TakesCredentials.credentials``.

        Raises:
            CredentialsError: there are none.
        """
        source = self._source
        if source is None:
            raise CredentialsError("the credentials of this instance do not change")
        if not self._is_up:
            self._used.clear()
            self._due = math.inf
        handed, self._handed = self._handed, None
        found = handed[0] if handed is not None and self._now() < handed[1] else await source.ask()
        self._used.append(found)
        self._schedule(found)
        return found

    def connected(self) -> None:
        """Renew the credentials in time from now on."""
        self._is_up = True
        if self._source is not None and self._task is None:
            self._task = self._engine.spawn(self._run())

    def stop(self) -> None:
        """Stop renewing: the connection has ended."""
        self._is_up = False
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    # --- the task

    async def _run(self) -> None:
        failures = 0
        pauses = Backoff(self._settings.reconnect_min, self._settings.reconnect_max)
        while self._task is asyncio.current_task():
            try:
                await self._wait()
                await self._renew()
            except CredentialsError as error:
                failures += 1
                pause = self._pause(next(pauses))
                logger.log(
                    logging.WARNING if failures == 1 else logging.INFO,
                    "%s: cannot renew the credentials: %s; they %s; trying again in %.1f s",
                    self._label(), error, self._validity(), pause,
                )  # fmt: skip
                self._due = self._now() + pause
            except ConnectionLostError:
                return  # reported by the adapter: the next connection asks
            except MessagingError as error:
                self._due = self._now() + self._pause(next(pauses))
                logger.warning("%s: the new credentials are not in use: %s; trying again", self._label(), error)
            except Exception:
                logger.exception("%s: the adapter failed to renew the credentials; trying again", self._label())
                self._due = self._now() + self._pause(next(pauses))
            else:
                if failures:
                    logger.info("%s: the credentials are renewed again", self._label())
                    failures = 0
                    pauses.reset()

    async def _wait(self) -> None:
        """Return when it is time to ask, or when the password file has changed."""
        while (left := self._due - self._now()) > 0:
            source = self._source
            signature = None if source is None else source.signature
            self._changed.clear()
            try:
                async with clock.timeout(min(left, _LONGEST if signature is None else LOOK)):
                    await self._changed.wait()
            except TimeoutError:
                pass
            if source is not None and signature is not None:
                seen = await on_worker(signature)
                # a file that is missing is about to be replaced
                if seen is not None and seen != source.seen:
                    return

    async def _renew(self) -> None:
        source, adapter = self._source, self._adapter
        if source is None or adapter is None:
            return
        fresh = await source.ask()
        if all(each.is_same_secret(fresh) for each in self._used):
            self._used[:] = [fresh]
            self._due = math.inf
            self._schedule(fresh)
            return
        # if the adapter makes another connection, it is made with these
        self._handed = fresh, self._now() + _HANDED
        await of_library(adapter.renew(fresh))
        if self._task is asyncio.current_task():  # on the same connection
            self._handed = None
            self._used[:] = [fresh]
            self._due = math.inf
            self._schedule(fresh)
            logger.info("%s: credentials renewed", self._label())

    # --- times

    def _now(self) -> float:
        return clock.time_of(self._engine.loop)

    def _schedule(self, credentials: Credentials) -> None:
        remaining = credentials.remaining
        if remaining == math.inf:
            return
        left = max(_SHORTEST, remaining * jitter(*_FRACTION))
        if remaining <= 0:
            left = _EXPIRED
            if not self._is_expiry_told:
                logger.warning(
                    "%s: the provider returned credentials that expired %.0f s ago; trying them: a clock may be wrong",
                    self._label(), -remaining,
                )  # fmt: skip
        self._is_expiry_told = remaining <= 0
        self._due = min(self._due, self._now() + left)
        self._changed.set()

    def _pause(self, delay: float) -> float:
        """Return the delay until a provider that failed is asked again: short enough for more than one attempt."""
        remaining = min((each.remaining for each in self._used), default=math.inf)
        return max(_SHORTEST, min(delay, remaining / 4) if remaining > 0 else delay)

    def _validity(self) -> str:
        remaining = min((each.remaining for each in self._used), default=math.inf)
        if remaining == math.inf:
            return "are still in use"
        return f"expire in {remaining:.0f} s" if remaining > 0 else f"expired {-remaining:.0f} s ago"
