"""Leases of landlords in other processes, over each adapter."""

from __future__ import annotations

import contextlib
import json
import math
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import messaging
from messaging.dispatch.calls import CallServer, call
from messaging.errors import (
    ArgumentError,
    ClosedError,
    DecodeError,
    LeaseDeniedError,
    LeaseMapError,
    MessagingError,
    OutcomeUnknownError,
    UnknownLeaseError,
)
from messaging.execution import Promise, engine
from messaging.leases import (
    Landlord,
    Lease,
    LeaseRenewalManager,
    LeaseServer,
    cancel_all,
    find_leases,
    lease_from_value,
    lease_operations,
    lease_time,
    lease_to_value,
    reference_of,
    remote_leases,
    renew_all,
)
from messaging.leases import remote as remote_module
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, results
from tests.leases.clocks import FakeClock
from tests.leases.conftest import Connect


@contextlib.contextmanager
def served(instance: messaging.Messaging, channel: str, **options: Any) -> Iterator[Landlord]:
    """Serve the leases of a new landlord with ``options`` on a channel."""
    with Landlord(**options) as landlord, LeaseServer(instance, channel, landlord) as serving:
        serving.ready.result(PATIENCE)
        yield landlord


def remote(instance: messaging.Messaging, channel: str, lease: Lease, asked_at: float | None = None) -> Lease:
    """Return the handle that a holder in another process gets."""
    at = lease_time() if asked_at is None else asked_at
    return lease_from_value(instance, channel, lease_to_value(lease), lease.requested, at, timeout=PATIENCE)


def test_a_remote_lease_is_renewed_and_cancelled(connect: Connect, channel: str) -> None:
    """Scenarios 16, 19 and 20."""
    server, client = connect(), connect()
    with served(server, channel, max_duration=100.0) as landlord:
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
    with served(server, channel) as landlord:
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
    with served(server, channel, max_duration=1.0) as landlord:
        granted = landlord.grant(10.0)
        renewed: Recorder[Lease] = Recorder()
        granted.on_renewed = renewed
        with LeaseRenewalManager() as manager:
            manager.renew_until(remote(client, channel, granted))
            renewed.wait_for(3)
            assert landlord.lease(granted.id) is not None


def test_all_leases_at_a_broker_are_found(connect: Connect) -> None:
    server, client = connect(), connect()
    channels = sorted(f"leases-of/{uuid.uuid4().hex}" for _ in range(2))
    with (
        Landlord() as first,
        Landlord(max_duration=math.inf) as second,
        LeaseServer(server, channels[0], first) as one,
        LeaseServer(server, channels[1], second) as two,
    ):
        one.ready.result(PATIENCE)
        two.ready.result(PATIENCE)
        first.grant(1000.0, about="a printer")
        second.grant(Lease.FOREVER)

        def find_both() -> dict[str, Any] | None:
            found = {channel: infos for channel, infos in find_leases(client, 0.5) if channel in channels}
            return found if len(found) == 2 else None  # the answers take longer than usual

        found = eventually(find_both)
        assert [found[each][0].about for each in channels] == ["a printer", ""]
        assert found[channels[1]][0].remaining == math.inf
        assert [each.id for each in remote_leases(client, channels[0], timeout=PATIENCE).result()] == [
            each.id for each in first.leases()
        ]


def test_a_landlord_that_is_not_there_is_an_indefinite_failure() -> None:
    with messaging.connect(f"memory://{uuid.uuid4().hex}") as client:
        lease = lease_from_value(client, "nowhere", ["id", 10.0], 10.0, lease_time(), timeout=0.2)
        error = lease.renew(10.0).exception()
        assert error is not None
        assert not isinstance(error, UnknownLeaseError)
        assert isinstance(error, OutcomeUnknownError) or "nowhere" in str(error)


@table("value", [None, [], ["id"], [1, 2.0], ["id", "x"], {"id": 1}])
def test_a_malformed_lease_is_refused(value: object) -> None:
    with messaging.connect(f"memory://{uuid.uuid4().hex}") as client, pytest.raises(DecodeError):
        lease_from_value(client, "a", value, 10.0, lease_time())


def test_only_a_lease_of_another_process_has_a_reference() -> None:
    with messaging.connect(f"memory://{uuid.uuid4().hex}") as client, Landlord() as landlord:
        granted = landlord.grant(10.0)
        with pytest.raises(ArgumentError):
            reference_of(granted)
        assert reference_of(remote(client, "a", granted)) == ["a", granted.id]


class LossyServer:
    """Serves leases, and keeps the answers to renewals back until the test lets them go."""

    def __init__(self, instance: messaging.Messaging, channel: str, landlord: Landlord) -> None:
        operations = dict(lease_operations(landlord))
        self._renew = operations["renew"]
        operations["renew"] = self.renew
        self.answers: Recorder[Promise[Any]] = Recorder()
        self.results: list[Any] = []
        self.server = CallServer(instance, channel, operations)
        self.server.ready.result(PATIENCE)

    def renew(self, arguments: Any, body: bytes) -> Promise[Any]:
        self.results.append(self._renew(arguments, body))
        answer: Promise[Any] = Promise("an answer")
        self.answers.append(answer)
        return answer

    def answer(self, number: int) -> None:
        engine().call(self.answers[number].resolve, self.results[number])


def test_a_lost_answer_to_a_shortening_renewal_shortens_the_lease(memory: Connect, channel: str) -> None:
    """The holder never takes a lease for longer than its grantor does."""
    with Landlord() as landlord:
        server = LossyServer(memory(), channel, landlord)
        granted = landlord.grant(1000.0)
        lease = lease_from_value(memory(), channel, lease_to_value(granted), 1000.0, lease_time(), timeout=0.3)
        promise = lease.renew(50.0)
        server.answers.wait_for(1)
        assert isinstance(promise.exception(PATIENCE), OutcomeUnknownError)
        assert granted.remaining <= 50.0
        assert lease.remaining <= granted.remaining
        unknown = lease.renew(Lease.ANY)
        assert isinstance(unknown.exception(PATIENCE), OutcomeUnknownError)
        assert 0.0 < lease.remaining <= 50.0


def test_a_shortening_renewal_counts_before_its_answer(memory: Connect, channel: str) -> None:
    """The lease has ended for its holder when its grantor ends it, however late the answer is."""
    clock = FakeClock()
    with Landlord() as landlord:
        server = LossyServer(memory(), channel, landlord)
        granted = landlord.grant(1000.0)
        lease = lease_from_value(memory(), channel, lease_to_value(granted), 1000.0, lease_time())
        promises = [lease.renew(50.0), lease.renew(900.0)]
        server.answers.wait_for(2)
        server.answer(1)
        promises[1].result(PATIENCE)
        assert lease.remaining == 50.0  # the other one may come last
        server.answer(0)
        results(promises)
        promises = [lease.renew(20.0)]
        server.answers.wait_for(3)
        assert lease.remaining == granted.remaining == 20.0
        clock.advance(20.0)
        assert lease.is_ended
        assert granted.is_expired
        server.answer(2)
        results(promises)
        assert lease.is_ended


def test_a_refused_renewal_does_not_shorten_a_lease() -> None:
    clock = FakeClock()
    with messaging.connect(f"memory://{uuid.uuid4().hex}") as client:
        lease = lease_from_value(client, "a", ["id", 100.0], 100.0, lease_time())
    first = lease.note_asked(10.0, lease_time())
    clock.advance(1.0)
    second = lease.note_asked(30.0, lease_time())
    assert lease.remaining == 9.0
    lease.note_answered(first, LeaseDeniedError("refused"))
    assert lease.remaining == 30.0
    lease.note_answered(second, LeaseDeniedError("refused"))
    assert lease.remaining == 99.0


def test_overlapping_renewals_leave_the_shorter_one(memory: Connect, channel: str) -> None:
    """The grantor may take them in any order, and answer them in any order."""
    for first, second in ((0, 1), (1, 0)):
        with Landlord() as landlord:
            server = LossyServer(memory(), f"{channel}/{first}", landlord)
            granted = landlord.grant(1000.0)
            lease = lease_from_value(memory(), server.server.channel, lease_to_value(granted), 1000.0, lease_time())
            promises = [lease.renew(1000.0), lease.renew(50.0)]
            server.answers.wait_for(2)
            server.answer(first)
            server.answer(second)
            results(promises)
            assert lease.remaining <= 50.0
            later = lease.renew(900.0)
            server.answers.wait_for(3)
            server.answer(2)
            later.result(PATIENCE)
            assert 890.0 < lease.remaining <= 900.0


def test_a_renewal_that_was_answered_before_a_shorter_one_was_asked_for_does_not_count(
    memory: Connect, channel: str
) -> None:
    with Landlord() as landlord:
        server = LossyServer(memory(), channel, landlord)
        granted = landlord.grant(1000.0)
        lease = lease_from_value(memory(), channel, lease_to_value(granted), 1000.0, lease_time())
        promises = [lease.renew(1000.0), lease.renew(1000.0)]
        server.answers.wait_for(2)
        server.answer(0)
        promises[0].result(PATIENCE)
        promises.append(lease.renew(50.0))
        server.answers.wait_for(3)
        server.answer(1)
        server.answer(2)
        results(promises)
        assert lease.remaining <= granted.remaining <= 50.0


def test_a_lost_answer_does_not_shorten_a_lease_that_was_renewed_meanwhile(memory: Connect, channel: str) -> None:
    with Landlord() as landlord:
        server = LossyServer(memory(), channel, landlord)
        granted = landlord.grant(1000.0)
        holder = memory()
        lease = lease_from_value(holder, channel, lease_to_value(granted), 1000.0, lease_time(), timeout=2.0)
        lost = lease.renew(100.0)
        server.answers.wait_for(1)
        later = lease.renew(100.0)
        server.answers.wait_for(2)
        server.answer(1)
        later.result(PATIENCE)
        remaining = lease.remaining + lease_time()
        assert isinstance(lost.exception(PATIENCE), OutcomeUnknownError)
        assert lease.remaining + lease_time() == pytest.approx(remaining)


def test_the_manager_survives_a_lost_answer(memory: Connect, channel: str) -> None:
    """Scenario 21: the request waits for the timeout of the instance, which is longer than the lease."""
    with Landlord(max_duration=3.0) as landlord, LeaseRenewalManager() as manager:
        server = LossyServer(memory(), channel, landlord)
        granted = landlord.grant(3.0)
        lease = lease_from_value(memory(), channel, lease_to_value(granted), 3.0, lease_time())
        manager.renew_until(lease)
        server.answers.wait_for(2)  # the first one is not answered
        server.answer(1)
        server.answers.wait_for(3)
        assert lease in manager
        assert not granted.is_ended


@table(
    "leases", [[["x"]], [5], [[5, 1.0]], [["id", "1"]], [["id", 10**400]], [["id", True]], "x", None, [["id", 1.0, 2]]]
)
def test_malformed_requests_are_answered_without_a_traceback(
    memory: Connect, channel: str, leases: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with served(memory(), channel):
        client = memory()
        with pytest.raises(DecodeError):
            call(client, channel, "renew", {"leases": leases}, timeout=PATIENCE).result()
        with pytest.raises(DecodeError):
            call(client, channel, "cancel", {"leases": [["x"]] if leases else leases}, timeout=PATIENCE).result()
    assert "Traceback" not in caplog.text


def info(**changed: Any) -> dict[str, Any]:
    return {"id": "id", "about": "", "duration": 1.0, "remaining": 1.0, "expiration": None, **changed}


def test_a_malformed_answer_hides_no_other_one(memory: Connect, channel: str, caplog: pytest.LogCaptureFixture) -> None:
    server, client = memory(), memory()
    bad: list[Any] = [
        {"channel": "bad", "leases": [info(duration=10**400)]},
        {"channel": "bad", "leases": [info(remaining="1")]},
        {"channel": "bad", "leases": [info(id=["i"])]},
        {"channel": "bad", "leases": [info(about=5)]},
        {"channel": "bad", "leases": [info(expiration="tomorrow")]},
        {"channel": "bad", "leases": [5]},
        {"channel": "bad", "leases": {}},
        {"channel": 5, "leases": []},
        {"channel": "bad"},
        [],
    ]

    def answer_badly(query: messaging.Message) -> None:
        for each in bad:
            server.publish(json.loads(query.payload)["answer"], json.dumps(each).encode()).result()

    with served(server, channel) as landlord:
        landlord.grant(1000.0, about="a printer")
        server.on("leases/query", answer_badly).ready.result(PATIENCE)

        def find_one() -> bool:
            caplog.clear()
            found = [(each, leases[0].about) for each, leases in find_leases(client, 0.5)]
            return found == [(channel, "a printer")] and caplog.text.count("malformed answer") == len(bad)

        eventually(find_one)


def test_a_malformed_list_of_leases_is_refused(memory: Connect, channel: str) -> None:
    server = CallServer(memory(), channel, {"leases": lambda _arguments, _body: [info(expiration="tomorrow")]})
    server.ready.result(PATIENCE)
    with pytest.raises(DecodeError):
        remote_leases(memory(), channel, timeout=PATIENCE).result()


def test_a_malformed_query_is_logged_in_one_line(
    memory: Connect, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = memory(), memory()
    queries = [b"{", b"[]", b"{}", b'{"answer":"a"}', b'{"answer":"leases/answers/#"}']
    with served(server, channel):
        for payload in queries:
            client.publish("leases/query", payload).result()
        eventually(lambda: caplog.text.count("a query is not answered") == len(queries))
        eventually(lambda: [each for each, _ in find_leases(client, 0.5)] == [channel])
    assert "Traceback" not in caplog.text


@table("wait", [-1, math.nan, math.inf, 3601, True, "1", None, 10**400])
def test_a_wait_that_is_no_number_of_seconds_is_refused(memory: Connect, wait: Any) -> None:
    with pytest.raises(ArgumentError, match="wait"):
        find_leases(memory(), wait)


def test_the_kept_answers_are_bounded(
    memory: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = memory(), memory()
    monkeypatch.setattr(remote_module, "_MOST_LEASES", 3)
    monkeypatch.setattr(remote_module, "_MOST_OBJECTS", 2)
    answers = [("a", 2), ("a", 3), ("b", 1), ("c", 0), ("d", 0)]

    def answer(query: messaging.Message) -> None:
        channel = json.loads(query.payload)["answer"]
        for name, count in answers:
            server.publish(channel, json.dumps({"channel": name, "leases": [info()] * count}).encode()).result()

    server.on("leases/query", answer).ready.result(PATIENCE)
    eventually(lambda: [(name, len(leases)) for name, leases in find_leases(client, 0.5)] == [("a", 3), ("c", 0)])
    assert "too many answers" in caplog.text


def test_a_batch_that_is_larger_than_a_message_is_split(memory: Connect, channel: str) -> None:
    server, client = memory(), memory("?max_message_size=1000")
    with served(server, channel) as landlord:
        granted = [landlord.grant(10.0) for _ in range(100)]
        leases = [remote(client, channel, each) for each in granted]
        granted[7].cancel()
        with pytest.raises(LeaseMapError, match="1 of 100"):
            renew_all(dict.fromkeys(leases, 60.0)).result(PATIENCE)
        assert all(each.remaining > 50.0 for each in granted if each is not granted[7])
        assert all(each.remaining > 50.0 for each in leases if each is not leases[7])


def test_a_closed_instance_keeps_no_other_one_from_being_asked(memory: Connect, channel: str) -> None:
    server, closed, client = memory(), memory(), memory()
    with served(server, channel) as landlord:
        dead, alive = (remote(each, channel, landlord.grant(10.0)) for each in (closed, client))
        local = landlord.grant(10.0)
        closed.close()
        with pytest.raises(LeaseMapError) as caught:
            renew_all(dict.fromkeys((dead, alive, local), 60.0)).result(PATIENCE)
        assert [*caught.value.failures] == [dead]
        assert alive.duration == local.duration == 60.0
        assert isinstance(dead.renew(10.0).exception(PATIENCE), ClosedError)
        assert isinstance(dead.cancel().exception(PATIENCE), ClosedError)
        with pytest.raises(LeaseMapError):
            cancel_all((dead, alive, local)).result(PATIENCE)
        assert alive.is_ended
        assert local.is_ended


def test_the_leases_of_a_server_that_could_not_be_made_are_not_served(
    memory: Connect, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = memory(), memory()

    def refuse(*_: object) -> None:
        raise ArgumentError("refused")

    with Landlord() as landlord:
        with monkeypatch.context() as patched:
            patched.setattr(remote_module, "LeaseDirectory", refuse)
            with pytest.raises(ArgumentError, match="refused"):
                LeaseServer(server, channel, landlord)
        with LeaseServer(server, channel, landlord) as serving:  # the channel is free again
            serving.ready.result(PATIENCE)
            assert remote_leases(client, channel, timeout=PATIENCE).result() == []
        error = remote_leases(client, channel, timeout=0.3).exception()
        assert isinstance(error, MessagingError)
