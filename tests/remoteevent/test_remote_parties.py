"""Listeners, generators and mailboxes of other processes, over each adapter."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

import messaging
from messaging.calls import CallServer, call, read_result
from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    DecodeError,
    InvalidEventError,
    InvalidIteratorError,
    ListenerGoneError,
    MessagingError,
    PayloadTooLargeError,
    ReplyError,
    UnknownEventError,
    UnknownLeaseError,
    WouldBlockError,
)
from messaging.leases import Landlord, LeaseServer
from messaging.remoteevent import (
    EventGenerator,
    EventMailbox,
    EventServer,
    ListenerReference,
    ListenerServer,
    MailboxServer,
    RemoteGenerator,
    RemoteListener,
    RemoteMailbox,
    RetryPolicy,
)
from messaging.remoteevent.layout import decode_event
from messaging.testing.waiting import eventually
from tests.remoteevent.helpers import Recorder, event, events

Connect = Callable[[], messaging.Messaging]
FAST: Final = RetryPolicy(first_delay=0.01, max_delay=0.05)


@pytest.fixture
def memory() -> Any:
    with messaging.connect(f"memory://{uuid.uuid4().hex}") as m:
        yield m


# --- listeners


def test_notify_is_acknowledged_by_the_listener(connect: Connect) -> None:
    listener = Recorder()
    with ListenerServer(connect()) as server:
        server.ready.result(10)
        stub = RemoteListener(connect(), server.add(listener))
        stub.notify(event(1, handback={"h": b"x"}))
        assert listener.events == [event(1, handback={"h": b"x"})]
        assert stub.deliver(events(2, 600)).result(10)[:1] == [None]
        eventually(lambda: len(listener.events) >= 2)
        listener.unknown = {("source", 2)}
        outcomes = stub.deliver([event(601), event(1, 2), event(602)]).result(10)
        assert [type(each) for each in outcomes] == [type(None), UnknownEventError, type(None)]
        with pytest.raises(UnknownEventError):
            stub.notify(event(2, 2))
        listener.error = ValueError("bad")
        with pytest.raises(ReplyError, match="ValueError: bad"):
            stub.notify(event(603))
        listener.go()
        with pytest.raises(ListenerGoneError):
            stub.notify(event(604))


def test_a_listener_that_was_removed_is_gone(memory: messaging.Messaging) -> None:
    with ListenerServer(memory) as server:
        reference = server.add(Recorder(), "one")
        assert reference == ListenerReference(server.channel, "one")
        with pytest.raises(ArgumentError):
            server.add(Recorder(), "one")
        stub = RemoteListener(memory, reference)
        stub.notify(event(1))
        assert server.remove(reference)
        assert not server.remove(reference)
        with pytest.raises(ListenerGoneError):
            stub.notify(event(2))


def test_a_listener_that_is_not_there_is_an_indefinite_failure(memory: messaging.Messaging) -> None:
    stub = RemoteListener(memory, "nowhere", timeout=0.2)
    (outcome,) = stub.deliver([event(1)]).result(10)
    assert isinstance(outcome, MessagingError)
    assert not isinstance(outcome, (ListenerGoneError, UnknownEventError))


def test_batches_of_several_senders_wait_for_each_other(memory: messaging.Messaging) -> None:
    """A listener is called for one event at a time, in the order of each sender."""
    running = threading.Semaphore(1)
    overlaps: list[int] = []
    received: dict[str, list[int]] = {}

    def notify(received_event: Any) -> None:
        if not running.acquire(blocking=False):
            overlaps.append(1)
        received.setdefault(received_event.source, []).append(received_event.sequence_number)
        running.release()

    with ListenerServer(memory) as server:
        reference = server.add(notify)

        def send(source: str) -> None:
            stub = RemoteListener(memory, reference)
            for first in range(1, 200, 10):
                assert stub.deliver(events(first, first + 9, source=source)).result(20) == [None] * 10

        threads = [threading.Thread(target=send, args=(name,)) for name in "abcd"]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert not overlaps
    assert received == {name: [*range(1, 201)] for name in "abcd"}


def test_junk_in_a_notification_is_refused_and_harms_no_other_event(memory: messaging.Messaging) -> None:
    listener = Recorder()
    with ListenerServer(memory) as server:
        reference = server.add(listener)
        for payload in (b"", b"junk", b"{}", b'{"operation":5}', b'{"operation":"explode"}', b"[1]\n"):
            with pytest.raises(MessagingError):
                read_result(memory.request(reference.channel, payload).result(5).payload)
        body = b'{"source":"s","id":1,"sequence":1}\njunk\n{"source":"s","id":1,"sequence":2}'
        arguments = {"listener": reference.id, "timeout": 5.0}
        outcomes = call(memory, reference.channel, "notify", arguments, body).result(5)
        assert outcomes == [None]  # the sender goes on behind it
        outcomes = call(memory, reference.channel, "notify", arguments, body.partition(b"\n")[2]).result(5)
        assert outcomes[0][0] == "DecodeError"
    assert listener.numbers[0] == 1


def test_an_event_without_a_form_is_dropped_and_the_next_one_sent(memory: messaging.Messaging) -> None:
    listener = Recorder()
    with ListenerServer(memory) as server, EventGenerator("s", events=[1], begin=0) as generator:
        stub = RemoteListener(memory, server.add(listener))
        generator.register(1, None, stub, 60.0)
        outcomes = stub.deliver([event(1, handback=object()), event(2)]).result(5)
        assert isinstance(outcomes[0], InvalidEventError)
        assert stub.deliver([event(2), event(3, handback=object())]).result(5) == [None]


def test_blocking_in_an_event_loop_is_refused(memory: messaging.Messaging) -> None:
    async def main() -> None:
        with ListenerServer(memory) as server:
            await server.ready
            stub = RemoteListener(memory, server.add(Recorder()))
            with pytest.raises(WouldBlockError):
                stub.notify(event(1))
            assert await stub.deliver([event(1)]) == [None]

    asyncio.run(main())


# --- generators


def test_a_listener_registers_with_a_generator_of_another_process(connect: Connect, channel: str) -> None:
    """Scenarios 7 to 12 over a broker."""
    listener = Recorder()
    here, there = connect(), connect()
    with (
        EventGenerator("boiler", events=["hot"], begin=0, retry=FAST) as generator,
        EventServer(there, channel, generator) as server,
        RemoteGenerator(here, channel) as remote,
    ):
        server.ready.result(10)
        generator.generate("hot")
        registration = remote.register("hot", {"h": b"x"}, listener, 100.0).result(10)
        assert (registration.id, registration.source, registration.sequence_number) == ("hot", "boiler", 1)
        assert registration.is_fully_ordered
        assert registration.lease.duration == 100.0
        for _ in range(100):
            generator.generate("hot")
        eventually(lambda: len(listener.events) == 100)
        assert listener.numbers == [*range(2, 102)]
        assert {each.handback["h"] for each in listener.events} == {b"x"}
        assert registration.lease.renew(50.0).result(10) == 50.0
        with pytest.raises(UnknownEventError):
            remote.register("cold", None, listener).result(10)
        with pytest.raises(ArgumentError):
            remote.register("hot", None, listener, 0.0)
        with pytest.raises(InvalidEventError):
            remote.register("", None, listener)
        registration.lease.cancel().result(10)
        eventually(lambda: len(generator.landlord) == 0)
        with pytest.raises(UnknownLeaseError):
            registration.lease.renew(5.0).result(10)


def test_a_server_needs_a_party(memory: messaging.Messaging, channel: str) -> None:
    with pytest.raises(ArgumentError):
        EventServer(memory, channel, object())


# --- mailboxes


@pytest.fixture
def served(connect: Connect, channel: str, tmp_path: Path) -> Any:
    """A mailbox, and the way to it from another instance."""
    there = connect()
    with (
        EventMailbox(tmp_path / "mailbox", messaging=there, retry=FAST) as mailbox,
        MailboxServer(there, channel, mailbox) as server,
        RemoteMailbox(connect(), channel) as remote,
    ):
        server.ready.result(10)
        yield mailbox, remote


def test_a_mailbox_of_another_process_stores_pushes_and_is_pulled(served: Any) -> None:
    """Scenarios 41, 42, 49 and 51 over a broker."""
    mailbox, remote = served
    target = Recorder()
    box = remote.register(100.0).result(10)
    assert box.lease.remaining <= mailbox.registration(box.id).lease.remaining
    box.listener.notify(event(1))
    assert box.listener.deliver(events(2, 500)).result(20)[0] is None
    eventually(lambda: len(mailbox.registration(box.id)) >= 2)
    stored = len(mailbox.registration(box.id))
    iterator = box.remote_events().result(10)
    assert iterator.next(5) == event(1)
    newer = box.remote_events().result(10)
    for _ in range(2):  # also of those that it had fetched before
        with pytest.raises(InvalidIteratorError):
            iterator.batch(1000, 1)
    taken = [event(1), *newer.batch(1000, 5)]
    assert taken[-1].sequence_number == stored
    newer.close()
    assert len(mailbox.registration(box.id)) == 0
    box.listener.notify(event(1001))
    box.enable_delivery(target).result(10)
    box.listener.notify(event(1002))
    eventually(lambda: target.numbers == [1001, 1002])
    box.disable_delivery().result(10)
    for number in range(1003, 1103):
        box.listener.notify(event(number))
    assert [each.sequence_number for each in box.drain()] == [*range(1003, 1103)]
    assert box.drain() == []


def test_a_wait_for_an_event_ends_early(served: Any) -> None:
    """Scenarios 49 and 50 over a broker."""
    mailbox, remote = served
    box = remote.register(100.0).result(10)
    iterator = box.remote_events().result(10)
    assert iterator.next(0.1) is None
    timer = threading.Timer(0.1, lambda: box.listener.notify(event(1)))
    timer.start()
    begun = time.monotonic()
    assert iterator.next(9) == event(1)
    assert time.monotonic() - begun < 5
    timer.join()
    timer = threading.Timer(0.1, lambda: mailbox.registration(box.id).lease.cancel())
    timer.start()
    begun = time.monotonic()
    with pytest.raises(UnknownLeaseError):
        iterator.next(9)
    assert time.monotonic() - begun < 5
    timer.join()
    for request in (box.remote_events, box.disable_delivery, lambda: box.enable_delivery(Recorder())):
        with pytest.raises(UnknownLeaseError):
            request().result(10)
    with pytest.raises(ListenerGoneError):
        box.listener.notify(event(2))


def test_a_registration_is_found_again_by_its_id(served: Any) -> None:
    mailbox, remote = served
    box = remote.register(100.0, keep="latest_and_count").result(10)
    for number in range(1, 6):
        box.listener.notify(event(number))
    again = remote.registration(box.id)
    (found,) = again.drain()
    assert (found.sequence_number, found.suppressed) == (5, 4)
    assert again.lease.renew(500.0).result(10) == 500.0
    (info,) = remote.registrations().result(10)
    assert (info.id, info.keep, info.stored, info.target) == (box.id, "latest_and_count", 0, None)
    assert 400 < info.remaining <= 500
    assert mailbox.registration(box.id).lease.duration == 500.0
    with pytest.raises(UnknownLeaseError):
        remote.registration("unknown").drain()


def test_a_mailbox_refuses_to_be_its_own_target_over_the_broker(served: Any) -> None:
    """Scenario 44."""
    mailbox, remote = served
    box = remote.register(100.0).result(10)
    other = remote.register(100.0).result(10)
    for target in (box.listener, other.listener, other.listener.reference):
        with pytest.raises(ArgumentError):
            box.enable_delivery(target)
    with pytest.raises(ArgumentError):
        mailbox.registration(box.id).enable_delivery(other.listener)


def test_events_can_be_awaited(served: Any) -> None:
    _, remote = served

    async def main() -> list[Any]:
        box = await remote.register(100.0)
        iterator = await box.remote_events()
        await box.listener.deliver([event(1)])
        with pytest.raises(WouldBlockError):
            box.drain()
        return [await iterator.next_soon(5), await iterator.next_soon(0.05)]

    assert asyncio.run(main()) == [event(1), None]


def test_a_mailbox_renews_leases_of_other_processes_also_after_a_restart(
    connect: Connect, channel: str, tmp_path: Path
) -> None:
    """EV.3.3, scenario 54."""
    here, there = connect(), connect()
    with (
        Landlord(max_duration=1.0) as landlord,
        EventGenerator("s", events=[1], begin=0, landlord=landlord, retry=FAST) as generator,
        EventServer(there, f"{channel}/g", generator) as server,
    ):
        server.ready.result(10)
        with EventMailbox(tmp_path / "m", messaging=here) as mailbox, MailboxServer(here, channel, mailbox) as served:
            served.ready.result(10)
            box = RemoteMailbox(there, channel).register(100.0).result(10)
            registration = RemoteGenerator(there, f"{channel}/g").register(1, None, box.listener, 1.0).result(10)
            box.renew_lease(registration.lease).result(10)
            with pytest.raises(ArgumentError):
                box.renew_lease(landlord.grant(1.0))
            name = registration.lease.id
        with EventMailbox(tmp_path / "m", messaging=here) as mailbox, MailboxServer(here, channel, mailbox) as served:
            served.ready.result(10)
            until = time.monotonic() + 1.5
            eventually(lambda: time.monotonic() > until)
            assert landlord.is_valid(name)
            generator.generate(1)
            eventually(lambda: len(mailbox.registration(box.id)) == 1)
            mailbox.registration(box.id).lease.cancel()
            eventually(lambda: not landlord.is_valid(name))


# --- calls


def test_errors_of_operations_keep_their_class(memory: messaging.Messaging, channel: str) -> None:
    def fail(arguments: Any, _body: bytes) -> Any:
        raise {"lease": UnknownLeaseError, "decode": DecodeError, "other": RuntimeError}[arguments["what"]]("why")

    with messaging.connect(f"memory://{uuid.uuid4().hex}") as other:
        server = CallServer(other, channel, {"fail": fail, "echo": lambda arguments, body: [arguments["x"], body]})
        assert call(other, channel, "echo", {"x": {"a": b"b"}}, b"body\n\x00").result(5) == [{"a": b"b"}, b"body\n\x00"]
        for what, error in (("lease", UnknownLeaseError), ("decode", DecodeError), ("other", ReplyError)):
            with pytest.raises(error, match="why"):
                call(other, channel, "fail", {"what": what}).result(5)
        with pytest.raises(ArgumentError, match="there are fail, echo"):
            call(other, channel, "explode").result(5)
        with pytest.raises(DecodeError, match="malformed reply"):
            call(other, channel, "echo", {"x": 1}, convert=lambda _result: 1 // 0).result(5)
        with pytest.raises(InvalidEventError):
            call(other, channel, "echo", {"x": object()})
        server.close()
        server.close()


# --- notifications that fail on their way


def test_a_garbled_reply_says_nothing_against_the_event(memory: messaging.Messaging, channel: str) -> None:
    listener = Recorder()
    garbled = [b"garbage", b'{"result": 7}', b'{"result": []}', b'{"error": ["ValueError"]}']

    def answer(request: messaging.Message) -> bytes:
        if garbled:
            return garbled.pop(0)
        for line in request.payload.split(b"\n")[1:]:
            listener.notify(decode_event(line))
        return b'{"result": [null]}'

    memory.reply(channel, answer)
    with EventGenerator("s", events=[1], begin=0, retry=RetryPolicy(first_delay=0.01, max_delay=0.02)) as generator:
        registration = generator.register(1, None, RemoteListener(memory, channel), 60.0)
        generator.generate(1)
        eventually(lambda: listener.numbers == [1])
        counts = generator.counts(registration)
        assert counts is not None
        assert (counts.invalid, counts.retries) == (0, 4)


def test_a_batch_that_is_too_large_for_the_broker_travels_in_parts() -> None:
    listener = Recorder()
    with messaging.connect(f"memory://{uuid.uuid4().hex}?max_message_size=2000") as m, ListenerServer(m) as server:
        reference = server.add(listener)
        with EventGenerator("s", events=[1], begin=0, retry=FAST) as generator:
            generator.register(1, "h" * 300, RemoteListener(m, reference), 60.0)
            for _ in range(50):
                generator.generate(1)
            eventually(lambda: listener.numbers == [*range(1, 51)])
        (outcome,) = RemoteListener(m, reference).deliver([event(1, handback="h" * 3000)]).result(10)
        assert isinstance(outcome, PayloadTooLargeError)


def test_a_listener_that_hangs_delays_no_other_behind_its_channel(connect: Connect) -> None:
    """Scenario 13: more notifications wait than the server works on at a time."""
    hanging, other = Recorder(), Recorder()
    with ListenerServer(connect()) as server:
        server.ready.result(10)
        m = connect()
        first = RemoteListener(m, server.add(hanging), timeout=20)
        with hanging.gate:
            waiting = [first.deliver([event(number)]) for number in range(1, 101)]
            assert RemoteListener(m, server.add(other)).deliver([event(1)]).result(5) == [None]
            assert not any(each.done() for each in waiting)
        assert [each.result(20) for each in waiting] == [[None]] * 100
    assert sorted(hanging.numbers) == [*range(1, 101)]


def test_notifications_that_wait_for_a_listener_are_bounded(
    memory: messaging.Messaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.remoteevent.remote_listener._MAX_WAITING_BYTES", 10_000)
    listener = Recorder()
    with ListenerServer(memory) as server, listener.gate:
        stub = RemoteListener(memory, server.add(listener), timeout=20)
        stub.deliver([event(1)])
        stub.deliver([event(2, handback="h" * 9_000)])
        (refused,) = stub.deliver([event(3, handback="h" * 9_000)]).result(10)
        assert isinstance(refused, BoundReachedError)


def test_the_listener_of_a_refused_registration_is_forgotten(memory: messaging.Messaging, channel: str) -> None:
    with (
        EventGenerator("s", events=[1]) as generator,
        EventServer(memory, channel, generator) as server,
        RemoteGenerator(memory, channel) as remote,
    ):
        server.ready.result(10)
        for _ in range(5):
            with pytest.raises(UnknownEventError):
                remote.register(2, None, Recorder()).result(10)
        remote.register(1, None, Recorder()).result(10)
        server = remote._listeners._server
        assert server is not None
        eventually(lambda: len(server._targets) == 1)


def test_a_server_needs_an_instance(channel: str) -> None:
    with Landlord() as landlord, EventGenerator(events=[1]) as generator:
        for make in (
            ListenerServer,
            lambda m: EventServer(m, channel, generator),
            lambda m: LeaseServer(m, channel, landlord),
        ):
            with pytest.raises(ArgumentError, match="messaging instance"):
                make("mqtt://localhost")  # type: ignore[operator]
