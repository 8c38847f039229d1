"""Several brokers behind one name: the one that is connected to is killed under load, again and again.

``python -m tests.faults.failover --kills 20``: three RabbitMQ nodes with a quorum queue. Publishers and receiver have
one URL with all nodes. ``--protocol mqtt``: two mosquittos that share nothing, each with a recorder of its own. The
killed broker starts again before the next kill. Ends with status 1 if a confirmed message did not arrive, if a message
arrived that was never sent or had failed, or if an instance was not connected to another broker within
``reconnect_max``.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import messaging
from messaging import Message
from messaging.connection import ConnectionState
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Broker, Mosquitto, RabbitCluster, RabbitMQ
from messaging.testing.waiting import PATIENCE, eventually
from tests.faults.ledger import Arrivals, Verdict, compare, read_log
from tests.faults.scenario import AMQP, MQTT5, Profile, Publisher

#: bounds of the delays between two attempts at one host, seconds
RECONNECT_MIN: Final = 0.1
RECONNECT_MAX: Final = 5.0
#: deadline of a message: a quorum queue has no leader for a while, and a node takes long to start, seconds
DEADLINE: Final = 60.0
#: the same for everything that has to happen after a fault
WAIT: Final = 3 * PATIENCE


@dataclass
class Figures:
    """What was measured.

    Attributes:
        back: seconds from a lost connection until there was one to another broker, of each instance and fault.
        flowing: seconds from a fault until a message was confirmed again, of each publisher and fault.
    """

    back: list[float] = field(default_factory=list)
    flowing: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        def shown(values: list[float]) -> str:
            return f"median {statistics.median(values):.3f} s, longest {max(values):.3f} s" if values else "none"

        return f"connected to another broker: {shown(self.back)}; confirmed again: {shown(self.flowing)}"


class Traffic(abc.ABC):
    """Publishers behind one name, and their log. Entering starts the traffic; leaving closes everything.

    The attributes without underscore are those that ``scenario.Publisher`` needs of a scene.

    Args:
        profile: how messages travel.
        folder: for the publishers' logs.
    """

    window, batch, pace = 200, 10, 0.02

    def __init__(self, profile: Profile, folder: Path, *, publishers: int = 2) -> None:
        self.profile = profile
        self.id = secrets.token_hex(4)
        self.arrivals = Arrivals(self.id)
        self.figures = Figures()
        self.instances: list[messaging.Messaging] = []
        self.publishers: list[Publisher] = []
        self.error: Exception | None = None
        self._folder = folder
        self._count = publishers
        self._stack = contextlib.ExitStack()

    # --- what differs

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """The name of all brokers."""

    @abc.abstractmethod
    def broker(self, host: str) -> Broker:
        """The broker at ``host``."""

    @abc.abstractmethod
    def receive(self, stack: contextlib.ExitStack) -> None:
        """Begin to receive."""

    @abc.abstractmethod
    def verdict(self) -> Verdict:
        """Compare what was received with what was sent, now."""

    # --- for publishers

    def channel(self, publisher: str) -> str:
        return f"failover/{self.id}/{publisher}"

    def body(self, sequence: int) -> bytes:
        return b"." * (sequence % 64)

    # --- life cycle

    def connect(self, stack: contextlib.ExitStack, url: str, **settings: Any) -> messaging.Messaging:
        settings = {"reconnect_min": RECONNECT_MIN, "reconnect_max": RECONNECT_MAX, "timeout": DEADLINE, **settings}
        return stack.enter_context(messaging.connect(url, services=ServiceRegistry(), **settings))

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.receive(stack)
            for number in range(self._count):
                instance = self.connect(stack, self.url, name=f"p{number}")
                self.instances.append(instance)
                publisher = Publisher(f"p{number}", instance, self)  # type: ignore[arg-type]
                publisher.start(self.id, self._folder / f"{self.id}-{publisher.name}.log")
                stack.callback(publisher.end)
                self.publishers.append(publisher)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def received(self, message: Message) -> None:
        self.arrivals.add(message.payload)

    def failed(self, error: Exception) -> None:
        self.error = error

    # --- faults

    def progress(self, count: int = 50) -> None:
        """Return once messages of every publisher that are published from now on are confirmed and received."""
        marks = {publisher: publisher.next + count for publisher in self.publishers}

        def reached() -> bool:
            latest = self.arrivals.latest
            return self.error is not None or all(
                min(publisher.confirmed, latest.get(publisher.name, -1)) >= mark for publisher, mark in marks.items()
            )

        def situation() -> str:
            where = [f"{m.name} {m.connection_state.value} at {m.connection_state.value.host}" for m in self.instances]
            made = [(each.name, each.next, each.confirmed, self.arrivals.latest.get(each.name)) for each in marks]
            return f"progress: {'; '.join(where)}; published, confirmed, received: {made}"

        eventually(reached, situation, patience=WAIT)
        assert self.error is None, f"the receiver's stream failed: {self.error!r}"

    def outlive(self, fault: Callable[[Broker], object], *, restart: Callable[[Broker], object]) -> None:
        """Have ``fault`` hit the broker of the first publisher, see that work goes on elsewhere, and repair it."""
        left = self.instances[-1].connection_state.value.host
        assert left is not None
        broker = self.broker(left)
        affected = [m for m in self.instances if m.connection_state.value.host == left]
        watches = [Watch(m, left) for m in affected]
        started = time.monotonic()
        fault(broker)
        flow = threading.Thread(target=self._await_flow, args=(started, {each: each.next for each in self.publishers}))
        flow.start()
        try:
            for watch in watches:
                back = watch.wait()
                assert back <= RECONNECT_MAX, f"{watch.name} took {back:.1f} s to connect to another broker"
                self.figures.back.append(back)
            self.progress()
        finally:
            flow.join()
            for watch in watches:
                watch.dispose()
            restart(broker)
        self.progress()

    def _await_flow(self, began: float, marks: Mapping[Publisher, int]) -> None:
        """Note when the first message was confirmed that was published after the fault."""
        for publisher, mark in marks.items():
            with contextlib.suppress(AssertionError):  # ``progress`` fails, too
                eventually(lambda publisher=publisher, mark=mark: publisher.confirmed >= mark, patience=WAIT)  # type: ignore[misc]
                self.figures.flowing.append(time.monotonic() - began)

    def kill(self) -> None:
        """SIGKILL of the broker that is connected to, and a new start of it."""
        self.outlive(lambda broker: broker.kill(), restart=lambda broker: broker.start())

    def finish(self) -> Verdict:
        """Stop the publishers, wait for everything, and compare.

        Raises:
            AssertionError: messages were lost, or came unexpected.
        """
        for publisher in self.publishers:
            publisher.stop()
        for publisher in self.publishers:
            eventually(lambda publisher=publisher: not publisher.open, patience=DEADLINE + WAIT)  # type: ignore[misc]
            publisher.log.sync()
        with contextlib.suppress(AssertionError):  # the verdict says it better
            eventually(lambda: not self.verdict().lost, "the rest")
        return self.verdict()


class Watch:
    """Waits until an instance has lost its connection to ``left``, and is connected to another host."""

    def __init__(self, m: messaging.Messaging, left: str) -> None:
        self.name = m.name
        self._left = left
        self._lost: float | None = None
        self._back = 0.0
        self._is_there = threading.Event()
        self._subscription = m.connection_state.subscribe(self._on_next)

    def _on_next(self, state: ConnectionState) -> None:
        if self._is_there.is_set() or (state.is_up and state.host == self._left):
            return
        if self._lost is None:
            self._lost = state.since
        if state.is_up:
            self._back = max(0.0, state.since - self._lost)
            self._is_there.set()

    def wait(self) -> float:
        """Return how long it was not connected, seconds."""
        assert self._is_there.wait(PATIENCE), f"{self.name} is not connected to another host than {self._left}"
        return self._back

    def dispose(self) -> None:
        self._subscription.dispose()


class ClusterTraffic(Traffic):
    """A quorum queue of a RabbitMQ cluster."""

    def __init__(self, cluster: RabbitCluster, folder: Path, **settings: Any) -> None:
        super().__init__(AMQP, folder, **settings)
        self._cluster = cluster

    @property
    def url(self) -> str:
        return self._cluster.url

    def broker(self, host: str) -> RabbitMQ:
        return self._cluster.node(host)

    def receive(self, stack: contextlib.ExitStack) -> None:
        receiver = self.connect(stack, self.url, name="receiver")
        self.instances.append(receiver)
        stream = receiver.subscribe(self.channel("+"), queue=f"failover-{self.id}", queue_type="quorum", qos=1)
        stream.subscribe(self.received, self.failed)
        stream.ready.result(PATIENCE)

    def verdict(self) -> Verdict:
        return compare({each.name: read_log(each.path) for each in self.publishers}, self.arrivals)


class PairTraffic(Traffic):
    """Two mosquittos that share nothing.

    A recorder at each broker, connected to it alone, keeps what arrives there. A confirmed message must have arrived at
    one of them. The receiver has the URL of the publishers: it is where they are, and subscribes again.
    """

    def __init__(self, brokers: Mapping[str, Mosquitto], url: str, folder: Path, **settings: Any) -> None:
        super().__init__(MQTT5, folder, **settings)
        self._brokers = brokers
        self._url = url
        self._recorded: list[Arrivals] = []

    @property
    def url(self) -> str:
        return self._url

    def broker(self, host: str) -> Mosquitto:
        return self._brokers[host]

    def receive(self, stack: contextlib.ExitStack) -> None:
        for broker in self._brokers.values():
            recorded = Arrivals(self.id)
            self._recorded.append(recorded)
            recorder = self.connect(stack, broker.url, reconnect_min=0.01, reconnect_max=0.02)
            # QoS 0 goes out before the publisher's PUBACK: a window would keep messages in a broker that is killed
            stream = recorder.subscribe(self.channel("+"), qos=0, buffer_size=100_000)
            stream.subscribe(lambda message, recorded=recorded: recorded.add(message.payload))  # type: ignore[misc]
            stream.ready.result(PATIENCE)
        receiver = self.connect(stack, self.url, name="receiver")
        self.instances.append(receiver)
        stream = receiver.subscribe(self.channel("+"), qos=1)
        stream.subscribe(self.received, self.failed)
        stream.ready.result(PATIENCE)

    def kill(self) -> None:
        """See ``Traffic``. Return once the recorder is back, too."""

        def start(broker: Broker) -> None:
            broker.start()
            index = [*self._brokers.values()].index(broker)  # type: ignore[arg-type]
            with messaging.connect(broker.url, services=ServiceRegistry()) as m:
                before = len(self._recorded[index].foreign)
                eventually(
                    lambda: (
                        m.publish(self.channel("probe"), b"", qos=1).result(PATIENCE) is None
                        and len(self._recorded[index].foreign) > before
                    ),
                    "the recorder is back",
                )

        self.outlive(lambda broker: broker.kill(), restart=start)

    def verdict(self) -> Verdict:
        histories = {each.name: read_log(each.path) for each in self.publishers}
        both = Arrivals(self.id)
        disorder = []
        for recorded in self._recorded:
            disorder += compare(histories, recorded).disorder  # the order at one broker; there is none among two
            both.stamps += recorded.stamps
        verdict = compare(histories, both)
        return Verdict(**{name: getattr(verdict, name) for name in Verdict.__slots__} | {"disorder": tuple(disorder)})


@contextlib.contextmanager
def pair(folder: Path, **settings: Any) -> Any:
    """Traffic over two mosquittos."""
    with Mosquitto() as one, Mosquitto() as other:
        brokers = {f"{broker.host}:{broker.port}": broker for broker in (one, other)}
        with PairTraffic(brokers, f"mqtt://{','.join(brokers)}", folder, **settings) as traffic:
            yield traffic


@contextlib.contextmanager
def cluster(folder: Path, **settings: Any) -> Any:
    """Traffic over three RabbitMQ nodes."""
    with RabbitCluster() as nodes, ClusterTraffic(nodes, folder, **settings) as traffic:
        yield traffic


def main() -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.failover", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="how often the connected broker is killed")
    parser.add_argument("--protocol", choices=["amqp", "mqtt"], default="amqp")
    parser.add_argument("--seconds", type=float, default=1.0, help="of load between two kills, at least")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = pair if given.protocol == "mqtt" else cluster
        with made(Path(folder)) as traffic:
            traffic.progress()
            for number in range(1, given.kills + 1):
                time.sleep(given.seconds)  # sleeps: traffic between two kills
                where = traffic.instances[-1].connection_state.value.host
                traffic.kill()
                sys.stdout.write(f"kill {number}: {where}; confirmed again after {traffic.figures.flowing[-1]:.2f} s\n")
                sys.stdout.flush()
            verdict = traffic.finish()
            sys.stdout.write(f"{verdict}\n{traffic.figures}\n")
    return 1 if verdict.lost or verdict.unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
