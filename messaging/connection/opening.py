"""Attempts to connect: opens the adapter at one endpoint after the other."""

from __future__ import annotations

import asyncio
from typing import Final

from messaging.adapter import Adapter, Events, TakesEndpoint
from messaging.connection.hosts import MAX_SERVERS, Hosts
from messaging.connection.names import addresses_of, is_address
from messaging.connection.proxies import parse_proxy
from messaging.connection.renewal import CredentialRenewal
from messaging.errors import (
    AuthenticationError,
    ConnectFailedError,
    ConnectionLostError,
    CredentialsError,
    InvalidUrlError,
    MessagingError,
    RedirectedError,
    TakenOverError,
)
from messaging.errors.text import SafeLog
from messaging.execution import Engine, clock, of_library
from messaging.model import Endpoint, Host, parse_host
from messaging.model.settings import NetworkSettings

logger = SafeLog(__name__)

#: a connection that lasted this long resets the delays between attempts, seconds
STABLE_SECONDS: Final = 5.0
#: for so long the addresses of a name are not asked for again, seconds
_FRESH_SECONDS: Final = 1.0
#: shortest share of the deadline of a message that an attempt at one of several endpoints gets, seconds
_LEAST_SHARE: Final = 1.0
#: errors that one error text names
_SHOWN: Final = 8


class Opener:
    """Connects one adapter. On the engine loop.

    **Deadlines.** With one endpoint an attempt takes at most ``connect_timeout``. With several, the first attempt at
    each takes at most its share of half the deadline of a message (the setting ``timeout``), and each further one
    twice as long, up to ``connect_timeout``: messages that are published meanwhile can wait for a host that answers.
    Credentials have ``connect_timeout`` of their own, before the attempt: no host is left because a provider is slow.

    Args:
        engine: runs the attempts.
        adapter: connects.
        renewal: provides the credentials that may change.

    Attributes:
        hosts: chooses the endpoints.
    """

    def __init__(self, engine: Engine, adapter: Adapter, renewal: CredentialRenewal) -> None:
        settings = adapter.settings
        self._engine = engine
        self._adapter = adapter
        self._renewal = renewal
        self._connect_timeout = settings.connect_timeout
        self._timeout = settings.timeout
        proxy = parse_proxy(settings.proxy) if isinstance(settings, NetworkSettings) else None
        #: name of the proxy, which looks up the names of the hosts
        self._proxy = None if proxy is None else proxy.host
        self.hosts = Hosts(
            adapter.url.hosts,
            is_shuffled=settings.host_order == "shuffled",
            shortest=settings.reconnect_min,
            longest=settings.reconnect_max,
            clock=lambda: clock.time_of(engine.loop),
        )
        #: when the addresses of a host were asked for
        self._resolved_at: dict[Host, float] = {}
        #: hosts whose last look-up had no answer in time
        self._unresolved: set[Host] = set()

    @property
    def is_alone(self) -> bool:
        """Whether there is one endpoint to connect to."""
        known = self.hosts.endpoints
        return known == [self.hosts.current or known[0]]

    @property
    def where(self) -> str:
        """The endpoint that was tried last, or is connected; all hosts before the first attempt."""
        url, current = self._adapter.url, self.hosts.current
        return url.address if current is None else str(current)

    # --- attempts

    async def once(self, events: Events) -> bool:
        """Try every endpoint, and return what ``Adapter.open`` returned at the first that connects.

        An endpoint that did not answer within its share of the deadline is tried once more with ``connect_timeout``.

        Raises:
            AuthenticationError: a host refused the credentials, and no host connected.
            CredentialsError: there are no credentials.
            MessagingError: no host connected.
        """
        errors: dict[Endpoint, MessagingError] = {}
        asked: set[Host] = set()
        asked_again: set[Host] = set()
        while (endpoint := self.hosts.untried()) is not None:
            is_second = self.hosts.attempts(endpoint) > 0
            timeout = self._connect_timeout if is_second else self._share(endpoint)
            if not await self._resolve(endpoint, asked_again if is_second else asked, timeout):
                continue
            try:
                return await self.attempt(endpoint, events, timeout)
            except CredentialsError:
                raise  # every other host would ask for the same
            except MessagingError as error:
                errors[endpoint] = error
        raise _of_all(self._adapter, [*errors.values()])

    async def ready(self) -> Endpoint:
        """Wait until an endpoint can be tried, and return it."""
        asked: set[Host] = set()
        while True:
            endpoint, wait = self.hosts.next()
            if wait > 0:
                await clock.sleep(wait)
                asked.clear()
            elif await self._resolve(endpoint, asked, self._share(endpoint)):
                return endpoint

    async def attempt(self, endpoint: Endpoint, events: Events, timeout: float | None = None) -> bool:
        """Open the adapter at ``endpoint``; see ``Adapter.open``.

        Args:
            endpoint: where to connect.
            events: told what happens to the connection.
            timeout: deadline, seconds; ``None``: see the class.

        Raises:
            MessagingError: it failed; :attr:`hosts` knows, and has the next one.
        """
        hosts = self.hosts
        hosts.trying(endpoint)
        timeout = timeout or self._share(endpoint)
        adapter = self._adapter
        where = str(adapter.url) if self.is_alone else str(endpoint)
        is_final = True
        failure: MessagingError
        try:
            if endpoint.address is None and endpoint.host in self._unresolved:
                raise TimeoutError  # the adapter would look the name up, and wait for the same answer
            if isinstance(adapter, TakesEndpoint):
                adapter.set_endpoint(endpoint)
            await self._renewal.prepare()
            try:
                async with clock.timeout(timeout):
                    resumed = await of_library(adapter.open(events))
            finally:
                _insist_on_cancellation()
        except TimeoutError:
            named = "its name" if self._proxy is None else f"the name of its proxy, {self._proxy!r},"
            why = f"; {named} is still being looked up" if endpoint.host in self._unresolved else ""
            failure = ConnectFailedError(f"no connection to {where} within {timeout:g} s{why}")
            is_final = timeout >= self._connect_timeout
        except RedirectedError as error:
            failure = error
        except ConnectionLostError as error:
            failure = ConnectFailedError(f"cannot connect to {where}: {error}")
            failure.__cause__ = error
        except MessagingError as error:
            failure = error
        except Exception as error:
            logger.exception("%s: the adapter failed to open", adapter.url.label(adapter.name, endpoint))
            failure = ConnectFailedError(f"cannot connect to {where}: {type(error).__name__}")
            failure.__cause__ = error
        else:
            hosts.connected()
            return resumed
        # credentials that may change may be right the next time
        needs_change = isinstance(failure, AuthenticationError) and not self._renewal.can_change
        was_tried = not isinstance(failure, CredentialsError)
        hosts.failed(needs_change=needs_change, is_final=is_final, was_tried=was_tried)
        raise self._followed(failure)

    def _share(self, endpoint: Endpoint) -> float:
        """Return the deadline of an attempt, seconds; see the class."""
        count = len(self.hosts.endpoints)
        if count == 1:
            return self._connect_timeout
        share = max(_LEAST_SHARE, self._timeout / (2 * count))
        return min(self._connect_timeout, share * 2.0 ** min(self.hosts.attempts(endpoint), 32))

    # --- losses

    def lost(self, cause: MessagingError, seconds: float) -> MessagingError:
        """Note the loss of a connection that lasted ``seconds``, and return its cause."""
        needs_change = isinstance(cause, TakenOverError)
        self.hosts.lost(is_stable=seconds > STABLE_SECONDS, needs_change=needs_change)
        return self._followed(cause)

    def _followed(self, error: MessagingError) -> MessagingError:
        """Follow a redirect. Return ``error``, or another one for a redirect that is not followed."""
        if not isinstance(error, RedirectedError):
            return error
        servers = []
        for server in error.servers[:MAX_SERVERS]:
            try:
                servers.append(parse_host(server))
            except InvalidUrlError:
                logger.warning(
                    "%s: the broker refers to %r, which is no host; leaving it out", self._label, server[:80]
                )
        is_able = isinstance(self._adapter, TakesEndpoint)
        followed = self.hosts.redirected(servers, is_permanent=error.is_permanent) if is_able and servers else []
        if followed:
            shown = ", ".join(map(str, followed))
            if error.is_permanent:
                logger.warning("%s: the broker has moved to %s; connecting there: change the URL", self._label, shown)
            else:
                logger.info("%s: the broker sends this client to %s; connecting there", self._label, shown)
            return error
        why = "it names no server" if not servers else "the servers that it names sent this client away, too"
        refused = ConnectFailedError(f"{error}; not followed: {why}", code=error.code, detail=error.detail)
        refused.__cause__ = error
        return refused

    @property
    def _label(self) -> str:
        return self._adapter.url.label(self._adapter.name, self.hosts.current)

    # --- names

    async def _resolve(self, endpoint: Endpoint, asked: set[Host], timeout: float) -> bool:
        """Look up the addresses of a host, or its proxy. Return whether they were known, so that the choice stands.

        A look-up that fails or takes more than ``timeout`` seconds leaves the addresses as they are. The hosts in
        ``asked`` are not looked up again, so that the choice has an end.
        """
        host = endpoint.host
        name = self._proxy or host.name
        if not isinstance(self._adapter, TakesEndpoint) or is_address(name) or host in asked:
            return True
        asked.add(host)
        loop = self._engine.loop
        known = self._resolved_at.get(host)
        if known is not None and clock.time_of(loop) - known < _FRESH_SECONDS and host not in self._unresolved:
            return True
        if len(self._resolved_at) > 2 * MAX_SERVERS + len(self.hosts.endpoints):
            self._resolved_at.clear()
            self._unresolved.clear()
        self._unresolved.discard(host)
        try:
            async with clock.timeout(timeout):
                addresses = await addresses_of(name)
        except TimeoutError:
            self._unresolved.add(host)
        except Exception as error:  # noqa: BLE001  # the adapter tries the name, and its error gives the reason
            logger.debug("%s: cannot look up %r: %s", self._label, name, error)
        else:
            if self._proxy is None:
                self.hosts.resolved(host, addresses)
        self._resolved_at[host] = clock.time_of(loop)
        return False


def _insist_on_cancellation() -> None:
    """Raise ``CancelledError`` if the task was cancelled: libraries turn it into an error of theirs, or a result."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _of_all(adapter: Adapter, errors: list[MessagingError]) -> MessagingError:
    """Return one error for all endpoints."""
    if len(errors) == 1:
        return errors[0]
    shown = "; ".join(map(str, errors[:_SHOWN])) + ("; ..." if len(errors) > _SHOWN else "")
    refusal = next((error for error in errors if isinstance(error, AuthenticationError)), None)
    text = f"cannot connect to any host of {adapter.url.address}: {shown}"
    if refusal is None:
        failure = ConnectFailedError(text)
    else:
        failure = AuthenticationError(text, code=refusal.code, detail=refusal.detail)
    failure.__cause__ = refusal or errors[-1]
    return failure
