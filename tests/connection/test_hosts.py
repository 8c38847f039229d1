"""The choice of hosts: order, delays, addresses, redirects; against a clock of the test's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from messaging.connection import hosts as rules
from messaging.connection.hosts import MAX_REDIRECTS, MAX_SERVERS, Hosts
from messaging.model import Endpoint, Host
from messaging.testing.tables import table

A, B, C, D = (Host(name, 1883) for name in "abcd")
LONGEST = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def choice(clock: Clock, *given: Host, is_shuffled: bool = False, shortest: float = 0.1) -> Hosts:
    return Hosts(given, is_shuffled=is_shuffled, shortest=shortest, longest=LONGEST, clock=clock)


def attempt(hosts: Hosts) -> Host:
    """Begin the attempt that is due now."""
    endpoint, wait = hosts.next()
    assert wait == 0
    hosts.trying(endpoint)
    return endpoint.host


def connect(hosts: Hosts) -> Host:
    host = attempt(hosts)
    hosts.connected()
    return host


# --- the steps of a row

Step = Callable[[Hosts, Clock], None]


def tries(host: Host) -> Step:
    """The attempt that is due now is at ``host``."""

    def step(hosts: Hosts, _: Clock) -> None:
        assert attempt(hosts) == host

    return step


def fails(*tried: Host, needs_change: bool = False) -> Step:
    """Each of ``tried`` is tried in its turn, and fails."""

    def step(hosts: Hosts, _: Clock) -> None:
        for host in tried:
            assert attempt(hosts) == host
            hosts.failed(needs_change=needs_change)

    return step


def connects(*possible: Host) -> Step:
    """The next attempt, at one of ``possible``, connects."""

    def step(hosts: Hosts, _: Clock) -> None:
        assert connect(hosts) in possible

    return step


def passes(seconds: float) -> Step:
    """So much time passes."""

    def step(_: Hosts, clock: Clock) -> None:
        clock.now += seconds

    return step


def loses(*, is_stable: bool = True, needs_change: bool = False) -> Step:
    """The connection is lost."""
    return lambda hosts, _: hosts.lost(is_stable=is_stable, needs_change=needs_change)


def plans(hosts: Hosts, _: Clock) -> None:
    """The connection ends as planned."""
    hosts.again()


def waits(least: float, most: float, host: Host | None = None) -> Step:
    """The next attempt, at ``host`` if given, is due in so many seconds."""

    def step(hosts: Hosts, _: Clock) -> None:
        endpoint, wait = hosts.next()
        assert least - 1e-9 <= wait <= most + 1e-9
        assert host in (None, endpoint.host)

    return step


def redirects(*to: Host, is_permanent: bool = False) -> Step:
    """The last host sends the client to other ones, which are followed."""

    def step(hosts: Hosts, _: Clock) -> None:
        assert hosts.redirected([*to], is_permanent=is_permanent) == [*to]

    return step


def knows(*known: Host | Endpoint) -> Step:
    """These are the endpoints, in this order."""

    def step(hosts: Hosts, _: Clock) -> None:
        assert hosts.endpoints == [each if isinstance(each, Endpoint) else Endpoint(each) for each in known]

    return step


def resolves(*addresses: str) -> Step:
    """The name of host A has these addresses."""
    return lambda hosts, _: hosts.resolved(A, [*addresses])


def at(*addresses: str) -> list[Endpoint]:
    return [Endpoint(A, address) for address in addresses]


HOUR = passes(3600)
SLOW = waits(LONGEST / 2, LONGEST)
ONE, TWO, THREE = "10.0.0.1", "10.0.0.2", "10.0.0.3"


@table(
    "given, steps",
    {
        "hosts are tried in order and each at once": ([A, B, C], [fails(A, B, C)]),
        "after a loss the next host is tried without delay":
            ([A, B, C], [connects(A), HOUR, loses(), fails(B), connects(C)]),
        "a search begins at the first host whose delay is over":
            ([A, B, C], [fails(A), connects(B), HOUR, loses(), tries(A)]),
        "after a loss that is not the host's fault every host waits":
            ([A, B, C], [connects(A), loses(needs_change=True), SLOW]),
        "refused credentials delay their host alone":
            ([A, B], [fails(A, needs_change=True), fails(B, needs_change=True), SLOW]),
        "a planned loss connects to the same host at once, and only once first":
            ([A, B], [fails(A), connects(B), HOUR, plans, fails(B), tries(A)]),
        "every address of a name is tried":
            ([A, B], [resolves(ONE, TWO, ONE), knows(*at(ONE, TWO), B), fails(A, A, B)]),
        "a name server that turns its answers round does not change the order":
            ([A], [resolves(ONE, TWO), resolves(THREE, TWO, ONE), knows(*at(ONE, TWO, THREE))]),
        "addresses that are gone are forgotten": ([A], [resolves(ONE, TWO), resolves("10.0.1.1"), knows(A)]),
        "a temporary redirect is followed at once and forgotten after it":
            ([A, B], [fails(A), redirects(C, D), fails(C), connects(D), knows(A, B), HOUR, loses(), tries(A)]),
        "a planned loss stays at the server of a temporary redirect":
            ([A, B], [fails(A), redirects(C), connects(C), plans, connects(C), loses(), connects(A, B)]),
        "servers that cannot be reached leave the hosts of the URL": ([A, B], [fails(A), redirects(C), fails(C, B)]),
        "a permanent redirect replaces its host, which comes last":
            ([A, B], [fails(A), redirects(C, is_permanent=True), knows(C, B, A), connects(C), HOUR, loses(),
                      fails(B, A)]),
        "a redirect to a host of the URL ignores its delay":
            ([A, B], [connects(A), loses(), fails(B), redirects(A), tries(A)]),
    },
)  # fmt: skip
def test_the_choice_of_hosts(given: list[Host], steps: list[Step]) -> None:
    clock = Clock()
    hosts = choice(clock, *given)
    for step in steps:
        step(hosts, clock)


@table(
    "given, series, steps",
    {
        "the host that was lost comes last, without delay":
            ([A, B], [0.0] * 9, [connects(A), loses(), fails(B), waits(0, 0, A)]),
        "the host that was lost comes last, with a delay":
            ([A, B], [0.05] * 9, [connects(A), loses(), fails(B), waits(0.05, 0.05, A)]),
        "delays belong to their host":
            ([A, B], [1, 2, 4, 8], [fails(A, B), waits(1, 1, A), passes(1), fails(A, B), waits(2, 2, A), passes(2),
                                    fails(A), connects(B), loses(), waits(1, 1, B)]),  # and the delay of A is 4
        "delays grow over connections that do not last":
            ([A], [1, 2, 4, 8], [connects(A), loses(is_stable=False), waits(1, 1), passes(1),
                                 connects(A), loses(is_stable=False), waits(2, 2), passes(2),
                                 connects(A), loses(is_stable=False), waits(4, 4), passes(4),
                                 connects(A), loses(), waits(1, 1)]),
    },
)  # fmt: skip
def test_the_delays_of_hosts(
    monkeypatch: pytest.MonkeyPatch, given: list[Host], series: list[float], steps: list[Step]
) -> None:
    class Series:
        def __init__(self, *_: object) -> None:
            self.reset()

        def reset(self) -> None:
            self._left = iter(series)

        def __next__(self) -> float:
            return next(self._left)

    monkeypatch.setattr(rules, "Backoff", Series)
    clock = Clock()
    hosts = choice(clock, *given)
    for step in steps:
        step(hosts, clock)


def test_when_all_have_failed_the_one_with_the_shortest_delay_is_waited_for() -> None:
    clock = Clock()
    hosts = choice(clock, A, B)
    for _ in range(20):
        endpoint, wait = hosts.next()
        assert 0 <= wait <= LONGEST
        clock.now += wait
        assert hosts.next() == (endpoint, 0.0)
        attempt(hosts)
        hosts.failed()


def test_shuffled_hosts_are_all_tried_and_begin_differently() -> None:
    first = Counter()
    for _ in range(60):
        hosts = choice(Clock(), A, B, C, is_shuffled=True)
        tried = []
        for _ in range(3):
            tried.append(attempt(hosts))
            hosts.failed()
        assert {*tried} == {A, B, C}
        first[tried[0]] += 1
    assert len(first) == 3


@table("cut_short, tried", {"each once": (None, [A, B]), "one that was cut short again": (A, [A, B, A])})
def test_the_first_connection_tries_every_host(cut_short: Host | None, tried: list[Host]) -> None:
    hosts = choice(Clock(), A, B)
    found: list[Host] = []
    while (endpoint := hosts.untried()) is not None:
        hosts.trying(endpoint)
        hosts.failed(is_final=endpoint.host != cut_short or endpoint.host in found)
        found.append(endpoint.host)
    assert found == tried


def test_the_number_of_addresses_is_bounded() -> None:
    hosts = choice(Clock(), A)
    hosts.resolved(A, [f"10.0.0.{number}" for number in range(100)])
    assert len(hosts.endpoints) == MAX_SERVERS


@table(
    "to, is_permanent, count",
    {
        "in a circle": ({A: B, B: A}, False, 1),
        "in a circle, for ever": ({A: B, B: A}, True, 1),
        "in a chain": ({}, False, MAX_REDIRECTS),
    },
)
def test_redirects_have_an_end(to: dict[Host, Host], is_permanent: bool, count: int) -> None:
    hosts = choice(Clock(), *(to or [A]))
    followed = 0
    for number in range(100):
        endpoint, wait = hosts.next()
        if wait:
            break
        hosts.trying(endpoint)
        hosts.failed()
        target = to.get(endpoint.host, Host(f"x{number}"))
        followed += bool(hosts.redirected([target], is_permanent=is_permanent))
    assert followed == count
    assert hosts.next()[1] > 0


def test_a_connection_that_lasts_allows_redirects_again() -> None:
    hosts = choice(Clock(), A, B)
    for _ in range(5):
        connect(hosts)
        hosts.lost(is_stable=True)
        origin = hosts.current
        assert origin is not None
        assert hosts.redirected([B if origin.host == A else A], is_permanent=False)


class HostsMachine(RuleBasedStateMachine):
    """Whatever happens: a host is always found, waits are bounded, known hosts stay known, memory is bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.hosts = choice(self.clock, A, B, C)
        self.is_connected = False
        #: attempts since time passed, by endpoint
        self.attempts: Counter[Endpoint] = Counter()

    def passed(self, seconds: float) -> None:
        if seconds:
            self.clock.now += seconds
            self.attempts.clear()

    @precondition(lambda self: not self.is_connected)
    @rule(outcome=st.sampled_from(["fail", "refuse", "connect"]))
    def try_next(self, outcome: str) -> None:
        endpoint, wait = self.hosts.next()
        self.passed(wait)
        endpoint, wait = self.hosts.next()  # several delays may end at once
        assert wait == 0
        self.hosts.trying(endpoint)
        self.attempts[endpoint] += 1
        if outcome == "connect":
            self.hosts.connected()
            self.is_connected = True
        else:
            self.hosts.failed(needs_change=outcome == "refuse")

    @precondition(lambda self: self.is_connected)
    @rule(how=st.sampled_from(["stable", "short", "taken over", "planned"]))
    def lose(self, how: str) -> None:
        self.is_connected = False
        before = self.hosts.current
        if how == "planned":
            self.hosts.again()
            endpoint, wait = self.hosts.next()
            assert before is not None
            assert (endpoint.host, wait) == (before.host, 0.0)
            self.attempts.clear()  # the connections are bounded by the planned losses
        else:
            self.hosts.lost(is_stable=how == "stable", needs_change=how == "taken over")
            endpoint, wait = self.hosts.next()
            assert wait > 0 or endpoint != before or len(self.hosts.endpoints) == 1

    @precondition(lambda self: self.hosts.current is not None and not self.is_connected)
    @rule(names=st.lists(st.sampled_from("abcdefgh"), max_size=4), is_permanent=st.booleans())
    def redirect(self, names: list[str], is_permanent: bool) -> None:
        current = self.hosts.current
        assert current is not None
        followed = self.hosts.redirected([Host(name, 1883) for name in names], is_permanent=is_permanent)
        assert current.host not in followed
        assert {host.name for host in followed} <= {*names}
        if followed:
            self.attempts.clear()  # it is bounded by the number of redirects
            endpoint, wait = self.hosts.next()
            assert wait == 0
            assert endpoint.host in followed

    @rule(host=st.sampled_from([A, B, C]), addresses=st.lists(st.integers(1, 5).map("10.0.0.{}".format), max_size=4))
    def resolve(self, host: Host, addresses: list[str]) -> None:
        self.hosts.resolved(host, addresses)
        self.attempts.clear()

    @rule(seconds=st.floats(0.0, 100.0))
    def wait(self, seconds: float) -> None:
        self.passed(seconds)

    @invariant()
    def every_host_of_the_url_stays(self) -> None:
        assert {A, B, C} <= {endpoint.host for endpoint in self.hosts.endpoints}

    @invariant()
    def waits_are_bounded(self) -> None:
        assert 0 <= self.hosts.next()[1] <= LONGEST

    @invariant()
    def endpoints_are_different_and_bounded(self) -> None:
        assert len(self.hosts.endpoints) == len({*self.hosts.endpoints}) <= 3 * 5 + 2 * MAX_SERVERS

    @invariant()
    def no_endpoint_is_stormed(self) -> None:
        assert all(count <= 2 for count in self.attempts.values())


TestHosts = HostsMachine.TestCase
TestHosts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
