"""The choice of hosts: order, delays, addresses, redirects; against a clock of the test's own."""

from __future__ import annotations

from collections import Counter

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


@pytest.fixture
def clock() -> Clock:
    return Clock()


def choice(clock: Clock, *given: Host, is_shuffled: bool = False, shortest: float = 0.1) -> Hosts:
    return Hosts(given, is_shuffled=is_shuffled, shortest=shortest, longest=LONGEST, clock=clock)


def attempt(hosts: Hosts) -> Host:
    """Begin the attempt that is due now."""
    endpoint, wait = hosts.next()
    assert wait == 0
    hosts.trying(endpoint)
    return endpoint.host


def fail(hosts: Hosts) -> Host:
    host = attempt(hosts)
    hosts.failed()
    return host


def connect(hosts: Hosts) -> Host:
    host = attempt(hosts)
    hosts.connected()
    return host


def test_hosts_are_tried_in_order_and_each_at_once(clock: Clock) -> None:
    hosts = choice(clock, A, B, C)
    assert [fail(hosts) for _ in range(3)] == [A, B, C]


def test_when_all_have_failed_the_one_with_the_shortest_delay_is_waited_for(clock: Clock) -> None:
    hosts = choice(clock, A, B)
    for _ in range(20):
        endpoint, wait = hosts.next()
        assert 0 <= wait <= LONGEST
        clock.now += wait
        assert hosts.next() == (endpoint, 0.0)
        fail(hosts)


def test_after_a_loss_the_next_host_is_tried_without_delay(clock: Clock) -> None:
    hosts = choice(clock, A, B, C)
    assert connect(hosts) == A
    clock.now += 3600
    hosts.lost(is_stable=True)
    assert fail(hosts) == B
    assert connect(hosts) == C


@table("delay", [0.0, 0.05])
def test_the_host_that_was_lost_comes_last_whatever_its_delay(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    monkeypatch.setattr(rules, "delays", lambda *_: iter([delay] * 9))
    hosts = choice(clock, A, B)
    assert connect(hosts) == A
    hosts.lost(is_stable=True)
    assert fail(hosts) == B
    endpoint, wait = hosts.next()
    assert endpoint.host == A
    assert wait == pytest.approx(delay)


def test_a_search_begins_at_the_first_host_whose_delay_is_over(clock: Clock) -> None:
    hosts = choice(clock, A, B, C)
    assert fail(hosts) == A
    assert connect(hosts) == B
    clock.now += 3600
    hosts.lost(is_stable=True)
    assert attempt(hosts) == A


def test_delays_belong_to_their_host(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "delays", lambda *_: iter([1.0, 2.0, 4.0, 8.0]))
    hosts = choice(clock, A, B)
    for expected in (1.0, 2.0):
        assert [fail(hosts), fail(hosts)] == [A, B]
        assert hosts.next() == (Endpoint(A), expected)
        clock.now += expected
    assert fail(hosts) == A
    assert connect(hosts) == B
    hosts.lost(is_stable=True)
    assert hosts.next() == (Endpoint(B), 1.0)  # and the delay of the other is 4


def test_delays_grow_over_connections_that_do_not_last(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "delays", lambda *_: iter([1.0, 2.0, 4.0, 8.0]))
    hosts = choice(clock, A)
    for is_stable, expected in ((False, 1.0), (False, 2.0), (False, 4.0), (True, 1.0)):
        connect(hosts)
        hosts.lost(is_stable=is_stable)
        assert hosts.next()[1] == pytest.approx(expected)
        clock.now += expected


def test_after_a_loss_that_is_not_the_hosts_fault_every_host_waits(clock: Clock) -> None:
    hosts = choice(clock, A, B, C)
    connect(hosts)
    hosts.lost(is_stable=True, needs_change=True)
    assert LONGEST / 2 <= hosts.next()[1] <= LONGEST


def test_refused_credentials_delay_their_host_alone(clock: Clock) -> None:
    hosts = choice(clock, A, B)
    attempt(hosts)
    hosts.failed(needs_change=True)
    assert attempt(hosts) == B
    hosts.failed(needs_change=True)
    assert LONGEST / 2 <= hosts.next()[1] <= LONGEST


def test_a_planned_loss_connects_to_the_same_host_at_once(clock: Clock) -> None:
    hosts = choice(clock, A, B)
    fail(hosts)
    connect(hosts)
    clock.now += 3600
    hosts.again()
    assert fail(hosts) == B
    assert attempt(hosts) == A  # and only once first


def test_shuffled_hosts_are_all_tried_and_begin_differently(clock: Clock) -> None:
    first = Counter()
    for _ in range(60):
        hosts = choice(clock, A, B, C, is_shuffled=True)
        tried = [fail(hosts) for _ in range(3)]
        assert {*tried} == {A, B, C}
        first[tried[0]] += 1
    assert len(first) == 3


# --- the first connection


def test_the_first_connection_tries_every_host_once(clock: Clock) -> None:
    hosts = choice(clock, A, B)
    tried = []
    while (endpoint := hosts.untried()) is not None:
        tried.append(endpoint.host)
        hosts.trying(endpoint)
        hosts.failed()
    assert tried == [A, B]


def test_the_first_connection_tries_a_host_again_that_was_cut_short(clock: Clock) -> None:
    hosts = choice(clock, A, B)
    tried = []
    while (endpoint := hosts.untried()) is not None:
        hosts.trying(endpoint)
        hosts.failed(is_final=endpoint.host == B or tried.count(A) == 1)
        tried.append(endpoint.host)
    assert tried == [A, B, A]


# --- names with several addresses


def test_every_address_of_a_name_is_tried(clock: Clock) -> None:
    hosts = choice(clock, A, B)
    hosts.resolved(A, ["10.0.0.1", "10.0.0.2", "10.0.0.1"])
    assert hosts.endpoints == [Endpoint(A, "10.0.0.1"), Endpoint(A, "10.0.0.2"), Endpoint(B)]
    assert [fail(hosts) for _ in range(3)] == [A, A, B]


def test_after_a_loss_the_other_address_of_the_name_is_tried_without_delay(clock: Clock) -> None:
    hosts = choice(clock, A)
    hosts.resolved(A, ["10.0.0.1", "10.0.0.2"])
    connect(hosts)
    hosts.lost(is_stable=True)
    hosts.resolved(A, ["10.0.0.2", "10.0.0.1"])
    assert hosts.next() == (Endpoint(A, "10.0.0.2"), 0.0)


def test_a_name_server_that_turns_its_answers_round_does_not_change_the_order(clock: Clock) -> None:
    hosts = choice(clock, A)
    hosts.resolved(A, ["10.0.0.1", "10.0.0.2"])
    hosts.resolved(A, ["10.0.0.3", "10.0.0.2", "10.0.0.1"])
    assert [each.address for each in hosts.endpoints] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_addresses_that_are_gone_are_forgotten_and_their_number_is_bounded(clock: Clock) -> None:
    hosts = choice(clock, A)
    hosts.resolved(A, [f"10.0.0.{number}" for number in range(100)])
    assert len(hosts.endpoints) == MAX_SERVERS
    hosts.resolved(A, ["10.0.1.1"])
    assert hosts.endpoints == [Endpoint(A)]


# --- redirects


def test_a_temporary_redirect_is_followed_at_once_and_forgotten_after_it(clock: Clock) -> None:
    hosts = choice(clock, A, B)
    attempt(hosts)
    hosts.failed()
    assert hosts.redirected([C, D], is_permanent=False) == [C, D]
    assert fail(hosts) == C
    assert connect(hosts) == D
    assert [each.host for each in hosts.endpoints] == [A, B]
    clock.now += 3600
    hosts.lost(is_stable=True)
    assert attempt(hosts) == A


def test_a_planned_loss_stays_at_the_server_of_a_temporary_redirect(clock: Clock) -> None:
    hosts = choice(clock, A, B)
    assert attempt(hosts) == A
    hosts.failed()
    hosts.redirected([C], is_permanent=False)
    assert connect(hosts) == C
    hosts.again()
    assert connect(hosts) == C
    hosts.lost(is_stable=True)
    assert connect(hosts) in (A, B)


def test_servers_that_cannot_be_reached_leave_the_hosts_of_the_url(clock: Clock) -> None:
    hosts = choice(clock, A, B)
    fail(hosts)
    hosts.redirected([C], is_permanent=False)
    assert [fail(hosts), fail(hosts)] == [C, B]


def test_a_permanent_redirect_replaces_its_host_which_comes_last(clock: Clock) -> None:
    hosts = choice(clock, A, B)
    fail(hosts)
    assert hosts.redirected([C], is_permanent=True) == [C]
    assert [each.host for each in hosts.endpoints] == [C, B, A]
    assert connect(hosts) == C
    clock.now += 3600
    hosts.lost(is_stable=True)
    assert [fail(hosts), fail(hosts)] == [B, A]


def test_a_redirect_to_a_host_of_the_url_ignores_its_delay(clock: Clock) -> None:
    hosts = choice(clock, A, B)
    connect(hosts)
    hosts.lost(is_stable=True)
    fail(hosts)
    hosts.redirected([A], is_permanent=False)
    assert attempt(hosts) == A


@table("is_permanent", [False, True])
def test_hosts_that_redirect_in_a_circle_are_not_followed_for_ever(clock: Clock, is_permanent: bool) -> None:
    hosts = choice(clock, A, B)
    to = {A: B, B: A}
    followed = 0
    for _ in range(10):
        endpoint, wait = hosts.next()
        if wait:
            break
        hosts.trying(endpoint)
        hosts.failed()
        followed += bool(hosts.redirected([to[endpoint.host]], is_permanent=is_permanent))
    assert followed == 1
    assert hosts.next()[1] > 0


def test_a_chain_of_redirects_has_an_end(clock: Clock) -> None:
    hosts = choice(clock, A)
    followed = 0
    for number in range(100):
        endpoint, wait = hosts.next()
        if wait:
            break
        hosts.trying(endpoint)
        hosts.failed()
        followed += bool(hosts.redirected([Host(f"x{number}")], is_permanent=False))
    assert followed == MAX_REDIRECTS


def test_a_connection_that_lasts_allows_redirects_again(clock: Clock) -> None:
    hosts = choice(clock, A, B)
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

    @rule(
        host=st.sampled_from([A, B, C]),
        addresses=st.lists(st.integers(1, 5).map("10.0.0.{}".format), max_size=4),
    )
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
