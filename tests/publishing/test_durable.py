"""The durable outbox at a broker that does as told: memory, deadlines, times to live, dead letters, interrupts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import messaging
from messaging import Messaging, OutcomeUnknownError
from messaging.errors import (
    ConnectFailedError,
    DeadlineError,
    InvalidOptionError,
    JournalFullError,
    OutboxFullError,
    PublishRefusedError,
    UnroutableError,
)
from messaging.journal import Journal, Record
from messaging.services import ServiceRegistry
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, results
from tests.disks import ballast
from tests.doubles.consumers import manual, reject
from tests.doubles.fake import FakeBroker, on_loop, settle_loop
from tests.doubles.fixtures import Connect
from tests.interrupts import InterruptError, interrupt_everywhere, ready
from tests.scripts import FORK, run_script

MEGABYTE = 2**20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The folder of the outbox."""
    return tmp_path / "outbox"


def left_behind(connect: Connect, broker: FakeBroker, path: Path, *payloads: bytes, **context: object) -> None:
    """Store messages that no instance has sent."""
    m = connect(broker, outbox_path=path, outbox_size=100_000)
    broker.go_down()
    results(m.publish("a", payload, **context).stored for payload in payloads)  # type: ignore[arg-type]
    m.close(0)
    broker.gates["open"].open()


def position(path: Path) -> int:
    with Journal.view(path) as journal:
        return journal.cursors()["outbox"]


def drained(m: Messaging) -> bool:
    return m.runtime.get_runtime_dto().publisher.pending == 0


# --- memory


def test_the_messages_in_memory_are_bounded_in_bytes_also_when_an_earlier_instance_left_many(
    broker: FakeBroker, connect: Connect, path: Path
) -> None:
    left_behind(connect, broker, path, *[b"%d" % number + bytes(MEGABYTE) for number in range(40)])
    broker.hold = True
    tracemalloc.start()
    try:
        m = connect(broker, outbox_path=path, outbox_bytes=4 * MEGABYTE)
        broker.wait_sent(3)
        broker.sent.clear()
        while not drained(m):
            broker.confirm()
            broker.sent.clear()
        assert tracemalloc.get_traced_memory()[1] < 16 * MEGABYTE
    finally:
        tracemalloc.stop()


def test_messages_larger_than_the_bound_are_sent_too(broker: FakeBroker, connect: Connect, path: Path) -> None:
    payloads = [bytes(number * 1000) for number in range(1, 6)]
    left_behind(connect, broker, path, *payloads)
    m = connect(broker, outbox_path=path, outbox_bytes=1500, outbox_size=1)
    eventually(lambda: drained(m), "the outbox to be empty")
    assert broker.payloads == payloads


def test_stored_messages_leave_requests_their_room(broker: FakeBroker, connect: Connect, path: Path) -> None:
    broker.hold = True
    m = connect(broker, outbox_path=path, outbox_size=10)
    for number in range(50):
        m.publish("a", b"%d" % number).stored.result(PATIENCE)
    broker.wait_sent(10)
    request = m.request("r", b"request", timeout=PATIENCE)
    eventually(lambda: b"request" in broker.payloads, "the request to be sent")
    m.close(0)
    assert request.exception(PATIENCE) is not None


# --- ids


@pytest.mark.usefixtures("virtual_clock")
def test_stored_messages_and_requests_have_different_ids(broker: FakeBroker, connect: Connect, path: Path) -> None:
    m = connect(broker, outbox_path=path)
    requests = [m.request("a", b"request", timeout=0.2) for _ in range(5)]
    broker.wait_sent(5)
    for number in range(5):
        m.publish("a", b"%d" % number).result(PATIENCE)
    assert len({sent.message_id for sent in broker.sent}) == 10
    assert all(request.exception(PATIENCE) is not None for request in requests)


# --- deadlines


@pytest.mark.usefixtures("virtual_clock")
def test_a_promise_fails_at_its_deadline_behind_patient_ones(broker: FakeBroker, connect: Connect, path: Path) -> None:
    m = connect(broker, outbox_path=path, outbox_size=10, timeout=600.0)
    broker.go_down()
    patient = [m.publish("a", b"") for _ in range(2000)]
    promise = m.publish("a", b"", timeout=0.2)
    assert type(promise.exception(PATIENCE)) is OutcomeUnknownError
    assert not any(each.done() for each in patient)
    broker.gates["open"].open()
    results(patient)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.usefixtures("virtual_clock")
def test_promises_fail_at_their_deadlines_without_a_link(
    broker: FakeBroker, connect: Connect, path: Path, size: int
) -> None:
    m = connect(broker, outbox_path=path, outbox_size=size, timeout=0.3)
    broker.go_down()
    promises = [m.publish("a", b"%d" % number) for number in range(5)]
    assert {type(each.exception(PATIENCE)) for each in promises} == {OutcomeUnknownError}
    assert "it is stored, and will be sent" in str(promises[0].exception())
    results(each.stored for each in promises)
    broker.gates["open"].open()
    broker.wait_sent(5)
    assert broker.payloads == [b"%d" % number for number in range(5)]


# --- time to live


def test_a_message_that_expires_without_a_connection_is_not_sent(
    virtual_clock: VirtualClock, broker: FakeBroker, connect: Connect, path: Path
) -> None:
    m = connect(broker, outbox_path=path)
    broker.go_down()
    short = m.publish("a", b"short", time_to_live=5.0)
    short.stored.result(PATIENCE)
    long = m.publish("a", b"long", time_to_live=60.0)
    virtual_clock.advance(5.0)
    broker.gates["open"].open()
    with pytest.raises(DeadlineError, match="time to live"):
        short.result(PATIENCE)
    assert long.result(PATIENCE) is None
    assert broker.payloads == [b"long"]
    m.close()
    assert position(path) == 2
    with Journal.view(path) as journal:
        assert journal.dead_letters() == []


@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_broker_is_told_what_time_is_left(
    virtual_clock: VirtualClock, broker: FakeBroker, connect: Connect, path: Path, is_restarted: bool
) -> None:
    m = connect(broker, outbox_path=path)
    broker.go_down()
    m.publish("a", b"", time_to_live=60.0, store_and_forward=True).result(PATIENCE)
    virtual_clock.advance(10.0)
    broker.hold = True
    if is_restarted:
        m.close(0)
    broker.gates["open"].open()
    if is_restarted:
        connect(broker, outbox_path=path)
    broker.wait_sent(1)
    eventually(lambda: broker.held, "the message")
    left = broker.held[0].plan.options.time_to_live
    assert left is not None
    assert 45.0 < left < 50.001
    broker.lose_and_reconnect()  # it is sent again
    eventually(lambda: broker.held, "the message")
    again = broker.held[0].plan.options.time_to_live
    assert again is not None
    assert again < left


def test_a_clock_that_is_set_back_prolongs_no_message(broker: FakeBroker, connect: Connect, path: Path) -> None:
    with Journal.open(path) as journal:
        journal.append("a", b"", '{"extensions": {"timeToLive": 5.0}}', timestamp=time.time() + 3600)
    broker.hold = True
    connect(broker, outbox_path=path)
    eventually(lambda: broker.held, "the message")
    left = broker.held[0].plan.options.time_to_live
    assert left is not None
    assert left <= 5.0


# --- dead letters


def test_a_refused_message_with_a_time_to_live_is_a_dead_letter(
    broker: FakeBroker, connect: Connect, path: Path
) -> None:
    left_behind(connect, broker, path, b"1", time_to_live=60.0)
    broker.hold = True
    m = connect(broker, outbox_path=path, close_timeout=PATIENCE)
    eventually(lambda: broker.held, "the message")
    broker.fail(PublishRefusedError("not here"))
    m.close()
    assert position(path) == 1
    with Journal.view(path) as journal:
        (letter,) = journal.dead_letters()
        assert letter.stored.payload == b"1"
        assert letter.stored.context.extensions["timeToLive"] == 60.0


def test_a_dead_letter_of_a_subscription_that_is_refused_is_kept_by_the_outbox_once(
    broker: FakeBroker, connect: Connect, path: Path
) -> None:
    """Its message is acknowledged: the outbox has it, with the reason."""
    broker.hold = True
    m = connect(broker, outbox_path=path)
    stream = manual(m, deadLetterChannel="dead")
    tokens = broker.deliver(b"0")
    reject(stream.receive(PATIENCE))
    broker.held.wait_for(1)
    broker.fail(UnroutableError("no queue"))
    eventually(lambda: broker.acknowledged == tokens)
    assert stream.counters.unrouted == 0
    m.close()
    with Journal.open(path) as journal:
        (letter,) = journal.dead_letters()
        assert (letter.stored.payload, letter.reason) == (b"0", "UnroutableError: no queue")


def test_a_stored_message_that_is_too_large_is_a_dead_letter(broker: FakeBroker, connect: Connect, path: Path) -> None:
    left_behind(connect, broker, path, bytes(100), b"small")
    broker.limit = 10
    m = connect(broker, outbox_path=path)
    eventually(lambda: drained(m), "the outbox to be empty")
    m.close()
    assert broker.payloads == [b"small"]
    assert position(path) == 2
    with Journal.view(path) as journal:
        assert [letter.reason.partition(":")[0] for letter in journal.dead_letters()] == ["PayloadTooLargeError"]


def test_a_message_over_which_the_connection_is_lost_again_and_again_is_reported(
    broker: FakeBroker, connect: Connect, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker.hold = True
    m = connect(broker, outbox_path=path)
    promise = m.publish("a", b"12345", message_id="mine")
    for count in range(1, 6):
        assert "max_message_size" not in caplog.text
        broker.wait_sent(count)
        broker.lose_and_reconnect()
    assert "message mine to 'a' (5 bytes)" in caplog.text
    broker.wait_sent(6)
    broker.confirm()
    assert promise.result(PATIENCE) is None


def test_many_refused_messages_do_not_take_many_threads(broker: FakeBroker, connect: Connect, path: Path) -> None:
    broker.hold = True
    m = connect(broker, outbox_path=path, close_timeout=PATIENCE)
    promises = [m.publish("a", b"%d" % number) for number in range(200)]
    broker.wait_sent(200)
    eventually(lambda: len(broker.held) == 200, "all messages at the broker")

    def refuse_all() -> int:
        for outgoing in broker.held:
            outgoing.fail(PublishRefusedError("not here"))
        return threading.active_count()

    before = threading.active_count()
    assert on_loop(refuse_all) < before + 10
    broker.held.clear()
    assert {type(each.exception(PATIENCE)) for each in promises} == {PublishRefusedError}
    m.close()
    assert position(path) == 200
    with Journal.view(path) as journal:
        assert [letter.stored.payload for letter in journal.dead_letters()] == [b"%d" % number for number in range(200)]


def test_dead_letters_that_are_kept_while_an_instance_closes_are_not_sent_by_the_next_one(
    broker: FakeBroker, connect: Connect, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Journal.add_dead_letter

    def keep_late(self: Journal, record: Record, reason: str, *, most: int) -> int:
        eventually(lambda: broker.closed, "the end of the connection")
        return keep(self, record, reason, most=most)

    left_behind(connect, broker, path, bytes(100), bytes(101), b"small")
    broker.closed, broker.limit = 0, 10
    monkeypatch.setattr(Journal, "add_dead_letter", keep_late)
    m = connect(broker, outbox_path=path)
    broker.wait_sent(1)
    m.close(0)
    with Journal.view(path) as journal:
        assert [len(letter.stored.payload) for letter in journal.dead_letters()] == [100, 101]
    assert position(path) == 3
    broker.limit = None
    m = connect(broker, outbox_path=path)
    m.publish("a", b"next").result(PATIENCE)
    assert broker.payloads == [b"small", b"next"]


def test_a_message_whose_dead_letter_cannot_be_kept_before_the_end_is_left_to_the_next_instance(
    broker: FakeBroker, connect: Connect, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        eventually(lambda: broker.closed, "the end of the connection")
        raise JournalFullError("outbox_path", "no space left on device")

    left_behind(connect, broker, path, bytes(100))
    broker.closed, broker.limit = 0, 10
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add_dead_letter", refuse)
        m = connect(broker, outbox_path=path)
        eventually(lambda: m.runtime.get_runtime_dto().outbox.failed, "the refusal")  # type: ignore[union-attr]
        m.close(0)
    assert position(path) == 0
    m = connect(broker, outbox_path=path)
    eventually(lambda: drained(m), "the outbox to be empty")
    m.close()
    with Journal.view(path) as journal:
        assert [len(letter.stored.payload) for letter in journal.dead_letters()] == [100]


def test_a_dead_letter_is_kept_when_a_full_disk_has_room_again(
    broker: FakeBroker, connect: Connect, disk_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    disk = disk_of("1m")
    broker.hold = True
    m = connect(broker, outbox_path=disk / "outbox")
    refused = m.publish("a", bytes(20_000))
    refused.stored.result(PATIENCE)
    broker.wait_sent(1)
    file = ballast(disk)
    eventually(lambda: broker.held, "the message")
    broker.fail(PublishRefusedError("not here"))
    assert type(refused.exception(PATIENCE)) is PublishRefusedError
    eventually(lambda: "cannot keep a dead letter" in caplog.text, "an attempt to keep it")
    file.unlink()
    broker.hold = False
    m.publish("a", b"next").result(PATIENCE)

    def letters() -> int:
        with Journal.view(disk / "outbox") as journal:
            return len(journal.dead_letters())

    eventually(lambda: letters() == 1, "the dead letter")
    m.close()
    assert position(disk / "outbox") == 2


# --- a full disk


def test_an_instance_starts_on_a_full_disk_and_sends_what_is_left(
    broker: FakeBroker, connect: Connect, disk_of: Callable[[str], Path]
) -> None:
    disk = disk_of("1m")
    left_behind(connect, broker, disk / "outbox", *[b"%d" % number for number in range(10)])
    file = ballast(disk)
    m = connect(broker, outbox_path=disk / "outbox")
    with Journal.view(disk / "outbox") as journal:
        assert journal.end == 10
    eventually(lambda: drained(m), "the outbox to be empty")
    assert broker.payloads == [b"%d" % number for number in range(10)]
    file.unlink()
    m.publish("a", b"next").result(PATIENCE)
    m.close()
    assert position(disk / "outbox") == 11


def test_dropped_messages_are_reported_as_dropped_on_close(broker: FakeBroker, connect: Connect, path: Path) -> None:
    m = connect(broker, outbox_path=path, outbox_size=10, outbox_disk_bytes=2**16, outbox_full="drop_oldest")
    broker.go_down()
    promises = [m.publish("a", bytes(1000)) for _ in range(200)]
    promises[-1].stored.result(PATIENCE)
    m.close()
    with Journal.view(path) as journal:
        begin = journal.begin
    assert 50 < begin < 200
    errors = [type(each.exception(PATIENCE)) for each in promises]
    assert errors == [OutboxFullError] * begin + [OutcomeUnknownError] * (200 - begin)


# --- settings


@table("setting", ["outbox_path", "inbox_path"])
def test_an_empty_path_is_refused(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOptionError, match=setting):
        connect(broker, **{setting: ""})
    with pytest.raises(InvalidOptionError, match=setting):
        connect(f"{broker.url}?{setting}=")
    monkeypatch.setenv(f"MESSAGING_{setting.upper()}", "")
    with pytest.raises(InvalidOptionError, match=setting):
        connect(broker)
    assert [*tmp_path.iterdir()] == []


# --- interrupts and forks


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the interrupt keeps files from those that close them
@pytest.mark.parametrize(
    "modules",
    [
        ("publishing/durable.py",),
        pytest.param(("instance/messaging.py", "journal/journal.py", "journal/folders.py"), marks=pytest.mark.slow),
    ],
    ids=["outbox", "everywhere"],
)
def test_an_interrupted_connect_frees_the_outbox(
    registry: ServiceRegistry, path: Path, modules: tuple[str, ...]
) -> None:
    numbers = itertools.count()

    def run() -> None:
        with contextlib.suppress(InterruptError):
            with ready():
                m = messaging.connect(f"memory://interrupted{next(numbers)}", outbox_path=path, services=registry)
            m.close()

    def check() -> None:
        messaging.connect(f"memory://interrupted{next(numbers)}", outbox_path=path, services=registry).close()

    assert interrupt_everywhere(run, check, *modules) > 10


def test_an_interrupted_publish_counts_once(connect: Connect, path: Path) -> None:
    m = connect(outbox_path=path)

    def run() -> None:
        with contextlib.suppress(InterruptError):
            with ready():
                promise = m.publish("a", b"x")
            promise.result(PATIENCE)

    def check() -> None:
        eventually(lambda: drained(m), "everything to be sent")

    modules = ("publishing/stored.py", "publishing/sending.py", "journal/commit.py")
    assert interrupt_everywhere(run, check, *modules) > 10


def test_the_promise_stored_of_a_parent_fails_in_a_forked_child(tmp_path: Path) -> None:
    script = """
from tests.doubles.fake import FakeBroker, FakeAdapter

broker = FakeBroker()
settings = {"outbox_path": sys.argv[1], "outbox_full": "block", "outbox_disk_bytes": 2**16, "close_timeout": 0.1}
m = messaging.instance.Messaging(
    FakeAdapter, messaging.model.url.parse_url(broker.url), messaging.services.ServiceRegistry(), settings
)
m.ready.result(5)
broker.hold = True
promises = [m.publish("a", bytes(20_000)) for _ in range(10)]
promises[0].stored.result(5)
broker.wait_sent(1)

def work():
    error = promises[-1].stored.exception(5)  # waits for room in the outbox of the parent
    assert type(error) is messaging.ClosedError, error

child(work)
m.close()
"""
    run_script(f"{FORK}\nsys.argv = ['', {str(tmp_path / 'outbox')!r}]\n{script}")


def test_closing_frees_the_outbox_of_a_failed_connect(
    broker: FakeBroker, registry: ServiceRegistry, path: Path
) -> None:
    broker.errors["open"].append(ConnectFailedError("refused"))
    broker.gates["close"].close()

    async def main() -> None:
        m = messaging.connect(broker.url, outbox_path=path, services=registry)
        await asyncio.to_thread(eventually, lambda: broker.gates["close"].waiting)
        closing = asyncio.create_task(m.aclose())
        await asyncio.sleep(0)
        await asyncio.to_thread(settle_loop)
        assert not closing.done()
        broker.gates["close"].open()
        await closing
        assert type(m.ready.exception(0)) is ConnectFailedError

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
