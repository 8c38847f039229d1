"""Leases of landlords in other processes, over each adapter."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import messaging
from messaging.errors import ArgumentError, DecodeError, LeaseMapError, OutcomeUnknownError, UnknownLeaseError
from messaging.leases import (
    Landlord,
    Lease,
    LeaseRenewalManager,
    LeaseServer,
    find_leases,
    lease_from_value,
    lease_time,
    lease_to_value,
    reference_of,
    remote_leases,
    renew_all,
)

Connect = Callable[[], messaging.Messaging]


@pytest.fixture(params=["memory", "mqtt", "amqp"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects instances to one broker."""
    if request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}"
    elif request.param == "mqtt":
        url = request.getfixturevalue("mosquitto").url + "?version=5"
    else:
        url = request.getfixturevalue("rabbitmq").url
    instances: list[messaging.Messaging] = []

    def make() -> messaging.Messaging:
        instances.append(messaging.connect(url))
        return instances[-1]

    yield make
    for each in instances:
        each.close()


@pytest.fixture
def channel() -> str:
    return f"leases-of/{uuid.uuid4().hex}"


def remote(instance: messaging.Messaging, channel: str, lease: Lease, asked_at: float | None = None) -> Lease:
    """Return the handle that a holder in another process gets."""
    at = lease_time() if asked_at is None else asked_at
    return lease_from_value(instance, channel, lease_to_value(lease), lease.requested, at, timeout=5.0)


def test_a_remote_lease_is_renewed_and_cancelled(connect: Connect, channel: str) -> None:
    """Scenarios 16, 19 and 20."""
    server, client = connect(), connect()
    with Landlord(max_duration=100.0) as landlord, LeaseServer(server, channel, landlord) as serving:
        serving.ready.result(10)
        granted = landlord.grant(10.0)
        lease = remote(client, channel, granted)
        assert lease.renew(1000.0).result() == 100.0
        assert (lease.requested, lease.duration) == (1000.0, 100.0)
        assert lease.remaining <= granted.remaining  # it never lasts longer for the holder
        with pytest.raises(ArgumentError):
            lease.renew(0.0)
        lease.cancel().result()
        assert lease.is_ended
        assert granted.is_ended
        with pytest.raises(UnknownLeaseError):
            lease.renew(10.0).result()
        with pytest.raises(UnknownLeaseError):
            lease.cancel().result()


def test_a_batch_of_remote_leases_travels_in_one_request_and_reports_failures(
    connect: Connect, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 20."""
    server, client = connect(), connect()
    with Landlord() as landlord, LeaseServer(server, channel, landlord) as serving:
        serving.ready.result(10)
        granted = [landlord.grant(10.0) for _ in range(100)]
        leases = [remote(client, channel, each) for each in granted]
        granted[3].cancel()
        requests: list[Any] = []
        request = client.request

        def counted(*arguments: Any, **options: Any) -> Any:
            requests.append(arguments)
            return request(*arguments, **options)

        monkeypatch.setattr(client, "request", counted)
        with pytest.raises(LeaseMapError) as caught:
            renew_all(dict.fromkeys(leases, 60.0)).result()
        assert [*caught.value.failures] == [leases[3]]
        assert len(requests) == 1
        assert all(each.duration == 60.0 for each in leases if each is not leases[3])


def test_the_manager_keeps_a_remote_lease_alive(connect: Connect, channel: str) -> None:
    """Scenario 21."""
    server, client = connect(), connect()
    with Landlord(max_duration=1.0) as landlord, LeaseServer(server, channel, landlord) as serving:
        serving.ready.result(10)
        granted = landlord.grant(10.0)
        with LeaseRenewalManager() as manager:
            manager.renew_until(remote(client, channel, granted))
            begun = time.monotonic()
            while time.monotonic() < begun + 2.5:
                assert landlord.is_valid(granted.id)
                time.sleep(0.05)


def test_all_leases_at_a_broker_are_found(connect: Connect) -> None:
    server, client = connect(), connect()
    channels = sorted(f"leases-of/{uuid.uuid4().hex}" for _ in range(2))
    with (
        Landlord() as first,
        Landlord(max_duration=math.inf) as second,
        LeaseServer(server, channels[0], first) as one,
        LeaseServer(server, channels[1], second) as two,
    ):
        one.ready.result(10)
        two.ready.result(10)
        first.grant(10.0, about="a printer")
        second.grant(Lease.FOREVER)
        found = {channel: infos for channel, infos in find_leases(client, 0.5) if channel in channels}
        assert [found[each][0].about for each in channels] == ["a printer", ""]
        assert found[channels[1]][0].remaining == math.inf
        assert [each.id for each in remote_leases(client, channels[0], timeout=5).result()] == [
            each.id for each in first.leases()
        ]


def test_a_landlord_that_is_not_there_is_an_indefinite_failure() -> None:
    with messaging.connect(f"memory://{uuid.uuid4().hex}") as client:
        lease = lease_from_value(client, "nowhere", ["id", 10.0], 10.0, lease_time(), timeout=0.2)
        error = lease.renew(10.0).exception()
        assert error is not None
        assert not isinstance(error, UnknownLeaseError)
        assert isinstance(error, OutcomeUnknownError) or "nowhere" in str(error)


@pytest.mark.parametrize("value", [None, [], ["id"], [1, 2.0], ["id", "x"], {"id": 1}])
def test_a_malformed_lease_is_refused(value: object) -> None:
    with messaging.connect(f"memory://{uuid.uuid4().hex}") as client, pytest.raises(DecodeError):
        lease_from_value(client, "a", value, 10.0, lease_time())


def test_only_a_lease_of_another_process_has_a_reference() -> None:
    with messaging.connect(f"memory://{uuid.uuid4().hex}") as client, Landlord() as landlord:
        granted = landlord.grant(10.0)
        with pytest.raises(ArgumentError):
            reference_of(granted)
        assert reference_of(remote(client, "a", granted)) == ["a", granted.id]
