"""The choice of the host to connect to.

The hosts of the URL are tried in their order (``host_order``), a name with several addresses address by address. Each
such *endpoint* has delays of its own:

- The first endpoint in the order whose delay is over is next, those first that were tried least since the last
  connection. If all have to wait, it is the one that waits least.
- After an endpoint failed, the next one is tried at once.
- After a connection was lost, its endpoint comes after all others whose delay is over.
- Delays of an endpoint grow until a connection to it lasts.

**Redirects.** A broker may name other servers. They are tried first, without delay. Temporary ones are forgotten once
a connection is made. Permanent ones take the place of the host that named them, which moves to the end of the order.
A server that redirected this client itself is not followed to again, and :data:`MAX_REDIRECTS` are followed, within
the longest delay. So hosts that redirect in a circle are retried with growing delays like hosts that fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import SystemRandom
from typing import Final

from messaging.execution import Backoff, jitter
from messaging.model import Endpoint, Host

#: redirects that are followed within the longest delay
MAX_REDIRECTS: Final = 8
#: servers of one redirect, and addresses of one name; further ones are left out
MAX_SERVERS: Final = 16
#: hosts that permanent redirects have added
_MAX_ADDED: Final = 16

shuffle: Final = SystemRandom().shuffle

_Key = tuple[str, int | None]


class _HostRecord:
    """The delays and attempts of one endpoint."""

    __slots__ = ("attempts", "delays", "is_done", "retry_at")

    def __init__(self, delays: Backoff) -> None:
        self.delays = delays
        #: no attempt before this time
        self.retry_at = 0.0
        #: attempts that failed since the instance was last connected, and 1 more at the host that it was connected to
        self.attempts = 0
        #: whether the first connection is not to try it again
        self.is_done = False


class Hosts:
    """See the module. Not thread safe: for the engine loop.

    Args:
        hosts: of the URL.
        is_shuffled: shuffle hosts and addresses, once each.
        shortest, longest: bounds of the delays of one endpoint, seconds.
        clock: returns the time, seconds.

    Attributes:
        current: the endpoint that was tried last, or is connected; ``None`` before the first attempt.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        is_shuffled: bool,
        shortest: float,
        longest: float,
        clock: Callable[[], float],
    ) -> None:
        self._is_shuffled = is_shuffled
        self._shortest = shortest
        self._longest = max(shortest, longest)
        self._clock = clock
        self._order = self._in_order(hosts)
        self._configured = {host.key() for host in hosts}
        #: servers of the last redirect, first until a connection is made
        self._detour: list[Host] = []
        self._addresses: dict[_Key, tuple[str | None, ...]] = {}
        self._records: dict[Endpoint, _HostRecord] = {}
        #: hosts that redirected this client, and when
        self._redirects: dict[_Key, float] = {}
        #: to be tried before all others, and not before this time
        self._preferred: Endpoint | None = None
        self._preferred_at = 0.0
        self.current: Endpoint | None = None

    def _in_order(self, items: Sequence[Host]) -> list[Host]:
        found = [*items]
        if self._is_shuffled:
            shuffle(found)
        return found

    # --- choosing

    @property
    def endpoints(self) -> list[Endpoint]:
        """Return the endpoints that are known now, in order."""
        detour = {host.key() for host in self._detour}
        hosts = [*self._detour, *(host for host in self._order if host.key() not in detour)]
        return [Endpoint(host, address) for host in hosts for address in self._addresses.get(host.key(), (None,))]

    def next(self) -> tuple[Endpoint, float]:
        """Return the endpoint to try next, and the seconds to wait before."""
        now = self._clock()
        known = self.endpoints
        if (preferred := self._preferred_of(known)) is not None:
            return preferred, max(0.0, self._preferred_at - now)
        due = [each for each in known if self._record(each).retry_at <= now]
        if due:
            return min(due, key=lambda each: self._record(each).attempts), 0.0
        first = min(known, key=lambda each: self._record(each).retry_at)
        return first, self._record(first).retry_at - now

    def _preferred_of(self, known: Sequence[Endpoint]) -> Endpoint | None:
        """Return the preferred endpoint, or another one of its host: its addresses may have changed.

        The host of a temporary redirect is not among the ``known`` ones any more.
        """
        preferred = self._preferred
        if preferred is None or preferred in known:
            return preferred
        return next((each for each in known if each.host.key() == preferred.host.key()), preferred)

    def untried(self) -> Endpoint | None:
        """Return the endpoint that the first connection tries next; ``None`` if all have failed for good."""
        left = [each for each in self.endpoints if not self._record(each).is_done]
        return min(left, key=lambda each: self._record(each).attempts, default=None)

    def attempts(self, endpoint: Endpoint) -> int:
        """Return the number of attempts at ``endpoint`` in the present search."""
        return self._record(endpoint).attempts

    def resolved(self, host: Host, addresses: Sequence[str]) -> None:
        """Note the addresses of a host's name. With fewer than two the host is connected to by its name."""
        found = [*dict.fromkeys(addresses)]
        key = host.key()
        if len(found) < 2:
            self._addresses.pop(key, None)
        else:
            known = self._addresses.get(key, ())
            if self._is_shuffled:
                shuffle(found)
            # the order of a name server may change with each answer
            kept = [address for address in known if address in found]
            self._addresses[key] = (*kept, *(each for each in found if each not in kept))[:MAX_SERVERS]
        self._prune()

    def _record(self, endpoint: Endpoint) -> _HostRecord:
        record = self._records.get(endpoint)
        if record is None:
            record = self._records[endpoint] = _HostRecord(Backoff(self._shortest, self._longest))
        return record

    def _prune(self) -> None:
        """Forget the endpoints that are no longer there."""
        known = {*self.endpoints, self.current}
        self._records = {endpoint: record for endpoint, record in self._records.items() if endpoint in known}
        hosts = {endpoint.host.key() for endpoint in known if endpoint is not None}
        self._addresses = {key: found for key, found in self._addresses.items() if key in hosts}

    # --- outcomes

    @property
    def _tried(self) -> Endpoint:
        return self.current or self.endpoints[0]

    def trying(self, endpoint: Endpoint) -> None:
        """Note the beginning of an attempt."""
        self.current = endpoint
        self._preferred = None

    def failed(self, *, needs_change: bool = False, is_final: bool = True, was_tried: bool = True) -> None:
        """Note that the current attempt failed.

        Args:
            needs_change: only a change at the broker helps, so that the delay is a long one.
            is_final: the first connection need not try the endpoint again.
            was_tried: whether the host was tried; if not, it is the next one again.
        """
        record = self._postpone(needs_change=needs_change)
        if was_tried:
            record.attempts += 1
            record.is_done = is_final
        else:
            self._preferred, self._preferred_at = self.current, record.retry_at

    def connected(self) -> None:
        """Note that the current attempt succeeded."""
        self._detour = []
        self._prune()
        for record in self._records.values():
            record.attempts = 0

    def lost(self, *, is_stable: bool, needs_change: bool = False) -> None:
        """Note the loss of the connection.

        Args:
            is_stable: the connection lasted, so that the delays of its endpoint are the shortest again.
            needs_change: no host is to be tried before a long delay, because the loss was not the host's fault.
        """
        if is_stable:
            self._redirects.clear()
            self._record(self._tried).delays.reset()
        # the connection counts as an attempt of the search that begins
        self._postpone().attempts = 1
        if needs_change:
            until = self._clock() + jitter(self._longest / 2, self._longest)
            for endpoint in self.endpoints:
                record = self._record(endpoint)
                record.retry_at = max(record.retry_at, until)

    def again(self) -> None:
        """Have the host of the current connection tried next, without delay, because it was ended on purpose."""
        self._preferred, self._preferred_at = self.current, 0.0

    def _postpone(self, *, needs_change: bool = False) -> _HostRecord:
        record = self._record(self._tried)
        delay = next(record.delays)
        if needs_change:
            delay = max(delay, jitter(self._longest / 2, self._longest))
        record.retry_at = self._clock() + delay
        return record

    # --- redirects

    def redirected(self, servers: Sequence[Host], *, is_permanent: bool) -> list[Host]:
        """Have ``servers`` tried next, as the current host asked for.

        Returns:
            The servers that will be tried, in order; an empty list if the redirect is not followed.
        """
        origin = self._tried.host
        now = self._clock()
        self._redirects = {key: at for key, at in self._redirects.items() if now - at < self._longest}
        self._redirects[origin.key()] = now
        unique = {host.key(): host for host in servers if host.key() not in self._redirects}
        followed = self._in_order([*unique.values()])[:MAX_SERVERS]
        if len(self._redirects) > MAX_REDIRECTS or not followed:
            return []
        if is_permanent:
            self._replace(origin, followed)
        self._detour = followed
        self._preferred = None
        keys = {host.key() for host in followed}
        self._records = {each: record for each, record in self._records.items() if each.host.key() not in keys}
        self._prune()
        return followed

    def _replace(self, origin: Host, followed: Sequence[Host]) -> None:
        """Put ``followed`` in the place of ``origin``, which goes to the end."""
        keys = {host.key() for host in followed}
        rest = [host for host in self._order if host.key() not in keys]
        at = next((index for index, host in enumerate(rest) if host.key() == origin.key()), None)
        order = [*followed, *rest] if at is None else [*rest[:at], *followed, *rest[at + 1 :], rest[at]]
        surplus = sum(host.key() not in self._configured for host in order) - _MAX_ADDED
        for host in reversed(order[:]):
            if surplus > 0 and host.key() not in self._configured:
                order.remove(host)
                surplus -= 1
        self._order = order
