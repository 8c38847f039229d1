"""Traffic that goes on while something breaks: publishers and a receiver over proxies, and the ledger of what they did.

::

    with Scene(MQTT5, broker, tmp_path) as scene:
        scene.progress()
        scene.sending.sever()
        scene.progress()  # what is published from now on is confirmed and received
        scene.finish()  # nothing was lost, came unexpected or out of order

Publishers go through one proxy and the receiver through another, so that each side can be hit alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import messaging
from messaging import AcknowledgeMessageContext, ClosedError, Message, MessageStream, MessagingError, Promise
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Broker
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import PATIENCE, eventually, eventually_async
from tests.faults.ledger import Arrivals, History, PublisherLog, Stamp, Verdict, compare, encode, read_log
from tests.forking import ForkedProcess

#: how long traffic may take to go on after a fault, seconds: brokers take long to start
OUTAGE: Final = 3 * PATIENCE
#: messages of one publisher that await their outcome at most, and how many it sends at a time
WINDOW: Final = 200
BATCH: Final = 20
#: pause between two batches: a few thousand messages a second are enough; seconds
PACE: Final = 0.01
#: reconnecting in the time a test has
QUICK: Final[Mapping[str, Any]] = MappingProxyType({"reconnect_min": 0.02, "reconnect_max": 0.3})


def attempts_within(proxy: Proxy, seconds: float) -> int:
    """How many connections clients make in the next ``seconds``."""
    before = proxy.attempts
    time.sleep(seconds)  # sleeps: counts attempts in a time
    return proxy.attempts - before


def attempts_to_connect(proxy: Proxy, url: str, seconds: float, **settings: Any) -> int:
    """How many connections an instance makes, in ``seconds`` after the first one; all must fail."""

    async def main() -> int:
        before = proxy.attempts  # the instance begins at once, on another thread
        m = messaging.connect(through(proxy, url), retry_connect=True, **settings)
        try:
            await eventually_async(lambda: proxy.attempts > before, "an attempt")
            await asyncio.sleep(seconds)  # sleeps: counts attempts in a time
            assert not m.ready.done(), f"connected to {url}"
            return proxy.attempts - before
        finally:
            await m.aclose()

    return asyncio.run(main())


def state(m: messaging.Messaging) -> str:
    """State of the connection, as the runtime tells it."""
    return m.runtime.get_runtime_dto().connection.state


def by_hand(m: messaging.Messaging, channel: str, **extensions: str) -> MessageStream:
    """Subscribe, with messages that are acknowledged by :func:`acknowledge`."""
    context = m.acknowledge_context_builder().message_context_builder().channel(channel)
    for name, value in extensions.items():
        context.extension_entry(name, value)
    return m.subscription.subscribe(context.build_context())


def acknowledge(message: Message) -> bool:
    """Acknowledge a message; return whether it was not too late."""
    assert isinstance(message.context, AcknowledgeMessageContext)
    return message.context.acknowledge_handler.acknowledge()


def through(proxy: Proxy, url: str) -> str:
    """``url``, by way of ``proxy``."""
    parts = urlsplit(url)
    credentials = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{''.join(credentials[:2])}{proxy.host}:{proxy.port}").geturl()


class Victim:
    """A program in a process of its own, to be killed. Entered when it has written ``up`` to its stdout.

    Args:
        code: the program.
        arguments: its arguments.
    """

    def __init__(self, code: str, *arguments: str) -> None:
        self._program = code, arguments

    def __enter__(self) -> Self:
        self._process = ForkedProcess(*self._program)
        self.expect("up")
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def expect(self, line: str) -> None:
        """Wait for the next line of its stdout."""
        assert self._process.stdout is not None
        found = self._process.stdout.readline()
        assert found == f"{line}\n".encode(), found or self._process.stderr.read().decode()

    def kill(self) -> None:
        """Send SIGKILL, and wait for its end. Idempotent."""
        self._process.kill()
        self._process.wait(OUTAGE)


class Lives:
    """A program in a process that is killed and started again. Its lives write one log, and ``up`` when they are there.

    Args:
        code: the program.
        log: a file for its stdout.
    """

    def __init__(self, code: str, log: Path) -> None:
        self.log = log
        self.count = 0
        self._code = code
        self._process: ForkedProcess | None = None

    def start(self, *arguments: str) -> None:
        """Begin the next life; does not wait until it is up."""
        self.count += 1
        with self.log.open("ab") as log:
            self._process = ForkedProcess(self._code, arguments, stdout=log)

    def wait_up(self) -> None:
        """Wait until a life is up."""
        eventually(lambda: b"up\n" in self.log.read_bytes(), lambda: f"a start: {self.errors()}", patience=OUTAGE)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def tell(self, line: str) -> None:
        """Send it a line."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    @property
    def pid(self) -> int:
        """The process id of this life."""
        assert self._process is not None
        return self._process.pid

    def errors(self) -> str:
        """Why it has ended by itself, and the end of its log; empty if it runs."""
        process = self._process
        if process is None or process.poll() is None or process.stderr is None:
            return ""
        return process.stderr.read().decode()[-3000:] + self.log.read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """Send SIGKILL, and wait for its end. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(OUTAGE)
            for pipe in (process.stdin, process.stderr):
                if pipe is not None:
                    pipe.close()


@dataclass(frozen=True)
class Profile:
    """How messages travel so that none that is confirmed may be lost, as far as the protocol can.

    Attributes:
        sender, receiver: settings of the instances.
        publish, subscribe: contexts, in snake case.
        once: whether the protocol promises that nothing arrives twice, if only the connection breaks.
        ahead: how many confirmed messages of a publisher may wait for the receiver at the broker.
    """

    name: str
    sender: Mapping[str, Any] = field(default_factory=dict)
    receiver: Mapping[str, Any] = field(default_factory=dict)
    publish: Mapping[str, Any] = field(default_factory=dict)
    subscribe: Mapping[str, Any] = field(default_factory=dict)
    once: bool = False
    ahead: int = 100_000

    def __str__(self) -> str:
        return self.name


_GUARANTEED: Final = {"guaranteed_delivery": True}
# clean_start: mosquitto writes only sessions to disk that began without it
_V5: Final = {"session_expiry": 3600, "clean_start": False}
_V3: Final = {"version": "3.1.1", "clean_start": False}
_QOS2: Final = {"qos": 2}

MQTT5: Final = Profile("mqtt5", receiver=_V5, publish=_GUARANTEED, subscribe=_GUARANTEED)
MQTT311: Final = Profile(
    "mqtt311", sender={"version": "3.1.1"}, receiver=_V3, publish=_GUARANTEED, subscribe=_GUARANTEED
)
MQTT5_QOS2: Final = Profile("mqtt5-qos2", sender=_V5, receiver=_V5, publish=_QOS2, subscribe=_QOS2, once=True)
MQTT311_QOS2: Final = Profile("mqtt311-qos2", sender=_V3, receiver=_V3, publish=_QOS2, subscribe=_QOS2, once=True)
AMQP: Final = Profile("amqp", publish=_GUARANTEED, subscribe=_GUARANTEED)
#: confirmed, and not on disk
AMQP_TRANSIENT: Final = Profile("amqp-transient")

MQTT: Final = (MQTT5, MQTT311)


class Publisher:
    """Publishes as long as it is let, on a thread of its own, and keeps the log."""

    def __init__(self, name: str, instance: messaging.Messaging, scene: Scene) -> None:
        self.name = name
        self.instance = instance
        self._scene = scene
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._numbers: Iterator[int] = iter(())
        #: whether the instance is closed and takes no more
        self.refused = False
        #: the sequence that comes next
        self.next = 0
        #: the latest that was confirmed, and how many have no outcome yet
        self.confirmed, self.open = -1, 0
        self._changed = threading.Condition()  # guards the two above

    def start(self, run: str, log: Path) -> None:
        """Begin a run."""
        self.run, self.path = run, log
        self.log = PublisherLog(log)
        self._numbers = itertools.count()
        self.next, self.confirmed = 0, -1
        self._stopping.clear()
        self._threads = [threading.Thread(target=self._work, name=f"publisher-{self.name}", daemon=True)]
        self._threads[0].start()

    def _work(self) -> None:
        scene = self._scene
        while not self._stopping.is_set():
            with self._changed:
                room = self._changed.wait_for(lambda: self.open + scene.batch <= scene.window, 0.1)
            if room and self.confirmed - scene.arrivals.latest.get(self.name, -1) <= scene.profile.ahead:
                self.send(scene.batch)
            self._stopping.wait(scene.pace or 0.001)

    def send(self, count: int) -> list[Promise[None]]:
        """Publish as many messages; on one thread at a time."""
        sequences = [next(self._numbers) for _ in range(count)]
        self.log.attempt(sequences)
        promises = []
        for sequence in sequences:
            payload = encode(Stamp(self.run, self.name, sequence), self._scene.body(sequence))
            with self._changed:
                self.open += 1
            self.next = sequence + 1
            try:
                promise = self.instance.publish(self._scene.channel(self.name), payload, **self._scene.profile.publish)
            except MessagingError as error:
                self.refused = isinstance(error, ClosedError)
                self._settled(sequence, error)
            else:
                promise.add_done_callback(functools.partial(self._settled_by, sequence))
                promises.append(promise)
        return promises

    def _settled_by(self, sequence: int, promise: Promise[None]) -> None:
        self._settled(sequence, promise.exception())

    def _settled(self, sequence: int, error: MessagingError | None) -> None:
        if error is None:
            self.log.confirm(sequence)
        else:
            self.log.fail(sequence, error)
        with self._changed:
            self.open -= 1
            if error is None:
                self.confirmed = max(self.confirmed, sequence)
            self._changed.notify_all()

    def stop(self) -> None:
        """Send no more."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(OUTAGE)
            assert not thread.is_alive(), f"publisher {self.name} hangs"

    def end(self) -> None:
        """End the run, whatever is open."""
        self.stop()
        self.log.close()

    def wait_settled(self) -> None:
        """Wait until every promise has an outcome."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self.open, OUTAGE), f"{self.open} promises are open"


class Scene:
    """See the module. Entering it starts the traffic; leaving it closes everything.

    Args:
        profile: how messages travel.
        broker: running; it stays the caller's.
        folder: for the publishers' logs.
        publishers: how many.
        window, batch, pace: of each publisher; see the constants.
        body: of the message with that sequence; by default a few dozen bytes.
        before: called by the receiver with each message before it counts as received.
        settings: for all instances, over those of the profile.

    Attributes:
        sending, receiving: the proxies of the publishers and of the receiver.
        receiver: its instance.
    """

    def __init__(
        self,
        profile: Profile,
        broker: Broker,
        folder: Path,
        *,
        publishers: int = 2,
        window: int = WINDOW,
        batch: int = BATCH,
        pace: float = PACE,
        body: Callable[[int], bytes] = lambda sequence: b"." * (sequence % 64),
        before: Callable[[Message], object] | None = None,
        **settings: Any,
    ) -> None:
        self.profile = profile
        self.body = body
        self.window, self.batch, self.pace = window, batch, pace
        self.sending = Proxy(broker.host, broker.port)
        self.receiving = Proxy(broker.host, broker.port)
        self._url = broker.url
        self._folder = folder
        self._id = secrets.token_hex(4)
        self._count = publishers
        self._before = before
        self._settings = {**QUICK, "timeout": OUTAGE, "services": ServiceRegistry(), **settings}
        self._runs = itertools.count(1)
        self._past: set[str] = set()
        self._stack = contextlib.ExitStack()
        #: what the receiver's stream failed with
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.sending)
            stack.enter_context(self.receiving)
            self.receive_anew()
            stack.callback(lambda: self.receiver.close())
            self.publishers = [
                Publisher(
                    f"p{number}",
                    stack.enter_context(self._connect(self.sending, f"p{number}", self.profile.sender)),
                    self,
                )
                for number in range(self._count)
            ]
            for publisher in self.publishers:
                stack.callback(publisher.end)
            self.begin()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # whatever the test did to them, closing is not to wait for it
        for proxy in (self.sending, self.receiving):
            for flow in (proxy.up, proxy.down):
                flow.shape()
                flow.release()
        self._stack.close()

    def receive_anew(self) -> None:
        """Connect a receiver, in the place of the one before if there was one."""
        self.receiver = self._connect(self.receiving, "receiver", self.profile.receiver)
        context = {**self.profile.subscribe, **({"queue": self.queue} if self.queue else {})}
        stream = self.receiver.subscribe(self.channel("+"), **context)
        stream.subscribe(self._on_next, self._on_error)
        stream.ready.result(PATIENCE)

    def _connect(self, proxy: Proxy, role: str, settings: Mapping[str, Any]) -> messaging.Messaging:
        url = through(proxy, self._url)
        return messaging.connect(url, **{"client_id": self.client_id(role), **self._settings, **settings})

    def client_id(self, role: str) -> str:
        """What an instance calls itself: that of a publisher, by its name, or of the ``receiver``."""
        return f"faults-{self._id}-{role}"

    def channel(self, publisher: str) -> str:
        """Where a publisher publishes."""
        return f"faults/{self._id}/{publisher}"

    @property
    def queue(self) -> str | None:
        """The receiver's queue, where the protocol keeps messages in queues rather than sessions."""
        return f"faults-{self._id}" if urlsplit(self._url).scheme == "amqp" else None

    def _on_next(self, message: Message) -> None:
        if self._before is not None:
            self._before(message)
        self.arrivals.add(message.payload)

    def _on_error(self, error: Exception) -> None:
        self.error = error

    # --- runs

    def begin(self) -> None:
        """Begin a run: the publishers start, and the ledger is empty."""
        run = f"{self._id}-{next(self._runs)}"
        self.arrivals = Arrivals(run, self._past.copy())
        self._past.add(run)
        for publisher in self.publishers:
            publisher.start(run, self._folder / f"{run}-{publisher.name}.log")

    def progress(self, batches: int = 2) -> None:
        """Return once so many batches of each publisher that are published from now on are confirmed and received."""
        count = batches * self.batch
        marks = {publisher: publisher.next + count for publisher in self.publishers}

        def reached(publisher: Publisher) -> int:
            return min(self.arrivals.latest.get(publisher.name, -1), publisher.confirmed)

        def situation() -> str:
            where = [f"{each.name} {state(each.instance)}, {reached(each)} of {mark}" for each, mark in marks.items()]
            return f"progress: {'; '.join(where)}; receiver {state(self.receiver)}"

        eventually(
            lambda: self.error is not None or all(reached(publisher) >= mark for publisher, mark in marks.items()),
            situation,
            patience=OUTAGE,
        )
        assert self.error is None, f"the receiver's stream failed: {self.error}"

    def outlived(self, fault: Callable[[], object], proxy: Proxy) -> None:
        """Have something break connections through ``proxy``, see that they are made again, and that work goes on."""
        before = proxy.attempts
        fault()
        eventually(lambda: proxy.attempts > before, "a new connection", patience=OUTAGE)
        self.progress()

    def stop(self) -> None:
        """Stop the publishers, and wait until every promise has its outcome."""
        for publisher in self.publishers:
            publisher.stop()
        for publisher in self.publishers:
            publisher.wait_settled()

    def finish(self, *, may_lose: bool = False, ordered: bool = True) -> Verdict:
        """End the run, have everything arrive that is under way, and compare.

        Args:
            may_lose: do not wait for what was confirmed and never comes.
            ordered: whether order is promised.

        Raises:
            AssertionError: messages were lost (unless they may be), came unexpected or out of order.
        """
        self.stop()
        # one more each: behind it nothing is under way any more, where order is kept
        for publisher in self.publishers:
            eventually(
                lambda publisher=publisher: [each.exception(OUTAGE) for each in publisher.send(1)] == [None],  # type: ignore[misc]
                f"the last message of {publisher.name}",
                patience=OUTAGE,
            )
        self.wait_received()
        if not may_lose or not ordered:
            with contextlib.suppress(AssertionError):  # the verdict says it better
                eventually(lambda: not self.verdict().lost, "the rest", patience=1.0 if may_lose else PATIENCE)
        for publisher in self.publishers:
            publisher.wait_settled()
            publisher.log.close()
        return self.verdict().check(may_lose=may_lose, ordered=ordered)

    def wait_received(self) -> None:
        """Wait until the last message of each publisher has arrived."""
        latest = self.arrivals.latest
        eventually(
            lambda: all(latest.get(publisher.name, -1) >= publisher.next - 1 for publisher in self.publishers),
            lambda: f"the last messages: {[publisher.next - 1 for publisher in self.publishers]}; there are {latest}",
            patience=OUTAGE,
        )

    def histories(self) -> dict[str, History]:
        """What the publishers did so far, from their logs."""
        for publisher in self.publishers:
            publisher.log.sync()
        return {publisher.name: read_log(publisher.path) for publisher in self.publishers}

    def verdict(self) -> Verdict:
        """What the ledger says now."""
        return compare(self.histories(), self.arrivals)
