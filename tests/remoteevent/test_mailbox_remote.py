"""Mailboxes of other processes: switching, draining, junk and repeated requests (EV.3.3)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from messaging import Messaging
from messaging.dispatch.calls import call
from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    DeadlineError,
    DecodeError,
    InvalidIteratorError,
    MessagingError,
    OutcomeUnknownError,
    ReplyError,
)
from messaging.execution import Promise
from messaging.leases import Landlord, Lease, LeaseDirectory, RemoteGrantor
from messaging.remoteevent import (
    EventMailbox,
    MailboxServer,
    RemoteListener,
    RemoteMailbox,
    RemoteMailboxRegistration,
)
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import FAST, Recorder, event, events, ready, store, taken

CHANNEL = "mailboxes/field"
RemoteBox = RemoteMailboxRegistration


@pytest.fixture
def mailbox(m: Messaging, tmp_path: Path) -> Iterator[EventMailbox]:
    with (
        EventMailbox(tmp_path / "mailbox", messaging=m, retry=FAST) as made,
        ready(MailboxServer(m, CHANNEL, made)),
    ):
        yield made


@pytest.fixture
def remote(m: Messaging, mailbox: EventMailbox) -> Iterator[RemoteMailbox]:  # it is served
    with RemoteMailbox(m, CHANNEL) as made:
        yield made


@pytest.fixture
def box(remote: RemoteMailbox) -> RemoteBox:
    return remote.register(100.0).result(PATIENCE)


# --- switching


def test_what_was_pulled_is_not_pushed(mailbox: EventMailbox, box: RemoteBox) -> None:
    """Scenario 51."""
    target = Recorder()
    store(mailbox.registration(box.id), events(1, 20))
    iterator = box.remote_events().result(PATIENCE)
    assert taken(iterator.batch(10)) == [*range(1, 11)]
    box.enable_delivery(target).result(PATIENCE)
    target.events.wait_for(10)
    for call_ in (iterator.next, iterator.batch, iterator.close):
        with pytest.raises(InvalidIteratorError):
            call_()
    eventually(lambda: len(mailbox.registration(box.id)) == 0)
    assert target.numbers == [*range(11, 21)]


def test_a_newer_iterator_goes_on_where_the_older_was(mailbox: EventMailbox, box: RemoteBox) -> None:
    """Scenario 51."""
    store(mailbox.registration(box.id), events(1, 20))
    first = box.remote_events().result(PATIENCE)
    assert taken(first.batch(5)) == [1, 2, 3, 4, 5]
    second = box.remote_events().result(PATIENCE)
    with pytest.raises(InvalidIteratorError):
        first.next()
    assert taken(second.batch(100)) == [*range(6, 21)]
    second.close()
    assert len(mailbox.registration(box.id)) == 0


def test_an_iterator_goes_on_after_a_switch_that_failed(
    mailbox: EventMailbox, box: RemoteBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(mailbox.registration(box.id), events(1, 20))
    iterator = box.remote_events().result(PATIENCE)
    assert taken(iterator.batch(5)) == [1, 2, 3, 4, 5]

    def fail(*_: Any) -> None:
        raise BoundReachedError("the disk is full")

    monkeypatch.setattr(mailbox.registration(box.id).pushing, "_persist", fail)
    with pytest.raises(BoundReachedError):
        box.enable_delivery(Recorder()).result(PATIENCE)
    assert taken(iterator.batch(100)) == [*range(6, 21)]


def test_taken_events_of_an_older_iterator_acknowledge_nothing(
    m: Messaging, mailbox: EventMailbox, box: RemoteBox
) -> None:
    store(mailbox.registration(box.id), events(1, 5))
    old, _ = call(m, CHANNEL, "iterate", {"id": box.id}).result(PATIENCE)
    new, stored = call(m, CHANNEL, "iterate", {"id": box.id, "taken": [old, 1]}).result(PATIENCE)
    assert stored == 3
    call(m, CHANNEL, "iterate", {"id": box.id, "taken": [old, 4]}).result(PATIENCE)
    assert (len(mailbox.registration(box.id)), new != old) == (3, True)


# --- draining


def test_a_drain_that_is_interrupted_returns_what_has_arrived(
    mailbox: EventMailbox, box: RemoteBox, remote: RemoteMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 42: what was acknowledged is not lost."""
    store(mailbox.registration(box.id), events(1, 2500))
    request = remote.call
    fetches: list[Any] = []

    def failing(operation: str, arguments: Any = None, **options: Any) -> Promise[Any]:
        if operation == "fetch":
            fetches.append(arguments)
            if len(fetches) == 2:
                request(operation, arguments, **options).result(PATIENCE)  # it arrives; the reply is lost
                lost: Promise[Any] = Promise("fetch")
                lost.reject(OutcomeUnknownError("the connection was lost"))
                return lost
        return request(operation, arguments, **options)

    monkeypatch.setattr(remote, "call", failing)
    first = taken(box.drain())
    assert first == [*range(1, len(first) + 1)]
    assert 0 < len(first) < 2500
    second = taken(box.drain())
    assert sorted({*first, *second}) == [*range(1, 2501)]
    assert len(mailbox.registration(box.id)) == 0


def test_a_drain_whose_first_request_fails_raises(
    mailbox: EventMailbox, box: RemoteBox, remote: RemoteMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(mailbox.registration(box.id), events(1, 5))
    request = remote.call

    def failing(operation: str, arguments: Any = None, **options: Any) -> Promise[Any]:
        if operation == "fetch":
            raise OutcomeUnknownError("the connection was lost")
        return request(operation, arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "call", failing)
        with pytest.raises(OutcomeUnknownError):
            box.drain()
    assert taken(box.drain()) == [1, 2, 3, 4, 5]


def test_a_drain_ends_although_events_keep_arriving(
    mailbox: EventMailbox, box: RemoteBox, remote: RemoteMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as many events as were stored when it began."""
    store(mailbox.registration(box.id), events(1, 10))
    request = remote.call
    numbers = iter(range(11, 100_000))

    def arriving(operation: str, arguments: Any = None, **options: Any) -> Promise[Any]:
        if operation == "fetch":
            store(mailbox.registration(box.id), [event(next(numbers))])
        return request(operation, arguments, **options)

    monkeypatch.setattr(remote, "call", arriving)
    assert taken(box.drain()) == [*range(1, 11)]
    assert taken(box.drain(3)) == [11, 12, 13]
    for junk in (-5, True, "x"):
        with pytest.raises(ArgumentError):
            box.drain(junk)  # type: ignore[arg-type]


def test_a_drain_waits_for_the_target_that_has_the_events(
    mailbox: EventMailbox, box: RemoteBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Recorder()
    with target.gate:
        store(mailbox.registration(box.id), events(1, 5))
        mailbox.registration(box.id).enable_delivery(target)
        delivery = mailbox.registration(box.id).pushing.delivery
        assert delivery is not None
        eventually(lambda: delivery.is_busy)
        with monkeypatch.context() as patch:
            patch.setattr("messaging.remoteevent.mailbox.iterator.BATCH_WAIT", 0.05)
            with pytest.raises(DeadlineError, match="target"):
                box.drain()
    drained = taken(box.drain())
    assert target.numbers + drained == [*range(1, 6)]


# --- junk


@table(
    "operation, arguments, error",
    [
        ("fetch", {"iterator": "TOKEN", "ticket": None, "most": -5}, DecodeError),
        ("fetch", {"iterator": "TOKEN", "ticket": -1, "most": 5}, DecodeError),
        ("fetch", {"iterator": "TOKEN", "ticket": None, "most": True}, DecodeError),
        ("fetch", {"iterator": "TOKEN", "ticket": None, "most": 1, "timeout": "x"}, DecodeError),
        ("fetch", {"iterator": 1, "ticket": None, "most": 5}, DecodeError),
        ("fetch", {"iterator": "other", "ticket": None, "most": 5}, InvalidIteratorError),
        ("refuse", {"kinds": [5]}, DecodeError),
        ("refuse", {"kinds": ["ab"]}, DecodeError),
        ("refuse", {"kinds": [["a", 1, 2]]}, DecodeError),
        ("refuse", {"kinds": [[5, 1]]}, ArgumentError),
        ("refuse", {"kinds": [["a", [1]]]}, ArgumentError),
        ("refuse", {"kinds": "ab"}, DecodeError),
        ("enable", {"target": ["a/#", ""]}, ArgumentError),
        ("enable", {"target": 5}, DecodeError),
        ("enable", {"target": ["a", ""], "taken": 5}, DecodeError),
        ("enable", {"target": [CHANNEL, "x"]}, ArgumentError),
        ("iterate", {"taken": ["x", "y"]}, DecodeError),
        ("renew_lease", {"lease": ["a", "b", -5.0], "duration": 5.0}, ArgumentError),
        ("renew_lease", {"lease": ["a", "b", 5.0], "duration": -1.0}, ArgumentError),
        ("renew_lease", {"lease": ["a", "b", 5.0], "duration": -5.0}, ArgumentError),
        ("renew_lease", {"lease": ["a/#", "b", 5.0], "duration": 5.0}, ArgumentError),
        ("renew_lease", {"lease": ["a", "b" * 20_000, 5.0], "duration": 5.0}, ArgumentError),
        ("renew_lease", {"lease": 5, "duration": 5.0}, DecodeError),
        ("register", {"duration": 5.0, "keep": ["all"]}, ArgumentError),
        ("register", {"duration": 5.0, "max_events": True}, ArgumentError),
        ("register", {"duration": "x"}, DecodeError),
    ],
)
def test_junk_in_a_request_is_refused_with_an_error_of_its_class(
    m: Messaging, mailbox: EventMailbox, box: RemoteBox, operation: str, arguments: Any, error: type[MessagingError],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    store(mailbox.registration(box.id), events(1, 3))
    token = mailbox.registration(box.id).begin_iterator()
    given = {key: token if value == "TOKEN" else value for key, value in arguments.items()}
    with pytest.raises(MessagingError) as caught:
        call(m, CHANNEL, operation, {"id": box.id, **given}).result(PATIENCE)
    assert isinstance(caught.value, error), caught.value
    assert "Traceback" not in caplog.text
    assert [record for record in caplog.records if record.exc_info] == []
    assert len(mailbox.registration(box.id)) == 3
    assert mailbox.registration(box.id).refused == frozenset()
    assert len(mailbox) == 1


def test_a_stub_refuses_junk_before_it_asks(m: Messaging, box: RemoteBox) -> None:
    for junk in ([("", 1)], [("a", None)]):
        with pytest.raises(ArgumentError):
            box.add_unknown_events(junk)  # type: ignore[arg-type]
    lease = Lease("lease", RemoteGrantor(m, "leases/here"), 100.0, 100.0)
    for duration in (0, -1, -3.0):
        with pytest.raises(ArgumentError):
            box.renew_lease(lease, duration)


def test_a_mailbox_tells_that_it_is_there(m: Messaging, box: RemoteBox) -> None:
    assert box.id
    assert call(m, CHANNEL, "mailbox").result(PATIENCE) == 1


def test_a_mailbox_stays_no_target_of_itself_after_a_second_server_of_its_channel_has_closed(
    m: Messaging, mailbox: EventMailbox, box: RemoteBox
) -> None:
    """Scenario 44."""
    second = MailboxServer(m, CHANNEL, mailbox)
    second.close()
    second.close()
    with pytest.raises(ArgumentError, match="itself"):
        mailbox.registration(box.id).enable_delivery(RemoteListener(m, box.listener.reference))


def test_a_mailbox_refuses_to_renew_leases_of_its_own(
    m: Messaging, mailbox: EventMailbox, remote: RemoteMailbox, box: RemoteBox
) -> None:
    """Neither the registration nor its events would ever end."""
    other = remote.register(100.0).result(PATIENCE)
    for lease in (box.lease, other.lease):
        with pytest.raises(ArgumentError, match="of this mailbox"):
            box.renew_lease(lease).result(PATIENCE)
        own = mailbox.registration(lease.id)
        for each in (own.lease, Lease(lease.id, RemoteGrantor(m, CHANNEL), 9.0, 9.0)):
            with pytest.raises(ArgumentError, match="of this mailbox"):
                mailbox.renew_lease(mailbox.registration(box.id), each)
    mailbox.renew_lease(mailbox.registration(box.id), mailbox.landlord.grant(9.0))  # of another resource


# --- iterators that are not valid any more


def test_an_iterator_that_was_taken_over_hands_out_nothing_that_it_has_read_ahead(
    m: Messaging, mailbox: EventMailbox, box: RemoteBox
) -> None:
    """Scenario 51: also if the other reader is in another process."""
    store(mailbox.registration(box.id), events(1, 9))
    first = box.remote_events().result(PATIENCE)
    assert first.next(PATIENCE) == event(1)
    other = RemoteMailbox(m, CHANNEL).registration(box.id)
    second = other.remote_events().result(PATIENCE)
    for call_ in (first.next, first.batch, first.close):
        with pytest.raises(InvalidIteratorError, match="took the place"):
            call_()
    assert taken(second.batch(100)) == [*range(1, 10)]  # the first reader has not said that it took one


def test_the_error_of_an_iterator_of_an_earlier_run_says_so(m: Messaging, tmp_path: Path) -> None:
    with RemoteMailbox(m, CHANNEL) as remote:
        with EventMailbox(tmp_path / "m") as mailbox, ready(MailboxServer(m, CHANNEL, mailbox)):
            box = remote.register(100.0).result(PATIENCE)
            store(mailbox.registration(box.id), events(1, 3))
            iterator = box.remote_events().result(PATIENCE)
            assert iterator.next(PATIENCE) == event(1)
        with EventMailbox(tmp_path / "m") as mailbox, ready(MailboxServer(m, CHANNEL, mailbox)):
            with pytest.raises(InvalidIteratorError, match="earlier run"):
                iterator.next(PATIENCE)
            assert taken(box.drain()) == [1, 2, 3]


# --- starting


def test_a_mailbox_server_that_is_being_made_answers_fetches(
    m: Messaging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owners of an earlier run call as soon as the server has subscribed."""
    found: list[Any] = []

    class Directory(LeaseDirectory):
        def __init__(self, messaging: Messaging, channel: str, landlord: Landlord) -> None:
            box = RemoteMailbox(messaging, channel, timeout=PATIENCE).registration(local.id)
            with box.remote_events().result(PATIENCE) as iterator:
                found.extend(iterator.batch())
            super().__init__(messaging, channel, landlord)

    monkeypatch.setattr("messaging.leases.remote.LeaseDirectory", Directory)
    with EventMailbox(tmp_path / "mailbox", messaging=m) as mailbox:
        local = mailbox.register(100.0)
        store(local, events(1, 2))
        with MailboxServer(m, CHANNEL, mailbox):
            assert taken(found) == [1, 2]


# --- the disk of the mailbox


def test_the_owner_is_told_that_the_disk_of_the_mailbox_failed(
    remote: RemoteMailbox, box: RemoteBox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail)
        for promise in (remote.register(100.0), box.enable_delivery(Recorder())):
            with pytest.raises(ReplyError) as caught:
                promise.result(PATIENCE)
            assert caught.value.kind == "JournalError"
            assert "Input/output error" in caught.value.reason
    assert "a call has failed" in caplog.text
    assert "Traceback" not in caplog.text
    assert remote.register(100.0).result(PATIENCE).id != box.id
