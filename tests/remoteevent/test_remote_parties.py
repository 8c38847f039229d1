"""Listeners, generators and mailboxes of other processes, over each adapter."""

from __future__ import annotations

import asyncio
import threading
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import Messaging
from messaging.dispatch.calls import CallServer, call, read_result
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
    UnroutableError,
    WouldBlockError,
)
from messaging.leases import Landlord, Lease, LeaseServer
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
)
from messaging.remoteevent.event import decode_event
from messaging.testing import waiting
from messaging.testing.brokers import Mosquitto
from messaging.testing.servers import Servers
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, results
from tests.leases.conftest import Connect
from tests.remoteevent.helpers import FAST, Recorder, deliver_all, event, events, generate, ready, taken
from tests.threads import in_background, together

# --- listeners


def test_notify_is_acknowledged_by_the_listener(connect: Connect) -> None:
    listener = Recorder()
    with ready(ListenerServer(connect())) as server:
        stub = RemoteListener(connect(), server.add(listener))
        stub.notify(event(1, handback={"h": b"x"}))
        assert listener.events == [event(1, handback={"h": b"x"})]
        assert stub.deliver(events(2, 600)).result(PATIENCE)[:1] == [None]
        listener.events.wait_for(2)
        listener.unknown = {("source", 2)}
        outcomes = stub.deliver([event(601), event(1, 2), event(602)]).result(PATIENCE)
        assert [type(each) for each in outcomes] == [type(None), UnknownEventError, type(None)]
        with pytest.raises(UnknownEventError):
            stub.notify(event(2, 2))
        listener.error = ValueError("bad")
        with pytest.raises(ReplyError, match="ValueError: bad"):
            stub.notify(event(603))
        listener.go()
        with pytest.raises(ListenerGoneError):
            stub.notify(event(604))


def test_a_listener_that_was_removed_is_gone(m: Messaging) -> None:
    with ListenerServer(m) as server:
        reference = server.add(Recorder(), "one")
        assert reference == ListenerReference(server.channel, "one")
        with pytest.raises(ArgumentError):
            server.add(Recorder(), "one")
        stub = RemoteListener(m, reference)
        stub.notify(event(1))
        assert server.remove(reference)
        assert not server.remove(reference)
        with pytest.raises(ListenerGoneError):
            stub.notify(event(2))


@pytest.mark.usefixtures("virtual_clock")
def test_a_listener_that_is_not_there_is_an_indefinite_failure(m: Messaging) -> None:
    stub = RemoteListener(m, "nowhere", timeout=0.2)
    (outcome,) = stub.deliver([event(1)]).result(PATIENCE)
    assert isinstance(outcome, MessagingError)
    assert not isinstance(outcome, (ListenerGoneError, UnknownEventError))


def test_batches_of_several_senders_wait_for_each_other(m: Messaging) -> None:
    """A listener is called for one event at a time, in the order of each sender."""
    running = threading.Semaphore(1)
    overlaps: list[int] = []
    received: dict[str, list[int]] = {}

    def notify(received_event: Any) -> None:
        if not running.acquire(blocking=False):
            overlaps.append(1)
        received.setdefault(received_event.source, []).append(received_event.sequence_number)
        running.release()

    with ListenerServer(m) as server:
        reference = server.add(notify)

        def send(source: str) -> None:
            stub = RemoteListener(m, reference)
            for first in range(1, 200, 10):
                deliver_all(stub, events(first, first + 9, source=source))

        together(*(partial(send, name) for name in "abcd"))
    assert not overlaps
    assert received == {name: [*range(1, 201)] for name in "abcd"}


def test_junk_in_a_notification_is_refused_and_harms_no_other_event(m: Messaging) -> None:
    listener = Recorder()
    with ListenerServer(m) as server:
        reference = server.add(listener)
        for payload in (b"", b"junk", b"{}", b'{"operation":5}', b'{"operation":"explode"}', b"[1]\n"):
            with pytest.raises(MessagingError):
                read_result(m.request(reference.channel, payload).result(PATIENCE).payload)
        body = b'{"source":"s","id":1,"sequence":1}\njunk\n{"source":"s","id":1,"sequence":2}'
        arguments = {"listener": reference.id, "timeout": 5.0}
        outcomes = call(m, reference.channel, "notify", arguments, body).result(PATIENCE)
        assert outcomes == [None]  # the sender goes on behind it
        outcomes = call(m, reference.channel, "notify", arguments, body.partition(b"\n")[2]).result(PATIENCE)
        assert outcomes[0][0] == "DecodeError"
    assert listener.numbers[0] == 1


def test_an_event_without_a_form_is_dropped_and_the_next_one_sent(m: Messaging) -> None:
    listener = Recorder()
    with ListenerServer(m) as server, EventGenerator("s", events=[1], begin=0) as generator:
        stub = RemoteListener(m, server.add(listener))
        generator.register(1, None, stub, 60.0)
        outcomes = stub.deliver([event(1, handback=object()), event(2)]).result(PATIENCE)
        assert isinstance(outcomes[0], InvalidEventError)
        assert stub.deliver([event(2), event(3, handback=object())]).result(PATIENCE) == [None]


def test_blocking_in_an_event_loop_is_refused(m: Messaging) -> None:
    async def main() -> None:
        with ListenerServer(m) as server:
            await server.ready
            stub = RemoteListener(m, server.add(Recorder()))
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
        ready(EventServer(there, channel, generator)),
        RemoteGenerator(here, channel) as remote,
    ):
        generator.generate("hot")
        registration = remote.register("hot", {"h": b"x"}, listener, 100.0).result(PATIENCE)
        assert (registration.id, registration.source, registration.sequence_number) == ("hot", "boiler", 1)
        assert registration.is_fully_ordered
        assert registration.lease.duration == 100.0
        generate(generator, 100, "hot")
        eventually(lambda: len(listener.events) == 100)
        assert listener.numbers == [*range(2, 102)]
        assert {each.handback["h"] for each in listener.events} == {b"x"}
        assert registration.lease.renew(50.0).result(PATIENCE) == 50.0
        with pytest.raises(UnknownEventError):
            remote.register("cold", None, listener).result(PATIENCE)
        with pytest.raises(ArgumentError):
            remote.register("hot", None, listener, 0.0)
        with pytest.raises(InvalidEventError):
            remote.register("", None, listener)
        registration.lease.cancel().result(PATIENCE)
        eventually(lambda: len(generator.landlord) == 0)
        with pytest.raises(UnknownLeaseError):
            registration.lease.renew(5.0).result(PATIENCE)


def test_a_server_needs_a_party(m: Messaging, channel: str) -> None:
    with pytest.raises(ArgumentError):
        EventServer(m, channel, object())


# --- mailboxes


@pytest.fixture
def served(connect: Connect, channel: str, tmp_path: Path) -> Any:
    """A mailbox, and the way to it from another instance."""
    there = connect()
    with (
        EventMailbox(tmp_path / "mailbox", messaging=there, retry=FAST) as mailbox,
        ready(MailboxServer(there, channel, mailbox)),
        RemoteMailbox(connect(), channel) as remote,
    ):
        yield mailbox, remote


def test_a_mailbox_of_another_process_stores_pushes_and_is_pulled(served: Any) -> None:
    """Scenarios 41, 42, 49 and 51 over a broker."""
    mailbox, remote = served
    target = Recorder()
    box = remote.register(100.0).result(PATIENCE)
    assert box.lease.remaining <= mailbox.registration(box.id).lease.remaining
    box.listener.notify(event(1))
    assert box.listener.deliver(events(2, 500)).result(PATIENCE)[0] is None
    eventually(lambda: len(mailbox.registration(box.id)) >= 2)
    stored = len(mailbox.registration(box.id))
    iterator = box.remote_events().result(PATIENCE)
    assert iterator.next(5) == event(1)
    newer = box.remote_events().result(PATIENCE)
    for _ in range(2):  # also of those that it had fetched before
        with pytest.raises(InvalidIteratorError):
            iterator.batch(1000, 1)
    found = [event(1), *newer.batch(1000, 5)]
    assert found[-1].sequence_number == stored
    newer.close()
    assert len(mailbox.registration(box.id)) == 0
    box.listener.notify(event(1001))
    box.enable_delivery(target).result(PATIENCE)
    box.listener.notify(event(1002))
    eventually(lambda: target.numbers == [1001, 1002])
    box.disable_delivery().result(PATIENCE)
    for number in range(1003, 1103):
        box.listener.notify(event(number))
    assert taken(box.drain()) == [*range(1003, 1103)]
    assert box.drain() == []


def test_a_wait_for_an_event_ends_early(served: Any) -> None:
    """Scenarios 49 and 50 over a broker."""
    mailbox, remote = served
    box = remote.register(100.0).result(PATIENCE)
    iterator = box.remote_events().result(PATIENCE)
    assert iterator.next(0.1) is None
    stored = mailbox.registration(box.id)
    found: waiting.Recorder[Any] = waiting.Recorder()
    for act in (lambda: box.listener.notify(event(1)), stored.lease.cancel):
        join = in_background(lambda: found.append(iterator.next(9)))
        eventually(lambda: stored.pulling)
        act()
        if not found:
            found.wait_for(1)
            join()
    assert found == [event(1)]
    with pytest.raises(UnknownLeaseError):
        join()
    for request in (box.remote_events, box.disable_delivery, lambda: box.enable_delivery(Recorder())):
        with pytest.raises(UnknownLeaseError):
            request().result(PATIENCE)
    with pytest.raises(ListenerGoneError):
        box.listener.notify(event(2))


def test_a_registration_is_found_again_by_its_id(served: Any) -> None:
    mailbox, remote = served
    box = remote.register(100.0, keep="latest_and_count").result(PATIENCE)
    for number in range(1, 6):
        box.listener.notify(event(number))
    again = remote.registration(box.id)
    (found,) = again.drain()
    assert (found.sequence_number, found.suppressed) == (5, 4)
    assert again.lease.renew(500.0).result(PATIENCE) == 500.0
    (info,) = remote.registrations().result(PATIENCE)
    assert (info.id, info.keep, info.stored, info.target) == (box.id, "latest_and_count", 0, None)
    assert 400 < info.remaining <= 500
    assert mailbox.registration(box.id).lease.duration == 500.0
    with pytest.raises(UnknownLeaseError):
        remote.registration("unknown").drain()


def test_a_mailbox_refuses_to_be_its_own_target_over_the_broker(served: Any) -> None:
    """Scenario 44."""
    mailbox, remote = served
    box = remote.register(100.0).result(PATIENCE)
    other = remote.register(100.0).result(PATIENCE)
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
        ready(EventServer(there, f"{channel}/g", generator)),
    ):
        with EventMailbox(tmp_path / "m", messaging=here) as mailbox, ready(MailboxServer(here, channel, mailbox)):
            box = RemoteMailbox(there, channel).register(100.0).result(PATIENCE)
            registration = RemoteGenerator(there, f"{channel}/g").register(1, None, box.listener, 1.0).result(PATIENCE)
            box.renew_lease(registration.lease).result(PATIENCE)
            with pytest.raises(ArgumentError):
                box.renew_lease(landlord.grant(1.0))
            name = registration.lease.id
        with EventMailbox(tmp_path / "m", messaging=here) as mailbox, ready(MailboxServer(here, channel, mailbox)):
            renewed: waiting.Recorder[Lease] = waiting.Recorder()
            found = landlord.lease(name)
            assert found is not None
            found.on_renewed = renewed
            renewed.wait_for(2)  # in more than its duration
            assert landlord.lease(name) is not None
            generator.generate(1)
            eventually(lambda: len(mailbox.registration(box.id)) == 1)
            mailbox.registration(box.id).lease.cancel()
            eventually(lambda: landlord.lease(name) is None)


# --- calls


def test_a_call_that_arrives_before_its_server_has_subscribed_fails_at_once(
    connect: Connect, channel: str, tmp_path: Path
) -> None:
    """The owner is told "later" by the broker: nothing was delivered, so asking again does no harm."""
    m = connect()
    box = RemoteMailbox(m, channel).registration("a" * 24)
    generator = RemoteGenerator(m, channel)
    for ask in (
        box.drain,
        lambda: box.lease.renew(5.0).result(),
        lambda: box.remote_events().result(),
        lambda: box.enable_delivery(box.listener.reference._replace(channel="other")).result(),
        lambda: box.listener.notify(event(1)),
        lambda: RemoteMailbox(m, channel).register(5.0).result(),
        lambda: generator.register(1, None, box.listener, 5.0).result(),
    ):
        with pytest.raises(UnroutableError):
            ask()
    with EventMailbox(tmp_path / "m", messaging=m) as mailbox, ready(MailboxServer(m, channel, mailbox)):
        assert RemoteMailbox(m, channel).register(5.0).result(PATIENCE).drain() == []


def test_calls_reach_a_server_at_a_broker_that_takes_no_qos_1(servers: Servers, channel: str, tmp_path: Path) -> None:
    with (
        servers.borrow(Mosquitto, ["max_qos 0"]) as broker,
        messaging.connect(f"{broker.url}?version=5") as m,
        EventMailbox(tmp_path / "m", messaging=m) as mailbox,
        ready(MailboxServer(m, channel, mailbox)),
    ):
        box = RemoteMailbox(m, channel).register(5.0).result(PATIENCE)
        assert box.lease.renew(9.0).result(PATIENCE) == 9.0
        assert box.drain() == []


@table("timeout", [None, 7.0, 1e7])
def test_a_call_expires_with_its_timeout_also_without_one_of_its_own(
    connect: Connect, channel: str, timeout: float | None
) -> None:
    """A broker keeps none for the session of a server that is away, so it is not executed when its sender is gone."""
    here, there = connect(), connect()
    with here.subscribe(channel) as requests:
        asked = call(there, channel, "iterate", timeout=timeout)
        asked.was_retrieved = True
        found = requests.receive(PATIENCE).context.extensions.get("timeToLive")
        assert found is not None
        wanted = there.timeout if timeout is None else min(timeout, 4_294_967.0)
        assert wanted - PATIENCE < found <= wanted + 1.0  # MQTT has whole seconds


def test_errors_of_operations_keep_their_class(m: Messaging, channel: str) -> None:
    def fail(arguments: Any, _body: bytes) -> Any:
        raise {"lease": UnknownLeaseError, "decode": DecodeError, "other": RuntimeError}[arguments["what"]]("why")

    with messaging.connect(f"memory://{uuid.uuid4().hex}") as other:
        server = CallServer(other, channel, {"fail": fail, "echo": lambda arguments, body: [arguments["x"], body]})
        assert call(other, channel, "echo", {"x": {"a": b"b"}}, b"body\n\x00").result(PATIENCE) == [
            {"a": b"b"},
            b"body\n\x00",
        ]
        for what, error in (("lease", UnknownLeaseError), ("decode", DecodeError), ("other", ReplyError)):
            with pytest.raises(error, match="why"):
                call(other, channel, "fail", {"what": what}).result(PATIENCE)
        with pytest.raises(ArgumentError, match="there are fail, echo"):
            call(other, channel, "explode").result(PATIENCE)
        with pytest.raises(DecodeError, match="malformed reply"):
            call(other, channel, "echo", {"x": 1}, convert=lambda _result: 1 // 0).result(PATIENCE)
        with pytest.raises(InvalidEventError):
            call(other, channel, "echo", {"x": object()})
        server.close()
        server.close()


# --- notifications that fail on their way


def test_a_garbled_reply_says_nothing_against_the_event(m: Messaging, channel: str) -> None:
    listener = Recorder()
    garbled = [b"garbage", b'{"result": 7}', b'{"result": []}', b'{"error": ["ValueError"]}']

    def answer(request: messaging.Message) -> bytes:
        if garbled:
            return garbled.pop(0)
        for line in request.payload.split(b"\n")[1:]:
            listener.notify(decode_event(line))
        return b'{"result": [null]}'

    m.reply(channel, answer)
    with EventGenerator("s", events=[1], begin=0, retry=FAST) as generator:
        registration = generator.register(1, None, RemoteListener(m, channel), 60.0)
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
            generate(generator, 50)
            eventually(lambda: listener.numbers == [*range(1, 51)])
        (outcome,) = RemoteListener(m, reference).deliver([event(1, handback="h" * 3000)]).result(PATIENCE)
        assert isinstance(outcome, PayloadTooLargeError)


def test_a_listener_that_hangs_delays_no_other_behind_its_channel(connect: Connect) -> None:
    """Scenario 13: more notifications wait than the server works on at a time."""
    hanging, other = Recorder(), Recorder()
    with ready(ListenerServer(connect())) as server:
        m = connect()
        first = RemoteListener(m, server.add(hanging), timeout=20)
        with hanging.gate:
            sent = [first.deliver([event(number)]) for number in range(1, 101)]
            assert RemoteListener(m, server.add(other)).deliver([event(1)]).result(PATIENCE) == [None]
            assert not any(each.done() for each in sent)
        assert results(sent) == [[None]] * 100
    assert sorted(hanging.numbers) == [*range(1, 101)]


def test_notifications_that_wait_for_a_listener_are_bounded(m: Messaging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("messaging.remoteevent.remote._MAX_WAITING_BYTES", 10_000)
    listener = Recorder()
    with ListenerServer(m) as server, listener.gate:
        stub = RemoteListener(m, server.add(listener), timeout=20)
        stub.deliver([event(1)])
        stub.deliver([event(2, handback="h" * 9_000)])
        (refused,) = stub.deliver([event(3, handback="h" * 9_000)]).result(PATIENCE)
        assert isinstance(refused, BoundReachedError)


def test_the_listener_of_a_refused_registration_is_forgotten(m: Messaging, channel: str) -> None:
    with (
        EventGenerator("s", events=[1]) as generator,
        ready(EventServer(m, channel, generator)) as server,
        RemoteGenerator(m, channel) as remote,
    ):
        for _ in range(5):
            with pytest.raises(UnknownEventError):
                remote.register(2, None, Recorder()).result(PATIENCE)
        remote.register(1, None, Recorder()).result(PATIENCE)
        server = remote._server
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
