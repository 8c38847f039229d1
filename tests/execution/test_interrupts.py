"""A signal handler that raises, wherever it does, loses nothing and blocks nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel

from messaging import Messaging
from messaging.errors import ClosedError
from messaging.execution import Promise
from messaging.services import ServiceRegistry
from messaging.testing.waiting import PATIENCE, eventually
from tests.doubles.fake import FakeBroker
from tests.doubles.fixtures import Connect
from tests.interrupts import RECEIVING_MODULES, InterruptError, again, interrupt_everywhere, ready

T = TypeVar("T")


class Reading(BaseModel):
    celsius: float


class Deliveries:
    """Delivers a few messages at a time, and sees that each is settled once."""

    def __init__(self, broker: FakeBroker, *payloads: bytes, **options: Any) -> None:
        self.broker = broker
        self.payloads = payloads
        self.options = options
        self.tokens: list[Any] = []

    def deliver(self) -> None:
        self.tokens += self.broker.deliver(*self.payloads, **self.options)

    def check(self, settled: list[Any], but: int = 0) -> None:
        expected = self.tokens[: len(self.tokens) - but]
        eventually(lambda: len(settled) >= len(expected), f"{len(expected)} verdicts rather than {len(settled)}")
        assert settled == expected


#: what an interrupt leaves to the garbage collector: coroutines that were not started, streams without a reference
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
    pytest.mark.filterwarnings("ignore:a stream of .* was neither consumed nor closed"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _garbage() -> Iterator[None]:
    yield
    gc.collect()


READINGS = (b'{"celsius": 1}', b'{"celsius": 2}', b'{"celsius": 3}')


@pytest.mark.parametrize("kind", ["prefetch", "auto", "qos 0"])
def test_every_message_arrives_once_and_is_acknowledged(broker: FakeBroker, m: Messaging, kind: str) -> None:
    options = {"auto_acknowledge": True} if kind == "auto" else {"prefetch": 2}
    stream = m.subscribe("a", **options)
    deliveries = Deliveries(broker, *READINGS, content_type="application/json", qos0=kind == "qos 0")
    broker.wait_subscribed()

    def run() -> None:
        deliveries.deliver()
        assert [again(lambda: stream.receive(PATIENCE)).payload for _ in READINGS] == [*READINGS]

    def check() -> None:
        if kind != "qos 0":
            deliveries.check(broker.acknowledged, but=kind == "prefetch")

    assert interrupt_everywhere(run, check) > 50
    assert broker.rejected == []


@pytest.mark.parametrize("kind", ["model", "filter"])
def test_a_message_whose_check_was_interrupted_comes_again(connect: Connect, kind: str) -> None:
    m = connect()
    extensions = {"prefetch": 2, "queue": "q"}
    builder = m.acknowledge_context_builder().filter_acknowledge(lambda _: True).message_context_builder()
    stream = (
        m.subscribe("a", Reading, **extensions)
        if kind == "model"
        else m.subscription.subscribe(builder.channel("a").extensions(extensions).build_context())
    )
    stream.ready.result(PATIENCE)

    def run() -> None:
        for reading in READINGS:
            m.publish("a", reading, content_type="application/json").result(PATIENCE)
        assert {again(lambda: stream.receive(PATIENCE)).payload for _ in READINGS} == {*READINGS}

    def check() -> None:
        credit = stream._primary.credit
        eventually(lambda: credit.handed_out - credit.settled <= (kind == "model"), "all settled")

    assert interrupt_everywhere(run, check) > 50


def test_a_coroutine_gets_every_message_once(
    broker: FakeBroker, m: Messaging, caplog: pytest.LogCaptureFixture
) -> None:
    stream = m.subscribe("a", prefetch=2)
    deliveries = Deliveries(broker, b"1", b"2", b"3")
    broker.wait_subscribed()

    async def receive() -> None:
        async with asyncio.timeout(PATIENCE):
            got: list[bytes] = []
            while len(got) < 3:
                try:
                    with ready():
                        message = await anext(stream)
                    got.append(message.payload)
                except InterruptError:
                    pass
            assert got == [b"1", b"2", b"3"]

    def run() -> None:
        deliveries.deliver()
        asyncio.run(receive())

    def check() -> None:
        deliveries.check(broker.acknowledged, but=1)

    # an interrupt of asyncio's own code may lose a wake-up
    assert interrupt_everywhere(run, check, *RECEIVING_MODULES, "stream.py") > 50
    caplog.clear()  # asyncio logs errors of its callbacks


@pytest.mark.parametrize("accepted", [True, False])
def test_a_verdict_that_was_interrupted_counts_or_can_be_given_again(
    broker: FakeBroker, m: Messaging, accepted: bool
) -> None:
    context = m.acknowledge_context_builder().message_context_builder().channel("a").extensions({"prefetch": 1})
    stream = m.subscription.subscribe(context.build_context())
    deliveries = Deliveries(broker, b"1", b"2", delivery_count=1)
    broker.wait_subscribed()

    def run() -> None:
        deliveries.deliver()
        for _ in range(2):
            handler: Any = again(lambda: stream.receive(PATIENCE)).context.acknowledge_handler  # type: ignore[attr-defined]
            again(handler.acknowledge if accepted else handler.reject)

    settled = broker.acknowledged if accepted else broker.rejected
    assert interrupt_everywhere(run, lambda: deliveries.check(settled)) > 50


@pytest.mark.parametrize("options", [{}, {"timeout": 5.0}])
def test_publishing_goes_on_and_nothing_stays_in_the_outbox(
    broker: FakeBroker, connect: Connect, options: dict[str, Any]
) -> None:
    m = connect(broker, outbox_size=4)
    numbers = iter(range(10**6))
    published: list[bytes] = []

    def run() -> None:
        payload = b"%d" % next(numbers)
        promise = again(lambda: m.publish("a", payload, **options))
        again(lambda: promise.result(PATIENCE))
        published.append(payload)

    def check() -> None:
        eventually(lambda: m.runtime.get_runtime_dto().publisher.pending == 0, "an empty outbox")
        assert {*published} <= {*broker.payloads}

    assert interrupt_everywhere(run, check) > 50


def test_a_publisher_that_waits_for_room_can_be_interrupted(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, outbox_size=1)
    broker.hold = True
    is_over = threading.Event()
    blocked = m.publisher._admission.blocked

    def confirm() -> None:
        while not is_over.wait(0.002):
            if blocked:  # not before: the second one has to wait each time
                broker.confirm()

    def run() -> None:
        for _ in range(2):
            again(lambda: m.publish("a", b"1"))

    confirming = threading.Thread(target=confirm)
    confirming.start()
    try:
        assert interrupt_everywhere(run, lambda: None, "waiting.py", "publishing/sending.py", "deadlines.py") > 20
    finally:
        is_over.set()
        confirming.join()

    def is_empty() -> bool:
        broker.confirm()
        return m.runtime.get_runtime_dto().publisher.pending == 0

    eventually(is_empty, "an empty outbox")


def test_callbacks_of_promises_are_called(connect: Connect) -> None:
    called: list[int] = []
    numbers = iter(range(10**6))

    def call(is_done: bool) -> None:
        promise: Promise[int] = Promise("a test")
        number = next(numbers)
        if is_done:
            promise.resolve(number)
        for _ in range(2):
            again(lambda: promise.add_done_callback(lambda promise: called.append(promise.result())))
        if not is_done:
            promise.resolve(number)
        eventually(lambda: called.count(number) >= 2)

    def run() -> None:
        call(is_done=False)
        call(is_done=True)

    assert interrupt_everywhere(run, lambda: None) > 20


def test_requests_are_answered_and_none_stays_open(connect: Connect) -> None:
    m = connect()
    m.reply("sum", sum)

    def run() -> None:
        for numbers in ([1, 2], [3]):

            def ask(numbers: list[int] = numbers) -> Any:
                return m.request("sum", numbers, int).result(PATIENCE)

            assert again(ask) == sum(numbers)

    def check() -> None:
        eventually(lambda: m.runtime.get_runtime_dto().requests.pending == 0, "no open requests")

    assert interrupt_everywhere(run, check) > 50


def test_the_first_request_can_be_interrupted(connect: Connect) -> None:
    server = connect()
    server.reply("sum", sum)
    clients: list[Messaging] = []

    def run() -> None:
        m = connect(server.runtime.get_runtime_dto().connection_uri)
        clients.append(m)
        assert again(lambda: m.request("sum", [1, 2], int).result(PATIENCE)) == 3
        m.close()

    interrupt_everywhere(run, lambda: None, "replyto/requests.py", "deadlines.py")


def test_many_replies_arrive(connect: Connect) -> None:
    m = connect()
    m.reply("count", lambda count: iter(range(count)), many=True)

    def run() -> None:
        def ask() -> list[int]:
            stream = again(lambda: m.request_many("count", 3))
            got = []
            with contextlib.suppress(ClosedError):
                while True:
                    got.append(again(lambda: stream.receive(PATIENCE)))
            return [message.value(int) for message in got]

        assert ask() == [0, 1, 2]

    interrupt_everywhere(run, lambda: None)


def subscriptions(m: Messaging) -> int:
    return len(m.runtime.get_runtime_dto().subscriptions)


def subscribe(m: Messaging, _: FakeBroker) -> None:
    stream = again(lambda: m.subscribe("a"))
    disposable = again(lambda: stream.subscribe(lambda _: None))
    again(disposable.dispose)


def register(m: Messaging, broker: FakeBroker) -> None:
    registration = again(lambda: m.on("a", lambda message: None))
    broker.deliver(b"1")
    again(registration.close)


def enter(m: Messaging, broker: FakeBroker) -> None:
    def use() -> None:
        with m.subscribe("a") as stream:
            broker.deliver(b"1")
            assert again(lambda: stream.receive(PATIENCE)).payload == b"1"

    again(use)


@pytest.mark.parametrize("use", [subscribe, register, enter])
def test_no_subscription_or_handler_is_left_behind(
    broker: FakeBroker, m: Messaging, use: Callable[[Messaging, FakeBroker], None]
) -> None:
    def check() -> None:
        eventually(lambda: not m.handlers and not subscriptions(m) and not broker.live, "all unsubscribed")

    assert interrupt_everywhere(partial(use, m, broker), check) > 50


def test_an_interrupted_connect_leaves_no_name_and_no_services_behind(connect: Connect) -> None:
    registry = ServiceRegistry()

    def run() -> None:
        m = again(lambda: connect("memory://interrupts", name="only", services=registry))
        again(m.close)

    def check() -> None:
        eventually(lambda: not registry.find(None), "no services")

    assert (
        interrupt_everywhere(run, check, "instance/connecting.py", "instance/messaging.py", "instance/services.py") > 50
    )
