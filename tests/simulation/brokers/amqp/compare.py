"""Compare the simulated broker with a real RabbitMQ: the same random programs, step by step.

::

    python -m tests.simulation.brokers.amqp.compare --programs 200 --seed 1

After each step the clients of both must have received the same frames, and the queues must have the same numbers of
messages and consumers. A step is over once synchronous methods on every channel were answered. What a broker does
later, such as requeuing the messages of a lost connection, is waited for, up to ``_LIMIT`` seconds.

Not compared, since it may differ:

* names that brokers give: queues, reply addresses;
* how confirms are batched, and whether they come before or after other frames of a step;
* the order of deliveries to different consumers of one channel, and so their delivery tags;
* the order of a dead letter and another message that come to a queue over the same step: RabbitMQ's queues are
  processes. A program that has come across one is left at its next difference;
* which queue may send first once a channel is below its limit: RabbitMQ favours none. Such a program is left likewise;
* what becomes of the messages of two channels that use the same queue and end with their connection: which one ends
  first, and gives its messages to the other, is a race. Such a program is left there;
* crashes: a channel of RabbitMQ 3.10.8 that has published to a classic queue ends with 541 once there is a quorum queue
  of the same name instead. Such a program is left there;
* the time in ``x-death``.

Not in the programs, since the real broker answers at different times: messages that expire at once in quorum queues,
and several messages at a time to quorum queues that refuse messages. There the simulated broker differs in this:

* it applies the commands of a quorum queue when they are received, and not after they are stored. So a consumer may get
  a message that a kill then loses, which its publisher had no confirm for;
* a quorum queue tells the channels at once that it refuses messages, so none sends more meanwhile;
* a dead letter is moved as one change of the disk: a kill leaves it in one of the two queues.

Streams and transactions are not simulated, and are answered with 540. Texts about malformed frames show no octets.
One comparison at a time may use a real broker: programs bind to the exchanges that every virtual host has.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from pamqp import commands
from pamqp.base import Frame

from messaging.testing.brokers import RabbitMQ
from tests.simulation.brokers.amqp import properties
from tests.simulation.brokers.amqp.connection import AmqpConnection
from tests.simulation.brokers.amqp.fake_host import Received
from tests.simulation.brokers.amqp.programs import Program
from tests.simulation.brokers.amqp.replay import RealSide, SimulatedSide, normal
from tests.simulation.brokers.amqp.views import Events, Publish, Step, confirmed, reply_to

#: how long the real broker has for a step, seconds
_LIMIT: Final = 3.0
STEPS: Final = 40
#: the connection that asks for the state of queues if that of the step has ended
_OBSERVER: Final = 1_000
#: consumer that does not exist: the answer to its cancellation shows that a channel has done everything before
_BARRIER: Final = "barrier"
#: reply code of a channel of the real broker that has crashed
_CRASH: Final = 541
_ENDS: Final = ("Channel.Close", "Channel.CloseOk", "Connection.Close", "Connection.CloseOk")
_ANSWERS: Final = ("Queue.DeclareOk", "Basic.CancelOk")
_DELIVERIES: Final = ("Basic.Deliver",)
_CONFIRMS: Final = ("Basic.Ack", "Basic.Nack")


class DifferenceError(AssertionError):
    """The two brokers did not do the same."""


class _AbandonedError(Exception):
    """A difference that may come from a race in the real broker."""


class Comparison:
    """One program on both sides.

    Args:
        url: of the real broker.
        seed: of the program.
    """

    def __init__(self, url: str, seed: int, steps: int = STEPS, *, is_traced: bool = False) -> None:
        self.seed = seed
        self.real = RealSide(url)
        self.simulated = SimulatedSide(seed, self.real.vhost)
        self.program = Program(random.Random(seed), f"p{seed}.")
        self.history: list[Step] = []
        self._steps = steps
        self._is_traced = is_traced
        #: channel of the observer that was used last to see whether a queue is deleted
        self._spare = 1
        #: whether there was something whose order differs from time to time, such as dead letters
        self._may_be_reordered = False
        #: whether the program ended early, since the order of events differs from time to time
        self.is_abandoned = False

    def run(self) -> None:
        """Execute the program.

        Raises:
            DifferenceError: with the steps so far, and what differs.
        """
        observe = Step("connect", _OBSERVER)
        opening = Step("call", _OBSERVER, 1, commands.Channel.Open)
        try:
            for step in (observe, opening):
                self._execute(step)
            for _ in range(self._steps):
                step = self.program.step()
                self._adapt(step)
                self.history.append(step)
                self._may_be_reordered = self._may_be_reordered or self._shares_limit(step)
                may_race = self._shares_queue(step.connection)
                events = self._execute(step, may_race=may_race)
                if events is None:
                    self.is_abandoned = True
                    break
                self.program.view.update(step, events)
                self._settle(step)
        except _AbandonedError:
            self.is_abandoned = True
        finally:
            self._clean_up()

    # --- steps

    def _adapt(self, step: Step) -> None:
        """Settle a single message where the brokers have delivered in different orders."""
        queues = self.simulated.broker.vhosts[self.real.vhost].queues.values()
        # a quorum queue tells each publisher later that it refuses messages
        is_slow = any(queue.type == "quorum" and queue.overflow != "drop-head" for queue in queues)
        if len(step.messages) > 1 and (is_slow or any(self._may_fail(each) for each in step.messages)):
            # the effects of the other messages on this channel may come before or after its end
            del step.messages[1:]
        if step.values.get("multiple"):
            view = self.program.view.connections[step.connection][step.channel]
            real = [view.real_tags.get(tag, tag) for tag in view.unacked]
            if real != sorted(real):
                step.values["multiple"] = False
                step.values["delivery_tag"] = step.values["delivery_tag"] or view.unacked[0]

    def _shares_limit(self, step: Step) -> bool:
        """Return whether several queues wait for the credit of the step's channel."""
        client = self.simulated.clients.get(step.connection)
        if client is None or not isinstance(client.connection, AmqpConnection):
            return False
        channel = client.connection.channels.get(step.channel)
        if channel is None or not channel.prefetch:
            return False
        return len(dict.fromkeys(consumer.queue for consumer in channel.consumers.values())) > 1

    def _may_fail(self, message: Publish) -> bool:
        exchange = self.simulated.broker.vhosts[self.real.vhost].exchanges.get(message.exchange)
        values = properties.split(message.raw)
        return (
            exchange is None
            or exchange.internal
            or values.get(properties.EXPIRATION, b"\x010")[-1:] == b"x"
            or values.get(properties.USER_ID, b"\x05guest") != b"\x05guest"
            or properties.REPLY_TO in values
        )

    def _shares_queue(self, connection: int) -> bool:
        """Return whether two channels of a connection have consumers or messages of the same queue."""
        client = self.simulated.clients.get(connection)
        if client is None or not isinstance(client.connection, AmqpConnection):
            return False
        channels = client.connection.channels.values()
        queues = [
            queue
            for channel in channels
            for queue in dict.fromkeys(
                [each.queue for each in channel.consumers.values()]
                + [queue for _, queue, _ in channel.unacked.values()]
            )
        ]
        return len(queues) != len(dict.fromkeys(queues))

    def _execute(self, step: Step, *, may_race: bool = False) -> Events | None:
        """Execute a step on both sides, wait until they agree, and return what was received.

        With ``may_race``, return ``None`` if the step ends the connection: which of its channels ends first, and gives
        its messages to the other one, differs from time to time.
        """
        view = self.program.view.connections.get(step.connection, {}).get(step.channel)
        if step.action == "publish" and view is not None and view.confirms:
            for _ in step.messages:
                view.published += 1
                view.unconfirmed.add(view.published)
        queues, counters = self.simulated.broker.vhosts[self.real.vhost].queues, self.simulated.broker.counters
        before, letters = {queue: queue.arrivals for queue in queues.values()}, counters.dead_lettered
        self.simulated.execute(step)
        if counters.dead_lettered > letters:
            arrivals = [queue.arrivals - before.get(queue, 0) for queue in queues.values()]
            self._may_be_reordered = self._may_be_reordered or max(arrivals, default=0) > 1
        expected = self.simulated.take()
        if self._is_traced:
            print(step)  # noqa: T201
            for where, events in expected.items():
                print("   ", where, *(normal(event, {}) for event in events), sep="\n        ")  # noqa: T201
        if counters.dead_lettered > letters and any(
            event.name in _ENDS for events in expected.values() for event in events
        ):
            # what comes first: the end of a consumer, or the dead letter of a message that its channel gives back
            self._may_be_reordered = True
        gone = [queue.name for queue in before if queue.is_deleted]
        if may_race and step.connection not in self.simulated.clients:
            return None
        self.real.received = {}
        self.real.execute(step)
        deadline = time.monotonic() + _LIMIT
        while (difference := self._difference(expected)) is not None and time.monotonic() < deadline:
            self.real.read(0.1)
        if difference is not None:
            self._fail(difference)
        for where, events in expected.items():
            if any(event.name == "Channel.OpenOk" for event in events):
                self.real.forget_tags(*where)
            self._pair(where, events, self.real.received.get(where, []))
        for name in gone:
            self._await_deletion(name)
        return expected

    def _await_deletion(self, name: str) -> None:
        """Wait until the real broker has deleted a queue, as it does some time after its connection is lost."""
        deadline = time.monotonic() + _LIMIT
        while True:
            self._spare += 1
            where = (_OBSERVER, self._spare)
            self.real.received = {}
            self.real.call(*where, commands.Channel.Open)
            self.real.call(*where, commands.Queue.Declare, queue=name, passive=True)
            while len(self.real.received.get(where, [])) < 2 and time.monotonic() < deadline:
                self.real.read(0.1)
            answers = self.real.received.get(where, [])
            if any(event.name == "Channel.Close" and event.reply_code == 404 for event in answers):
                return
            if time.monotonic() > deadline:
                self._fail(f"queue {name} is deleted in the simulation only: {answers}")
            if answers[-1].name != "Channel.Close":
                self.real.call(*where, commands.Channel.Close, reply_code=200)
            time.sleep(0.005)  # sleeps: between two looks at a real broker

    def _difference(self, expected: Events) -> str | None:
        received = self.real.received
        for where in sorted({*expected, *received}):
            ours, theirs = expected.get(where, []), received.get(where, [])
            self._learn(ours, theirs)
            unconfirmed = self._unconfirmed(where)
            parts: list[tuple[str, Any, Any]] = [
                (f"confirms {where}", confirmed(ours, unconfirmed), confirmed(theirs, unconfirmed)),
                (f"{where}", self._normal(_others(ours)), self._normal(_others(theirs))),
            ]
            tags = dict.fromkeys(event.consumer_tag for event in (*ours, *theirs) if event.name in _DELIVERIES)
            for tag in tags:
                one, other = (self._normal(_to_consumer(events, tag)) for events in (ours, theirs))
                parts.append((f"deliveries to {tag} {where}", one, other))
            for what, one, other in parts:
                if one != other:
                    return f"{what}:\n  simulated {one}\n  real      {other}"
        return None

    def _unconfirmed(self, where: tuple[int, int]) -> set[int]:
        view = self.program.view.connections.get(where[0], {}).get(where[1])
        return set() if view is None else view.unconfirmed

    def _normal(self, events: list[Received]) -> list[tuple[Any, ...]]:
        return [normal(event, self.real.names) for event in events]

    def _learn(self, ours: list[Received], theirs: list[Received]) -> None:
        """Find out which names of the real broker are which of the simulated one."""
        for one, other in zip(_others(ours), _others(theirs), strict=False):
            if one.name == other.name == "Queue.DeclareOk" and one.queue.startswith("amq.gen-"):
                self.real.learn(other.queue, one.queue)
        for tag in dict.fromkeys(event.consumer_tag for event in ours if event.name in _DELIVERIES):
            pairs = zip(_to_consumer(ours, tag), _to_consumer(theirs, tag), strict=False)
            for one, other in pairs:
                mine, address = reply_to(one), reply_to(other)
                if mine and address:
                    self.real.learn(address, mine)
        for one, other in zip(_others(ours), _others(theirs), strict=False):
            if one.name == other.name in ("Basic.GetOk", "Basic.Return"):
                mine, address = reply_to(one), reply_to(other)
                if mine and address:
                    self.real.learn(address, mine)

    def _pair(self, where: tuple[int, int], ours: list[Received], theirs: list[Received]) -> None:
        """Remember the real tags of deliveries."""
        pairs = [
            (one, other)
            for tag in dict.fromkeys(event.consumer_tag for event in ours if event.name in _DELIVERIES)
            for one, other in zip(_to_consumer(ours, tag), _to_consumer(theirs, tag), strict=True)
        ]
        pairs += zip(_others(ours), _others(theirs), strict=True)
        view = self.program.view.connections.get(where[0], {}).get(where[1])
        for one, other in pairs:
            if one.name in (*_DELIVERIES, "Basic.GetOk"):
                self.real.real_tags[*where, one.delivery_tag] = other.delivery_tag
                if view is not None:
                    view.real_tags[one.delivery_tag] = other.delivery_tag

    # --- the end of a step

    def _settle(self, step: Step) -> None:
        """Wait until the effects of a step have reached all channels, and compare the state of the queues."""
        asked = self._channels_to_ask(step)
        wanted: dict[str, Any] = {}
        for where, names in asked.items():
            for name in names:
                found = self.simulated.call(*where, commands.Queue.Declare, queue=name, passive=True)
                wanted[name] = normal(found, {})
        deadline = time.monotonic() + _LIMIT
        while (difference := self._ask(asked, wanted)) is not None:
            if time.monotonic() > deadline:
                self._fail(difference)
            time.sleep(0.005)  # sleeps: between two looks at a real broker

    def _channels_to_ask(self, step: Step) -> dict[tuple[int, int], list[str]]:
        """Return the queues by connection and channel: the step's own, unless only another may use the queue."""
        views = self.program.view.connections
        own = (step.connection, step.channel)
        if step.channel not in views.get(step.connection, {}):
            own = (_OBSERVER, 1)
        owners = {client.connection: number for number, client in self.simulated.clients.items()}
        asked: dict[tuple[int, int], list[str]] = {}
        for name, queue in self.simulated.broker.vhosts[self.real.vhost].queues.items():
            where: tuple[int, int] | None = own
            if queue.owner is not None and owners[queue.owner] != own[0]:
                number = owners[queue.owner]
                where = next(((number, channel) for channel in views[number]), None)
            if where is not None:
                asked.setdefault(where, []).append(name)
        return asked

    def _ask(self, asked: dict[tuple[int, int], list[str]], wanted: dict[str, Any]) -> str | None:
        real = self.real
        real.received = {}
        awaited = {where: len(names) for where, names in asked.items()}
        for where, names in asked.items():
            for name in names:
                real.call(*where, commands.Queue.Declare, queue=name, passive=True)
        for number, channels in self.program.view.connections.items():
            for each in channels:
                real.call(number, each, commands.Basic.Cancel, consumer_tag=_BARRIER)
                awaited[number, each] = awaited.get((number, each), 0) + 1
        deadline = time.monotonic() + _LIMIT
        while not self._is_answered(awaited):
            if time.monotonic() > deadline:
                self._fail(f"no answer to {awaited}: {real.received}")
            real.read(0.1)
        extra = [event for events in real.received.values() for event in events if event.name not in _ANSWERS]
        if extra:
            self._fail(f"the real broker has sent more: {extra}")
        answers = [event for events in real.received.values() for event in events if event.name == "Queue.DeclareOk"]
        found = {normal(event, real.names)[1][-1][1]: normal(event, real.names) for event in answers}
        wrong = [f"queue {name}:\n  simulated {each}\n  real      {found.get(name)}"
                 for name, each in wanted.items() if each != found.get(name)]  # fmt: skip
        return "\n".join(wrong) or None

    def _is_answered(self, awaited: dict[tuple[int, int], int]) -> bool:
        received = self.real.received
        if any(event.name.endswith(".Close") for events in received.values() for event in events):
            return True
        return all(
            sum(event.name in _ANSWERS for event in received.get(where, ())) >= count
            for where, count in awaited.items()
        )

    def _fail(self, difference: str) -> NoReturn:
        real = [event for events in self.real.received.values() for event in events]
        has_crashed = any(event.name == "Connection.Close" and event.reply_code == _CRASH for event in real)
        if self._may_be_reordered or has_crashed:
            raise _AbandonedError
        steps = "\n".join(f"{number:3} {step}" for number, step in enumerate(self.history))
        queues = "\n".join(
            f"    {queue.name} {queue.type} {queue.arguments} ready {queue.ready}, consumers "
            + str([(each.channel.connection.peer.name, each.channel.number, each.tag) for each in queue.turns.all])
            for queue in self.simulated.broker.vhosts[self.real.vhost].queues.values()
        )
        raise DifferenceError(f"program {self.seed}: {difference}\nafter\n{steps}\nqueues\n{queues}")

    def _clean_up(self) -> None:
        """Delete what the program has left at the real broker."""
        real = self.real
        real.close()
        real.connect(_OBSERVER)
        deadline = time.monotonic() + _LIMIT
        channel = 0
        todo: list[tuple[type[Frame], dict[str, str]]] = [
            *((commands.Queue.Delete, {"queue": real.real_name(name)}) for name in self.program.view.queues),
            *((commands.Exchange.Delete, {"exchange": name}) for name in self.program.exchanges),
        ]
        channel, answers = 1, ("Queue.DeleteOk", "Exchange.DeleteOk", "Channel.Close")
        real.call(_OBSERVER, channel, commands.Channel.Open)
        while todo and time.monotonic() < deadline:
            method, values = todo.pop(0)
            real.received = {}
            real.call(_OBSERVER, channel, method, **values)
            found: list[str] = []
            while not found and time.monotonic() < deadline:
                real.read(0.1)
                events = real.received.get((_OBSERVER, channel), [])
                found = [event.name for event in events if event.name in answers]
            if "Channel.Close" in found:
                # an exclusive queue, whose connection is ending
                todo.append((method, values))
                channel += 1
                real.call(_OBSERVER, channel, commands.Channel.Open)
                time.sleep(0.01)  # sleeps: between two looks at a real broker
        real.close()


def _others(events: list[Received]) -> list[Received]:
    return [event for event in events if event.name not in (*_DELIVERIES, *_CONFIRMS)]


def _to_consumer(events: list[Received], tag: str) -> list[Received]:
    return [event for event in events if event.name in _DELIVERIES and event.consumer_tag == tag]


def seeds(first: int, count: int) -> Iterator[int]:
    """Return the seeds of the programs of a run."""
    return iter(range(first * 100_000, first * 100_000 + count))


def main() -> int:
    """Run the comparison; return 1 if there are differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200, help="number of programs")
    parser.add_argument("--seed", type=int, default=1, help="seed of the run")
    parser.add_argument("--only", type=int, help="seed of one program")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a program")
    parser.add_argument("--url", help="of a RabbitMQ that runs; by default one is started")
    parser.add_argument("--trace", action="store_true", help="print the steps and what the simulated broker sends")
    parser.add_argument("--all", action="store_true", help="go on after a difference")
    given = parser.parse_args()
    broker = None if given.url else RabbitMQ()
    if broker is not None:
        broker.start()
    failed = ran = abandoned = steps = 0
    started = time.monotonic()
    try:
        for seed in seeds(given.seed, given.programs) if given.only is None else (given.only,):
            ran += 1
            try:
                comparison = Comparison(
                    given.url or (broker.url if broker else ""), seed, given.steps, is_traced=given.trace
                )
                comparison.run()
                abandoned += comparison.is_abandoned
                steps += len(comparison.history)
            except DifferenceError as difference:
                failed += 1
                print(difference, flush=True)  # noqa: T201
                if not given.all:
                    break
    finally:
        if broker is not None:
            broker.close()
    seconds = time.monotonic() - started
    print(f"{ran} programs, {steps} steps, {abandoned} left over races, {failed} with differences, {seconds:.1f} s")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
